"""Several scorers of one answer as one reward: the least of them, their product, or a weighted sum.

    exact_match    min(exact_match, judge)    product(tagged_match, judge)    sum(0.8*exact_match, 0.2*f1_match)

For pass or fail the least or the product is right: a scorer that is fooled then pays nothing alone, as in a mean it would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxagent.types import ToolCall

Score = tuple[Any, str]  # a number, or numbers by the names of parts; and why
_COMPOSED = re.compile(r"(min|product|sum)\((.*)\)", re.DOTALL)
_WEIGHTED = re.compile(r"(?:([0-9.]+)\s*\*\s*)?(\w+)")


@dataclass(frozen=True)
class Case:
    """What is scored: the policy's last turn, for a task.

    `session` opens a sandbox session in which nothing of the episode has run.
    """

    task: Mapping[str, Any]
    answer: str
    calls: Sequence[ToolCall] = field(default_factory=tuple)
    error: str = ""
    session: Callable[[], Awaitable[Any]] | None = None


Scorer = Callable[[Case], Awaitable[Score]]


def finite(name: str, score: Score) -> Score:
    """The score. Raises ArithmeticError where a number in it is none: such a reward would poison every weight."""
    values = score[0].values() if isinstance(score[0], dict) else (score[0],)
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ArithmeticError(f"the reward {name} must be finite, got {score[0]!r} ({score[1]})")
    return score


def names_of(expression: str) -> tuple[str, dict[str, float]]:
    """How scorers are composed ("" for one alone), and their weights by name. Raises ValueError."""
    found = _COMPOSED.fullmatch(expression.strip())
    if not found:
        return "", {expression.strip(): 1.0}
    weights: dict[str, float] = {}
    for part in found[2].split(","):
        term = _WEIGHTED.fullmatch(part.strip())
        if not term or (term[1] and found[1] != "sum"):
            wanted = "0.8*name" if found[1] == "sum" else "a name"
            raise ValueError(f"{expression!r}: {wanted} is wanted between the commas, got {part.strip()!r}")
        if term[2] in weights:
            raise ValueError(f"{expression!r}: {term[2]} stands there twice")
        weights[term[2]] = float(term[1] or 1.0)
    if found[1] == "sum" and abs(sum(weights.values()) - 1) > 1e-6:
        raise ValueError(
            f"{expression!r}: weights must add up to 1, so that all right is worth 1; got {sum(weights.values()):g}"
        )
    return found[1], weights


def composed(expression: str, scorer_of: Callable[[str], Scorer]) -> Scorer:
    """The scorer of an expression. Args: scorer_of: the scorer of a name; raises ValueError for one it does not know."""
    how, weights = names_of(expression)
    scorers = {name: scorer_of(name) for name in weights}

    async def score(case: Case) -> Score:
        scores = {name: finite(name, await _tolerant(scorer, case)) for name, scorer in scorers.items()}
        if not how:
            return next(iter(scores.values()))
        values = {name: outcome(value) for name, (value, _) in scores.items()}
        if how == "min":
            total = min(values.values())
        elif how == "product":
            total = math.prod(max(0.0, value) for value in values.values())  # two faults make no merit
        else:
            total = sum(weights[name] * value for name, value in values.items())
        return total, "; ".join(f"{name} {values[name]:.3g}: {why}" for name, (_, why) in scores.items())

    return score


async def _tolerant(scorer: Scorer, case: Case) -> Score:
    """The score; 0 for an answer that cannot be read: an exception would be played again, and so spare the policy its zero."""
    try:
        return await scorer(case)
    except (ValueError, RecursionError, OverflowError) as error:
        return 0.0, f"cannot be scored: {type(error).__name__}: {error}"


def outcome(value: Any) -> float:
    """What a score says of the task: a number, or of several parts the outcome."""
    return float(value["outcome"] if isinstance(value, dict) else value)
