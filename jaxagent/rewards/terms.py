"""What is added to an outcome, as formulas over counts: costs of length, of calls, of failures. All are bounded.

A cost of success multiplies the outcome, so that no wrong answer can earn by being cheap; a cost of a fault is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

FAILURES = 5  # failed calls after which no more is lost


def overlong(length: int, limit: int, zone: int) -> float:
    """DAPO's soft punishment of long answers, in [-1, 0] (arXiv:2503.14476, eq. 13).

    0 up to limit - zone, then falling to -1 at the limit and beyond. `length` counts sampled tokens only: what a tool says
    is not the policy's length.
    """
    return max(-1.0, min(0.0, (limit - zone - length) / zone))


def efficiency(outcome: float, calls: int, fewest: int, cost: float) -> float:
    """R (1 - c min(1, max(0, m - m*) / m*)): what an outcome is worth when m calls were made and m* would have done.

    `fewest` is the least number of calls among the group's members that solved the task; at least 1 is reckoned with. The
    excess is capped at m*, so that the cost c in [0, 1] bounds what can be lost. A failure is worth the same at any length.
    """
    least = max(1, fewest)
    return outcome * (1.0 - cost * min(1.0, max(0, calls - least) / least))


def otc(outcome: float, calls: int, smoothing: float) -> float:
    """R cos(m pi / (2 m + c)): the efficiency of OTC-PPO (arXiv:2504.14870, eq. 4), with its smoothing constant c > 0.

    1 without calls, falling to cos(pi / 2) = 0 with ever more. Where some calls are needed, `efficiency` does not tell the
    policy that none would be best.
    """
    return outcome * math.cos(calls * math.pi / (2 * calls + smoothing)) if calls else outcome


def failed_calls(failed: int) -> float:
    """-min(n, FAILURES) / FAILURES, in [-1, 0], for n calls that failed; nothing for those that did not.

    A reward for calls that work would be farmed.
    """
    return -min(failed, FAILURES) / FAILURES


def progressive(outcome: float, steps: Sequence[float], alpha: float) -> float:
    """alpha R + (1 - alpha) mean(r_1, ..., r_T): from process to outcome as alpha goes from 0 to 1.

    The mean, not the sum, so that further steps earn nothing. This is how progressive reward shaping is commonly summed up;
    arXiv:2512.07478, which has the name, goes by stages instead: see `staged`.
    """
    return alpha * outcome + (1.0 - alpha) * (sum(steps) / len(steps) if steps else 0.0)


def staged(scores: Sequence[float], stage: int) -> float:
    """The mean of the scores up to `stage`, of which each counts only where all before it are full (1).

    First the form, then what it is for: after arXiv:2512.07478, whose equations could not be read; no constant is taken
    from there.
    """
    total, open_gate = 0.0, True
    for score in scores[: stage + 1]:
        total += score if open_gate else 0.0
        open_gate = open_gate and score >= 1.0
    return total / (stage + 1)


def held(values: Sequence[float]) -> Callable[[float], float]:
    """A schedule over a run's progress in [0, 1]: every value for an equal share of it."""
    return lambda progress: values[min(len(values) - 1, int(progress * len(values)))]
