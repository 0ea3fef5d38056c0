"""SIGTERM while an evaluation is played: the run is saved at once, and owes it; it ends as the one that was never stopped.

Ctrl-C in the middle of a step saves nothing; the run goes on from its last checkpoint, and ends alike too.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scripted import ScriptedSampler, never
from test_hosts import environment, free_port, on_each
from test_train import configured, final_params, steady_metrics, trajectories
from toys import Parity

from jaxagent import config as configs
from jaxagent import train
from jaxagent.__main__ import main
from jaxagent.agent import Agent, Limits
from jaxagent.alarms import Alarms
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.tasks import TaskStream
from jaxagent.envs.env import Env, Step
from jaxagent.envs.maze import Maze, MazeEpisode
from jaxagent.evaluate import HeldOut, evaluate
from jaxagent.feed import Feed, FeedOptions
from jaxagent.finetune import copied
from jaxagent.hosts import ALONE, Hosts
from jaxagent.metrics import read
from jaxagent.parts import Parts, build, use_devices
from jaxagent.progress import Progress
from jaxagent.rollout import RolloutOptions, Rollouts, Stopped
from jaxagent.types import Message, SampleRequest, Sampling

PLAIN = PlainTemplate()
ROOT = Path(__file__).parents[1]
# Two steps of warm-up, then four, with an evaluation after the second, at which a checkpoint is due too. What hangs would be
# given up after a while, and counted as broken: a run that waits for it ends with other numbers.
SHORT = ("warmup.steps=2", "train.steps=4", "evaluate.every=2", "checkpoint.every=2", "train.minibatches=1")
SHORT = (*SHORT, "rollout.deadline_s=30", "rollout.attempts=1")
EPISODES = 4  # of an evaluation
DEADLINE_S = 25.0  # from SIGTERM to what is saved: some tenths of a second, and more where others use the machine


class Preempted(Maze):
    """Mazes in which a signal comes while episodes of `split` are played, when `after` evaluations' of them have begun.

    From then on no door opens any more.
    """

    split, after, begun, told, signal = "", 0, 0, False, signal.SIGTERM

    def episode(self, name: str, sandbox: Any) -> Env:
        if f"/{self.split}/" not in name:
            return super().episode(name, sandbox)
        self.begun += 1
        return super().episode(name, sandbox) if self.begun <= self.after * EPISODES else Hanging(self, name, sandbox)


class Hanging(MazeEpisode):
    world: Preempted

    async def step(self, action: Message) -> Step:
        if not self.world.told or self.world.signal == signal.SIGTERM:  # one Ctrl-C: another would cut the saving short
            self.world.told = True
            os.kill(os.getpid(), self.world.signal)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")


Start = Callable[..., tuple[int, str]]
Chapter = Callable[[train.Run], None]


@contextmanager
def told_in(phase: str) -> Iterator[Chapter]:
    """What makes SIGTERM come, once and to nobody but this run, as soon as a step is in this phase."""
    over, threads = threading.Event(), list[threading.Thread]()

    def tell(run: train.Run) -> None:
        while not over.wait(0.0002):
            if run.watchdog.phase == phase:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def chapter(run: train.Run) -> None:
        threads.append(threading.Thread(target=tell, args=(run,), daemon=True))
        threads[0].start()

    try:
        yield chapter
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module", autouse=True)
def late() -> Iterator[None]:
    """A signal of an episode that had not heard that its run is over ends nobody."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    return configured(*SHORT)


@pytest.fixture(scope="module")
def start(config: ConfigDict) -> Iterator[Start]:
    """Starts a run in a workdir, with programs that are compiled once; returns its exit code and what it says."""
    use_devices(config)
    parts = build(config)
    initial = copied(parts.learner.weights())

    def started(
        workdir: Path, split: str = "never", after: int = 0, alarms: Alarms | None = None, *more: Chapter, **told: Any
    ) -> Any:
        train.prepare(config, workdir)
        configs.save(config, workdir / "config.json")
        world, said = Preempted(**config.env.options), io.StringIO()
        world.split, world.after, world.signal = split, after, told.get("signal", signal.SIGTERM)
        options = RolloutOptions(**config.rollout)
        rollouts = Rollouts(world, parts.rollouts.agent, parts.sandbox.client, config.seed, options)
        here: Parts = replace(parts, world=world, rollouts=rollouts)
        here.learner.restore_weights(copied(initial))
        run = train.Run(config, workdir, here, Progress(said))
        run.alarms = alarms or run.alarms
        try:
            return train.story(run, train.resume, train.warm_up, *more, train.train, train.finish), said.getvalue()
        finally:
            rollouts.close()

    yield started
    parts.close()


@pytest.fixture(scope="module")
def whole(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert start(workdir)[0] == train.EXIT_DONE
    return workdir


def want_equal(one: Path, other: Path) -> None:
    assert steady_metrics(one) == steady_metrics(other)
    assert trajectories(one) == trajectories(other)
    assert (one / "eval.json").read_text() == (other / "eval.json").read_text()
    jax.tree.map(np.testing.assert_array_equal, final_params(one, 6), final_params(other, 6))


def test_sigterm_in_any_evaluation_saves_at_once_and_the_run_that_goes_on_makes_it(
    start: Start, whole: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    assert "eval/success" in read(whole / "metrics.jsonl")[3]
    # Before the first step; after the second, and there again while what is owed is made; after the last, and without tools.
    for split, after, step in (("test", 0, 2), ("valid", 0, 4), ("valid", 0, 4), ("test", 0, 6), ("test", 1, 6)):
        code, said = start(stopped, split, after)
        assert code == train.EXIT_AGAIN, said
        took = re.search(rf"saved at step {step} \(.*/.\); the same command resumes \(saved (.*) s after SIGTERM\)", said)
        assert took and float(took[1]) < DEADLINE_S, said
        assert len(read(stopped / "metrics.jsonl")) == step - (split == "valid")
    # What was killed after it told the evaluation, and before another step was saved, goes on from there.
    (stopped / "checkpoints" / "6").rename(tmp_path / "lost")
    code, said = start(stopped)
    assert code == train.EXIT_DONE
    assert "resumed at step 4 (step 2/4)\n" in said
    want_equal(stopped, whole)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background of a script, whose children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def command(heard: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command line, on which Ctrl-C is pressed while its config is read; returns its exit code and its last word."""
    config = tmp_path / "interrupted.py"

    def called(workdir: Path, told: str = "SIGINT") -> tuple[int, str]:
        config.write_text(f"import os, signal\n\n\ndef get_config(arg=''):\n    os.kill(os.getpid(), signal.{told})\n")
        code = main(["train", f"--config={config}", f"--workdir={workdir}"])
        return code, capfd.readouterr().err.strip()

    return called


def test_ctrl_c_in_mid_step_ends_the_run_at_once_and_the_same_command_ends_as_if_it_had_not_been(
    start: Start, whole: Path, command: Callable[[Path], tuple[int, str]], tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    assert command(stopped) == (130, "stopped before anything was saved; the same command begins anew")
    with pytest.raises(KeyboardInterrupt):  # some episodes of the first step have begun
        start(stopped, "train", after=1, signal=signal.SIGINT)
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["2"]
    assert command(stopped) == (130, "stopped; the same command goes on from the last checkpoint, step 2 (warm-up 2/2)")
    code, said = start(stopped)
    assert code == train.EXIT_DONE
    assert "resumed at step 2 (warm-up 2/2)\n" in said
    want_equal(stopped, whole)


def test_sigterm_before_anything_is_trained_says_that_nothing_is_lost_and_has_the_command_started_again(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    said = "SIGTERM while nothing was trained: stopped"
    began_anew = f"{said} before anything was saved; the same command begins anew"
    assert command(tmp_path / "run", "SIGTERM") == (train.EXIT_AGAIN, began_anew)
    (tmp_path / "run" / "checkpoints" / "7").mkdir(parents=True)
    goes_on = f"{said}; the same command goes on from the last checkpoint, step 7"
    assert command(tmp_path / "run", "SIGTERM") == (train.EXIT_AGAIN, goes_on)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_host_that_is_told_to_end_before_anything_is_trained_ends_without_waiting_for_the_others() -> None:
    program = (
        "from jaxagent.__main__ import AGAIN, Terminated\nfrom jaxagent.hosts import Hosts\n"
        "with Hosts(0, 2).ending_together():\n    raise Terminated(AGAIN)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "host 0 of 2 ends: Terminated: SIGTERM while nothing was trained\n")


def test_sigterm_is_heard_by_a_host_that_has_joined_others() -> None:
    """JAX has a hearer of its own, which only writes down that it came."""
    program = (
        "import os, signal, sys, time\nfrom jaxagent.hosts import join\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\njoin()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(free_port(), 0, hosts=1), check=False)
    assert done.returncode == 75


def test_ctrl_c_is_not_heard_while_what_was_saved_is_made_whole(heard: None) -> None:
    with train.deaf(signal.SIGINT):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_run_that_an_alarm_ends_at_a_step_that_it_owed_goes_on(start: Start, tmp_path: Path) -> None:
    def low() -> Alarms:
        """One that is raised as soon as there is an entropy to compare with, at step 4, and stays."""
        return Alarms({"entropy": 100.0}, stop="entropy")

    assert start(tmp_path, "valid")[0] == train.EXIT_AGAIN
    with pytest.raises(train.Alarmed, match="at step 2/4 the entropy fell"):
        start(tmp_path, alarms=low())
    assert start(tmp_path, alarms=low())[0] == train.EXIT_DONE
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_takes_no_more_ends_the_run_with_a_sentence_and_the_same_command_goes_on(
    start: Start, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run: train.Run) -> None:
        run.saved()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))  # of every file of this process

    try:
        with pytest.raises(
            train.Broken, match=r"cannot be written at step 2: File too large; the checkpoint of step 2 is whole"
        ):
            start(workdir, "never", 0, None, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    code, said = start(workdir)
    assert code == train.EXIT_DONE and "resumed at step 2" in said
    assert [record["step"] for record in read(workdir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.learning
def test_sigterm_in_any_part_of_a_step_ends_the_run_in_time_and_it_goes_on_as_if_it_had_not_been(
    start: Start, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert start(whole)[0] == train.EXIT_DONE
    for phase in ("rollout", "a tool call", "train", "publish", "checkpoint"):
        with told_in(phase) as tell:
            code, said = start(stopped, "train") if phase == "a tool call" else start(stopped, "never", 0, None, tell)
        assert code == train.EXIT_AGAIN, (phase, said)
        took = re.search(r"the same command resumes \(saved (.*) s after SIGTERM\)", said)
        assert took and float(took[1]) < train.SAVE_S, said
    assert start(stopped)[0] == train.EXIT_DONE
    assert steady_metrics(stopped) == steady_metrics(whole)
    assert trajectories(stopped) == trajectories(whole)
    jax.tree.map(np.testing.assert_array_equal, final_params(stopped, 6), final_params(whole, 6))


# ---------------------------------------------------------------------- who is told, and who is not


def test_an_evaluation_is_given_up_by_all_hosts_where_one_is_to_stop() -> None:
    """The host that is told has episodes that never end; the other one's are over by themselves."""

    def evaluated(hosts: Hosts) -> str:
        hangs = hosts.index == 1

        def write(text: str, request: SampleRequest) -> Any:
            return never() if hangs else PLAIN.turn(Message("assistant", "0"))

        world, options = Parity(), RolloutOptions(deadline_s=60.0)
        rollouts = Rollouts(world, Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, write), Limits()), lambda: None, 0, options)
        try:
            how = {"split": "test", "tasks": 3, "hosts": hosts, "stop": lambda: hangs}
            return f"{evaluate(rollouts, HeldOut(max_tokens=20), **how)[0]['n']} tasks"
        except Stopped:
            return "stopped"
        finally:
            rollouts.close()

    assert on_each(2, evaluated) == ["stopped", "stopped"]
    assert evaluated(ALONE) == "3 tasks"


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_is_given_up_by_all_hosts_where_one_is_to_stop_and_played_again_as_it_was(mixed: bool) -> None:
    """The host that is told has episodes that never end; the other one's are over by themselves, and it comes along."""

    def played(hosts: Hosts) -> list[list[str]]:
        hangs = [hosts.index == 1]

        def write(text: str, request: SampleRequest) -> Any:
            return never() if hangs[0] else PLAIN.turn(Message("assistant", "0"))

        world, options = Parity(), RolloutOptions(deadline_s=60.0)
        rollouts = Rollouts(world, Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, write), Limits()), lambda: None, 0, options)
        shape = FeedOptions(prompts=4, rollouts=2, max_rounds=2, max_staleness=1)
        feed = Feed(world, TaskStream(100, 3), rollouts, Sampling(max_tokens=20), shape, hosts if hosts.count > 1 else None)
        before = feed.state()
        try:
            if hosts.count > 1:
                with pytest.raises(Stopped):
                    feed.take(mixed=mixed, steps_left=1, stop=lambda: hangs[0])
                assert feed.state() == before
            hangs[0] = False
            sampled = feed.take(mixed=mixed, steps_left=1, version=7, stop=lambda: hangs[0])[1]
            return [[group.key, *(str(row.tokens) for row in group.trajectories)] for group in sampled]
        finally:
            rollouts.close()

    one, other = on_each(2, played)
    whole = played(ALONE)
    assert len(whole) == (8 if mixed else 4)
    assert [max(pair, key=len) for pair in zip(one, other, strict=True)] == whole
