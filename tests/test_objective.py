"""The loss of a policy and of a critic, through the learner: corrections, distances, averages, and what is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxagent.algos import losses
from jaxagent.algos.table import TABLE, WORDS, Algorithm, choose
from jaxagent.data.pack import Batch, Row, pack
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.objective import EDGES, PolicyObjective, ValueObjective, join

B, T = 3, 8


def batch(seed: int = 0, **changes: Any) -> dict[str, jax.Array]:
    """Three rows of two sequences; the log-probs of the policy, of the start of the step and of the sampler differ."""
    rng = np.random.default_rng(seed)
    segment = np.repeat(np.asarray([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32), B, 0)
    mask = (rng.random((B, T)) < 0.7) & (segment > 0)
    mask[:, [0, 4]] = False
    arrays = {
        "segment": segment,
        "mask": mask,
        "advantage": np.where(mask, rng.normal(size=(B, T)), 0),
        "weight": np.where(mask, rng.random((B, T)), 0),
        "share": np.where(mask, rng.random((B, T)), 0),
        "turn": np.zeros((B, T)),
        "age": np.zeros((B, T)),
        **{name: -2 + 0.4 * rng.normal(size=(B, T)) for name in ("logprob", "old_logprob", "reference", "new", "entropy")},
    }
    return {name: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else None) for name, x in (arrays | changes).items()}


def loss(
    algorithm: Algorithm, given: dict[str, jax.Array], on_policy: bool = False
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The sum of the losses, its gradient by the policy's log-probs, and the metrics."""
    objective = PolicyObjective(algorithm)

    def of(new: jax.Array) -> tuple[jax.Array, dict]:
        return objective.loss({"logprob": new, "entropy": given["entropy"]}, given, jnp.asarray(on_policy))

    (total, sums), gradient = jax.value_and_grad(of, has_aux=True)(given["new"])
    assert {name: x.shape for name, x in sums.items()} == objective.sums
    return float(total), np.asarray(gradient), objective.metrics(sums, 0.0)


def plain(name: str = "reinforce", **columns: Any) -> Algorithm:
    return choose(name, **columns)


def test_the_importance_weight_and_the_filter_take_their_part_of_the_loss_and_not_of_the_denominator() -> None:
    given = batch()
    _, free, whole = loss(plain(), given)
    log_rho = given["old_logprob"] - given["logprob"]
    weight = losses.importance_weight("token_masked", (0.7, 1.4), log_rho, given["mask"], given["segment"])
    _, masked, metrics = loss(plain(importance="token_masked", importance_bounds=(0.7, 1.4)), given)
    assert masked == pytest.approx(free * np.asarray(weight), abs=1e-6)
    assert metrics["off_policy/masked"] == pytest.approx(((weight == 0) & given["mask"]).sum() / given["mask"].sum())
    assert 0 < metrics["off_policy/masked"] < 1
    assert metrics["policy/denominator"] == whole["policy/denominator"]

    means = losses.sequence_mean(log_rho, given["mask"], given["segment"])
    keep = np.asarray((jnp.exp(means) >= 0.8) & (jnp.exp(means) <= 1.25))
    _, kept, metrics = loss(plain(filter="geometric", filter_bounds=(0.8, 1.25)), given)
    assert kept == pytest.approx(np.where(keep, free, 0), abs=1e-6)
    assert 0 < metrics["off_policy/filtered"] < 1
    assert metrics["policy/denominator"] == whole["policy/denominator"]


@pytest.mark.parametrize("kl", ["k2_loss", "k3_loss"])
def test_the_distance_in_the_loss_shares_weight_and_mask_and_no_other_correction(kl: str) -> None:
    given = batch()
    columns = {"importance": "token_truncated", "filter": "geometric", "filter_bounds": (0.9, 1.1)}
    total, gradient, _ = loss(plain(**columns), given)
    with_kl, its_gradient, metrics = loss(plain(**columns, kl=kl, kl_coef=0.3), given)
    d, weight = np.asarray(given["new"] - given["reference"]), np.where(given["mask"], 0.3 * given["weight"], 0)
    value, slope = (d**2 / 2, d) if kl == "k2_loss" else (np.exp(-d) + d - 1, 1 - np.exp(-d))
    assert with_kl - total == pytest.approx((weight * value).sum(), abs=1e-5)
    assert its_gradient - gradient == pytest.approx(weight * slope, abs=1e-5)
    k3 = (np.exp(-d) + d - 1)[np.asarray(given["mask"])]
    assert metrics["policy/kl_reference"] == pytest.approx(k3.mean(), abs=1e-5)


def test_supervised_learning_knows_neither_ratio_nor_correction_nor_distance() -> None:
    given = batch()
    row = plain("decoupled", filter="k3", filter_bounds=(0.0, 0.0), kl_coef=0.5, kl="k2_loss", entropy_coef=0.7)
    _, gradient, _ = loss(row, given, on_policy=True)
    assert gradient == pytest.approx(-np.asarray(given["advantage"] * given["weight"]), abs=1e-6)


def test_the_dual_clip_is_counted_where_it_bites() -> None:
    given = batch(new=jnp.zeros((B, T)), old_logprob=jnp.full((B, T), -np.log(5.0), jnp.float32))
    _, gradient, metrics = loss(replace(TABLE["ppo_dual"], clip_dual=3.0), given)
    bad = np.asarray(given["mask"] & (given["advantage"] < 0))
    assert not gradient[bad].any()
    assert metrics["policy/clip_frac_dual"] == pytest.approx(bad.sum() / given["mask"].sum())


@pytest.mark.parametrize("name", TABLE)
def test_without_advantage_nothing_moves(name: str) -> None:
    given = batch(advantage=jnp.zeros((B, T)))
    assert not loss(TABLE[name], given)[1].any()


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "sequence_tis", "off_policy_mask"])
def test_padding_and_the_order_of_rows_change_nothing(name: str) -> None:
    given = batch(seed=4)
    row = replace(TABLE[name], kl_coef=0.1, entropy_coef=0.1)
    total, gradient, metrics = loss(row, given)
    order = np.asarray([2, 0, 1])
    moved = {key: jnp.pad(x[order], ((0, 0), (0, 5))) for key, x in given.items()}
    again, its_gradient, same = loss(row, moved)
    assert again == pytest.approx(total, abs=1e-5)
    assert its_gradient[:, :T] == pytest.approx(gradient[order], abs=1e-6)
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_what_stands_at_tool_tokens_changes_nothing() -> None:
    given = batch(seed=5)
    row = replace(TABLE["geometric"], kl_coef=0.1, entropy_coef=0.1)
    wild = dict(given)
    for name in ("logprob", "old_logprob", "reference", "new", "entropy"):
        wild[name] = jnp.where(given["mask"], given[name], 7.0)
    wild["advantage"] = given["advantage"]
    assert loss(row, wild)[0] == pytest.approx(loss(row, given)[0], abs=1e-6)
    assert loss(row, wild)[1] == pytest.approx(loss(row, given)[1], abs=1e-6)
    assert loss(row, wild)[2] == pytest.approx(loss(row, given)[2], abs=1e-6)


def test_the_metrics_of_ratios_by_hand() -> None:
    mask = np.zeros((B, T), bool)
    mask[0, 1:5] = True
    log_u = np.zeros((B, T))
    log_u[0, 1:5] = [0.1, 0.8, -0.5, 0.0]
    part = np.zeros((2, B, T), np.float32)
    part[:, 0, 1:5] = [0, 1, 1, 9], [0, 0, 5, 1]
    given = batch(
        turn=jnp.asarray(part[0]),
        age=jnp.asarray(part[1]),
        mask=jnp.asarray(mask),
        new=jnp.asarray(log_u, jnp.float32),
        old_logprob=jnp.zeros((B, T)),
        logprob=jnp.zeros((B, T)),
        advantage=jnp.asarray(np.where(mask, 1.0, 0), jnp.float32),
    )
    u = np.exp([0.1, 0.8, -0.5, 0.0])
    metrics = loss(plain("grpo"), given)[2]
    wanted = {
        "policy/tokens": 4,
        "policy/ratio_mean": u.mean(),
        "policy/ratio_max": u.max(),
        "policy/kl": (u - 1 - np.log(u)).mean(),
        "policy/kl_k1": -0.1,
        "policy/clip_frac_high": 0.25,
        "policy/clip_frac_low": 0.0,
        "policy/sampler_logprob_gap": 0.35,
        "policy/sampler_logprob_gap_max": 0.8,
        **{f"policy/sampler_logprob_gap_turn_{part}": gap for part, gap in (("0", 0.1), ("1", 0.65), ("3_on", 0.0))},
        **{f"policy/sampler_logprob_gap_age_{part}": gap for part, gap in (("0", 0.45), ("1", 0.0), ("3_on", 0.5))},
        "off_policy/rho_mean": u.mean(),
        "off_policy/rho_std": u.std(),
        "off_policy/rho_max": u.max(),
        "off_policy/ess": u.mean() ** 2 / (u**2).mean(),
        "off_policy/chi2": (u**2).mean() - 1,
        "off_policy/perplexity_ratio": np.exp(-0.1),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)
    assert not {f"policy/sampler_logprob_gap_{part}_2" for part in ("turn", "age")} & set(metrics)  # nothing was there
    assert 2.225 < metrics["policy/ratio_p99"] < np.exp(0.8 * (EDGES[1] / EDGES[0]))


def test_the_99th_percentile_leaves_one_in_a_hundred_above() -> None:
    log_u = np.full((1, 200), 0.05)
    log_u[0, 1] = 3.0  # one in 199
    ones = jnp.ones((1, 200))
    mask = jnp.asarray(np.arange(200)[None] > 0)
    given = {"mask": mask, "segment": ones.astype(int), "advantage": ones, "weight": ones, "share": ones, "logprob": 0 * ones}
    given |= {"turn": 0 * ones, "age": 0 * ones}
    given |= {"old_logprob": 0 * ones, "new": jnp.asarray(log_u, jnp.float32), "entropy": ones}
    metrics = loss(plain("grpo"), given)[2]
    assert np.exp(0.05) < metrics["policy/ratio_p99"] < 1.07
    assert metrics["policy/ratio_max"] == pytest.approx(np.exp(3.0), rel=1e-5)


def test_sums_of_two_parts_are_those_of_the_whole() -> None:
    given = batch(seed=6)
    objective = PolicyObjective(plain("grpo", kl_coef=0.1))

    def sums(rows: slice) -> dict[str, Any]:
        part = {name: x[rows] for name, x in given.items()}
        return objective.loss({"logprob": part["new"], "entropy": part["entropy"]}, part, jnp.asarray(False))[1]

    whole, parts = sums(slice(None)), join(sums(slice(0, 2)), sums(slice(2, 3)))
    for name, x in whole.items():
        np.testing.assert_allclose(parts[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


# ====================================================================== the critic


def values(value: list[float], old: list[float], target: list[float], judged: list[int], **columns: Any) -> tuple[float, dict]:
    given = {name: jnp.asarray([x], jnp.float32) for name, x in (("value", old), ("target", target))}
    objective = ValueObjective(replace(TABLE["ppo"], **columns))
    given["judged"] = jnp.asarray([judged])
    total, sums = objective.loss({"value": jnp.asarray([value], jnp.float32)}, given, jnp.asarray(False))
    return float(total), objective.metrics(sums, 0.0)


def test_a_critic_is_judged_at_its_places_only() -> None:
    total, metrics = values([0.9, 5.0, 0.9], [0.5, 0.0, 0.5], [1.0, 9.0, 0.0], [1, 0, 1])
    assert total == pytest.approx(0.045 + 0.405)
    assert metrics["critic/loss"] == pytest.approx(0.225)
    assert metrics["critic/tokens"] == 2
    assert metrics["critic/clip_frac"] == 1.0
    assert (metrics["critic/value_mean"], metrics["critic/target_mean"]) == pytest.approx((0.9, 0.5))


@pytest.mark.parametrize(
    ("value", "explained"),
    [([0.0, 1.0], 1.0), ([0.5, 0.5], 0.0), ([1.0, 0.0], -3.0), ([7.0, 8.0], 1.0), ([0.25, 0.75], 0.75)],
)
def test_explained_variance_by_hand(value: list[float], explained: float) -> None:
    metrics = values(value, value, [0.0, 1.0], [1, 1])[1]
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert metrics["critic/clip_frac"] == 0.0


def test_returns_that_are_all_equal_explain_nothing() -> None:
    assert values([0.1, 0.2], [0, 0], [0.5, 0.5], [1, 1])[1]["critic/explained_variance"] == 0.0


# ====================================================================== every average, however the rows are split

CONFIG = tiny.config()
OPTIONS = LearnerOptions(batch_rows=8, row_tokens=16, head_chunk=64)
PLAIN = OptimizerOptions(lr=1e-2, warmup_steps=0, b1=0.0, clip_norm=1e9)


@pytest.fixture(scope="module")
def learner() -> Callable[..., Learner]:
    """Learners of the plain policy gradient, made once for a mesh: averages are data."""
    known: dict[tuple, Learner] = {}

    def get(*mesh: int) -> Learner:
        if mesh not in known:
            known[mesh] = Learner(CONFIG, tiny.params(CONFIG), tiny.mesh(*mesh), TABLE["reinforce"], OPTIONS)
        made = known[mesh]
        made.trained = jax.device_put(tiny.params(CONFIG), jax.tree.map(lambda p: p.sharding, made.trained))
        made.begin(PLAIN, 2)
        return made

    return get


def rollouts(mode: str) -> list[Row]:
    """Eight rollouts of one or two turns of ragged lengths."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(8):
        lengths = rng.integers(1, 6, rng.integers(1, 3)).tolist()
        columns: dict[str, list] = {"mask": [], "weight": [], "share": []}
        for (weight, share), n in zip(losses.aggregation(mode, lengths, 7.0), lengths, strict=True):
            for name, value in (("mask", True), ("weight", weight), ("share", share)):
                columns[name] += [type(value)(0), *[value] * n]
        n = len(columns["mask"])
        tokens, advantage = rng.integers(0, CONFIG.vocab_size, n).tolist(), [float(rng.normal())] * n
        rows.append(Row(tokens, columns["mask"], [-3.0] * n, advantage, columns["weight"], columns["share"]))
    return rows


def step(made: Learner, batches: list[Batch]) -> tuple[Any, float]:
    for micro in batches:
        made.accumulate(micro, on_policy=True)
    metrics = made.apply()
    return jax.device_get(optax.tree.get(made.opt_state, "mu")), metrics["policy/loss"]


def one_per_row(rows: list[Row]) -> Batch:
    """Every row in a training row of its own; what is left is empty."""
    single = [pack([row], batch_rows=1, row_tokens=OPTIONS.row_tokens)[0].arrays() for row in rows]
    single += [Batch.empty(1, OPTIONS.row_tokens).arrays()] * (8 - len(rows))
    return Batch(**{name: np.concatenate([part[name] for part in single]) for name in single[0]})


@pytest.mark.parametrize("mode", WORDS["aggregate"])
def test_one_batch_four_micro_batches_packing_and_eight_devices_give_one_loss_and_one_gradient(
    learner: Callable[..., Learner], mode: str
) -> None:
    rows = rollouts(mode)
    want, loss = step(learner(1, 1, 1), [one_per_row(rows)])
    assert abs(loss) > 1e-3
    splits = {
        "four micro-batches": ((1, 1, 1), [one_per_row(rows[i : i + 2]) for i in range(0, 8, 2)]),
        "packed": ((1, 1, 1), pack(rows, batch_rows=8, row_tokens=OPTIONS.row_tokens)),
        "eight devices": ((8, 1, 1), [one_per_row(rows)]),
    }
    assert [len(batches) for _, batches in splits.values()] == [4, 1, 1]
    for name, (mesh, batches) in splits.items():
        got, again = step(learner(*mesh), batches)
        assert again == pytest.approx(loss, rel=1e-4), name
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4), got, want)
