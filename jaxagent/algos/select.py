"""Selection instead of gradients: how often the best of several rollouts succeeds."""

from __future__ import annotations


def success_of_best(p: float, rollouts: int) -> float:
    """1 - (1 - p)^N: the chance that one of N independent rollouts succeeds, each with probability p."""
    return 1.0 - (1.0 - p) ** rollouts
