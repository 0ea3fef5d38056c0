"""Continuations of a turn: the same tokens before it, other draws after it, and worlds that do not come back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from scripted import ScriptedSampler, script
from toys import InTurns, Stairs, climbing

from jaxagent.agent import Agent, Limits, beside
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import audit
from jaxagent.envs.env import Step, Task
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.stem import Stem, stem_of, want_one_agent
from jaxagent.types import Group, Message, SampleRequest, Sampling, StopReason, Trajectory

PLAIN = PlainTemplate()
SAMPLING = Sampling(max_tokens=4)
TURNS = 6


def drawing(text: str, request: SampleRequest) -> Sequence[int]:
    """A move drawn as the engine draws: from the request's key and the place in the row."""
    luck = random.Random(f"{request.key}/{request.start + len(request.tokens)}")
    return PLAIN.turn(climbing(luck.choice("UD"))[0])


@contextmanager
def rollouts(world: Any, sampler: ScriptedSampler | None = None, attempts: int = 1) -> Iterator[Rollouts]:
    sampler = sampler or ScriptedSampler(PLAIN, drawing)
    agent = Agent(PLAIN, world.tools, sampler, Limits(max_turns=TURNS, max_tokens=100))
    made = Rollouts(world, agent, lambda: None, seed=11, options=RolloutOptions(attempts=attempts))
    try:
        yield made
    finally:
        made.close()


def task(world: Any) -> Task:
    found: Task = world.task("train", 0)
    return found


def played(many: Rollouts, count: int = 1) -> list[Trajectory]:
    (futures,) = many.play([("train/0", task(many.world))], count, SAMPLING)
    return [row for future in futures for row in future.result(timeout=60)]


def continued(many: Rollouts, stem: Stem, *numbers: int) -> list[Trajectory]:
    futures = many.branch(stem, task(many.world), numbers, SAMPLING)
    rows = [row for future in futures for row in future.result(timeout=60)]
    assert [audit(row) for row in rows] == [""] * len(rows)
    return rows


def facts(row: Trajectory) -> tuple[Any, ...]:
    return row.tokens, row.mask, row.turn, row.stop, [(turn.start, turn.state, turn.reward) for turn in row.turns]


def test_how_long_continuations_take_says_nothing_of_whole_episodes() -> None:
    with rollouts(Stairs(9)) as many:
        (trunk,) = played(many)
        known = many._lengths.mean, many._lengths.of_task(task(many.world)["id"])
        continued(many, stem_of(trunk, 2), 0, 1)
        assert known == (many._lengths.mean, many._lengths.of_task(task(many.world)["id"]))
        assert many._lengths_of_rests.mean > 0 == known.count(0.0)


def test_continuations_share_the_tokens_before_the_turn_and_learn_only_from_their_own() -> None:
    sampler = ScriptedSampler(PLAIN, drawing)
    with rollouts(Stairs(9), sampler) as many:
        (trunk,) = played(many)
        stem = stem_of(trunk, 2)
        sampler.requests.clear()
        rows = continued(many, stem, 0, 1, 2, 3)
    assert stem.tokens == tuple(trunk.tokens[: trunk.turns[2].start])
    for row in rows:
        assert tuple(row.tokens[: len(stem.tokens)]) == stem.tokens
        assert not any(row.mask[: len(stem.tokens)])
        assert [turn.start for turn in row.turns][:1] == [len(stem.tokens)]
        assert (row.trunk, row.trunk_turns, row.turns[0].state) == (0, 2, trunk.turns[2].state)
        assert (row.stop, len(row.turns)) == (StopReason.MAX_TURNS, TURNS - 2)  # the stem's turns count
    firsts = [request for request in sampler.requests if request.start == 0]
    assert {(request.tokens, request.group) for request in firsts} == {(stem.tokens, "train/0#0@2")}  # one prefill for all
    assert len({request.trajectory for request in firsts}) == 4


def test_draws_differ_from_the_trunk_and_from_each_other_and_are_the_same_again() -> None:
    with rollouts(Stairs(99)) as many:
        (trunk,) = played(many)
        rows = continued(many, stem_of(trunk, 1), *range(6))
        again = continued(many, stem_of(trunk, 1), 5, 3)
    assert len({str(row.tokens) for row in [trunk, *rows]}) > 4
    assert [facts(row) for row in again] == [facts(rows[5]), facts(rows[3])]


def test_who_does_the_same_again_comes_to_the_same_end() -> None:
    with rollouts(Stairs(3), script(PLAIN, *climbing("U"))) as many:
        (trunk,) = played(many)
        for turn in range(3):
            (row,) = continued(many, stem_of(trunk, turn), 0)
            assert row.tokens == trunk.tokens
            assert (row.reward, row.stop) == (trunk.reward, trunk.stop) == (1.0, StopReason.ENV_TERMINATED)
            assert row.mask == [own and at >= trunk.turns[turn].start for at, own in enumerate(trunk.mask)]


def test_a_continuation_can_be_continued() -> None:
    with rollouts(Stairs(99)) as many:
        (trunk,) = played(many)
        first = stem_of(trunk, 2)
        (row,) = continued(many, first, 1)
        second = first.then(row, 2)
        (further,) = continued(many, second, 0)
    assert (second.turns, second.group, second.trunk) == (4, "train/0#0@2#1@4", 0)
    assert further.tokens[: len(second.tokens)] == row.tokens[: row.turns[2].start]
    assert (further.trunk_turns, len(further.turns)) == (4, TURNS - 4)


def test_a_conversation_begun_anew_in_a_continuation_is_still_of_it() -> None:
    row = Stem("t", 0, "train/0#1@2", (1, 2), ((0, 1), (1, 2)), trunk=1).row(3)
    further = beside(row)
    assert (further.trunk, further.trunk_turns) == (1, 2)
    assert Group.of("train/0", [row, further]).branches == [row, further]


def test_a_stored_trajectory_has_the_same_stems() -> None:
    with rollouts(Stairs(99)) as many:
        (trunk,) = played(many)
        stored = Trajectory.from_json(json.loads(json.dumps(trunk.to_json())))
        rows = continued(many, stem_of(trunk, 3), 0)
        assert [facts(row) for row in continued(many, stem_of(stored, 3), 0)] == [facts(row) for row in rows]
        assert facts(Trajectory.from_json(json.loads(json.dumps(rows[0].to_json())))) == facts(rows[0])


def test_malformed_turns_and_turns_cut_short_are_taken_again_as_they_were() -> None:
    class Patient(Stairs):
        def episode(self, name: str, sandbox: Any) -> Any:
            climb = super().episode(name, sandbox)
            step = climb.step

            async def answer(action: Message) -> Step:
                return Step([Message("tool", "?")], state="?") if action.error else await step(action)

            climb.step = answer
            return climb

    with rollouts(Patient(9), script(PLAIN, [260, 257], [65, 66, 67, 68], *climbing("U"))) as many:
        (trunk,) = played(many)
        (row,) = continued(many, stem_of(trunk, 4), 0)
    assert [bool(turn.error) for turn in trunk.turns][:3] == [True, True, False]
    assert row.trunk_turns == 4
    assert row.tokens[: trunk.turns[4].start] == trunk.tokens[: trunk.turns[4].start]


# ---------------------------------------------------------------------- worlds


def test_a_world_that_does_not_come_back_is_told_and_counts_for_nothing() -> None:
    with rollouts(Stairs(99, restless=True), attempts=2) as many:
        (trunk,) = played(many)
        (row,) = continued(many, stem_of(trunk, 2), 0)
        (anew,) = continued(many, stem_of(trunk, 0), 0)  # nothing has to come back
    assert (row.stop, row.attempts, row.turns) == (StopReason.INFRA_FAILURE, 2, [])
    assert not row.stop.counts
    assert "Diverged: retracing train/0#0@2: before turn 1 the world said '<result>31<turn>'" in row.error
    assert "where it had said '<result>11<turn>'" in row.error
    assert anew.stop == StopReason.MAX_TURNS


def test_a_world_that_ends_too_early_is_told() -> None:
    world = Stairs(4)
    with rollouts(world, script(PLAIN, *climbing("U"))) as many:
        (trunk,) = played(many)
        world.top = 2
        (row,) = continued(many, stem_of(trunk, 3), 0)
    assert (row.stop, row.turns) == (StopReason.INFRA_FAILURE, [])
    assert "retracing train/0#0@3: the episode ended before turn 2: arrived" in row.error


@pytest.mark.parametrize(("forks", "steps"), [(True, 4 + 2 * 3), (False, 3 * 4 + 2 * 3)])
def test_a_world_that_forks_is_brought_back_once_for_all_continuations(forks: bool, steps: int) -> None:
    world = Stairs(99, forks=forks)
    with rollouts(world) as many:
        (trunk,) = played(many)
        before, world.steps = world.steps, 0
        rows = continued(many, stem_of(trunk, 4), 0, 1, 2)
        again = continued(many, stem_of(trunk, 4), 1)
    assert before == TURNS
    assert world.steps - (4 + 2) == steps
    assert len({str(row.tokens) for row in rows}) > 1
    assert facts(again[0]) == facts(rows[1])
    assert world.closed == 1 + (3 + 1) + forks  # who is alone needs no copy


def test_a_fork_that_fails_is_brought_back_by_its_own_turns() -> None:
    class Unforkable(Stairs):
        def episode(self, name: str, sandbox: Any) -> Any:
            climb = super().episode(name, sandbox)

            async def fork(name: str) -> Any:
                raise ConnectionError("no room for a copy")

            climb.fork = fork
            return climb

    with rollouts(Unforkable(99, forks=True), attempts=2) as many:
        (trunk,) = played(many)
        rows = continued(many, stem_of(trunk, 2), 0, 1)
    assert [(row.attempts, row.stop) for row in rows] == [(2, StopReason.MAX_TURNS)] * 2


def test_episodes_of_several_agents_are_refused_by_name() -> None:
    with rollouts(InTurns(99)) as many:
        rows = played(many)
        assert [row.role for row in rows] == ["agent", "black", "white"]
        (row,) = continued(many, stem_of(rows[0], 0), 0)
    assert row.stop == StopReason.INFRA_FAILURE
    assert "only episodes of 'agent' alone can be branched" in row.error
    with pytest.raises(ValueError, match=r"turns of several agents \(agent, black, white\) cannot be taken again"):
        want_one_agent(rows)


def test_what_cannot_be_branched_is_refused() -> None:
    with rollouts(Stairs(99)) as many:
        (trunk,) = played(many)
        (row,) = continued(many, stem_of(trunk, 2), 0)
        with pytest.raises(ValueError, match=r"train/0#0@1 is of task stairs/train/0 with seed 0, got stairs/train/1 with 1"):
            many.branch(stem_of(trunk, 1), many.world.task("train", 1), [0], SAMPLING)
    with pytest.raises(ValueError, match="has 6 turns of its own, so none can be taken again at turn 6"):
        stem_of(trunk, 6)
    with pytest.raises(ValueError, match="is a continuation that shares 2 turns with another row"):
        stem_of(row, 1)
    trunk.segment = 1
    with pytest.raises(ValueError, match="is segment 1 of its rollout: what came before it is not in its tokens"):
        stem_of(trunk, 1)
