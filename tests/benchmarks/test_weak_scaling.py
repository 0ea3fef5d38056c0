"""What benchmarks/scaling.py rests on: the mean of the longest of several steps, over all ways to choose them."""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def scaling() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import scaling
    finally:
        sys.path.pop(0)
    return scaling


def test_the_mean_of_the_longest_is_that_of_all_choices_written_out(scaling: Any) -> None:
    seconds, slow = [3.0, 1.0, 4.0, 1.5, 9.0], [2.0, 5.0]
    for count in range(1, 6):
        chosen = list(itertools.combinations(seconds, count))
        assert scaling.longest(seconds, count) == pytest.approx(statistics.mean(map(max, chosen)))
        beside = [max((*others, s)) for others in itertools.combinations(seconds, count - 1) for s in slow]
        assert scaling.longest_beside(seconds, slow, count) == pytest.approx(statistics.mean(beside))


def test_a_step_does_not_depend_on_the_machine_and_a_slow_device_samples_the_same_more_slowly(scaling: Any) -> None:
    shape = scaling.Shape(groups=2, turns=(2, 4), tool_s=0.1)
    seconds, tokens = scaling.sampled(shape)
    assert scaling.sampled(shape) == (pytest.approx(seconds, rel=0.03), tokens)
    slow_s, same = scaling.sampled(shape, slow=2.0)
    assert same == tokens
    assert 1.2 * seconds < slow_s < 2.05 * seconds
