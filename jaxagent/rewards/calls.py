"""Rewards that compare the tool calls of a turn with the right ones, one by one (ToolRL)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxagent.types import ToolCall

SPAN = 3.0  # correctness lies in [-SPAN, SPAN]


def tool_correctness(calls: Sequence[ToolCall], right: Sequence[ToolCall]) -> tuple[float, str]:
    """6 R_match / S_max - 3 in [-3, 3] (ToolRL, arXiv:2504.13958, section 3.3); -3 where a call is missing, 3 if all are equal.

    R_match = overlap of the tools' names + over matched calls (overlap of the parameters' names + number of equal values),
    S_max = 1 + number of right calls + number of their parameters. An overlap is intersection over union, of names as often
    as they occur. Every right call takes the unused call of the same name that fits it best, in order.

    Where no call is right, any call is worth -3: the paper's task is to know that, too.
    """
    if list(calls) == list(right):
        return SPAN, "the right calls"
    if not calls or not right:
        return -SPAN, "a call was wanted, none was made" if right else "no call was wanted"
    best = 1.0 + len(right) + sum(len(call.arguments) for call in right)
    match = _overlap([call.name for call in calls], [call.name for call in right])
    unused = list(calls)
    for wanted in right:
        scores = [(_likeness(call, wanted), -i) for i, call in enumerate(unused) if call.name == wanted.name]
        if scores:
            score, place = max(scores)
            match += score
            del unused[-place]
    return 2 * SPAN * match / best - SPAN, f"{match:.3g} of {best:g} of the right calls"


def tool_format(error: str) -> tuple[float, str]:
    """1 if the turn could be read, else 0 (ToolRL's format reward); `error` is what the chat template said of it."""
    return (0.0, error) if error else (1.0, "readable")


def _likeness(call: ToolCall, wanted: ToolCall) -> float:
    equal = sum(name in call.arguments and call.arguments[name] == value for name, value in wanted.arguments.items())
    return _overlap(list(call.arguments), list(wanted.arguments)) + equal


def _overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Intersection over union, of names as often as they occur; 1 of nothing and nothing."""
    a, b = Counter(one), Counter(other)
    union = (a | b).total()
    return (a & b).total() / union if union else 1.0
