"""Proposing and solving: the gate, the solve rate, who is paid what, and one role over several seats."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from scripted import ScriptedSampler, episode

from jaxagent.agent import Limits
from jaxagent.algos.table import TABLE
from jaxagent.chat.plain import PlainTemplate
from jaxagent.credit import assign
from jaxagent.envs.proposals import Proposals, proposer_reward
from jaxagent.rewards.arithmetic import evaluate
from jaxagent.types import Group, Message, SampleRequest, Trajectory, by_rollout

PLAIN = PlainTemplate()
WORLD = Proposals()


def play(said: Callable[[str, str], str], world: Proposals = WORLD, split: str = "train", index: int = 0) -> list[Trajectory]:
    def write(text: str, request: SampleRequest) -> list[int]:
        return PLAIN.turn(Message("assistant", said(request.trajectory.rpartition("/")[2], text)))

    return asyncio.run(episode(world, world.task(split, index), ScriptedSampler(PLAIN, write), limits=Limits(1, 400)))


@pytest.mark.parametrize(("rate", "reward"), [(0.0, 0.0), (0.25, 0.75), (0.75, 0.25), (1.0, 0.0)])
def test_the_proposers_reward_by_hand(rate: float, reward: float) -> None:
    assert proposer_reward(rate) == reward


@pytest.mark.parametrize("right", range(5))
def test_four_solvers_each_alone_tell_how_hard_the_proposal_is(right: int) -> None:
    solvers = [f"solver#{i + 1}" for i in range(4)]
    rows = play(lambda seat, text: "7*8" if seat == "proposer" else "it is 56" if seat in solvers[:right] else "55")
    assert [(row.role, row.seat) for row in rows] == [("proposer", 0), *(("solver", i + 1) for i in range(4))]
    assert [row.reward for row in rows] == [proposer_reward(right / 4), *([1.0] * right + [0.0] * (4 - right))]
    assert [PLAIN.text(row.tokens).split("<turn>")[0] for row in rows[1:]] == ["<user>7*8 = ?"] * 4
    assert len(by_rollout(rows)) == 5


@pytest.mark.parametrize(
    ("proposal", "fault"),
    [
        ("7", "0 operations, not 1 to 3"),
        ("1+2+3+4+5", "4 operations, not 1 to 3"),
        ("9999*2", "beyond 9999"),
        ("2/1", "belongs to no expression"),
        ("import os", "belongs to no expression"),
        ("6//0", "division by zero"),
        ("", "ends where a number"),
    ],
)
def test_what_does_not_pass_the_gate_costs_and_is_never_asked(proposal: str, fault: str) -> None:
    rows = play(lambda seat, text: proposal)
    assert [(row.role, row.reward) for row in rows] == [("proposer", -0.5)]
    assert fault in rows[0].turns[0].reason


def test_an_example_is_no_proposal_however_it_is_spaced() -> None:
    example = WORLD.task("train", 0)["examples"][1]
    (row,) = play(lambda seat, text: " ".join(example))
    assert "repeats an example" in row.turns[0].reason


def test_held_out_sums_are_given_to_a_solver_alone() -> None:
    for index in range(20):
        task = WORLD.task("test", index)
        value = evaluate(task["given"]).value
        rows = play(lambda seat, text, value=value: str(value), split="test", index=index)
        assert [(row.role, row.solved) for row in rows] == [("solver", True)]
    assert not play(lambda seat, text: "none", split="test")[0].solved


def test_all_solvers_of_a_group_share_the_baseline_of_their_role() -> None:
    rows: list[Trajectory] = []
    for rollout in range(2):
        played = play(lambda seat, text, r=rollout: "7*8" if seat == "proposer" else "56" if int(seat[-1]) > 2 * r else "1")
        for row in played:
            row.rollout = rollout
        rows += played
    baselines = {"solver": 0.5, "proposer": 0.1}
    assign([Group.of("group", rows)], TABLE["spiral"], baselines=baselines)
    first, second = rows[:5], rows[5:]
    assert [row.turns[0].advantage for row in first] == pytest.approx([-0.1, 0.5, 0.5, 0.5, 0.5])
    assert [row.turns[0].advantage for row in second] == pytest.approx([0.4, -0.5, -0.5, 0.5, 0.5])
    assert set(baselines) == {"solver", "proposer"}
    assert baselines["solver"] == pytest.approx(0.95**8 * 0.5 + (1 - 0.95**8) * 6 / 8)
    assert baselines["proposer"] == pytest.approx(0.95**2 * 0.1 + (1 - 0.95**2) * 0.25)


def test_demonstrations_propose_what_passes_and_answer_what_was_asked() -> None:
    proposed = answered = right = 0
    for index in range(200):
        asked, said = WORLD.demonstrate(WORLD.task("demo", index), random.Random(index))
        if asked.content.startswith("Write"):
            proposed += 1
            assert WORLD.fault(said.content, WORLD.task("demo", index)["examples"]) == ""
        else:
            answered += 1
            right += evaluate(asked.content.removesuffix(" = ?")).value == int(said.content)
    assert proposed > 60
    assert 0.3 < right / answered < 0.7


@pytest.mark.parametrize("options", [{"solvers": 1}, {"operations": (2, 1)}, {"invalid": 0.0}, {"limit": 3}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"env\.options\.{next(iter(options))} must be"):
        Proposals(**options)  # type: ignore[arg-type]
