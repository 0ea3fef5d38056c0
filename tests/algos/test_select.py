"""Selection: how often the best of several succeeds."""

from __future__ import annotations

import pytest

from jaxagent.algos.select import success_of_best


def test_the_best_of_four_by_hand() -> None:
    assert success_of_best(0.2, 4) == pytest.approx(0.5904)


@pytest.mark.parametrize(("p", "rollouts", "wanted"), [(0.0, 64, 0.0), (1.0, 1, 1.0), (0.3, 1, 0.3), (0.5, 2, 0.75)])
def test_the_best_of_one_is_the_policy_and_what_never_succeeds_never_does(p: float, rollouts: int, wanted: float) -> None:
    assert success_of_best(p, rollouts) == pytest.approx(wanted)
