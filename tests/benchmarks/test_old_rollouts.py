"""What benchmarks/staleness.py rests on: its exact success, the age of its data, and the harm of old rollouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def staleness() -> Any:
    """The benchmark; its neighbours are found beside it, as when it is run."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import staleness
    finally:
        sys.path.pop(0)
    return staleness


def test_success_is_the_middle_of_a_binomial_and_that_of_the_episodes(staleness: Any) -> None:
    among_16 = [1820, 4368, 8008, 11440, 12870]  # 16 over 4, 5, 6, 7, 8
    assert staleness.success(np.asarray([0.5]), np.asarray([8])) == pytest.approx((2 * sum(among_16[2:4]) + 12870) / 2**16)
    assert staleness.success(np.asarray([1.0, 1.0]), np.asarray([14, 13])) == 0.5
    world = staleness.Searches(0)
    won = [(world.play(staleness.ROWS["none"])["advantage"][:, 0] > 0).mean() for _ in range(100)]
    assert np.mean(won) == pytest.approx(staleness.success(world.odds, world.asked), abs=0.03)


def test_what_is_trained_on_is_as_old_as_it_is_said_to_be(staleness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, trained = [], []
    play = staleness.Searches.play

    def noted(self: Any, algorithm: Any) -> Any:
        batch = play(self, algorithm)
        sampled.append(batch["advantage"])
        return batch

    def scored(params: Any, batch: Any) -> Any:
        trained.append((len(sampled), batch["advantage"]))
        return batch["logprob"]

    def kept(params: Any, moments: Any, batch: Any, numbers: Any) -> Any:
        return params, moments, dict.fromkeys(("gap", "tokens", "masked", "filtered"), 1.0)

    monkeypatch.setattr(staleness.Searches, "play", noted)
    monkeypatch.setattr(staleness, "programs", lambda algorithm: (kept, scored))
    staleness.learn("none", 3, 0, 0.01, steps=6)
    assert [step for step, _ in trained] == [4, 5, 6]
    assert all(batch is sampled[step - 4] for step, batch in trained)


def test_old_rollouts_undo_what_fresh_ones_teach_unless_they_are_masked(staleness: Any) -> None:
    fresh, old = (staleness.learn("none", n, 0, 0.03, steps=60) for n in (0, 4))
    masked = staleness.learn("off_policy_mask", 4, 0, 0.03, steps=60)
    assert fresh.end > 0.7
    assert old.end < 0.6
    assert masked.end > 0.7
    assert (old.dropped, fresh.dropped) == (0.0, 0.0)
    assert masked.dropped > 0.01
    assert old.gap > 2 * fresh.gap
