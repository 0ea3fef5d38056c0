"""What is added to an outcome, by hand; and that no cost can be gamed."""

from __future__ import annotations

import math

import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.rewards.terms import efficiency, failed_calls, held, otc, overlong, progressive, staged


@pytest.mark.parametrize(
    ("length", "wanted"), [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**9, -1.0)]
)
def test_the_soft_punishment_of_length_by_hand(length: int, wanted: float) -> None:
    assert overlong(length, limit=20480, zone=4096) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("calls", "fewest", "wanted"), [(2, 2, 1.0), (1, 2, 1.0), (3, 2, 0.8), (4, 2, 0.6), (40, 2, 0.6), (0, 0, 1.0), (1, 0, 1.0)]
)
def test_efficiency_multiplies_what_was_earned(calls: int, fewest: int, wanted: float) -> None:
    assert efficiency(1.0, calls, fewest, cost=0.4) == pytest.approx(wanted)
    assert efficiency(0.0, calls, fewest, cost=0.4) == 0.0
    assert efficiency(0.5, calls, fewest, cost=0.4) == pytest.approx(wanted / 2)


def test_otc_by_hand() -> None:
    assert otc(1.0, 0, smoothing=2.0) == 1.0
    assert otc(1.0, 1, smoothing=2.0) == pytest.approx(math.cos(math.pi / 4))
    assert otc(1.0, 3, smoothing=2.0) == pytest.approx(math.cos(3 * math.pi / 8))
    assert otc(0.0, 0, smoothing=2.0) == otc(0.0, 5, smoothing=2.0) == 0.0
    worth = [otc(1.0, calls, smoothing=3.0) for calls in range(50)]
    assert worth == sorted(worth, reverse=True)
    assert worth[-1] > 0


def test_failures_cost_up_to_a_bound_and_calls_that_work_earn_nothing() -> None:
    assert [failed_calls(n) for n in (0, 1, 5, 500)] == [0.0, -0.2, -1.0, -1.0]


@pytest.mark.parametrize(("alpha", "wanted"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_progressive_shaping_by_hand(alpha: float, wanted: float) -> None:
    assert progressive(1.0, [0.5, 0.0, 1.0], alpha) == pytest.approx(wanted)


@drawn
@given(st.floats(0, 1), st.lists(st.floats(0, 1), max_size=6), st.floats(0, 1))
def test_more_steps_of_the_same_kind_earn_nothing(outcome: float, steps: list[float], alpha: float) -> None:
    assert progressive(outcome, steps * 3, alpha) == pytest.approx(progressive(outcome, steps, alpha))
    assert 0 <= progressive(outcome, steps, alpha) <= 1


@pytest.mark.parametrize(
    ("scores", "stage", "wanted"),
    [
        ([0.5, 1.0], 0, 0.5),
        ([0.5, 1.0], 1, 0.25),  # not all in form: what it was for does not count
        ([1.0, 0.0], 1, 0.5),
        ([1.0, 1.0], 1, 1.0),
        ([1.0, 1.0, 0.5], 2, 2.5 / 3),
    ],
)
def test_a_stage_counts_where_those_before_it_are_full(scores: list[float], stage: int, wanted: float) -> None:
    assert staged(scores, stage) == pytest.approx(wanted)


def test_a_schedule_holds_every_value_for_its_share_of_the_run() -> None:
    alpha = held((0.3, 0.7, 1.0))
    assert [alpha(step / 9) for step in range(10)] == [0.3, 0.3, 0.3, 0.7, 0.7, 0.7, 1.0, 1.0, 1.0, 1.0]
    assert held((0.5,))(0.99) == 0.5
