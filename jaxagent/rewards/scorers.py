"""The scorers of answers by name, for worlds whose tasks say what is right."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.rewards.calls import SPAN, tool_correctness, tool_format
from jaxagent.rewards.compose import Case, Score, Scorer, composed, names_of, outcome
from jaxagent.rewards.judge import fault_of_rubric, judge, rubric
from jaxagent.rewards.match import calibrated_match, exact_match, f1_match, last_number, tagged_match
from jaxagent.rewards.mathematics import math_match
from jaxagent.rewards.programs import code_tests, fault_of_tests
from jaxagent.types import ToolCall

CORRECTNESS, FORMAT = 0.3, 0.1  # weights of ToolRL's two parts beside the outcome


def _compared(compare: Callable[[str, str], Score]) -> Callable[[], Scorer]:
    """A scorer from a comparison with the right answer; of several right answers the best counts."""

    async def score(case: Case) -> Score:
        right = case.task["answer"]
        every = [compare(case.answer, str(one)) for one in (right if isinstance(right, list) else [right])]
        return max(every, key=lambda scored: outcome(scored[0]))

    return lambda: score


def tool_calls() -> Scorer:
    """The scorer `tool_calls`: the calls of a turn against the task's `calls` (ToolRL, see rewards/calls.py).

    The outcome is 1 where all are equal, else 0; beside it stand CORRECTNESS times ToolRL's correctness over its span, in
    [-1, 1], and FORMAT times its format. ToolRL adds format and correctness in [-3, 3]; here both stay below an outcome.
    """

    async def score(case: Case) -> Score:
        right = [ToolCall(call["name"], call.get("arguments", {})) for call in case.task["calls"]]
        correct, why = (-SPAN, case.error) if case.error else tool_correctness(case.calls, right)
        formed, _ = tool_format(case.error)
        parts = {"outcome": float(correct == SPAN), "correctness": CORRECTNESS * correct / SPAN, "format": FORMAT * formed}
        return parts, why

    return score


SCORERS: dict[str, Callable[..., Scorer]] = {
    "exact_match": _compared(exact_match),
    "f1_match": _compared(f1_match),
    "last_number": _compared(last_number),
    "tagged_match": _compared(tagged_match),
    "calibrated_match": _compared(calibrated_match),
    "math_match": math_match,
    "code_tests": code_tests,
    "tool_calls": tool_calls,
    "judge": judge,
    "rubric": rubric,
}
_WANT_ANSWER = SCORERS.keys() - {"code_tests", "tool_calls", "rubric"}


def scorer_of(expression: str, options: Mapping[str, Mapping[str, Any]]) -> Scorer:
    """The scorer of an expression, see `compose`. Args: options: by the names in it.

    Raises ValueError for names and options that are not known.
    """
    how, weights = names_of(expression)
    if how and "tool_calls" in weights:
        raise ValueError(f"{expression!r}: tool_calls scores a turn of calls and stands alone")

    def build(name: str) -> Scorer:
        if name not in SCORERS:
            raise ValueError(f"must be made of {', '.join(SCORERS)}; got {name!r}")
        given = dict(options.get(name, {}))
        try:
            inspect.signature(SCORERS[name]).bind(**given)
            return SCORERS[name](**given)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None

    return composed(expression, build)


def fault_of_task(expression: str, task: Mapping[str, Any]) -> str:
    """What a task lacks for the scorers of an expression, or nothing."""
    _, names = names_of(expression)
    answers = [str(one) for one in (task["answer"] if isinstance(task.get("answer"), list) else [task.get("answer")])]
    if "last_number" in names and not all(map(_is_number, answers)):
        return f"last_number needs numbers as answers, got {answers[0]!r}"
    if "code_tests" in names and (fault := fault_of_tests(task)):
        return fault
    if "rubric" in names and (fault := fault_of_rubric(task)):
        return fault
    calls = task.get("calls")
    if "tool_calls" in names and not (
        isinstance(calls, list) and all(isinstance(one, dict) and "name" in one for one in calls)
    ):
        return 'a list `calls` of {"name": ..., "arguments": {...}} is wanted'
    for key, readers in (("answer", _WANT_ANSWER), ("question", {"judge", "rubric"})):
        if key not in task and (wanting := sorted(readers.intersection(names))):
            return f"{wanting[0]} wants the task's `{key}`, which has only {', '.join(task)}"
    return ""


def _is_number(answer: str) -> bool:
    try:
        return math.isfinite(float(answer.replace(",", "")))
    except ValueError:
        return False
