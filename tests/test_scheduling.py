"""Scheduling with a virtual clock: the real feed, rollouts, agent and slots; tools and the device are seconds that pass."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler
from toys import Lone

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from clocked import Clock
from scheduling import Shape, pace, tails

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.env import Env, Step, Task
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, SampleRequest, Sampling, Trajectory

PLAIN = PlainTemplate()


class Long(Lone):
    """Task n takes n + 1 turns."""

    def task(self, split: str, index: int) -> Task:
        return {"id": f"long/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Long()

    async def reset(self, task: Task, seed: int) -> Step:
        self.left = seed + 1
        return Step([Message("user", "q")])

    async def step(self, action: Message) -> Step:
        self.left -= 1
        await asyncio.sleep(1.0)
        return Step(terminated=True) if not self.left else Step([Message("user", "go")])


def test_in_whatever_order_they_begin_all_draw_the_same() -> None:
    """With two places for 24 episodes the long ones begin first, once it is known which they are; tokens do not change."""

    def write(text: str, asked: SampleRequest) -> Sequence[int]:
        drawn = random.Random(f"{asked.key}/{asked.start}").randrange(1000)
        return PLAIN.turn(Message("assistant", str(drawn)))

    def played(concurrency: int) -> tuple[list[list[Trajectory]], list[str]]:
        sampler, world = ScriptedSampler(PLAIN, write), Long()
        agent, options = Agent(PLAIN, (), sampler, Limits(99, 999)), RolloutOptions(concurrency=concurrency)
        clock = Clock()
        rollouts = Rollouts(world, agent, lambda: None, 0, options, clock)
        named = [(f"train/{i}", world.task("train", i)) for i in (0, 5, 1, 30, 2, 3)]
        try:
            for _ in range(2):
                futures = rollouts.play(named, 4, Sampling(max_tokens=8))
                while not all(future.done() for group in futures for future in group):
                    now = clock.time()
                    clock.go_on(lambda now=now: clock.time() > now)
                asked = [asked.trajectory for asked in sampler.requests if asked.start == 0]
            return [[future.result()[0] for future in group] for group in futures], asked[24:]
        finally:
            rollouts.close()

    few, order = played(2)
    all_, _ = played(99)
    assert [[row.tokens for row in group] for group in few] == [[row.tokens for row in group] for group in all_]
    found = [name.partition("#")[0] for name in order]
    assert found[:6] == ["train/0"] * 2 + ["train/30"] * 4  # two found the places free
    assert found[6:] == [f"train/{i}" for i in (5, 3, 2, 1) for _ in range(4)] + ["train/0"] * 2


@pytest.mark.parametrize(("max_staleness", "least"), [(0, 0.75), (1, 0.85)])
def test_steps_of_slow_tools_come_near_what_cannot_be_beaten(max_staleness: int, least: float) -> None:
    """Tools of 2 s in the middle, sigma 1; 5 to 50 turns; 8 groups of 4, each row standing for 8 of a step of 256."""
    found = pace(Shape(groups=8, rollouts=4), slots=32, max_staleness=max_staleness, steps=3, weight=8)
    assert least < found["bound / wall"] <= 1.0
    assert found["bound / wall"] <= found["busy"] <= 1.0
    assert found["floor / wall"] >= found["bound / wall"]
    assert (found["staleness"] > 0) == (max_staleness > 0)


def test_long_episodes_begin_first_where_slots_are_scarce_and_a_step_is_over_sooner() -> None:
    """The episodes of the last of 24 tasks take 30 turns, the others about 4; 16 slots for 96 episodes."""
    found = tails(Shape(groups=24, rollouts=4, turns=(4, 30), endless=1, sorted=True), slots=16)
    assert found["fifo 0"] > 1.2 * found["long first 0"]  # what is not known at first costs a little
    assert found["fifo 1"] > 1.3 * found["long first 1"]
    assert found["known 1"] == pytest.approx(found["long first 1"], rel=0.1)


def test_where_tools_dominate_and_lengths_are_known_a_step_takes_two_thirds_of_first_come_first_served() -> None:
    """Tools of 10 s, sigma 0.3; the episodes of the last of 24 tasks take 30 turns, the others about 4; 32 slots for 192."""
    slow = Shape(groups=24, rollouts=8, turns=(4, 30), endless=1, sorted=True, tool_s=10.0, tool_sigma=0.3)
    found = tails(slow, slots=32)
    assert found["fifo 0"] > 1.2 * found["long first 0"]  # the first of every group is played before it is known which are long
    assert found["fifo 1"] > 1.5 * found["long first 1"]
    assert found["long first 1"] < 1.05 * found["bound 1"]
