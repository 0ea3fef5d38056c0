"""Ratios, bounds and averaging, worked out by hand; and the gradient that all of them share at ratio 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algos import losses
from jaxagent.algos.table import TABLE, choose

Loss = Callable[..., Any]


def tokens(*rows: list[float]) -> jax.Array:
    return jnp.asarray(rows, jnp.float32)


def bounded(bound: Loss, ratio: list[float], advantage: list[float], new: list[float], low: float, high: float) -> list[float]:
    return bound(tokens(ratio), tokens(advantage), tokens(new), low, high)[0].tolist()


# ====================================================================== ratios

ONE = jnp.asarray([[1, 1, 1]])
ALL = jnp.asarray([[True, True, True]])


def test_a_token_ratio_is_the_quotient_of_the_probabilities_and_one_where_nothing_was_sampled() -> None:
    mask = jnp.asarray([[True, False, True]])
    u = losses.token_ratio(tokens([-1.0, -9.0, -2.0]), tokens([-1.1, -1.0, -1.5]), mask, ONE)
    assert u[0].tolist() == pytest.approx([1.105171, 1.0, 0.606531])


def test_a_ratio_stays_finite_however_far_the_policy_has_gone() -> None:
    for ratio in (losses.token_ratio, losses.sequence_ratio):
        u = ratio(tokens([0.0, -500.0, 0.0]), tokens([-500.0, 0.0, 0.0]), ALL, jnp.asarray([[1, 2, 3]]))
        assert u[0].tolist() == pytest.approx([np.exp(20.0), np.exp(-20.0), 1.0], rel=1e-4)


def test_a_sequence_ratio_is_the_geometric_mean_over_the_sampled_tokens() -> None:
    s = losses.sequence_ratio(tokens([0.10, -0.02, 0.04]), tokens([0, 0, 0]), ALL, ONE)
    assert s[0].tolist() == pytest.approx([1.040811] * 3)  # exp(0.12 / 3); the product would be 1.127497
    mask = jnp.asarray([[True, False, True]])
    s = losses.sequence_ratio(tokens([0.10, -5.0, 0.04]), tokens([0, 0, 0]), mask, ONE)
    assert [float(s[0, 0]), float(s[0, 2])] == pytest.approx([1.072508] * 2)  # exp(0.14 / 2)


def test_rows_packed_beside_each_other_have_ratios_of_their_own() -> None:
    segment = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    mask = jnp.asarray([[False, True, False, True, True, False]])
    new = tokens([0.9, 0.2, 0.9, -0.3, 0.1, 0.9])
    s = losses.sequence_ratio(new, jnp.zeros((1, 6)), mask, segment)[0]
    assert s[1] == pytest.approx(1.221403)  # exp(0.2)
    assert s[3:5].tolist() == pytest.approx([0.904837] * 2)  # exp(-0.1)


def test_the_gradient_of_a_sequence_ratio_is_each_tokens_own() -> None:
    new = tokens([0.10, -0.02, 0.04])
    advantage = jnp.asarray([[1.0, 10.0, 100.0]])
    gradient = jax.grad(lambda x: (advantage * losses.sequence_ratio(x, jnp.zeros((1, 3)), ALL, ONE)).sum())(new)
    assert gradient[0].tolist() == pytest.approx([1.040811, 10.40811, 104.0811])


# ====================================================================== bounds


def test_the_clipped_loss_by_hand() -> None:
    found = bounded(losses.clipped, [1.5, 1.5, 0.5, 0.5, 1.1], [1, -1, 1, -1, 2], [0] * 5, 0.2, 0.2)
    assert found == pytest.approx([-1.2, 1.5, -0.5, 0.8, -2.2])


def test_clip_higher_only_moves_the_upper_bound() -> None:
    found = bounded(losses.clipped, [1.5, 1.25, 0.5], [1, 1, -1], [0] * 3, 0.2, 0.28)
    assert found == pytest.approx([-1.28, -1.25, 0.8])


def test_the_clip_of_gspo_bites_within_a_thousandth() -> None:
    assert bounded(losses.clipped, [1.040811, 0.99], [2, -2], [0, 0], 3e-4, 4e-4) == pytest.approx([-2.0008, 1.9994])


def test_a_clipped_token_loses_its_gradient_exactly_where_it_went_too_far_the_right_way() -> None:
    def loss(log_ratio: jax.Array) -> jax.Array:
        return losses.clipped(jnp.exp(log_ratio), advantage, log_ratio, 0.2, 0.28).sum()

    ratio = tokens([1.3, 1.27, 0.7, 1.3, 0.79, 0.81])
    advantage = tokens([1, 1, 1, -1, -1, -1])
    gradient = jax.grad(loss)(jnp.log(ratio))[0].tolist()
    assert gradient == pytest.approx([0, -1.27, -0.7, 1.3, 0, 0.81], abs=1e-6)


def test_a_capped_weight_by_hand() -> None:
    found = bounded(losses.capped_weight, [0.5, 1, 3, 3], [1, 1, 1, -1], [-1, -2, -0.5, -0.5], 1.0, 1.0)
    assert found == pytest.approx([0.5, 2, 1, -1])  # weights 0.5, 1, 2, 2


def test_a_capped_weight_never_takes_a_token_its_gradient() -> None:
    ratio, advantage, new = tokens([0.01, 1, 9]), tokens([1, -1, 1]), tokens([-1, -1, -1])
    gradient = jax.grad(lambda x: losses.capped_weight(jnp.exp(x - new) * ratio, advantage, x, 1.0, 1.0).sum())(new)
    assert gradient[0].tolist() == pytest.approx([-0.01, 1, -2])


def test_an_unbounded_loss_is_the_ratio_times_the_advantage() -> None:
    assert bounded(losses.unbounded, [1.5, 0.5, 30], [1, -2, 1], [0] * 3, 0.2, 0.2) == pytest.approx([-1.5, 1.0, -30])


# ====================================================================== averaging

LENGTHS, LOSSES = [2, 4], [1.0, 0.25]  # two rollouts, the same loss at each of their tokens


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_mean", 0.5),  # (2 * 1 + 4 * 0.25) / 6
        ("sequence_mean", 0.625),  # (1 + 0.25) / 2
        ("sequence_sum", 1.5),  # (2 + 1) / 2
        ("sequence_sum_norm", 0.375),  # the same over 4
    ],
)
def test_the_four_averages_by_hand(mode: str, wanted: float) -> None:
    weight, share = losses.aggregation(mode, LENGTHS, 4.0)
    total = sum(w * n * loss for w, n, loss in zip(weight, LENGTHS, LOSSES, strict=True))
    assert total / sum(s * n for s, n in zip(share, LENGTHS, strict=True)) == pytest.approx(wanted)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"])
def test_a_rollouts_part_does_not_depend_on_its_company(mode: str) -> None:
    weight, share = losses.aggregation(mode, [3, 5, 7], 4.0)
    for i, n in enumerate([3, 5, 7]):
        alone = losses.aggregation(mode, [n], 4.0)
        assert ([weight[i]], [share[i]]) == alone


# ====================================================================== identities


@pytest.mark.parametrize("name", TABLE)
def test_at_ratio_one_every_algorithm_has_the_gradient_of_reinforce(name: str) -> None:
    row = TABLE[name]
    mask = jnp.asarray([[False, True, True, False, True, False]])
    segment = jnp.asarray([[1, 1, 1, 1, 1, 0]])
    old = tokens([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    advantage = jnp.where(mask, 1.5, 0.0)

    def loss(new: jax.Array) -> jax.Array:
        ratio = row.ratio(new, old, mask, segment)
        return row.bound(ratio, advantage, new, row.clip_low, row.clip_high).sum()

    assert jax.grad(loss)(old)[0].tolist() == pytest.approx([0, -1.5, -1.5, 0, -1.5, 0])


def value(name: str, log_ratios: list[list[float]], advantage: list[float], **columns: Any) -> float:
    """The loss of whole rollouts, by an algorithm's ratio, bound and average."""
    row = choose(name, **columns)
    weight, share = losses.aggregation(row.aggregate, [len(r) for r in log_ratios], row.length)
    total = 0.0
    for rollout, a, w in zip(log_ratios, advantage, weight, strict=True):
        new, n = tokens(rollout), len(rollout)
        ratio = row.ratio(new, jnp.zeros((1, n)), jnp.ones((1, n), bool), jnp.ones((1, n), int))
        total += w * float(row.bound(ratio, jnp.full((1, n), a), new, row.clip_low, row.clip_high).sum())
    return total / sum(s * len(r) for s, r in zip(share, log_ratios, strict=True))


def test_dapo_with_equal_clips_is_grpo_up_to_averaging() -> None:
    rollouts, advantage = [[0.5, 0.1], [-0.5, 0.3, 0.0, -0.05]], [1.0, -1.0]
    # clipped at 1.2 and 0.8: -(1.2, 1.105171) and (0.8, 1.349859, 1, 0.951229)
    first, second = -(1.2 + 1.105171), 0.8 + 1.349859 + 1.0 + 0.951229
    assert value("grpo", rollouts, advantage) == pytest.approx((first / 2 + second / 4) / 2, rel=1e-5)
    assert value("dapo", rollouts, advantage, clip_high=0.2) == pytest.approx((first + second) / 6, rel=1e-5)
    same = [rollouts[0], rollouts[1][:2]]
    assert value("dapo", same, advantage, clip_high=0.2) == pytest.approx(value("grpo", same, advantage), rel=1e-6)


def test_gspo_of_one_token_is_grpo_with_its_clips() -> None:
    for log_ratio, advantage in ((0.0002, 1.0), (0.1, 1.0), (-0.1, -1.0), (0.1, -1.0)):
        gspo = value("gspo", [[log_ratio]], [advantage])
        assert gspo == pytest.approx(value("grpo", [[log_ratio]], [advantage], clip_low=3e-4, clip_high=4e-4))


def test_dr_grpo_divides_by_its_constant_and_never_by_the_length() -> None:
    short, long = [[0.0] * 2], [[0.0] * 50]
    assert value("dr_grpo", short, [1.0], length=100.0) == pytest.approx(-0.02)
    assert value("dr_grpo", long, [1.0], length=100.0) == pytest.approx(-0.5)
    assert value("grpo", short, [1.0]) == value("grpo", long, [1.0]) == pytest.approx(-1.0)
