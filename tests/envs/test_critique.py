"""Draft, critique, revision: what each seat reads, and how the team's reward and the critic's difference are paid."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted import ScriptedSampler, episode

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.critique import Critique
from jaxagent.rewards.shaping import components
from jaxagent.types import Message, SampleRequest, Trajectory

PLAIN = PlainTemplate()
WORLD = Critique(str(Path(__file__).parents[2] / "configs" / "arithmetic.jsonl"))


def play(**said: str) -> list[Trajectory]:
    def write(text: str, request: SampleRequest) -> list[int]:
        return PLAIN.turn(Message("assistant", said[request.trajectory.rpartition("/")[2]]))

    return asyncio.run(episode(WORLD, WORLD.task("train", 2), ScriptedSampler(PLAIN, write), limits=Limits(1, 400)))


RIGHT = WORLD.task("train", 2)["answer"]


@pytest.mark.parametrize(
    ("draft", "final", "team", "difference"),
    [("1000", RIGHT, 1.0, 1.0), (RIGHT, RIGHT, 1.0, 0.0), (RIGHT, "1000", 0.0, -1.0), ("1000", "1001", 0.0, 0.0)],
)
def test_the_team_earns_the_final_answer_and_the_critic_the_difference_it_made(
    draft: str, final: str, team: float, difference: float
) -> None:
    rows = play(drafter=draft, critic="look again", reviser=final)
    assert [(row.role, row.reward) for row in rows] == [("drafter", team), ("critic", difference), ("reviser", team)]
    assert [row.outcome for row in rows] == [team] * 3  # success is the team's
    told = components(rows)
    assert told["check_draft"] == float(draft == RIGHT)
    assert told["gap_draft"] == team - float(draft == RIGHT)
    assert told["part_draft"] == pytest.approx(-float(draft == RIGHT) / 3)


def test_each_seat_reads_what_came_before_and_the_right_answer_is_told_to_nobody() -> None:
    rows = play(drafter="1000", critic="too large", reviser="12")
    drafted, criticised, revised = (PLAIN.text(row.tokens) for row in rows)
    question = WORLD.task("train", 2)["question"]
    assert all(question in text and RIGHT not in text.replace(question, "") for text in (drafted, criticised, revised))
    assert "1000" in criticised
    assert "too large" not in drafted
    assert "1000" in revised
    assert "too large" in revised


def test_a_reward_in_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.options\.reward must be one of exact_match, f1_match"):
        Critique("x", reward="calibrated_match")
