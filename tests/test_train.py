"""The whole story on a tiny policy, with the real engine, learner, checkpoints and embedded sandbox."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from compilations import compiled
from flax import nnx
from lanes import lanes_of, within, wrongly_nested
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent import train
from jaxagent.__main__ import main as command
from jaxagent.chat.plain import PlainTemplate, tokenizer_files
from jaxagent.checkpoint import Checkpoints
from jaxagent.data.store import Store, audit
from jaxagent.envs.env import find
from jaxagent.lock import alone
from jaxagent.metrics import read
from jaxagent.models import hf
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.parts import policy_shape
from jaxagent.progress import Progress
from jaxagent.types import StopReason, Trajectory
from sandbox_client import EmbeddedServer

CONFIGS = Path(__file__).parent.parent / "configs"
SPEC = f"{CONFIGS / 'maze.py'}:runlocal"
PLAYED = ("function_calls", "maths", "search_r1")  # by a script in test_recipes.py; trained by `make learning`
# Mazes in which a walk at random sometimes arrives, so that there is something to learn from; a warm-up long enough to make
# tool calls; two replicas; saves before, at and after the end of the warm-up.
TINY = (
    *(
        "env.options.rooms=6",
        "env.options.distance=(1,2)",
        "env.options.demo_moves=5",
        "agent.max_turns=5",
        "agent.max_tokens=80",
    ),
    *("model.width=16", "model.layers=1", "model.heads=1", "model.ffn_width=32", "mesh.cpu_devices=8", "mesh.data=2"),
    *("engine.slots=8", "engine.slot_tokens=80", "engine.chunk=80", "engine.append_rows=4", "learner.batch_rows=4"),
    *("warmup.steps=18", "warmup.batch=16", "warmup.demos=300", "warmup_optimizer.lr=0.02"),
    *("warmup_optimizer.warmup_steps=2", "train.steps=8", "evaluate.every=4", "checkpoint.every=6", "checkpoint.keep=99"),
)
BASE = f"{CONFIGS / 'base.py'}"
SAVED = (6, 12, 18, 24, 26)
# What may differ between two equal runs: times, and what depends on which request came first.
CLOCKED = ("time/", "engine/", "sandbox/", "feed/streamed", "rollout/tool_latency_s", "rollout/retried", "rollout/seconds")
PATIENCE_S = 240.0  # a hang fails by this; nothing is measured


def configured(*overrides: str, spec: str = SPEC, tiny: tuple[str, ...] = TINY) -> ConfigDict:
    config, faults = configs.load(spec, [*tiny, *overrides])
    assert faults == []
    return config


def run(config: ConfigDict, workdir: Path) -> str:
    """Trains to the end in this process; returns what was said."""
    said = io.StringIO()
    assert train.main(config, workdir, Progress(said)) == 0
    return said.getvalue()


def final_params(workdir: Path, step: int = 26) -> Any:
    config = configs.read(workdir / "config.json")
    decoder = policy_shape(config)[1]
    shapes = jax.eval_shape(lambda: params_of(Decoder(decoder, nnx.Rngs(0)))[1])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = Checkpoints(workdir / "checkpoints", keep=99)
    try:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        return jax.device_get(checkpoints.trees(step, {"params": like})["params"])
    finally:
        checkpoints.close()


def steady_metrics(workdir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith(CLOCKED)} for record in read(workdir / "metrics.jsonl")]


def trajectories(workdir: Path) -> dict[str, list[Any]]:
    """All tokens, log-probs and rewards that were stored, without the times."""
    store = Store(workdir / "trajectories")
    return {
        label: [
            (t.task, t.group, t.rollout, t.tokens, t.mask, t.logprob, t.version, t.reward, t.stop) for t in store.read(label)
        ]
        for label in store.labels()
    }


def assert_same_run(got: Path, want: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, final_params(got), final_params(want))
    assert steady_metrics(got) == steady_metrics(want)
    assert trajectories(got) == trajectories(want)
    assert (got / "eval.json").read_text() == (want / "eval.json").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    run(configured("metrics.echoes=trace"), workdir)
    return workdir


# ---------------------------------------------------------------------- one run


def test_a_run_leaves_its_whole_workdir(whole: Path) -> None:
    records = read(whole / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 27))
    assert all("sft/nll" in record for record in records[:18])
    assert all({"reward/mean", "rollout/turns"} <= record.keys() for record in records[18:])
    taught = [record for record in records[18:] if record["reward/informative_groups"]]
    assert len(taught) >= 3
    assert all(record["policy/tokens"] > 0 for record in taught)
    assert "eval/success" in records[21]
    assert configs.differences(configured(), whole / "config.json") == []
    results = json.loads((whole / "eval.json").read_text())
    assert set(results) == {"before", "after", "ablated"}
    for table in results.values():
        assert {"success", "n", "k", "ci95"} <= table.keys()
        assert table["ci95"][0] <= table["success"] <= table["ci95"][1]
        assert table["n"] == 4
    page = (whole / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "maze/test/0" in page
    labels = [*(f"train-{i:06d}" for i in range(1, 9)), "before", "valid-000004", "after", "ablated"]
    assert Store(whole / "trajectories").labels() == sorted(labels)
    assert {int(path.name) for path in (whole / "checkpoints").iterdir()} == set(SAVED)


def test_the_trace_shows_who_was_busy_in_every_step(whole: Path) -> None:
    lanes = lanes_of(whole / "trace.json")
    assert {"step", "learner", "engine 1", "engine 2", "rollout 1", "tool 1"} <= set(lanes)
    assert {name: wrongly_nested(events) for name, events in lanes.items() if wrongly_nested(events)} == {}
    steps = {event["args"]["step"]: event for event in lanes["step"] if event["name"].startswith("step ")}
    assert sorted(steps) == list(range(1, 27))
    outside = [event for events in lanes.values() for event in events if not within(event, steps[event["args"]["step"]], 2)]
    assert outside == []
    busy = {
        step: {name.partition(" ")[0] for name in lanes for e in lanes[name] if e["args"]["step"] == step} for step in steps
    }
    assert all(busy[step] == {"step", "learner"} for step in range(1, 19))
    assert all(busy[step] >= {"step", "learner", "engine", "rollout"} for step in range(19, 27))
    assert sum("tool" in busy[step] for step in steps) > 4
    episodes = {e["name"]: e for name in lanes if name.startswith("rollout") for e in lanes[name] if "stop" in e["args"]}
    stored = [row for label in Store(whole / "trajectories").labels() for row in Store(whole / "trajectories").read(label)]
    told = {f"{row.group}#{row.rollout}": row for row in stored if row.group.startswith("train/")}
    assert set(told) <= set(episodes)
    assert {name: episodes[name]["args"]["reward"] for name in told} == {name: row.reward for name, row in told.items()}
    calls = [e for name in lanes if name.startswith("tool") for e in lanes[name]]
    assert all(within(call, episodes[call["args"]["of"]], slack_us=2) for call in calls)
    records = [tool for row in stored if not row.group.startswith("test/") for turn in row.turns for tool in turn.tools]
    assert len([call for call in calls if not call["args"]["of"].startswith("test/")]) == len(records)


def test_the_policy_called_tools_in_the_sandbox(whole: Path) -> None:
    """Without this the tests below would hold of a sandbox that nobody asks."""
    records = read(whole / "metrics.jsonl")[18:]
    assert sum(record["rollout/tool_calls"] * (1 - record["rollout/tool_errors"]) for record in records) > 20


def test_every_stored_trajectory_passes_the_audit(whole: Path) -> None:
    store = Store(whole / "trajectories")
    rows = [row for label in store.labels() for row in store.read(label)]
    assert len(rows) == 8 * 2 * 4 + 4 * 4
    assert sum(len(row.turns) > 1 for row in rows) > 10
    for row in rows:
        assert audit(row) == "", row.group


@pytest.mark.parametrize(("lost", "allowed", "stops"), [(0, 0.0, False), (2, 0.25, False), (3, 0.25, True), (8, 1.0, True)])
def test_a_step_that_lost_too_many_episodes_is_not_trained_on(whole: Path, lost: int, allowed: float, stops: bool) -> None:
    rows = Store(whole / "trajectories").read("train-000001")
    for row in rows[:lost]:
        row.stop, row.error = StopReason.INFRA_FAILURE, "the cable was cut"
    if stops:
        with pytest.raises(train.Broken, match=f"{lost / 8:.0%} of the episodes .* one of them said: the cable was cut"):
            train.sound(rows, allowed)
    else:
        assert train.sound(rows, allowed) == rows[lost:]


def test_a_row_that_is_not_what_was_sampled_is_not_trained_on(whole: Path) -> None:
    rows = Store(whole / "trajectories").read("train-000001")
    rows[5].tokens[2] ^= 1
    with pytest.raises(train.Broken, match=f"{rows[5].task}: turn 0, position 2: the sampler was fed"):
        train.sound(rows, 0.5)


def versions(row: Trajectory) -> set[int]:
    return {version for version, sampled in zip(row.version, row.mask, strict=True) if sampled}


def test_every_sampled_token_is_stamped_with_the_weights_of_its_step(whole: Path) -> None:
    store = Store(whole / "trajectories")
    for step in range(1, 9):
        for row in store.read(f"train-{step:06d}"):
            assert versions(row) == {step - 1}
    for label, version in (("before", 0), ("valid-000004", 4), ("after", 8)):
        assert {v for row in store.read(label) for v, sampled in zip(row.version, row.mask, strict=True) if sampled} == {
            version
        }


def test_the_trainer_agrees_with_the_sampler(whole: Path) -> None:
    """Measured on the first minibatch of a step; a step whose first minibatch teaches nothing has no value."""
    name = "policy/sampler_logprob_gap"
    gaps = [record[name] for record in read(whole / "metrics.jsonl") if record.get(name) is not None]
    assert gaps
    assert max(gaps) < 1e-5


def test_training_moved_the_policy(whole: Path) -> None:
    before, after = final_params(whole, step=18), final_params(whole)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, before, after)
    assert all(jax.tree.leaves(moved))


def test_shaping_is_learnt_from_by_its_parts_and_evaluation_never_sees_it(tmp_path: Path) -> None:
    shaping = ("reward.progressive=(0.5,)", "reward.failed_calls=0.2")
    run(configured(*shaping, "train.steps=2", "evaluate.every=0", "evaluate.ablate=False", "checkpoint.every=99"), tmp_path)
    store = Store(tmp_path / "trajectories")
    for step, record in enumerate(read(tmp_path / "metrics.jsonl")[18:], start=1):
        rows = store.read(f"train-{step:06d}")
        parts = [turn.parts for row in rows for turn in row.turns]
        for name in ("form", "failed_calls"):
            assert record[f"reward/part_{name}"] == pytest.approx(sum(part.get(name, 0.0) for part in parts) / len(rows))
        assert record["reward/outcome"] == pytest.approx(sum(row.outcome for row in rows) / len(rows))
        assert record["reward/mean"] == pytest.approx(sum(row.reward for row in rows) / len(rows))
        assert record["reward/mean"] != record["reward/outcome"]
        assert all("form +0.5" in row.turns[-1].reason for row in rows if not any(turn.error for turn in row.turns))
    assert not any(turn.parts for row in store.read("after") for turn in row.turns)
    assert all(row.reward == row.outcome for row in store.read("after"))


# ---------------------------------------------------------------------- stopped and gone on


def stopped_at(whole: Path, step: int, workdir: Path) -> Path:
    """The workdir of a run that was killed after the save of `step`: what came later was written only in part."""
    shutil.copytree(whole, workdir)
    (workdir / "eval.json").unlink()
    for saved in SAVED:
        if saved > step:
            shutil.rmtree(workdir / "checkpoints" / str(saved))
    with (workdir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 99, "torn')
    return workdir


@pytest.mark.parametrize("step", SAVED)
def test_a_run_resumed_from_any_save_equals_the_one_that_was_never_stopped(whole: Path, step: int, tmp_path: Path) -> None:
    workdir = stopped_at(whole, step, tmp_path / "resumed")
    said = run(configured(), workdir)
    assert f"resumed at step {step}" in said
    assert_same_run(workdir, whole)


def test_sigterm_saves_and_the_same_command_goes_on_to_the_same_end(whole: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    arguments = [f"--config={SPEC}", f"--workdir={workdir}", *(f"--config.{override}" for override in TINY)]
    with subprocess.Popen([sys.executable, "-m", "jaxagent", "train", *arguments], stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + PATIENCE_S
        while len(read(workdir / "metrics.jsonl")) < 7 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=PATIENCE_S)[0].decode()
    assert process.returncode == 75, said
    step = len(read(workdir / "metrics.jsonl"))
    assert f"saved at step {step} ({configs.place_in(configured(), step)}); the same command resumes" in said
    assert 7 <= step < 26
    assert f"resumed at step {step}" in run(configured(), workdir)
    assert_same_run(workdir, whole)


def server_processes() -> set[int]:
    """The embedded sandbox servers that this process started."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"sandbox_client.server" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found |= {int(entry.name)} if int(parent) == os.getpid() else set()
    return found


class Killing(Progress):
    """Kills the sandbox server of its run when the second training step has been told."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.others = server_processes()

    def step(self, step: int, steps: int, shown: dict[str, str], curve: float | None = None) -> None:
        super().step(step, steps, shown, curve)
        if "reward" in shown and step == 2:
            (server,) = server_processes() - self.others
            os.kill(server, signal.SIGKILL)


def test_a_sandbox_server_that_is_killed_is_started_again_and_changes_nothing(whole: Path, tmp_path: Path) -> None:
    before = server_processes()
    assert train.main(configured(), tmp_path, Killing()) == 0
    assert read(tmp_path / "metrics.jsonl")[-1]["sandbox/restarts"] == 1
    assert server_processes() == before
    assert_same_run(tmp_path, whole)


def test_another_config_on_the_same_workdir_is_refused_and_the_key_is_named(whole: Path) -> None:
    with pytest.raises(
        ValueError, match=r"holds a run of another config; name another --workdir.*\nconfig: optimizer\.lr: 0\.001 -> 0\.5"
    ):
        train.main(configured("optimizer.lr=0.5"), whole, Progress(io.StringIO()))


def test_a_second_run_in_a_workdir_is_refused_while_the_first_is_there(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = shutil.copytree(whole, tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_bytes()
    with alone(workdir / "run.lock", ""):
        arguments = [f"--config={SPEC}", f"--workdir={workdir}", *(f"--config.{override}" for override in TINY)]
        assert command(["train", *arguments]) == 2
    told = capsys.readouterr().err
    assert f"{workdir}: process {os.getpid()} on " in told and "trains there already; wait for its end" in told
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_workdir_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"--workdir=.*file/run cannot be written: Not a directory"):
        train.main(configured(), tmp_path / "file" / "run", Progress(io.StringIO()))


# ---------------------------------------------------------------------- what comes after


def test_the_export_of_a_run_is_its_policy_and_generates(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["export", f"--workdir={whole}", f"--to={tmp_path}"]) == 0
    assert "step 26" in capsys.readouterr().out
    said = json.loads((tmp_path / "generation_config.json").read_text())
    assert said["do_sample"] and said["eos_token_id"] == list(PlainTemplate().stop)
    exported = params_of(hf.load(tmp_path))[1]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(exported), final_params(whole))
    texts = []
    for temperature in ("0", "0", "1"):
        asked = ["--prompt=37AB", "--max-tokens=6", f"--temperature={temperature}"]
        assert command(["generate", f"--checkpoint={tmp_path}", *asked]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"


def test_evaluating_a_workdir_repeats_its_last_evaluation(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["eval", f"--workdir={whole}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    table = json.loads((whole / "eval.json").read_text())["after"]
    here, there = told.pop("settings"), table.pop("settings")
    assert here.pop("policy")["step"] == there.pop("policy")["step"] > 0 and here["split"] == "test"
    assert (told, here) == (table, there)
    assert command(["eval", f"--workdir={whole}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"success +{told['success']:.3f} +{told['ci95'][0]:.3f} to {told['ci95'][1]:.3f}", printed)
    assert f"{told['n']} tasks of test" in printed and str(whole / "evals") in printed


def test_training_goes_on_from_an_exported_checkpoint(whole: Path, tmp_path: Path) -> None:
    assert command(["export", f"--workdir={whole}", f"--to={tmp_path / 'policy'}"]) == 0
    kept = ("env.", "agent.", "mesh.", "engine.", "learner.", "evaluate.")
    world = tuple(override for override in TINY if override.startswith(kept))
    short = ("env.name=maze", "sampling.max_tokens=4", "train.steps=1", "feed.prompts=2", "evaluate.final_tasks=4")
    given = f"init_from={tmp_path / 'policy'}"
    run(
        configured(*short, given, "evaluate.ablate=False", "engine.append_tokens=(8,)", spec=BASE, tiny=world), tmp_path / "run"
    )
    fresh = trajectories(tmp_path / "run")["before"]
    assert [row[3] for row in fresh] == [row[3] for row in trajectories(whole)["after"]]  # the same policy, the same luck


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.learning] * (path.stem in PLAYED))
        for path in sorted(CONFIGS.glob("*.py"))
        if path.stem not in ("base", "sft", "raft", "dpo")
    ],
)
def test_every_config_runs_with_runlocal(path: Path, tmp_path: Path) -> None:
    config = configured("mesh.data=2", spec=f"{path}:runlocal", tiny=())
    try:
        find(config.env.name)(**config.env.options)
    except ValueError as missing:  # a library, or Java: the command says so before anything is compiled
        assert any(words in str(missing) for words in ("jaxagent env install", "needs the program", "needs the package"))
        assert command(["train", f"--config={path}:runlocal", f"--workdir={tmp_path}"]) == 2
        pytest.skip(str(missing))
    run(config, tmp_path)
    assert {"before", "after"} <= json.loads((tmp_path / "eval.json").read_text()).keys()
    store = Store(tmp_path / "trajectories")
    for label in store.labels():
        assert [fault for row in store.read(label) if (fault := audit(row))] == []


# ---------------------------------------------------------------------- bad input, before anything is compiled


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls the command line and returns what it says; nothing was compiled and nothing is left running."""

    def train_with(*overrides: str, spec: str = SPEC) -> str:
        compiled.clear()
        threads, servers = set(threading.enumerate()), server_processes()
        arguments = [f"--config.{override}" for override in overrides]
        assert command(["train", f"--config={spec}", f"--workdir={tmp_path / 'run'}", *arguments]) == 2
        assert compiled == []
        assert set(threading.enumerate()) <= threads
        assert server_processes() == servers
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return train_with


def checkpoint(path: Path, vocab_size: int) -> Path:
    """A checkpoint of the plain template whose model knows `vocab_size` tokens; its weights are not there yet."""
    path.mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "head_dim": 8}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocab_size, **sizes}))
    for name, text in tokenizer_files().items():
        (path / name).write_text(text)
    return path


def chatml_files() -> dict[str, str]:
    """A ChatML tokenizer of bytes, whose template only ever shows the last two messages."""
    files = tokenizer_files()
    for old, new in (("<system>", "<|im_start|>"), ("<eos>", "<|im_end|>")):
        files = {name: text.replace(old, new) for name, text in files.items()}
    settings = json.loads(files["tokenizer_config.json"])
    settings["chat_template"] = (
        "{% for m in messages[-2:] %}{{ '<|im_start|>' + m.role + m.content + m.tool_calls | d('') | string + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    return {**files, "tokenizer_config.json": json.dumps(settings)}


def test_a_missing_checkpoint_is_told(refused: Callable[..., str]) -> None:
    assert "nowhere: a Hugging Face checkpoint directory with config.json is wanted" in refused("init_from=/nowhere", spec=BASE)


def test_a_checkpoint_without_tokenizer_is_told(refused: Callable[..., str], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "bare", vocab_size=264)
    (path / "tokenizer_config.json").unlink()
    assert "a tokenizer is wanted beside the weights" in refused(f"init_from={path}", spec=BASE)


def test_a_tokenizer_larger_than_the_vocabulary_is_told(refused: Callable[..., str], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "small", vocab_size=200)
    assert "the tokenizer has 264 ids, the model's vocabulary only 200: they do not belong together" in refused(
        f"init_from={path}", spec=BASE
    )


def test_a_chat_template_that_rewrites_what_was_said_is_told_before_anything_is_compiled(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "chatml", vocab_size=9000)
    for name, text in chatml_files().items():
        (path / name).write_text(text)
    said = refused(f"init_from={path}", spec=BASE)
    assert f"{path}: the chat template rewrites what was said before once tool results follow" in said
    assert "in turn 0 the token " in said
    said = refused(f"init_from={path}", "chat.history=keep", spec=BASE)  # what is missing next: its weights
    assert "rewrites" not in said
    assert "safetensors" in said
    assert "chat.history must be one of refuse, keep, segment; got 'lose'" in refused("chat.history=lose")


def test_an_unknown_key_is_told_with_the_nearest_known_one(refused: Callable[..., str]) -> None:
    assert "unknown key 'optimizer.learning_rate'" in refused("optimizer.learning_rate=1")
    assert "did you mean 'engine.slots'?" in refused("engine.slot=4")


def test_all_faults_are_told_at_once(refused: Callable[..., str]) -> None:
    said = refused("engine.slot=4", "feed.rollouts=1", "optimizer.lr=0.0")
    assert "engine.slot" in said
    assert "feed.rollouts must be at least 2" in said
    assert "optimizer: lr must be positive" in said


def test_a_mesh_that_does_not_fit_is_told(refused: Callable[..., str]) -> None:
    assert "does not fit 8 devices" in refused("mesh.data=3", "mesh.tensor=4")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("a token\n")
    return tmp_path / "token"


def test_a_sandbox_that_does_not_answer_is_told(refused: Callable[..., str], token_file: Path) -> None:
    said = refused("sandbox.url=http://127.0.0.1:9", f"sandbox.token_file={token_file}", "sandbox.timeout_s=0.5")
    assert "sandbox.url=http://127.0.0.1:9: no sandbox server answers there" in said


def test_a_token_file_that_cannot_be_read_is_told(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused("sandbox.url=http://127.0.0.1:9", f"sandbox.token_file={tmp_path / 'absent'}")
    assert "absent: the server's bearer token cannot be read from it: No such file or directory" in said
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    said = refused("sandbox.url=http://127.0.0.1:9", f"sandbox.token_file={tmp_path / 'binary'}")
    assert "cannot be read from it: not a text" in said


def test_a_given_sandbox_is_asked_for_its_token_and_its_functions(
    refused: Callable[..., str], token_file: Path, tmp_path: Path
) -> None:
    with EmbeddedServer(functions=("jaxagent.envs.chain",), code="off") as server:
        given = f"sandbox.url={server.url}", f"sandbox.token_file={token_file}"
        assert "the server refuses this run: wanted Authorization" in refused(*given)
        token_file.write_text(server.token + "\n")
        assert (
            "the server does not hold the functions of jaxagent.envs.maze, it holds jaxagent.envs.chain; "
            "start it with --functions=jaxagent.envs.maze"
        ) in refused(*given)


def test_a_run_with_a_given_sandbox_equals_one_with_its_own(whole: Path, tmp_path: Path) -> None:
    with EmbeddedServer(functions=("jaxagent.envs.maze",), code="off", token_file=tmp_path / "its_token") as server:
        said = run(configured(f"sandbox.url={server.url}", f"sandbox.token_file={tmp_path / 'its_token'}"), tmp_path / "run")
    for told in ("held-out success to start from", "blind", "time: ", f"report: {tmp_path / 'run'}", "next:"):
        assert told in said
    assert_same_run(tmp_path / "run", whole)
