"""Shaping of a group: outcomes stay, every component stands by its name, and nothing outweighs an outcome."""

from __future__ import annotations

from typing import Any

import pytest

from jaxagent.rewards.shaping import ProgressiveReward, Shaping, components, form
from jaxagent.types import Group, Sample, StopReason, ToolRecord, Trajectory, Turn

OK = ToolRecord("f", {}, "ok", "1")
FAILED = ToolRecord("f", {}, "error", "!")
BAD = ToolRecord("f", {}, "bad_arguments", "?")


def rollout(number: int, outcome: float, *calls: list[ToolRecord], tokens: int = 2, **changes: Any) -> Trajectory:
    """A turn for each list of calls, and one that answers."""
    row = Trajectory("t", 0, "g", number, stop=StopReason.ANSWERED, **changes)
    for records in (*calls, []):
        row.feed([1])
        row.sampled(Sample([9] * tokens, [-0.1] * tokens, [0] * tokens, True, 0, [1]), "", "").tools = list(records)
    row.turns[-1].reward, row.turns[-1].reason = outcome, "because"
    return row


def shaped(shaping: Shaping, *rows: Trajectory, progress: float = 0.0) -> list[float]:
    shaping.apply(Group("g", list(rows)), progress)
    return [row.reward for row in rows]


def test_what_a_world_pays_is_left_alone_without_shaping() -> None:
    assert not Shaping().active
    row = rollout(0, 1.0, [OK])
    assert shaped(Shaping(), row) == [1.0]
    assert row.turns[-1].parts == {"outcome": 1.0}


def test_outcome_and_success_are_what_they_were_whatever_is_added() -> None:
    shaping = Shaping((0.25,), failed_calls=0.4, efficiency=0.3, overlong=0.2, limit=10)
    rows = [rollout(0, 1.0, [OK]), rollout(1, 1.0, [FAILED], [OK], [BAD]), rollout(2, 0.0, [BAD])]
    shaping.apply(Group("g", rows), 0.0)
    assert [row.outcome for row in rows] == [1.0, 1.0, 0.0]
    assert [row.solved for row in rows] == [True, True, False]
    for row in rows:
        assert row.reward == pytest.approx(sum(sum(turn.parts.values()) for turn in row.turns))


def test_progressive_shaping_fades_from_form_to_outcome() -> None:
    def rows() -> tuple[Trajectory, Trajectory]:
        return rollout(0, 1.0, [OK], [BAD]), rollout(1, 0.0, [OK])

    shaping = Shaping(progressive=(0.0, 0.5, 1.0))
    assert shaped(shaping, *rows(), progress=0.0) == pytest.approx([2 / 3, 1.0])
    assert shaped(shaping, *rows(), progress=0.5) == pytest.approx([5 / 6, 0.5])
    assert shaped(shaping, *rows(), progress=1.0) == pytest.approx([1.0, 0.0])


def test_the_class_of_the_summarys_formula_takes_any_schedule() -> None:
    reward = ProgressiveReward(lambda progress: progress**2)
    assert reward(1.0, [0.5, 0.0, 1.0], progress=0.5) == pytest.approx(0.25 + 0.75 * 0.5)


def test_stages_gate_the_outcome_by_form() -> None:
    def rows() -> tuple[Trajectory, ...]:
        return rollout(0, 1.0, [OK]), rollout(1, 1.0, [BAD]), rollout(2, 0.0, [OK])

    shaping = Shaping(staged=(0, 1))
    assert shaped(shaping, *rows(), progress=0.0) == pytest.approx([1.0, 0.5, 1.0])
    assert shaped(shaping, *rows(), progress=0.9) == pytest.approx([1.0, 0.25, 0.5])


def test_calls_beyond_the_fewest_of_those_that_solved_it_cost_a_share_of_the_outcome() -> None:
    shaping = Shaping(efficiency=0.4)
    rows = [rollout(0, 1.0, [OK], [OK]), rollout(1, 1.0, [OK], [OK], [OK]), rollout(2, 0.0, [OK]), rollout(3, 0.0, *[[OK]] * 9)]
    assert shaped(shaping, *rows) == pytest.approx([1.0, 0.8, 0.0, 0.0])  # the short failure sets no standard
    assert rows[1].turns[-1].parts == pytest.approx({"outcome": 1.0, "efficiency": -0.2})
    assert rows[1].turns[-1].reason == "because; efficiency -0.2"


def test_otc_takes_its_weight_of_what_ever_more_calls_lose() -> None:
    rows = [rollout(0, 1.0), rollout(1, 1.0, [OK]), rollout(2, 0.0, [OK])]
    assert shaped(Shaping(otc=0.5, turns=2), *rows) == pytest.approx([1.0, 0.5 + 0.5 * 0.5**0.5, 0.0])


def test_failed_calls_and_unreadable_turns_cost_their_weight_at_most() -> None:
    shaping = Shaping(failed_calls=0.5)
    unreadable = rollout(3, 1.0)
    unreadable.turns[-1].error = "no name"
    rows = [rollout(0, 1.0, [OK, OK]), rollout(1, 1.0, [FAILED, OK]), rollout(2, 1.0, *[[FAILED]] * 30), unreadable]
    assert shaped(shaping, *rows) == pytest.approx([1.0, 0.9, 0.5, 0.9])


def test_length_counts_sampled_tokens_only() -> None:
    shaping = Shaping(overlong=0.5, limit=100)
    near, over = rollout(0, 1.0, tokens=90), rollout(1, 1.0, tokens=130)
    told = rollout(2, 1.0, tokens=10)
    told.feed([1] * 500)
    assert shaped(shaping, near, over, told) == pytest.approx([0.75, 0.5, 1.0])


def test_what_a_world_pays_in_parts_is_kept_beside_what_is_added() -> None:
    row = rollout(0, 0.9)
    row.turns[-1].parts, row.turns[-1].outcome = {"outcome": 1.0, "calibration": -0.1}, 1.0
    shaped(Shaping(progressive=(0.5,)), row)
    assert row.turns[-1].parts == pytest.approx({"outcome": 0.5, "calibration": -0.1, "form": 0.5})
    assert row.reward == pytest.approx(0.9)


def test_what_named_parts_leave_of_a_reward_is_its_outcome() -> None:
    row = rollout(0, 1.2)
    row.turns[-1].parts, row.turns[-1].outcome = {"style": 0.2}, 1.0
    shaped(Shaping(failed_calls=0.5), row)
    assert row.turns[-1].parts == pytest.approx({"outcome": 1.0, "style": 0.2, "failed_calls": 0.0})
    assert row.reward == pytest.approx(1.2)


def test_an_episode_that_the_infrastructure_broke_is_not_touched() -> None:
    broken, whole = rollout(0, 1.0, [FAILED]), rollout(1, 1.0, [FAILED])
    broken.stop = StopReason.INFRA_FAILURE
    assert shaped(Shaping(failed_calls=0.5), broken, whole) == pytest.approx([1.0, 0.9])
    assert broken.turns[-1].parts == {}


def test_the_segments_of_a_rollout_are_shaped_as_one() -> None:
    first, second = rollout(0, 0.0, [FAILED]), rollout(0, 1.0, segment=1)
    first.elsewhere, second.elsewhere = 1.0, 0.0
    assert shaped(Shaping(failed_calls=0.5), first, second) == pytest.approx([0.9, 0.9])
    assert (first.outcome, second.outcome) == (1.0, 1.0)
    assert first.solved and second.solved


def test_components_are_means_per_episode_and_gaps_over_those_that_were_checked() -> None:
    rows = [rollout(0, 1.0, [FAILED]), rollout(1, 1.0), rollout(2, 0.0)]
    rows[0].turns[-1].checks, rows[1].turns[-1].checks = {"other": 0.0}, {"other": 1.0}
    shaped(Shaping(failed_calls=0.3), *rows)
    found = components(rows)
    assert found == pytest.approx({"part_failed_calls": -0.02, "check_other": 0.5, "gap_other": 0.5})
    assert {name: value.count for name, value in found.items()} == {"part_failed_calls": 3, "check_other": 2, "gap_other": 2}


def test_form_is_what_the_policy_can_help() -> None:
    def turn(error: str = "", *tools: ToolRecord) -> Turn:
        return Turn(0, 0, 1, "", error=error, tools=list(tools))

    assert [form(turn()), form(turn("", OK)), form(turn("", FAILED))] == [1.0, 1.0, 1.0]
    assert [form(turn("unreadable")), form(turn("", OK, BAD)), form(turn("", ToolRecord("x", {}, "unknown_tool", "")))] == [
        0.0
    ] * 3


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"progressive": (0.5,), "staged": (0,)}, "each replace what the world pays"),
        ({"progressive": (0.5, 1.5)}, r"reward.progressive must hold alphas in \[0, 1\], got \(0.5, 1.5\)"),
        ({"staged": (0, 2)}, "reward.staged must hold stages 0 .* or 1"),
        ({"overlong": 0.5, "failed_calls": 0.5}, "together stay below an outcome's 1"),
        ({"overlong": -0.5}, "weights that together stay below"),
        ({"otc": "much"}, "reward.otc must be a number, got 'much'"),
        ({"staged": 0}, r"reward.staged must be a tuple, .*, got 0: write \(1,\)"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Shaping(**options)
