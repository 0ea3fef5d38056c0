"""SIGTERM while an evaluation is played: the run is saved at once, and owes it; it ends as the one that was never stopped."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scripted import ScriptedSampler, never
from test_hosts import on_each
from test_train import configured, final_params, steady_metrics, trajectories
from toys import Parity

from jaxagent import config as configs
from jaxagent import train
from jaxagent.agent import Agent, Limits
from jaxagent.alarms import Alarms
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.env import Env, Step
from jaxagent.envs.maze import Maze, MazeEpisode
from jaxagent.evaluate import HeldOut, evaluate
from jaxagent.finetune import copied
from jaxagent.hosts import ALONE, Hosts
from jaxagent.metrics import read
from jaxagent.parts import Parts, build, use_devices
from jaxagent.progress import Progress
from jaxagent.rollout import RolloutOptions, Rollouts, Stopped
from jaxagent.types import Message, SampleRequest

PLAIN = PlainTemplate()
# Two steps of warm-up, then four, with an evaluation after the second, at which a checkpoint is due too. What hangs would be
# given up after a while, and counted as broken: a run that waits for it ends with other numbers.
SHORT = ("warmup.steps=2", "train.steps=4", "evaluate.every=2", "checkpoint.every=2", "train.minibatches=1")
SHORT = (*SHORT, "rollout.deadline_s=30", "rollout.attempts=1")
EPISODES = 4  # of an evaluation
DEADLINE_S = 25.0  # from SIGTERM to what is saved: some tenths of a second, and more where others use the machine


class Preempted(Maze):
    """Mazes in which SIGTERM comes while an evaluation of `split` is played, the one that follows `after` of the same split.

    From then on no door opens any more.
    """

    split, after, begun = "", 0, 0

    def episode(self, name: str, sandbox: Any) -> Env:
        if f"/{self.split}/" not in name:
            return super().episode(name, sandbox)
        self.begun += 1
        return super().episode(name, sandbox) if self.begun <= self.after * EPISODES else Hanging(self, name, sandbox)


class Hanging(MazeEpisode):
    async def step(self, action: Message) -> Step:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")


Start = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    return configured(*SHORT)


@pytest.fixture(scope="module")
def start(config: ConfigDict) -> Iterator[Start]:
    """Starts a run in a workdir, with programs that are compiled once; returns its exit code and what it says."""
    use_devices(config)
    parts = build(config)
    initial = copied(parts.learner.weights())

    def started(workdir: Path, split: str = "never", after: int = 0, alarms: Alarms | None = None) -> tuple[int, str]:
        train.prepare(config, workdir)
        configs.save(config, workdir / "config.json")
        world, said = Preempted(**config.env.options), io.StringIO()
        world.split, world.after = split, after
        options = RolloutOptions(**config.rollout)
        rollouts = Rollouts(world, parts.rollouts.agent, parts.sandbox.client, config.seed, options)
        here: Parts = replace(parts, world=world, rollouts=rollouts)
        here.learner.restore_weights(copied(initial))
        run = train.Run(config, workdir, here, Progress(said))
        run.alarms = alarms or run.alarms
        try:
            return train.story(run, train.resume, train.warm_up, train.train, train.finish), said.getvalue()
        finally:
            rollouts.close()

    yield started
    parts.close()


def test_sigterm_in_any_evaluation_saves_at_once_and_the_run_that_goes_on_makes_it(start: Start, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert start(whole)[0] == train.EXIT_DONE
    assert "eval/success" in read(whole / "metrics.jsonl")[3]
    # Before the first step; after the second, and there again while what is owed is made; after the last, and without tools.
    for split, after, step in (("test", 0, 2), ("valid", 0, 4), ("valid", 0, 4), ("test", 0, 6), ("test", 1, 6)):
        code, said = start(stopped, split, after)
        assert code == train.EXIT_AGAIN, said
        took = re.search(rf"saved at step {step}; the same command resumes \(saved (.*) s after SIGTERM\)", said)
        assert took and float(took[1]) < DEADLINE_S, said
        assert len(read(stopped / "metrics.jsonl")) == step - (split == "valid")
    # What was killed after it told the evaluation, and before another step was saved, goes on from there.
    (stopped / "checkpoints" / "6").rename(tmp_path / "lost")
    code, said = start(stopped)
    assert code == train.EXIT_DONE
    assert "resumed at step 4\n" in said
    assert steady_metrics(stopped) == steady_metrics(whole)
    assert trajectories(stopped) == trajectories(whole)
    assert (stopped / "eval.json").read_text() == (whole / "eval.json").read_text()
    jax.tree.map(np.testing.assert_array_equal, final_params(stopped, 6), final_params(whole, 6))


def test_a_run_that_an_alarm_ends_at_a_step_that_it_owed_goes_on(start: Start, tmp_path: Path) -> None:
    def low() -> Alarms:
        """One that is raised as soon as there is an entropy to compare with, at step 4, and stays."""
        return Alarms({"entropy": 100.0}, stop="entropy")

    assert start(tmp_path, "valid")[0] == train.EXIT_AGAIN
    with pytest.raises(train.Alarmed, match="at step 2/4 the entropy fell"):
        start(tmp_path, alarms=low())
    assert start(tmp_path, alarms=low())[0] == train.EXIT_DONE
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


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
