"""Ratios, bounds and averaging, worked out by hand; and the gradient that all of them share at ratio 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.algos import losses
from jaxagent.algos.table import TABLE, WORDS, choose

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
    for ratio in losses.RATIO.values():
        u = ratio(tokens([0.0, -500.0, 0.0]), tokens([-500.0, 0.0, 0.0]), ALL, jnp.asarray([[1, 2, 3]]))
        assert u[0].tolist() == pytest.approx([np.exp(20.0), np.exp(-20.0), 1.0], rel=1e-4)


def test_a_sequence_ratio_is_the_geometric_mean_over_the_sampled_tokens() -> None:
    mask = jnp.asarray([[True, False, True]])
    for ratio in (losses.sequence_ratio, losses.sequence_token_ratio):
        s = ratio(tokens([0.10, -0.02, 0.04]), tokens([0, 0, 0]), ALL, ONE)
        assert s[0].tolist() == pytest.approx([1.040811] * 3)  # exp(0.12 / 3); the product would be 1.127497
        s = ratio(tokens([0.10, -5.0, 0.04]), tokens([0, 0, 0]), mask, ONE)
        assert [float(s[0, 0]), float(s[0, 2])] == pytest.approx([1.072508] * 2)  # exp(0.14 / 2)


def test_rows_packed_beside_each_other_have_ratios_of_their_own() -> None:
    segment = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    mask = jnp.asarray([[False, True, False, True, True, False]])
    new = tokens([0.9, 0.2, 0.9, -0.3, 0.1, 0.9])
    for ratio in (losses.sequence_ratio, losses.sequence_token_ratio):
        s = ratio(new, jnp.zeros((1, 6)), mask, segment)[0]
        assert s[1] == pytest.approx(1.221403)  # exp(0.2)
        assert s[3:5].tolist() == pytest.approx([0.904837] * 2)  # exp(-0.1)


def test_gspo_averages_what_the_tokens_were_given_and_gspo_token_does_not() -> None:
    new = tokens([0.10, -0.02, 0.04])
    advantage = jnp.asarray([[1.0, 10.0, 100.0]])

    def gradient(ratio: Loss, advantage: jax.Array) -> list[float]:
        return jax.grad(lambda x: (advantage * ratio(x, jnp.zeros((1, 3)), ALL, ONE)).sum())(new)[0].tolist()

    assert gradient(losses.sequence_token_ratio, advantage) == pytest.approx([1.040811, 10.40811, 104.0811])
    assert gradient(losses.sequence_ratio, advantage) == pytest.approx([1.040811 * 37] * 3)
    alike = jnp.full((1, 3), 2.0)
    assert gradient(losses.sequence_ratio, alike) == pytest.approx(gradient(losses.sequence_token_ratio, alike))


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


def test_a_capped_by_hand() -> None:
    found = bounded(losses.capped, [0.5, 1, 3, 3], [1, 1, 1, -1], [-1, -2, -0.5, -0.5], 1.0, 1.0)
    assert found == pytest.approx([0.5, 2, 1, -1])  # weights 0.5, 1, 2, 2


def test_a_capped_never_takes_a_token_its_gradient() -> None:
    ratio, advantage, new = tokens([0.01, 1, 9]), tokens([1, -1, 1]), tokens([-1, -1, -1])
    gradient = jax.grad(lambda x: losses.capped(jnp.exp(x - new) * ratio, advantage, x, 1.0, 1.0).sum())(new)
    assert gradient[0].tolist() == pytest.approx([-0.01, 1, -2])


def test_an_unbounded_loss_is_the_ratio_times_the_advantage() -> None:
    assert bounded(losses.unbounded, [1.5, 0.5, 30], [1, -2, 1], [0] * 3, 0.2, 0.2) == pytest.approx([-1.5, 1.0, -30])


def test_the_dual_clip_bounds_what_a_bad_token_may_cost_and_nothing_else() -> None:
    ratio, advantage = tokens([5, 2, 5, 0.5]), tokens([-1, -1, 1, -1])
    free = losses.clipped(ratio, advantage, ratio, 0.2, 0.2)
    assert losses.dual_clipped(free, advantage, 3.0)[0].tolist() == pytest.approx([3.0, 2.0, -1.2, 0.8])


def test_the_dual_clip_takes_the_gradient_of_what_it_bounds() -> None:
    def loss(ratio: jax.Array) -> jax.Array:
        return losses.dual_clipped(losses.unbounded(ratio, advantage, ratio, 0, 0), advantage, 3.0).sum()

    advantage = tokens([-1, -1, 1])
    assert jax.grad(loss)(tokens([5, 2, 5]))[0].tolist() == [0, 1, -1]


# ====================================================================== a stale or mismatched sampler

LOG_RHO = tokens([0.1, 0.8, -0.5])
RHO = [1.105171, 2.225541, 0.606531]


@pytest.mark.parametrize(
    ("kind", "bounds", "wanted"),
    [
        ("none", (0.0, 2.0), [1, 1, 1]),
        ("token", (0.0, 2.0), RHO),
        ("token_truncated", (0.0, 2.0), [1.105171, 2, 0.606531]),
        ("token_masked", (0.5, 2.0), [1.105171, 0, 0.606531]),
        ("token_masked", (0.7, 5.0), [1.105171, 2.225541, 0]),
        ("sequence_truncated", (0.0, 2.0), [1.491825] * 3),
        ("sequence_truncated", (0.0, 1.4), [1.4] * 3),
        ("sequence_masked", (0.0, 3.0), [1.491825] * 3),
        ("sequence_masked", (0.0, 1.4), [0] * 3),
    ],
)
def test_importance_weights_by_hand(kind: str, bounds: tuple[float, float], wanted: list[float]) -> None:
    assert losses.importance_weight(kind, bounds, LOG_RHO, ALL, ONE)[0].tolist() == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("kind", WORDS["importance"])
def test_tool_tokens_and_neighbours_in_the_row_have_no_part_in_an_importance_weight(kind: str) -> None:
    log_rho = tokens([0.1, 9.0, 0.8, -0.5, 0.3])
    mask, segment = jnp.asarray([[True, False, True, True, True]]), jnp.asarray([[1, 1, 1, 1, 2]])
    alone = losses.importance_weight(kind, (0.0, 2.0), LOG_RHO, ALL, ONE)[0].tolist()
    packed = losses.importance_weight(kind, (0.0, 2.0), log_rho, mask, segment)[0].tolist()
    assert [packed[0], *packed[2:4]] == pytest.approx(alone)


@pytest.mark.parametrize("kind", WORDS["importance"])
def test_an_importance_weight_is_a_constant(kind: str) -> None:
    gradient = jax.grad(lambda x: losses.importance_weight(kind, (0.0, 9.0), x, ALL, ONE).sum())(LOG_RHO)
    assert gradient[0].tolist() == [0, 0, 0]


def test_decoupled_ppo_clips_against_the_policy_at_the_start_of_the_step() -> None:
    new, proximal, behaviour, advantage = (tokens([x]) for x in (-1.0, -1.1, -1.6, 1.0))
    one, all_of_it = jnp.ones((1, 1), int), jnp.ones((1, 1), bool)

    def loss(new: jax.Array, old: jax.Array, importance: str) -> jax.Array:
        u = losses.token_ratio(new, old, all_of_it, one)
        w = losses.importance_weight(importance, (0.0, 5.0), old - behaviour, all_of_it, one)
        return (w * losses.clipped(u, advantage, new, 0.2, 0.2)).sum()

    for importance in ("token", "token_masked"):
        value, gradient = jax.value_and_grad(loss)(new, proximal, importance)
        assert float(value) == pytest.approx(-1.822119, abs=1e-6)  # w = 1.648721, u = 1.105171
        assert float(gradient[0, 0]) == pytest.approx(-1.822119, abs=1e-6)
    value, gradient = jax.value_and_grad(loss)(new, behaviour, "none")
    assert (float(value), float(gradient[0, 0])) == (pytest.approx(-1.2), 0.0)  # what decoupling repairs


def kept(kind: str, bounds: tuple[float, float], log_rho: list[float], advantage: float = 1.0, now: float = 0.0) -> list[bool]:
    old, nothing = tokens(log_rho), jnp.zeros((1, len(log_rho)))
    n = nothing.shape[1]
    mask, segment = jnp.ones((1, n), bool), jnp.ones((1, n), int)
    return losses.kept_sequences(kind, bounds, (old + now, old, nothing), nothing + advantage, mask, segment)[0].tolist()


@pytest.mark.parametrize(
    ("kind", "bounds", "wanted"),
    [
        ("none", (0.0, 0.0), True),
        ("geometric", (0.999, 1.001), False),
        ("geometric", (0.8, 1.142632), True),  # exp(0.4 / 3) = 1.142631
        ("geometric", (0.8, 1.142630), False),
        ("k2", (0.0, 0.151), True),  # (0.01 + 0.64 + 0.25) / 6 = 0.15
        ("k2", (0.0, 0.149), False),
        ("k3", (0.0, 0.1792), True),  # (1.105171 + 2.225541 + 0.606531 - 3 - 0.4) / 3 = 0.179081
        ("k3", (0.0, 0.1790), False),
    ],
)
def test_filters_by_hand(kind: str, bounds: tuple[float, float], wanted: bool) -> None:
    assert kept(kind, bounds, [0.1, 0.8, -0.5]) == [wanted] * 3


@pytest.mark.parametrize("kind", WORDS["filter"])
def test_a_filter_does_not_see_how_long_a_sequence_is(kind: str) -> None:
    for bounds in ((0.8, 1.2), (0.8, 1.1), (0.0, 0.16), (0.0, 0.14)):
        short, long = kept(kind, bounds, [0.1, 0.8, -0.5], -1.0), kept(kind, bounds, [0.1, 0.8, -0.5] * 20, -1.0)
        assert set(short) == set(long)


def test_only_bad_sequences_that_became_unlikely_are_dropped_by_the_off_policy_mask() -> None:
    for advantage, now, wanted in ((-1.0, -0.5, False), (-1.0, -0.05, True), (-1.0, 0.5, True), (1.0, -0.5, True)):
        assert kept("unlikely_negative", (0.0, 0.1), [0.0, 0.0], advantage, now) == [wanted] * 2


def test_the_effective_sample_size_of_the_worked_weights() -> None:
    rho = np.asarray(RHO)
    assert rho.mean() ** 2 / (rho**2).mean() == pytest.approx(0.789826, abs=1e-6)


# ====================================================================== the distance to a reference

P, Q = np.asarray([0.5, 0.3, 0.2]), np.asarray([0.4, 0.4, 0.2])
KINDS = ("k1", "k2", "k3")


@pytest.mark.parametrize(("d", "wanted"), [(0.3, [0.3, 0.045, 0.040818]), (-0.3, [-0.3, 0.045, 0.049859])])
def test_the_three_estimates_by_hand(d: float, wanted: list[float]) -> None:
    assert [float(losses.kl_estimate(kind, jnp.float32(d))) for kind in KINDS] == pytest.approx(wanted, abs=1e-6)


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    exact = (P * np.log(P / Q)).sum()
    means = [(P * np.asarray(losses.kl_estimate(kind, jnp.asarray(np.log(P / Q))))).sum() for kind in KINDS]
    assert means == pytest.approx([0.025267, 0.024862, 0.025267], abs=2e-6)
    assert exact == pytest.approx(0.025267, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("k1", [0, 0, 0]), ("k2", [0.098938, -0.093885, -0.005053]), ("k3", [0.1, -0.1, 0])],
)
def test_as_a_loss_only_k2_has_the_gradient_of_the_distance(kind: str, wanted: list[float]) -> None:
    """In expectation over samples of the policy, which are not differentiated through."""
    logits = jnp.asarray(np.log(P), jnp.float32)

    def expected(logits: jax.Array) -> jax.Array:
        return (P * losses.kl_estimate(kind, jax.nn.log_softmax(logits) - np.log(Q))).sum()

    def exact(logits: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits)
        return (jnp.exp(log_p) * (log_p - np.log(Q))).sum()

    assert jax.grad(expected)(logits).tolist() == pytest.approx(wanted, abs=2e-6)
    if kind == "k2":
        assert jax.grad(exact)(logits).tolist() == pytest.approx(wanted, abs=2e-6)


# ====================================================================== the critic


@pytest.mark.parametrize(("target", "wanted"), [(1.0, 0.045), (0.0, 0.405)])
def test_the_clipped_value_loss_by_hand(target: float, wanted: float) -> None:
    found = losses.value_loss(tokens([0.9]), tokens([0.5]), tokens([target]), 0.2)
    assert float(found[0, 0]) == pytest.approx(wanted)


def test_without_a_clip_the_value_loss_is_half_the_squared_error() -> None:
    assert losses.value_loss(tokens([0.9]), tokens([0.1]), tokens([1.0]), 0.0)[0].tolist() == pytest.approx([0.005])


# ====================================================================== averaging

MODES = WORDS["aggregate"]
Rollouts = list[list[list[float]]]  # losses: of tokens, in turns, in rollouts


def average(mode: str, rollouts: Rollouts, constant: float = 4.0) -> float:
    """sum of weight times loss over sum of shares."""
    total = shares = 0.0
    for turns in rollouts:
        for (weight, share), turn in zip(losses.aggregation(mode, [len(t) for t in turns], constant), turns, strict=True):
            total += weight * sum(turn)
            shares += share * len(turn)
    return total / shares


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_mean", 0.5),  # (2 * 1 + 4 * 0.25) / 6
        ("sequence_mean", 0.625),  # (1 + 0.25) / 2
        ("sequence_sum", 1.5),  # (2 + 1) / 2
        ("sequence_sum_norm", 0.375),  # the same over 4
        ("turn_mean", 0.5),  # (1 + 0.25 + 0.25) / 3
    ],
)
def test_the_averages_by_hand(mode: str, wanted: float) -> None:
    assert average(mode, [[[1.0, 1.0]], [[0.25], [0.25] * 3]]) == pytest.approx(wanted)


def written_out(mode: str, rollouts: Rollouts, constant: float) -> float:
    flat = [[x for turn in turns for x in turn] for turns in rollouts]
    return {
        "token_mean": lambda: sum(map(sum, flat)) / sum(map(len, flat)),
        "sequence_mean": lambda: np.mean([np.mean(row) for row in flat]),
        "sequence_sum": lambda: np.mean([sum(row) for row in flat]),
        "sequence_sum_norm": lambda: np.mean([sum(row) for row in flat]) / constant,
        "turn_mean": lambda: np.mean([np.mean(turn) for turns in rollouts for turn in turns]),
    }[mode]()


number = st.floats(-3, 3, width=32)
ragged = st.lists(st.lists(st.lists(number, min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=4)


@drawn
@given(ragged, st.sampled_from(MODES), st.floats(1, 50))
def test_weights_and_shares_are_the_average_that_is_written_in_the_table(
    rollouts: Rollouts, mode: str, constant: float
) -> None:
    assert average(mode, rollouts, constant) == pytest.approx(written_out(mode, rollouts, constant), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_tool_says_changes_nothing_and_counts_nothing(mode: str) -> None:
    loss, mask = np.asarray([1, 1, 7, 7, 0.5]), np.asarray([1, 1, 0, 0, 1], bool)
    found = average(mode, [[loss[:2][mask[:2]].tolist(), loss[4:][mask[4:]].tolist()]])
    assert mode != "token_mean" or found == pytest.approx(0.833333, abs=1e-6)
    assert found == pytest.approx(written_out(mode, [[[1, 1], [0.5]]], 4.0))


# ====================================================================== identities


@pytest.mark.parametrize("name", TABLE)
def test_at_ratio_one_every_algorithm_has_the_gradient_of_reinforce(name: str) -> None:
    row = TABLE[name]
    mask = jnp.asarray([[False, True, True, False, True, False]])
    segment = jnp.asarray([[1, 1, 1, 1, 1, 0]])
    old = tokens([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    advantage = jnp.where(mask, 1.5, 0.0)

    def loss(new: jax.Array) -> jax.Array:
        ratio = losses.RATIO[row.ratio](new, old, mask, segment)
        loss = losses.BOUND[row.bound](ratio, advantage, new, row.clip_low, row.clip_high)
        weight = losses.importance_weight(row.importance, row.importance_bounds, old - old, mask, segment)
        kept = losses.kept_sequences(row.filter, row.filter_bounds, (new, old, old), advantage, mask, segment)
        dual = losses.dual_clipped(loss, advantage, row.clip_dual) if row.clip_dual else loss
        return jnp.where(mask & kept, dual * weight, 0.0).sum()

    assert jax.grad(loss)(old)[0].tolist() == pytest.approx([0, -1.5, -1.5, 0, -1.5, 0])


def value(name: str, log_ratios: list[list[float]], advantage: list[float], **columns: Any) -> float:
    """The loss of rollouts of one turn each, by an algorithm's ratio, bound and average."""
    row = choose(name, **columns)
    total = shares = 0.0
    for rollout, a in zip(log_ratios, advantage, strict=True):
        new, n = tokens(rollout), len(rollout)
        ((weight, share),) = losses.aggregation(row.aggregate, [n], row.length)
        ratio = losses.RATIO[row.ratio](new, jnp.zeros((1, n)), jnp.ones((1, n), bool), jnp.ones((1, n), int))
        bound = losses.BOUND[row.bound](ratio, jnp.full((1, n), a), new, row.clip_low, row.clip_high)
        total, shares = total + weight * float(bound.sum()), shares + share * n
    return total / shares


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
        assert gspo == pytest.approx(value("gspo_token", [[log_ratio]], [advantage]))
        assert gspo == pytest.approx(value("grpo", [[log_ratio]], [advantage], clip_low=3e-4, clip_high=4e-4))


def test_dr_grpo_divides_by_its_constant_and_never_by_the_length() -> None:
    short, long = [[0.0] * 2], [[0.0] * 50]
    assert value("dr_grpo", short, [1.0], length=100.0) == pytest.approx(-0.02)
    assert value("dr_grpo", long, [1.0], length=100.0) == pytest.approx(-0.5)
    assert value("grpo", short, [1.0]) == value("grpo", long, [1.0]) == pytest.approx(-1.0)
