"""A step that goes on without the last of its groups: who is dropped, when, and that nobody learns a zero from it."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler, script
from toys import Lone

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from clocked import Clock
from scheduling import Shape, without_the_last

from jaxagent import train
from jaxagent.agent import Agent, Limits
from jaxagent.algos.table import choose
from jaxagent.chat.plain import PlainTemplate
from jaxagent.credit import assign
from jaxagent.envs.env import Env, Step, Task
from jaxagent.feed import FeedOptions, has_signal
from jaxagent.journal import Journal
from jaxagent.rollout import GRACE, RolloutOptions, Rollouts
from jaxagent.types import Group, Message, Sampling, StopReason, Trajectory, Turn

PLAIN = PlainTemplate()
GROUPS, ROLLOUTS = 4, 5


class Waits(Lone):
    """Each episode takes one turn, and the seconds that its name draws."""

    def __init__(self, seed: int, broken: float = 0.0):
        self.seed, self.broken, self.opened, self.closed = seed, broken, 0, 0

    def task(self, split: str, index: int) -> Task:
        return {"id": f"waits/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Env:
        self.opened += 1
        return Wait(self, name.partition("/")[2])

    def seconds(self, name: str) -> float:
        return random.Random(f"{self.seed}/{name}").lognormvariate(0.0, 1.5)


class Wait:
    def __init__(self, world: Waits, name: str):
        self.world, self.name = world, name

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", "q")])

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(self.world.seconds(self.name))
        if random.Random(f"fate/{self.world.seed}/{self.name}").random() < self.world.broken:
            raise ConnectionError("lost")
        return Step(terminated=True, answered=True, reward=1.0)

    async def close(self) -> None:
        self.world.closed += 1


def played(
    world: Waits, least: int, concurrency: int = 99, journal: Journal | None = None
) -> tuple[list[list[Trajectory]], float, ScriptedSampler]:
    """A call's groups, hurried where `least` is not 0, and when they were over."""
    clock, sampler = Clock(), script(PLAIN, Message("assistant", "x"))
    options = RolloutOptions(concurrency=concurrency, deadline_s=500.0, attempts=1)
    made = Rollouts(world, Agent(PLAIN, (), sampler, Limits()), lambda: None, 0, options, clock)
    named = [(f"train/{i}", world.task("train", i)) for i in range(GROUPS)]
    futures = made.play(named, ROLLOUTS, Sampling(max_tokens=8), journal=journal)
    if least:
        made.hurry(futures, least)
    clock.go_on(lambda: all(future.done() for group in futures for future in group))
    seconds = clock.time()
    made.close()
    return [[future.result(timeout=0)[0] for future in group] for group in futures], seconds, sampler


def test_over_many_schedules_every_group_has_enough_the_rest_gets_its_grace_and_no_more() -> None:
    for seed in range(80):
        dice = random.Random(seed)
        world, least = Waits(seed, broken=0.1), dice.randint(2, ROLLOUTS)
        concurrency = dice.choice((3, 99))
        groups, seconds, sampler = played(world, least, concurrency)
        rows = [row for group in groups for row in group]
        dropped = [row for row in rows if row.stop is StopReason.STRAGGLER]
        assert {row.stop for row in rows} <= {StopReason.ANSWERED, StopReason.INFRA_FAILURE, StopReason.STRAGGLER}
        assert all(sum(row.stop is not StopReason.STRAGGLER for row in group) >= least for group in groups)
        assert all(row.reward == 0.0 and not row.stop.counts and "feed.min_group" in row.error for row in dropped)
        assert sampler.rows == {} and 0 < world.opened == world.closed <= len(rows)
        if concurrency == 99:  # then who is late is known beforehand
            took = [sorted(world.seconds(f"train/{g}#{i}") for i in range(ROLLOUTS)) for g in range(GROUPS)]
            enough_s = max(group[least - 1] for group in took)
            late = sum(s > enough_s * (1 + GRACE) + 1e-9 for group in took for s in group)
            assert len(dropped) == late
            assert seconds == pytest.approx(min(enough_s * (1 + GRACE), max(map(max, took))))


def test_nobody_is_dropped_where_all_are_waited_for() -> None:
    groups, seconds, _ = played(Waits(3), least=0)
    same, again_s, _ = played(Waits(3), least=ROLLOUTS)
    assert [[row.stop for row in group] for group in groups] == [[StopReason.ANSWERED] * ROLLOUTS] * GROUPS
    assert [[row.tokens for row in group] for group in groups] == [[row.tokens for row in group] for group in same]
    assert seconds == again_s


def test_a_run_that_goes_on_from_its_journal_drops_the_same_episodes(tmp_path: Path) -> None:
    log = Journal(tmp_path, redraw=False)
    log.begin(0)
    first, _, _ = played(Waits(5), 3, journal=log)
    log.close()
    again = Journal(tmp_path, redraw=False)
    again.begin(0)
    second, seconds, _ = played(Waits(5), 3, journal=again)
    again.close()
    assert any(row.stop is StopReason.STRAGGLER for group in first for row in group)
    assert seconds == 0.0
    assert [[row.to_json() for row in group] for group in first] == [[row.to_json() for row in group] for group in second]


def rollout(number: int, reward: float, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    turn = Turn(0, 1, 3, "", reward=reward)
    facts = {"tokens": [1, 2, 3], "mask": [False, True, True], "logprob": [0.0, -1.0, -1.0]}
    return Trajectory("t", 0, "g", number, version=[-1, 0, 0], turn=[-1, 0, 0], turns=[turn], stop=stop, **facts)


@pytest.mark.parametrize(("name", "wanted"), [("rloo", [1.0, -0.5, -0.5]), ("dr_grpo", [2 / 3, -1 / 3, -1 / 3])])
def test_who_is_left_is_compared_with_who_is_left(name: str, wanted: list[float]) -> None:
    """RLOO: 1 - 0 and 0 - 1/2 of three that are left; centred: less their mean of 1/3. The dropped are in neither."""
    late = rollout(3, 9.0, StopReason.STRAGGLER), rollout(4, 0.0, StopReason.STRAGGLER)
    group = Group("g", [rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.0), *late])
    small = Group("g", [rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.0)])
    assert len(assign([group], choose(name))[0]) == len(assign([small], choose(name))[0]) == 3
    for one in (group, small):
        assert [row.turns[0].advantage for row in one.trajectories[:3]] == pytest.approx(wanted)
    assert late[0].turns[0].advantage is None
    assert has_signal(group) and not has_signal(Group("g", [rollout(0, 1.0), rollout(1, 1.0), *late]))


def test_what_is_dropped_is_not_lost_to_the_infrastructure() -> None:
    rows = [rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.0, StopReason.STRAGGLER), rollout(3, 0.0, StopReason.STRAGGLER)]
    for row in rows:
        row.turns[0].fed = [1]
    assert train.sound(rows, max_broken=0.0) == rows[:2]
    rows[1] = replace(rows[1], stop=StopReason.INFRA_FAILURE, error="the cable was cut")
    with pytest.raises(train.Broken, match="50% of the episodes of this step were lost"):
        train.sound(rows, max_broken=0.25)


@pytest.mark.parametrize("least", [1, 9, -1])
def test_a_least_that_cannot_be_is_refused(least: int) -> None:
    with pytest.raises(ValueError, match=r"feed\.min_group must be"):
        FeedOptions(min_group=least)


def test_a_step_of_the_real_feed_is_over_sooner_at_the_same_version_and_says_what_it_dropped() -> None:
    """Tools of 2 s in the middle, sigma 2: of 8 groups of 8, at least 6 each."""
    shape = Shape(groups=8, turns=(3, 5), tool_sigma=2.0)
    every, some = without_the_last(shape, 64, 0), without_the_last(shape, 64, 6)
    assert every["dropped"] == 0 < some["dropped"] <= 0.25
    assert some["least"] >= 6
    assert every["s"] > 1.5 * some["s"]
