"""Whole groups in the order of the tasks, whoever finishes first, and a feed that goes on where it stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from scripted import ScriptedSampler, never
from toys import InTurns, Parity, Stairs, climbing

from jaxagent.agent import Agent, Limits
from jaxagent.algos.table import choose
from jaxagent.chat.plain import PlainTemplate
from jaxagent.credit import assign
from jaxagent.data.tasks import TaskStream, ValueStream
from jaxagent.feed import Feed, FeedOptions, has_signal, stream_of
from jaxagent.rollout import RolloutOptions, Rollouts, Stopped
from jaxagent.types import Group, Message, Sample, SampleRequest, Sampling, StopReason, Trajectory, Turn

PLAIN = PlainTemplate()


def answering(text: str, request: SampleRequest) -> Sequence[int]:
    """Even tasks get the same answer from all rollouts, odd ones do not."""
    task = int(text.removeprefix("<user>").removesuffix("<turn>"))
    rollout = int(request.trajectory.split("#")[1].split(".")[0])
    return PLAIN.turn(Message("assistant", str(rollout * (task % 2))))


@contextmanager
def feeding(size: int = 12, seed: int = 0, **options: Any) -> Iterator[Feed]:
    world = Parity()
    agent = Agent(PLAIN, (), ScriptedSampler(PLAIN, answering), Limits(2, 100))
    rollouts = Rollouts(world, agent, lambda: None, seed=0, options=RolloutOptions(attempts=1))
    try:
        yield Feed(world, TaskStream(size, seed), rollouts, Sampling(max_tokens=8), FeedOptions(**options))
    finally:
        rollouts.close()


def names(groups: Sequence[Group]) -> list[tuple[str, str]]:
    return [(group.key, group.trajectories[0].task) for group in groups]


def tasks(count: int, size: int = 12, seed: int = 0, skip: int = 0) -> list[int]:
    return TaskStream(size, seed).take(skip + count)[skip:]


def test_groups_are_whole_and_come_in_the_order_of_the_stream_not_of_completion() -> None:
    with feeding(prompts=6, rollouts=3) as feed:
        kept, sampled = feed.take(mixed=False)
    assert kept == sampled
    assert names(kept) == [(f"train/{i}", f"parity/train/{task}") for i, task in enumerate(tasks(6))]
    for group in kept:
        assert [row.rollout for row in group.trajectories] == [0, 1, 2]
        assert {row.group for row in group.trajectories} == {group.key}


def test_every_draw_of_a_task_is_a_group_of_its_own_over_the_epochs() -> None:
    with feeding(size=4, prompts=5, rollouts=2) as feed:
        first, _ = feed.take(mixed=False)
        second, _ = feed.take(mixed=False)
    assert [group.key for group in first + second] == [f"train/{i}" for i in range(10)]
    assert sorted({row.task for group in first + second for row in group.trajectories}) == [
        f"parity/train/{i}" for i in range(4)
    ]


def test_a_restored_feed_goes_on_exactly() -> None:
    with feeding(prompts=3, rollouts=2) as feed:
        feed.take(mixed=False)
        state = json.loads(json.dumps(feed.state()))
        wanted = [names(feed.take(mixed=False)[0]) for _ in range(3)]
    with feeding(prompts=3, rollouts=2) as feed:
        feed.take(mixed=False)
        feed.take(mixed=False)
        feed.restore(state)
        assert [names(feed.take(mixed=False)[0]) for _ in range(3)] == wanted


@pytest.mark.parametrize("bound", [0, 2])
def test_a_feed_that_is_stopped_while_it_waits_is_as_it_was_when_the_step_began(bound: int) -> None:
    with feeding(prompts=3, rollouts=2, max_staleness=bound) as feed:
        wanted = [names(feed.take(mixed=False, version=step, steps_left=2 - step)[0]) for step in range(3)]
    with feeding(prompts=3, rollouts=2, max_staleness=bound) as feed:
        assert names(feed.take(mixed=False, steps_left=2)[0]) == wanted[0]
        state = json.dumps(feed.state())
        with pytest.raises(Stopped):
            feed.take(mixed=False, version=1, steps_left=1, stop=lambda: True)
        assert json.dumps(feed.state()) == state
    with feeding(prompts=3, rollouts=2, max_staleness=bound) as feed:
        feed.restore(json.loads(state))
        assert [names(feed.take(mixed=False, version=step, steps_left=2 - step)[0]) for step in (1, 2)] == wanted[1:]


def test_mixed_selection_replaces_groups_without_a_signal_until_the_step_is_full() -> None:
    with feeding(prompts=4, rollouts=2, max_rounds=10) as feed:
        kept, sampled = feed.take(mixed=True)
        again, _ = feed.take(mixed=True)
    assert len(kept) == 4
    assert all(has_signal(group) for group in kept)
    assert [group for group in sampled if has_signal(group)] == kept
    assert [group.key for group in sampled] == [f"train/{i}" for i in range(len(sampled))]
    assert len(sampled) > 4
    later = [i for i, task in enumerate(tasks(60)) if i >= len(sampled) and task % 2 and task != 3]
    assert again[0].key == f"train/{later[0]}"


def test_groups_that_one_step_is_to_train_on_are_wanted_at_once_also_where_groups_were_replaced() -> None:
    """The first step takes five groups; so the second leaves the queue with room for one step, of groups 13 to 16."""
    with feeding(prompts=4, rollouts=2, max_rounds=10, max_staleness=2) as feed:
        taken = [len(feed.take(mixed=True, version=step, steps_left=3 - step)[1]) for step in range(3)]
        asked: Any = feed.rollouts.agent.sampler.requests  # type: ignore[union-attr]
        wave = {int(request.trajectory.split("#")[0].removeprefix("train/")): -request.rank()[0] for request in asked}
    assert taken[0] == 5
    assert [wave[number] for number in range(13, 17)] == [wave[13]] * 4
    assert wave[12] < wave[13] < wave[17]


def test_mixed_selection_gives_up_after_its_rounds_with_what_it_has() -> None:
    with feeding(prompts=8, rollouts=2, max_rounds=1) as feed:
        kept, sampled = feed.take(mixed=True)
    odd = [task for task in tasks(8) if task % 2 and task != 3]
    assert len(sampled) == 8
    assert [group.trajectories[0].seed for group in kept] == odd


def test_a_broken_group_is_told_and_left_out_of_a_mixed_selection() -> None:
    with feeding(prompts=12, rollouts=2) as feed:
        _, sampled = feed.take(mixed=False)
    broken = [group for group in sampled if group.trajectories[0].seed == 3]
    assert len(broken) == 1
    assert {row.stop for row in broken[0].trajectories} == {StopReason.INFRA_FAILURE}
    assert not has_signal(broken[0])


def row(reward: float, stop: StopReason = StopReason.ANSWERED, role: str = "agent") -> Trajectory:
    return Trajectory("t", 0, "g", 0, role=role, turns=[Turn(0, 0, 1, "", reward=reward)], stop=stop)


@pytest.mark.parametrize(
    ("rows", "signal"),
    [
        ([], False),
        ([row(1.0)], False),
        ([row(1.0), row(1.0)], False),
        ([row(1.0), row(0.0)], True),
        ([row(0.1 + 0.2), row(0.3)], False),
        ([row(1.0), row(0.0, StopReason.INFRA_FAILURE)], False),
        ([row(1.0), row(0.0, StopReason.POLICY_TIMEOUT)], True),
        ([row(1.0, role="white"), row(-1.0, role="black")] * 2, False),
        ([row(1.0, role="white"), row(-1.0, role="black"), row(0.0, role="white"), row(-1.0, role="black")], True),
    ],
)
def test_a_signal_is_a_difference_between_rollouts_that_count_and_play_the_same_role(
    rows: list[Trajectory], signal: bool
) -> None:
    assert has_signal(Group("g", rows)) is signal


def test_the_segments_of_a_rollout_are_no_difference_between_rollouts() -> None:
    first, second = row(1.0), row(0.0)
    first.elsewhere, second.elsewhere, second.segment = 0.0, 1.0, 1
    assert not has_signal(Group("g", [first, second, row(1.0)]))
    assert has_signal(Group("g", [first, second, row(0.0)]))


@pytest.mark.parametrize(
    "options", [{"prompts": 0}, {"branches": -1}, {"rollouts": 0}, {"max_rounds": 0}, {"max_staleness": -1}]
)
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"feed\.{next(iter(options))} must be"):
        FeedOptions(**options)


def test_rewards_are_shaped_before_it_is_asked_whether_they_differ() -> None:
    def shape(group: Group) -> None:
        for row in group.trajectories:
            row.turns[-1].reward += row.rollout  # even tasks, whose rewards were equal, now differ

    with feeding(prompts=4, rollouts=3, max_rounds=1) as feed:
        kept, sampled = feed.take(mixed=True, shape=shape)
    assert any(group.trajectories[0].seed % 2 == 0 for group in kept)
    assert all(row.reward >= row.rollout for group in sampled for row in group.trajectories if row.stop.counts)


class Finite(Parity):
    sizes: ClassVar[dict[str, int]] = {"train": 12}


def test_a_feed_tells_a_stream_by_value_how_its_tasks_went_and_both_go_on_from_their_state() -> None:
    options = FeedOptions(prompts=4, rollouts=2, max_repeats=3)
    with feeding(prompts=4, rollouts=2, max_repeats=3) as feed:
        feed.tasks = stream_of(Finite(), 0, options)
        feed.take(mixed=False)
        state = json.loads(json.dumps(feed.state()))
        stream = feed.tasks
        assert isinstance(stream, ValueStream)
        assert stream.played.sum() == 2 * sum(stream.played > 0)
        assert all(stream.solved[i] == (i % 2) for i in range(12) if stream.played[i])  # of odd tasks the second rollout
        wanted = names(feed.take(mixed=False)[0])
    with feeding(prompts=4, rollouts=2, max_repeats=3) as resumed:
        resumed.tasks = stream_of(Finite(), 0, options)
        resumed.restore(state)
        assert names(resumed.take(mixed=False)[0]) == wanted


def test_tasks_of_a_world_without_end_cannot_be_drawn_by_value() -> None:
    assert isinstance(stream_of(Parity(), 0, FeedOptions()), TaskStream)
    with pytest.raises(ValueError, match=r"feed\.max_repeats=2 .* this world makes a new task every time"):
        stream_of(Parity(), 0, FeedOptions(max_repeats=2))
    with pytest.raises(ValueError, match=r"feed\.max_repeats must be at least 0"):
        FeedOptions(max_repeats=-1)


# ---------------------------------------------------------------------- earlier versions of the policy beside it


def played(version: int, *, past: bool = False, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    made = Trajectory("t", 0, "train/0", 0, past=past, stop=stop)
    made.feed([1])
    made.sampled(Sample([2], [0.0], [version], True, 0, [1]), "", "")
    return made


def test_only_what_is_trained_on_may_not_be_too_old() -> None:
    broken = played(0, past=True, stop=StopReason.INFRA_FAILURE)
    with feeding(max_staleness=1) as feed:
        feed._check_age(Group.of("train/0", [played(4), broken, played(0, past=True)]), 5)
        with pytest.raises(RuntimeError, match=r"version 3 of the weights .* version 5, but feed\.max_staleness is 1"):
            feed._check_age(Group.of("train/0", [broken, played(3)]), 5)


def test_a_group_in_which_only_an_earlier_version_acted_is_told_as_one_that_nobody_played() -> None:
    with feeding() as feed:
        assert feed._endings([Group.of("train/0", [played(0, past=True)])]) == {"train/0": (0, 0, False)}


# ---------------------------------------------------------------------- continuations of turns


def wandering(text: str, request: SampleRequest) -> Sequence[int]:
    """Moves drawn as the engine draws, from the request's key and the place in the row."""
    luck = random.Random(f"{request.key}/{request.start + len(request.tokens)}")
    return PLAIN.turn(climbing(luck.choice("UUD"))[0])


@contextmanager
def climbing_feed(world: Stairs | None = None, **options: Any) -> Iterator[Feed]:
    world = world or Stairs(3)
    agent = Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, wandering), Limits(6, 100))
    rollouts = Rollouts(world, agent, lambda: None, seed=0, options=RolloutOptions(attempts=1))
    try:
        yield Feed(world, TaskStream(99, 0), rollouts, Sampling(max_tokens=4), FeedOptions(prompts=6, rollouts=4, **options))
    finally:
        rollouts.close()


@pytest.mark.parametrize("searched", [False, True])
def test_a_feed_that_is_stopped_while_turns_are_continued_is_as_it_was_before(searched: bool) -> None:
    waiting: list[str] = []

    def stuck(text: str, request: SampleRequest) -> Any:
        if "@" not in request.trajectory:
            return wandering(text, request)
        waiting.append(request.trajectory)
        return never()

    with climbing_feed(branches=5) as feed:
        assert isinstance(feed.rollouts.agent, Agent)
        feed.rollouts.agent.sampler = ScriptedSampler(PLAIN, stuck)
        before = json.dumps(feed.state())
        with pytest.raises(Stopped):
            _ = feed.search(stop=lambda: bool(waiting)) if searched else feed.take(mixed=False, stop=lambda: bool(waiting))
        assert json.dumps(feed.state()) == before


def rows(groups: Sequence[Group]) -> list[list[list[int]]]:
    return [[row.tokens for row in [*group.trajectories, *group.branches]] for group in groups]


def test_turns_of_groups_whose_rollouts_differ_are_continued_and_change_no_rollout() -> None:
    with climbing_feed(branches=5) as feed:
        groups, _ = feed.take(mixed=False)
    with climbing_feed(branches=5) as feed:
        assert rows(feed.take(mixed=False)[0]) == rows(groups)
    with climbing_feed() as feed:
        alone, _ = feed.take(mixed=False)
    assert [[row.tokens for row in group.trajectories] for group in alone] == [
        [t.tokens for t in g.trajectories] for g in groups
    ]
    assert [len(group.branches) for group in groups] == [5 * has_signal(group) for group in groups]
    assert 0 < sum(has_signal(group) for group in groups) < 6
    for group in groups:
        assert {row.stop.counts for row in group.branches} <= {True}
        for row in group.branches:
            trunk = group.trajectories[row.trunk]
            shared = trunk.turns[row.trunk_turns].start
            assert row.tokens[:shared] == trunk.tokens[:shared]
            assert row.turns[0].state == trunk.turns[row.trunk_turns].state


def test_continuations_are_trained_on_with_their_trunks_as_one_future() -> None:
    with climbing_feed(branches=5) as feed:
        groups, _ = feed.take(mixed=False)
    found = assign(groups, choose("anchor_gae"))
    shares = [sum(float(credit.share.sum()) for credit in credits) for credits in found]
    for group, credits, share in zip(groups, found, shares, strict=True):
        assert [credit.row for credit in credits] == [*group.trajectories, *group.branches]
        for credit in credits:
            assert not credit.share[~np.asarray(credit.row.mask)].any()
        trunks = [credit.share.sum() for credit in credits if credit.row.trunk < 0]
        turns = [len(row.turns) for row in group.trajectories]
        if group.branches:
            assert sum(trunks) < sum(turns)  # continuations share their parts
            assert min(credit.share.max() for credit in credits if credit.row.trunk >= 0) <= 0.5
        else:
            assert share == pytest.approx(sum(turns))
    told = [turn.advantage for group in groups for row in group.branches for turn in row.turns]
    assert None not in told
    assert len({round(float(advantage or 0), 3) for advantage in told}) > 3
    others = assign(groups, choose("gigpo"))
    assert [len(credits) for credits in others] == [4] * 6  # who knows no continuations leaves them out


def test_a_broken_continuation_teaches_nothing_and_fails_nobody() -> None:
    with climbing_feed(branches=5) as feed:
        groups, _ = feed.take(mixed=False)
    group = next(group for group in groups if group.branches)
    lost = group.branches[0]
    lost.stop = StopReason.INFRA_FAILURE
    (credits,) = assign([group], choose("anchor_gae"))
    assert len(credits) == 4 + 5 - 1
    assert lost not in [credit.row for credit in credits]
    group.branches = group.branches[1:]
    (again,) = assign([group], choose("anchor_gae"))
    assert [credit.advantage.tolist() for credit in again] == [credit.advantage.tolist() for credit in credits]


def test_worlds_of_several_agents_are_not_branched() -> None:
    with (
        climbing_feed(InTurns(3), branches=2) as feed,
        pytest.raises(ValueError, match=r"several agents \(agent, black, white\)"),
    ):
        feed.take(mixed=False)
