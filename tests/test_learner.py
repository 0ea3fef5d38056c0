"""The learner: its gradient against autodiff of the plain formula, and against itself however the rows are laid out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from jaxagent.algos.table import TABLE, Algorithm
from jaxagent.credit import training_rows
from jaxagent.data.pack import Batch, Row, pack
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.transformer import params_of
from jaxagent.types import Group, Sample, SampleRequest, Sampling, StopReason, Trajectory, sampling_key

CONFIG = tiny.config()
TEMPERATURE = 0.7
OPTIONS = LearnerOptions(batch_rows=8, row_tokens=32, head_chunk=64, temperature=TEMPERATURE)
# With b1 = 0 Adam's first moment is the gradient itself, and the clip does nothing.
PLAIN = OptimizerOptions(lr=1e-2, lr_final=1e-3, warmup_steps=0, b1=0.0, clip_norm=1e9)

Gradient = dict[str, Any]


COLUMNS = {field.name for field in fields(Algorithm)}


def make(algorithm: str = "grpo", mesh: tuple[int, ...] = (1, 1, 1), **changes: Any) -> Learner:
    """Args: changes: of the algorithm's columns and of the options."""
    columns = {name: value for name, value in changes.items() if name in COLUMNS}
    options = replace(OPTIONS, **{name: value for name, value in changes.items() if name not in COLUMNS})
    return Learner(CONFIG, tiny.params(CONFIG), tiny.mesh(*mesh), replace(TABLE[algorithm], **columns), options)


@pytest.fixture(scope="module")
def learner() -> Callable[..., Learner]:
    """Makes learners, each kind once; they are compiled once and their weights put back."""
    known: dict[str, Learner] = {}

    def get(algorithm: str = "grpo", mesh: tuple[int, ...] = (1, 1, 1), **options: Any) -> Learner:
        key = str((algorithm, mesh, options))
        if key not in known:
            known[key] = make(algorithm, mesh, **options)
            known[key].begin(PLAIN, 3)
        fresh = jax.device_put(tiny.params(CONFIG), jax.tree.map(lambda p: p.sharding, known[key].params))
        moments = jax.tree.map(jnp.zeros_like, known[key].opt_state)
        known[key].restore({"params": fresh, "opt_state": moments}, updates=0)  # and no reference
        return known[key]

    return get


def gradient(
    learner: Learner, batches: Sequence[Batch], idle: float = 0.0, *, on_policy: bool = False
) -> tuple[Gradient, dict]:
    """The divided gradient of micro-batches, and the step's metrics."""
    for batch in batches:
        learner.accumulate(batch, on_policy=on_policy)
    metrics = learner.apply(idle)
    return jax.device_get(optax.tree.get(learner.opt_state, "mu")), metrics


def assert_same(got: Gradient, want: Gradient, atol: float = 2e-6) -> None:
    assert any(np.abs(leaf).max() > 100 * atol for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4), got, want)


def random_rows(count: int, seed: int = 0, longest: int = 14) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        n = int(rng.integers(4, longest))
        mask = rng.random(n) < 0.5
        mask[0], mask[-1] = False, True
        tokens, logprob = rng.integers(0, CONFIG.vocab_size, n).tolist(), (-3 + rng.standard_normal(n)).tolist()
        share = [1.0 / int(mask.sum())] * n
        rows.append(Row(tokens, mask.tolist(), logprob, [float(rng.standard_normal())] * n, share, share))
    return rows


def one_per_row(rows: Sequence[Row], batch_rows: int) -> list[Batch]:
    """The rows without packing: a training row each."""
    batches = [pack([row], batch_rows=1, row_tokens=OPTIONS.row_tokens)[0] for row in rows]
    empty = Batch.empty(1, OPTIONS.row_tokens)
    batches += [empty] * (-len(batches) % batch_rows)
    return [joined(batches[i : i + batch_rows]) for i in range(0, len(batches), batch_rows)]


def joined(batches: Sequence[Batch]) -> Batch:
    return Batch(**{name: np.concatenate([batch.arrays()[name] for batch in batches]) for name in batches[0].arrays()})


def packs(rows: Sequence[Row], batch_rows: int = 8) -> list[Batch]:
    return pack(rows, batch_rows=batch_rows, row_tokens=OPTIONS.row_tokens)


# ---------------------------------------------------------------------- against the plain formula


def padded(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.asarray([[*getattr(row, name), *[0] * (OPTIONS.row_tokens - len(row.tokens))] for row in rows])


@jax.jit
def plain(tokens: jax.Array, d_logprob: jax.Array, d_entropy: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """log p of every token, the entropy it was drawn with, and the gradient of their sum weighted with what is given.

    By autodiff of the whole forward pass over rows padded at the end; one program for all tests.
    """
    graph, params = params_of(tiny.policy(CONFIG))

    def weighted(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        log_p = jax.nn.log_softmax(nnx.merge(graph, params)(tokens)[:, :-1] / TEMPERATURE)
        logprob = jnp.pad(jnp.take_along_axis(log_p, tokens[:, 1:, None], 2)[..., 0], ((0, 0), (1, 0)))
        entropy = jnp.pad(-jnp.sum(jnp.exp(log_p) * log_p, -1), ((0, 0), (1, 0)))
        return jnp.sum(d_logprob * logprob + d_entropy * entropy), (logprob, entropy)

    (_, (logprob, entropy)), grads = jax.value_and_grad(weighted, has_aux=True)(params)
    return logprob, entropy, grads


def of_rows(rows: Sequence[Row], d_logprob: Any = 0.0, d_entropy: Any = 0.0) -> tuple[np.ndarray, np.ndarray, Gradient]:
    tokens = padded(rows, "tokens")
    weights = (np.broadcast_to(np.float32(weight), tokens.shape) for weight in (d_logprob, d_entropy))
    return jax.device_get(plain(tokens, *weights))


def test_the_supervised_gradient_is_that_of_the_mean_cross_entropy(learner: Callable[..., Learner]) -> None:
    rows = random_rows(3)
    ones = [Row(r.tokens, r.mask, r.logprob, *[[1.0] * len(r.tokens)] * 3) for r in rows]
    mask = padded(rows, "mask")
    logprob, _, want = of_rows(rows, -mask / mask.sum())
    got, metrics = gradient(learner("reinforce"), packs(ones), on_policy=True)
    assert_same(got, want, atol=1e-5)
    assert metrics["policy/nll"] == pytest.approx(-(logprob * mask).sum() / mask.sum(), abs=1e-5)
    assert metrics["policy/tokens"] == mask.sum()


def test_the_clipped_gradient_is_that_of_the_formula_written_out(learner: Callable[..., Learner]) -> None:
    rows = random_rows(3, seed=1)
    mask, advantage = padded(rows, "mask"), padded(rows, "advantage")
    u = np.exp(of_rows(rows)[0] - padded(rows, "logprob"))
    free, clipped = u * advantage, np.clip(u, 0.8, 1.2) * advantage
    share = mask / mask.sum(1, keepdims=True) / len(rows)
    assert 0 < (mask * (free > clipped)).sum() < mask.sum()  # the clip holds some and not others
    want = of_rows(rows, -share * np.where(free <= clipped, free, 0.0))[2]  # du / dlogprob = u
    got, metrics = gradient(learner(), packs(rows))
    assert_same(got, want, atol=1e-5)
    assert metrics["policy/loss"] == pytest.approx(-(share * np.minimum(free, clipped)).sum(), abs=1e-5)


def test_scores_are_the_logprobs_of_the_plain_forward(learner: Callable[..., Learner]) -> None:
    rows = random_rows(3, longest=30)
    score = learner().score(one_per_row(rows, 8)[0])
    for got, want, row in zip(score, of_rows(rows)[0], rows, strict=False):
        np.testing.assert_allclose(got[1 : len(row.tokens)], want[1 : len(row.tokens)], atol=1e-5)


def test_the_entropy_bonus_adds_its_own_gradient(learner: Callable[..., Learner]) -> None:
    rows, coef = random_rows(3, seed=2), 0.1
    mask = padded(rows, "mask")
    bonus = of_rows(rows, 0.0, -coef * mask / mask.sum(1, keepdims=True) / len(rows))[2]
    without, _ = gradient(learner(), packs(rows))
    with_bonus, metrics = gradient(learner("grpo", entropy_coef=coef), packs(rows))
    assert_same(with_bonus, jax.tree.map(np.add, without, bonus), atol=1e-5)
    assert metrics["policy/entropy"] == pytest.approx((of_rows(rows)[1] * mask).sum() / mask.sum(), abs=1e-4)


def test_the_importance_weight_is_old_over_behaviour_and_capped(learner: Callable[..., Learner]) -> None:
    row = random_rows(1)[0]
    (batch,) = packs([row])
    plain = gradient(learner("reinforce"), [batch])[1]["policy/loss"]
    for shift, weight in ((np.log(1.5), 1.5), (np.log(9.0), 2.0), (-np.log(4.0), 0.25)):
        shifted = Batch(**{**batch.arrays(), "logprob": batch.old_logprob - np.float32(shift)})
        got = gradient(learner("reinforce", importance="token_truncated"), [shifted])[1]["policy/loss"]
        assert got == pytest.approx(weight * plain, rel=1e-5)


# ---------------------------------------------------------------------- against itself


def test_four_micro_batches_give_the_gradient_of_one(learner: Callable[..., Learner]) -> None:
    rows = random_rows(8)
    whole, metrics = gradient(learner(), one_per_row(rows, 8))
    four, again = gradient(learner(batch_rows=2), one_per_row(rows, 2))
    assert len(one_per_row(rows, 2)) == 4
    assert_same(four, whole)
    assert again == pytest.approx(metrics, rel=1e-4)


def test_packed_rows_give_the_gradient_of_unpacked_ones(learner: Callable[..., Learner]) -> None:
    rows = random_rows(8)
    apart, metrics = gradient(learner(), one_per_row(rows, 8))
    assert np.unique(packs(rows)[0].segment).max() >= 2
    together, again = gradient(learner(), packs(rows))
    assert_same(together, apart)
    assert again == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize(
    "mesh", [(8, 1, 1), (2, 2, 2), (2, 1, 2, 1, 2)], ids=["data", "data x fsdp x tensor", "data x tensor x context"]
)
def test_eight_devices_give_the_update_of_one(learner: Callable[..., Learner], mesh: tuple[int, ...]) -> None:
    rows = random_rows(8)
    one, eight = learner(), learner(mesh=mesh)
    want, metrics = gradient(one, one_per_row(rows, 8))
    got, again = gradient(eight, one_per_row(rows, 8))
    assert len(eight.params["embed"].sharding.device_set) == 8
    assert_same(got, want)
    assert again == pytest.approx(metrics, rel=1e-4)
    assert_same(jax.device_get(eight.params), jax.device_get(one.params), atol=1e-4)


def test_recomputed_layers_give_the_same_gradient(learner: Callable[..., Learner]) -> None:
    rows = random_rows(4)
    assert_same(gradient(learner(remat="full"), packs(rows))[0], gradient(learner(), packs(rows))[0])


def test_a_bfloat16_pass_gives_a_float32_gradient_near_the_float32_one(learner: Callable[..., Learner]) -> None:
    rows = random_rows(4)
    narrow, wide = (gradient(learner("reinforce", dtype=dtype), packs(rows))[0] for dtype in ("bfloat16", "float32"))
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) < 0.25 * np.linalg.norm(b)


def test_the_division_happens_once_by_all_shares(learner: Callable[..., Learner]) -> None:
    first, second = packs(random_rows(3, seed=1)), packs(random_rows(5, seed=2))
    (a, _), (b, _) = gradient(learner(), first), gradient(learner(), second)
    both, _ = gradient(learner(), [*first, *second])
    assert_same(both, jax.tree.map(lambda x, y: (3 * x + 5 * y) / 8, a, b))
    idle, metrics = gradient(learner(), first, idle=9.0)
    assert_same(idle, jax.tree.map(lambda x: x * 3 / 12, a))
    assert metrics["policy/loss"] == pytest.approx(gradient(learner(), first)[1]["policy/loss"] / 4, rel=1e-5)


def test_an_accumulator_is_empty_after_its_update(learner: Callable[..., Learner]) -> None:
    batches = packs(random_rows(3))
    once, _ = gradient(learner(), batches)
    gradient(learner(), packs(random_rows(3, seed=5)))
    again, metrics = gradient(learner(), batches)  # the same learner, its weights put back
    assert_same(again, once)
    assert metrics["policy/tokens"] == sum(batch.mask.sum() for batch in batches)


def test_a_step_without_rows_moves_nothing(learner: Callable[..., Learner]) -> None:
    trainer = learner()
    metrics = trainer.apply(idle_share=4.0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), jax.device_get(tiny.params(CONFIG)))
    assert metrics["policy/grad_norm"] == metrics["policy/tokens"] == 0.0


def test_warming_up_changes_nothing_and_copies_nothing(learner: Callable[..., Learner]) -> None:
    trainer, batches = learner(), packs(random_rows(3))
    given, before = jax.tree.leaves(trainer.state()), jax.device_get(jax.tree.map(jnp.copy, trainer.state()))
    trainer.warm_up()
    assert all(x.is_deleted() for x in given)  # updated in place
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(trainer.state()))
    assert_same(gradient(trainer, batches)[0], gradient(learner(), batches)[0])


# ---------------------------------------------------------------------- with the engine and the credit of groups


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Three groups of three sampled episodes of two turns; the rewards of the last group are equal."""
    options = EngineOptions(slots=4, slot_tokens=32, chunk=8, decode_tokens=3, append_rows=2, append_tokens=(4, 8))
    engine = Engine(CONFIG, options, tiny.mesh())
    engine.publish(tiny.params(CONFIG), version=0)

    async def play(group: int, rollout: int) -> Trajectory:
        trajectory = Trajectory(f"task{group}", group, f"g{group}", rollout, stop=StopReason.ANSWERED)
        held = 0
        for fed in ([1, 2, group], [4, 5]):
            name, key = f"{group}/{rollout}", sampling_key(0, f"g{group}", rollout)
            sample: Sample = await engine.generate(
                SampleRequest(name, tuple(fed), held, key, (3,), Sampling(max_tokens=6, temperature=TEMPERATURE))
            )
            trajectory.feed(fed)
            trajectory.sampled(sample, "", "")
            held += len(fed) + len(sample.tokens)
        trajectory.turns[-1].reward = 0.0 if group == 2 else float((rollout + group) % 3)
        engine.release(name)
        return trajectory

    async def play_all() -> list[Group]:
        return [Group(f"g{g}", [await play(g, i) for i in range(3)]) for g in range(3)]

    try:
        return asyncio.run(play_all())
    finally:
        engine.close()


def test_the_first_update_has_ratio_one_on_every_sampled_token(learner: Callable[..., Learner], groups: list[Group]) -> None:
    trainer = learner()
    rows, _ = training_rows(groups, TABLE["grpo"], keep_idle=True)
    batches = packs(rows)
    assert sum(int(batch.mask.sum()) for batch in batches) == sum(sum(t.mask) for g in groups for t in g.trajectories)
    for batch in batches:
        ratio = np.exp(trainer.score(batch) - batch.logprob)
        np.testing.assert_allclose(ratio[batch.mask], 1.0, atol=1e-4)
    _, metrics = gradient(trainer, batches)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/sampler_logprob_gap_max"] < 1e-4
    assert metrics["policy/clip_frac"] == 0.0


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "gspo", "cispo"])
def test_leaving_out_rows_without_advantage_changes_nothing(
    learner: Callable[..., Learner], groups: list[Group], algorithm: str
) -> None:
    kept, none = training_rows(groups, TABLE[algorithm], keep_idle=True)
    skipped, idle = training_rows(groups, TABLE[algorithm])
    assert none == 0.0
    assert len(kept) == 9
    assert len(skipped) < 9
    trainer = learner(algorithm)
    want, all_of_them = gradient(trainer, packs(kept))
    got, metrics = gradient(learner(algorithm), packs(skipped), idle)
    assert_same(got, want)
    assert metrics["policy/grad_norm"] == pytest.approx(all_of_them["policy/grad_norm"], rel=1e-4)
    if algorithm == "cispo":
        return  # its loss is a multiple of log pi: a surrogate, not zero in value where its gradient is
    assert metrics["policy/loss"] == pytest.approx(all_of_them["policy/loss"], rel=1e-6, abs=1e-6)


# ---------------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("old", [-1e9, -200.0, 200.0])
def test_an_absurd_old_logprob_gives_a_finite_gradient(learner: Callable[..., Learner], algorithm: str, old: float) -> None:
    (batch,) = packs(random_rows(2))
    at = tuple(np.argwhere(batch.mask)[0])
    batch.old_logprob[at] = old
    got, metrics = gradient(learner(algorithm), [batch])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    assert np.isfinite(metrics["policy/ratio_max"])


def test_what_stands_outside_the_mask_is_never_looked_at() -> None:
    row = random_rows(1)[0]
    wild = [value if sampled else float("nan") for sampled, value in zip(row.mask, row.logprob, strict=True)]
    wilder = [value if sampled else float("inf") for sampled, value in zip(row.mask, row.advantage, strict=True)]
    (batch,), (clean,) = packs([replace(row, logprob=wild, advantage=wilder)]), packs([row])
    for name, array in clean.arrays().items():
        np.testing.assert_array_equal(batch.arrays()[name], array, err_msg=name)


# ---------------------------------------------------------------------- the optimizer


def test_the_rate_rises_linearly_and_falls_to_its_final_value_at_the_last_update() -> None:
    rate = OptimizerOptions(lr=1.0, lr_final=0.1, warmup_steps=4).schedule(11)
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert float(rate(7)) == pytest.approx(0.55)  # half of the cosine
    assert float(rate(10)) == pytest.approx(0.1)
    assert all(rate(i) > rate(i + 1) for i in range(4, 10))


def test_without_warm_up_the_first_update_has_the_full_rate() -> None:
    rate = OptimizerOptions(lr=1.0, lr_final=0.5, warmup_steps=0).schedule(5)
    assert (float(rate(0)), float(rate(4))) == pytest.approx((1.0, 0.5))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_phase_shorter_than_its_warm_up_still_reaches_the_full_rate(steps: int) -> None:
    rate = OptimizerOptions(lr=1.0, warmup_steps=10).schedule(steps)
    assert float(rate(steps - 1)) == pytest.approx(1.0)


@pytest.mark.parametrize(("lr", "final"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -0.1), (float("nan"), 0.0)])
def test_a_rate_that_cannot_be_is_refused(lr: float, final: float) -> None:
    with pytest.raises(ValueError, match="lr must be positive"):
        OptimizerOptions(lr=lr, lr_final=final)


def test_the_gradient_is_clipped_to_its_norm_and_the_rate_is_told() -> None:
    trainer = make("reinforce")
    trainer.begin(replace(PLAIN, clip_norm=1e-3), 3)
    rates = []
    for _ in range(3):
        got, metrics = gradient(trainer, packs(random_rows(3)))
        rates.append(metrics["policy/lr"])
        assert metrics["policy/grad_norm"] > 1e-2  # told as it was
        assert float(optax.tree.norm(got)) == pytest.approx(1e-3, rel=1e-4)
    np.testing.assert_allclose(rates, [1e-2, 5.5e-3, 1e-3], rtol=1e-5)


def test_the_step_is_that_of_adamw_as_its_authors_wrote_it(learner: Callable[..., Learner]) -> None:
    options = OptimizerOptions(lr=3e-3, lr_final=1e-3, warmup_steps=2, b1=0.8, b2=0.95, weight_decay=0.1, clip_norm=0.05)
    reference = optax.adamw(options.schedule(4), 0.8, 0.95, weight_decay=0.1)
    trainer = learner("reinforce")
    trainer.begin(options, 4)
    weights = jax.device_get(trainer.params)
    moments = reference.init(weights)
    for seed in range(3):
        (batch,) = packs(random_rows(3, seed))
        trainer.accumulate(batch)
        acc = jax.device_get(trainer._acc)
        divided = jax.tree.map(lambda g, share=acc["sums"]["share"]: g / share, acc["grads"])
        scale = min(1.0, 0.05 / float(optax.tree.norm(divided)))
        step, moments = reference.update(jax.tree.map(lambda g, s=scale: g * s, divided), moments, weights)
        weights = optax.apply_updates(weights, step)
        trainer.apply()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), jax.device_get(trainer.params), weights)
    trainer.begin(PLAIN, 3)


def test_another_phase_compiles_nothing(learner: Callable[..., Learner]) -> None:
    trainer = learner()
    gradient(trainer, packs(random_rows(3)))
    trainer.begin(replace(PLAIN, b2=0.5, weight_decay=0.3, clip_norm=0.1), 9)
    gradient(trainer, packs(random_rows(3)))
    assert (trainer._apply._cache_size(), trainer._accumulate._cache_size()) == (1, 1)
    trainer.begin(PLAIN, 3)


def test_a_gradient_that_is_not_finite_updates_nothing_and_is_counted(learner: Callable[..., Learner]) -> None:
    trainer = learner("reinforce")
    _, first = gradient(trainer, packs(random_rows(3)))
    before = jax.device_get(trainer.state())
    (batch,) = packs(random_rows(3, seed=1))
    batch.advantage[tuple(np.argwhere(batch.mask)[0])] = np.nan
    _, metrics = gradient(trainer, [batch])
    assert (first["policy/skipped"], metrics["policy/skipped"]) == (0.0, 1.0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state()), before)
    _, after = gradient(trainer, packs(random_rows(3)))
    assert after["policy/skipped"] == 0.0


def test_where_nobody_teaches_nothing_moves(learner: Callable[..., Learner]) -> None:
    """Momentum alone has walked a policy away from all successes while every group failed alike."""
    trainer = learner("reinforce")
    gradient(trainer, packs(random_rows(3)))
    before = jax.device_get(trainer.state())
    metrics = trainer.apply(idle_share=3.0)
    assert (metrics["policy/grad_norm"], metrics["policy/update_norm"], metrics["policy/skipped"]) == (0.0, 0.0, 0.0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state()), before)
    assert trainer.updates == 2  # the rate goes by the steps of the plan
    _, after = gradient(trainer, packs(random_rows(3)))
    assert after["policy/update_norm"] > 0


# ---------------------------------------------------------------------- what cannot work is refused


def test_rows_that_the_mesh_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner\.batch_rows=6 must be a multiple of mesh data x fsdp x expert = 4"):
        make(mesh=(2, 2, 1), batch_rows=6)


def test_an_attention_that_cannot_run_here_is_refused_and_the_chosen_one_is_told() -> None:
    with pytest.raises(ValueError, match="attention must be one of auto, xla, splash, cudnn, context, got 'flash'"):
        LearnerOptions(attention="flash")
    with pytest.raises(ValueError, match="attention=splash: its kernels are for TPUs and this is a cpu; here xla can"):
        make(attention="splash")
    assert make().attention.note == "attention xla: XLA on cpu with all scores of a row at once"


def test_a_weight_that_the_mesh_cannot_cut_is_named() -> None:
    with pytest.raises(ValueError, match="dimension 'heads' of 4 cannot be cut by mesh tensor=8"):
        make(mesh=(1, 1, 8))
