"""Calls compared with the right ones: the worked number, and the order of better and worse."""

from __future__ import annotations

from typing import Any

import pytest

from jaxagent.rewards.calls import tool_correctness, tool_format
from jaxagent.types import ToolCall


def f(**arguments: Any) -> ToolCall:
    return ToolCall("f", arguments)


RIGHT = [f(x=1, y=2)]


def test_one_wrong_parameter_by_hand() -> None:
    """Name 1, parameters 1/3, one equal value: 2.333333 of 1 + 1 + 2, which is 0.5 in [-3, 3]."""
    score, why = tool_correctness([f(x=1, z=2)], RIGHT)
    assert score == pytest.approx(0.5)
    assert why == "2.33 of 4 of the right calls"


@pytest.mark.parametrize(
    ("calls", "right", "wanted"),
    [
        (RIGHT, RIGHT, 3.0),
        ([], RIGHT, -3.0),
        (RIGHT, [], -3.0),
        ([], [], 3.0),
        ([ToolCall("g", {"x": 1, "y": 2})], RIGHT, -3.0),
        ([f(x=9, y=9)], RIGHT, 0.0),  # name 1, parameters 1
        ([f(y=2, x=1)], RIGHT, 3.0),  # order of parameters is nothing
        ([f(x=1, y=2), f(x=1, y=2)], RIGHT, 6 * 3.5 / 4 - 3),  # names 1/2, parameters 1, values 2
        ([f(x=3), f(x=2), f(x=1)], [f(x=1), f(x=2)], 6 * (2 / 3 + 2 + 2) / 5 - 3),  # each takes the call that fits best
        ([ToolCall("f")], [ToolCall("f"), ToolCall("g")], 6 * (0.5 + 1) / 3 - 3),
    ],
)
def test_calls_by_hand(calls: list[ToolCall], right: list[ToolCall], wanted: float) -> None:
    assert tool_correctness(calls, right)[0] == pytest.approx(wanted)


def test_the_reward_is_bounded_and_only_the_right_calls_reach_the_top() -> None:
    choices = [f(), f(x=1), f(x=1, y=2), f(x=1, y=2, z=3), ToolCall("g", {"x": 1})]
    for one in choices:
        for other in choices:
            for calls in ([one], [one, other], [one, other, one]):
                score = tool_correctness(calls, RIGHT)[0]
                assert -3 <= score <= 3
                assert (score == 3) == (calls == RIGHT)


def test_a_turn_that_cannot_be_read_has_no_format() -> None:
    assert tool_format("")[0] == 1.0
    assert tool_format("a call needs a name") == (0.0, "a call needs a name")
