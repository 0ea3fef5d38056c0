"""Several processes are one run: real ones, with `jax.distributed`, agree with one process; alone nothing changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from scripted import ScriptedSampler
from several_hosts import CONFIG, OPTIONS, everything, two_steps
from test_rollout import PLAIN, SAMPLING, drawing, facts, rollouts
from test_train import final_params

from jaxagent.__main__ import main as command
from jaxagent.algos.table import TABLE
from jaxagent.data.tasks import TaskStream
from jaxagent.envs.chain import Chain
from jaxagent.feed import Feed, FeedOptions
from jaxagent.hosts import ALONE, Hosts, check_mesh, join
from jaxagent.learner import Learner
from jaxagent.metrics import Mean, read
from jaxagent.sharding import DeviceMesh
from sandbox_client import EmbeddedServer

HERE = Path(__file__).parent
PATIENCE_S = 900.0  # a hang fails by this; nothing is measured


class Threads(Hosts):
    """Hosts that are threads of this process, and hand each other what they gather."""

    def __init__(self, index: int, table: dict[int, Any], barrier: threading.Barrier):
        super().__init__(index, barrier.parties)
        self.table, self.barrier = table, barrier

    def gather(self, value: Any) -> list[Any]:
        self.table[self.index] = json.dumps(value)
        self.barrier.wait()
        found = [json.loads(self.table[i]) for i in range(self.count)]
        self.barrier.wait()
        return found


def on_each(count: int, work: Any) -> list[Any]:
    """What `work(hosts)` gives on every host."""
    table: dict[int, Any] = {}
    found: dict[int, Any] = {}
    barrier = threading.Barrier(count, timeout=PATIENCE_S)

    def run(index: int) -> None:
        found[index] = work(Threads(index, table, barrier))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(count)]


def test_shares_come_back_in_order_and_lists_are_levelled() -> None:
    assert on_each(3, lambda hosts: hosts.together(hosts.share(range(7)))) == [list(range(7))] * 3
    parts = {0: [(["a"], 1.0), ([], 0.5)], 1: [(["b", "c"], 2.0), (["d"], 0.0)]}
    assert on_each(2, lambda hosts: hosts.level(parts[hosts.index], lambda: "-")) == [
        [(["a", "-"], 3.0), (["-"], 0.5)],
        [(["b", "c"], 3.0), (["d"], 0.5)],
    ]
    assert ALONE.level([(["a"], 1.5)], lambda: "-") == [(["a"], 1.5)] and ALONE.share("ab") == ["a", "b"]


def test_means_combine_by_sum_and_count_counters_add_and_what_one_host_lacks_is_of_the_others() -> None:
    values = {
        0: {"reward/mean": Mean(3, 4), "rollout/tool_calls": 5.0, "x_max": 2.0, "x_min": 2.0, "plain": 1.0},
        1: {"reward/mean": Mean(0, 1), "rollout/tool_calls": 2.0, "x_max": 3.0, "x_min": 3.0, "plain": 2.0, "late": Mean(1, 2)},
    }
    want = {"reward/mean": 0.6, "rollout/tool_calls": 7.0, "x_max": 3.0, "x_min": 2.0, "plain": 1.5, "late": 0.5}
    assert on_each(2, lambda hosts: hosts.combined(values[hosts.index])) == [want, want]
    assert json.dumps(Mean.of([1, 2])) == "1.5" and Mean.of([]) == 0.0


def test_what_says_half_of_where_the_others_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID is missing"):
        join()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(ValueError, match=r"0 to JAX_NUM_PROCESSES - 1, got 2 of 2"):
        join()


def test_the_address_of_a_store_is_no_workdir(capsys: pytest.CaptureFixture[str]) -> None:
    config = f"--config={HERE.parent / 'configs' / 'maze.py'}:runlocal"
    assert command(["train", config, "--workdir=gs://bucket/run"]) == 2
    assert "mount a file system that all hosts see" in capsys.readouterr().err
    assert not Path("gs:").exists()


def test_a_mesh_that_cuts_replicas_or_rows_between_hosts_is_refused() -> None:
    check_mesh(tiny.mesh(data=2, fsdp=2, tensor=2), Hosts(0, 4))
    with pytest.raises(ValueError, match=r"mesh tensor=4 x context=1 must divide the devices of a host, which are 8 / 4"):
        check_mesh(tiny.mesh(data=2, tensor=4), Hosts(0, 4))


def test_two_feeds_play_together_what_one_plays_alone() -> None:
    """The same tasks with the same draws, each once; both know how all groups ended."""

    def played(hosts: Hosts) -> tuple[list[list[str]], dict[str, Any], dict[str, Any]]:
        world = Chain()
        with (
            EmbeddedServer(functions=(Chain.functions,), code="off") as server,
            rollouts(world, ScriptedSampler(PLAIN, drawing), server, attempts=1, concurrency=8) as many,
        ):
            options = FeedOptions(prompts=4, rollouts=2, max_rounds=2)
            feed = Feed(world, TaskStream(100, 3), many, SAMPLING, options, None if hosts.count == 1 else hosts)
            taken = [feed.take(mixed=mixed) for mixed in (False, True)]
            rows = {(t.group, t.rollout): facts(t) for _, sampled in taken for group in sampled for t in group.trajectories}
            return [[group.key for group in part] for both in taken for part in both], rows, feed.state()

    keys, rows, state = played(ALONE)
    (keys_0, rows_0, state_0), (keys_1, rows_1, state_1) = on_each(2, played)
    assert keys_0 == keys_1 == keys and state_0 == state_1 == state
    assert not rows_0.keys() & rows_1.keys() and rows_0 | rows_1 == rows
    assert {int(key.split("/")[1]) % 2 for key, _ in rows_0} == {0} and len(rows_1) >= 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(port: int, index: int, devices: int = 2, hosts: int = 2) -> dict[str, str]:
    told = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": f"{hosts}", "JAX_PROCESS_ID": f"{index}"}
    paths = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    own = {"JAX_NUM_CPU_DEVICES": f"{devices}", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": paths}
    return {**os.environ, **own, **(told if index >= 0 else {})}


@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.learning)])
def test_several_processes_take_the_steps_of_one_and_each_has_its_own_copy_to_sample_from(hosts: int, tmp_path: Path) -> None:
    """Two devices each; of four processes one has no rows at all, and two replicas of the training mesh share them."""
    port = free_port()
    outs = [tmp_path / f"{i}.npz" for i in range(hosts)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "several_hosts.py"), str(out)],
            env=environment(port, i, hosts=hosts),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, out in enumerate(outs)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * hosts, said
    found = [dict(np.load(out)) for out in outs]
    for one in found:
        assert all(value for name, value in one.items() if name.startswith("fact ")), one
        assert one["fact no copies"] and one["told batches"] == found[0]["told own"]
    own = [int(one["told own"]) for one in found]
    assert own[0] > own[1] and (hosts < 4 or own[3] == 0)
    mesh = DeviceMesh.build(data=hosts // 2, fsdp=4, devices=jax.devices()[: 2 * hosts])
    learner = Learner(CONFIG, tiny.params(CONFIG), mesh, TABLE["grpo"], OPTIONS)
    told = two_steps(learner, ALONE)
    want = everything(learner.params)
    start = everything(tiny.params(CONFIG))
    assert max(np.abs(want[name] - start[name]).max() for name in want) > 1e-3
    for one in found:
        for name, value in want.items():
            np.testing.assert_allclose(one[name], value, atol=1e-6)
        assert one["told policy/tokens"] == told["policy/tokens"]
        np.testing.assert_allclose(one["told policy/denominator"], told["policy/denominator"])


# ---------------------------------------------------------------------- the whole story; minutes, so by `make learning`

STORY = (
    *("env.name=tests.letters", "model.width=32", "model.layers=1", "model.heads=2", "model.ffn_width=48"),
    *("agent.max_turns=1", "agent.max_tokens=48", "sampling.max_tokens=12", "engine.slots=8", "engine.slot_tokens=48"),
    *("engine.chunk=48", "engine.append_rows=4", "engine.append_tokens=(16,)"),
    *("learner.batch_rows=4", "learner.row_tokens=64", "feed.prompts=4", "feed.rollouts=4", "train.minibatches=2"),
    *("evaluate.every=0", "evaluate.tasks=4", "evaluate.final_tasks=4", "evaluate.ablate=False", "sandbox.code=off"),
    *("checkpoint.every=1", "optimizer.lr=1e-4", "optimizer.warmup_steps=0", "alarms.stop="),
)
# The quickstart itself, smaller: its world, its tools in a sandbox of each process, its warm-up.
QUICKSTART = (
    *("model.width=32", "model.layers=1", "model.heads=1", "model.ffn_width=64", "warmup.steps=6", "warmup.demos=96"),
    *("warmup.batch=16", "feed.prompts=4", "feed.rollouts=4", "learner.batch_rows=4", "alarms.stop="),
    *("evaluate.every=0", "evaluate.tasks=4", "evaluate.final_tasks=4", "evaluate.ablate=False", "mesh.fsdp=2"),
)


@dataclass(frozen=True)
class Story:
    """A run of so many steps of training. Args: devices: of each process."""

    steps: int
    hosts: int = 2
    devices: int = 2
    config: str = "base"

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            *(STORY if self.config == "base" else QUICKSTART),
            f"train.steps={self.steps}",
            f"mesh.cpu_devices={self.devices}",
        )


def started(workdir: Path, log: Path, index: int, port: int, story: Story) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jaxagent", "train", f"--config={HERE.parent / 'configs' / story.config}.py"]
    command += [f"--workdir={workdir}", *(f"--config.{setting}" for setting in story.settings)]
    kept = environment(port, index, story.devices, story.hosts)
    kept.pop("JAX_NUM_CPU_DEVICES")
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=HERE.parent, env=kept, stdout=out, stderr=subprocess.STDOUT)


def trained(workdir: Path, story: Story) -> list[str]:
    """Trains to the end; returns what the processes said."""
    logs, port = [workdir.with_suffix(f".{i}.log") for i in range(story.hosts)], free_port()
    processes = [started(workdir, log, i if story.hosts > 1 else -1, port, story) for i, log in enumerate(logs)]
    try:
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [log.read_text() for log in logs]
    assert codes == [0] * story.hosts, said
    return said


def stored(workdir: Path, step: int) -> dict[tuple[str, int], Any]:
    files = sorted((workdir / "trajectories").rglob(f"train-{step:06d}.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(row["group"], row["rollout"]): (row["task"], row["tokens"]) for row in rows}


def weights_of(workdir: Path, step: int) -> dict[str, np.ndarray]:
    return everything(final_params(workdir, step))


@pytest.mark.learning
@pytest.mark.parametrize(
    "story",
    [Story(2), Story(2, 2, 2, "quickstart"), Story(2, 4, 1, "quickstart")],
    ids=["two", "two use tools", "four use tools"],
)
def test_several_processes_train_what_one_trains_and_one_of_them_tells(story: Story, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    trained(alone, replace(story, hosts=1, devices=story.hosts * story.devices))
    said = trained(together, story)
    for step in (1, 2):
        assert stored(alone, step) == stored(together, step) and len(stored(together, step)) == 16
    last = max(int(path.name) for path in (together / "checkpoints").iterdir() if path.name.isdecimal())
    want, found = weights_of(alone, last), weights_of(together, last)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)
    records = [read(workdir / "metrics.jsonl") for workdir in (alone, together)]
    for one, all_ in zip(*records, strict=True):
        for name in ("reward/mean", "rollout/entropy", "rollout/tokens", "credit/advantage_mean", "policy/tokens"):
            assert all_.get(name) == pytest.approx(one.get(name), abs=1e-6), name
    calls = sum(record.get("rollout/tool_calls", 0) for record in records[1])
    assert (calls > 0) == (story.config == "quickstart")
    assert json.loads((alone / "eval.json").read_text()) == json.loads((together / "eval.json").read_text())
    # One log on a terminal, one page, one file of metrics; every process keeps the trajectories and the sandbox of its own.
    for name in ("report.html", "metrics.jsonl", "eval.json"):
        assert list(together.rglob(name)) == [together / name]
    assert "report:" in said[0] and not any("report:" in other or "step" in other for other in said[1:]), said[1:]
    for index in range(1, story.hosts):
        assert (together / "trajectories" / f"host-{index}" / "train-000001.jsonl").is_file()
    assert 0 <= records[1][-1]["hosts/waited_s_min"] <= records[1][-1]["hosts/waited_s_max"]


@pytest.mark.learning
def test_a_killed_process_ends_the_other_with_a_reason_and_a_restart_goes_on_with_two_or_with_one(tmp_path: Path) -> None:
    workdir, port, story = tmp_path / "run", free_port(), Story(10)
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    processes = [started(workdir, log, i, port, story) for i, log in enumerate(logs)]
    deadline = time.monotonic() + PATIENCE_S
    while not (workdir / "checkpoints" / "3").is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    killed = time.monotonic()
    assert processes[0].wait(PATIENCE_S) != 0
    assert time.monotonic() - killed < 60
    said = logs[0].read_text()
    assert "another host has ended" in said or "another task died" in said
    done = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())
    assert 3 <= done < story.steps
    shutil.copytree(workdir, tmp_path / "alone")
    for copy, hosts in ((workdir, 2), (tmp_path / "alone", 1)):
        assert f"resumed at step {done}" in trained(copy, replace(story, hosts=hosts))[0]
        steps_told: Sequence[int] = [record["step"] for record in read(copy / "metrics.jsonl")]
        assert steps_told == list(range(1, story.steps + 1))
