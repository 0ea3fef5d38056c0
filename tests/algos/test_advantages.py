"""Advantages of a group, worked out by hand; and what no group may get."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array

from jaxagent.algos import advantages

Advantage = Callable[[Array, Array], Array]
BASELINED = [advantages.centred, advantages.normalised, advantages.leave_one_out]


def of(advantage: Advantage, rewards: list[list[float]], valid: list[list[int]] | None = None) -> np.ndarray:
    reward_PG = jnp.asarray(rewards, jnp.float32)
    valid_PG = jnp.ones(reward_PG.shape, bool) if valid is None else jnp.asarray(valid, bool)
    return np.asarray(advantage(reward_PG, valid_PG))


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        (advantages.reinforce, [1, 0, 0, 1, 0]),
        (advantages.centred, [0.6, -0.4, -0.4, 0.6, -0.4]),
        (advantages.leave_one_out, [0.75, -0.5, -0.5, 0.75, -0.5]),
        # the unbiased deviation is sqrt(0.3) = 0.547723; the biased one would give 1.224742
        (advantages.normalised, [1.095443, -0.730295, -0.730295, 1.095443, -0.730295]),
    ],
)
def test_two_wins_in_five(advantage: Advantage, wanted: list[float]) -> None:
    assert of(advantage, [[1, 0, 0, 1, 0]])[0] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        (advantages.reinforce, [2, -1, 0.5, 0]),
        (advantages.centred, [1.625, -1.375, 0.125, -0.375]),
        (advantages.leave_one_out, [2.166667, -1.833333, 0.166667, -0.5]),  # 2 - (-1 + 0.5 + 0) / 3, ...
        (advantages.normalised, [1.299998, -1.099998, 0.1, -0.3]),  # the deviation is 1.25
    ],
)
def test_rewards_of_any_size_and_sign(advantage: Advantage, wanted: list[float]) -> None:
    assert of(advantage, [[2, -1, 0.5, 0]])[0] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        (advantages.reinforce, [1, 0, 0, 1]),
        (advantages.centred, [1 / 3, -2 / 3, 0, 1 / 3]),
        (advantages.leave_one_out, [0.5, -1, 0, 0.5]),
        (advantages.normalised, [0.577349, -1.154699, 0, 0.577349]),  # the deviation of 1, 0, 1 is 0.577350
    ],
)
def test_a_broken_rollout_leaves_the_mean_the_deviation_and_the_loss(advantage: Advantage, wanted: list[float]) -> None:
    for lost in (0.0, 9.0, -1e6):
        assert of(advantage, [[1, 0, lost, 1]], [[1, 1, 0, 1]])[0] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("advantage", BASELINED)
@pytest.mark.parametrize("valid", [[1, 0, 0], [0, 0, 0]])
def test_a_rollout_without_company_teaches_nothing(advantage: Advantage, valid: list[int]) -> None:
    assert of(advantage, [[1, 0, 5]], [valid])[0].tolist() == [0, 0, 0]


def test_groups_do_not_see_each_other() -> None:
    for advantage in BASELINED:
        both = of(advantage, [[1, 0, 0], [7, 7, 4]])
        assert both[0].tolist() == of(advantage, [[1, 0, 0]])[0].tolist()
        assert both[1].tolist() == of(advantage, [[7, 7, 4]])[0].tolist()


@drawn
@given(st.floats(-1e6, 1e6, width=32), st.sampled_from([2, 7, 16]))
def test_equal_rewards_teach_nothing_however_large_they_are(reward: float, rollouts: int) -> None:
    assert of(advantages.normalised, [[reward] * rollouts])[0].tolist() == [0.0] * rollouts


def test_rewards_that_differ_by_float_noise_teach_nothing() -> None:
    assert of(advantages.normalised, [[0.1, 0.1 + 1e-8, 0.1, 0.1 - 3e-8]])[0].tolist() == [0.0] * 4


def test_rewards_that_differ_a_little_teach_as_much_as_others() -> None:
    assert of(advantages.normalised, [[1e-3, 0, 0, 1e-3, 0]])[0] == pytest.approx(
        [1.0935, -0.7290, -0.7290, 1.0935, -0.7290], abs=2e-4
    )


groups = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=5, max_size=5), min_size=1, max_size=3)


@drawn
@given(groups, st.lists(st.booleans(), min_size=5, max_size=5))
def test_baselined_advantages_of_a_group_add_up_to_nothing(rewards: list[list[float]], valid: list[bool]) -> None:
    for advantage in BASELINED:
        sums = of(advantage, rewards, [[int(v) for v in valid]] * len(rewards)).sum(1)
        assert np.abs(sums).max() < 1e-4


@drawn
@given(groups)
def test_leave_one_out_is_the_centred_advantage_times_g_over_g_minus_1(rewards: list[list[float]]) -> None:
    assert of(advantages.leave_one_out, rewards) == pytest.approx(of(advantages.centred, rewards) * 5 / 4, abs=1e-5)


@drawn
@given(groups)
def test_a_leave_one_out_baseline_is_the_mean_of_the_others(rewards: list[list[float]]) -> None:
    for group, found in zip(rewards, of(advantages.leave_one_out, rewards), strict=True):
        wanted = [r - (sum(group) - r) / 4 for r in group]
        assert found == pytest.approx(wanted, abs=1e-4)
