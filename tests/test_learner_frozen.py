"""The learner over frozen weights: only what is trained changes, has moments and is saved; the base is the reference."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax.traverse_util import flatten_dict

from jaxagent.algos.table import TABLE
from jaxagent.checkpoint import Checkpoints
from jaxagent.data.pack import Batch, Row, pack
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.adapters import adapters_off, is_adapter, merged, unadapted
from jaxagent.models.frozen import split
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import LINEARS, DecoderConfig, Params
from jaxagent.types import SampleRequest, Sampling, sampling_key

CONFIG = tiny.config(lora=LoraSpec(2, 3.0, tuple(LINEARS)))
OPTIONS = LearnerOptions(batch_rows=8, row_tokens=32, head_chunk=64)
ADAMW = OptimizerOptions(lr=1e-2, lr_final=1e-3, warmup_steps=0, weight_decay=0.1)


def make(
    config: DecoderConfig = CONFIG, mesh: tuple[int, int, int] = (1, 1, 1), params: Params | None = None, **options: Any
) -> Learner:
    """A learner with weights and moments of its own; each kind is compiled once."""
    kind = compiled(config, mesh, replace(OPTIONS, **options))
    made = copy.copy(kind)
    given = split(tiny.params(config) if params is None else params, kind._names)
    made.trained, made.frozen = (
        jax.tree.map(lambda w, old: jax.device_put(jnp.array(w, old.dtype, copy=True), old.sharding), *parts)
        for parts in zip(given, (kind.trained, kind.frozen), strict=True)
    )
    made.begin(ADAMW, 4)
    return made


@cache
def compiled(config: DecoderConfig, mesh: tuple[int, int, int], options: LearnerOptions) -> Learner:
    return Learner(config, tiny.params(config), tiny.mesh(*mesh), TABLE["grpo"], options)


def random_batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(8):
        n = int(rng.integers(6, 20))
        share = [1.0 / n] * n
        old = (-3 + 0.1 * rng.standard_normal(n)).tolist()
        rows.append(Row(tiny.tokens(CONFIG, n, seed=n).tolist(), [False, *[True] * (n - 1)], old, [1.0] * n, share, share))
    (batch,) = pack(rows, batch_rows=8, row_tokens=32)
    return batch


def update(learner: Learner, times: int = 1, start: int = 0) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for seed in range(start, start + times):
        learner.accumulate(random_batch(seed))
        metrics = learner.apply()
    return metrics


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def test_only_adapters_change_and_only_they_have_moments_and_gradients() -> None:
    learner, before = make(), flatten_dict(tiny.params(CONFIG), sep=".")
    metrics = update(learner, 2)
    assert metrics["policy/update_norm"] > 0
    for name, weight in flatten_dict(learner.params, sep=".").items():
        changed = bool(np.any(np.asarray(weight) != np.asarray(before[name])))
        assert changed == is_adapter(name), name  # weight decay too moves nothing else
    adapters = sum(w.size for name, w in before.items() if is_adapter(name))
    assert bytes_of(learner.trained) == 4 * adapters
    assert bytes_of([optax.tree.get(learner.opt_state, moment) for moment in ("mu", "nu")]) == 2 * 4 * adapters
    assert bytes_of(learner._new_acc()["grads"]) == 4 * adapters
    assert sum(map(bytes_of, (learner.trained, learner.frozen))) == bytes_of(before)


def test_the_step_is_that_of_adamw_on_the_gradient_through_the_merged_weights() -> None:
    learner, plain = make(), unadapted(CONFIG)
    whole = make(plain, params=jax.jit(lambda w: merged(w, CONFIG))(tiny.params(CONFIG)))
    batch = random_batch()
    for each in (learner, whole):
        each.accumulate(batch)
    through = jax.device_get(whole._acc["grads"])
    want = jax.vjp(
        lambda t: merged({**learner.frozen, "blocks": {**learner.frozen["blocks"], **t}}, CONFIG), learner.trained["blocks"]
    )
    (want_grads,) = want[1](through)
    got = jax.device_get(learner._acc["grads"]["blocks"])
    for name, grad in want_grads.items():
        size = float(np.abs(grad).max())
        assert size > 1e-4
        np.testing.assert_allclose(got[name], grad, atol=1e-4 * size, err_msg=name)
    share = float(learner._acc["sums"]["share"])
    norm = float(optax.tree.norm(got)) / share  # what is clipped is the norm of the trained weights' gradient
    assert learner.apply()["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_frozen_patterns_without_adapters_hold_what_they_name() -> None:
    config = tiny.config()
    learner, before = make(config, freeze="embed,blocks.*_norm"), tiny.params(config)
    update(learner)
    after = learner.params
    for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
        assert_equal(after["blocks"][name], before["blocks"][name])
    assert_equal(after["embed"], before["embed"])
    assert all(np.any(after["blocks"][name] != before["blocks"][name]) for name in LINEARS)
    assert np.any(after["norm"] != before["norm"])


def test_a_base_kept_in_bfloat16_trains_a_bfloat16_pass_bit_for_bit_as_one_in_float32() -> None:
    wide, narrow = make(dtype="bfloat16"), make(dtype="bfloat16", frozen_dtype="bfloat16")
    assert bytes_of(narrow.frozen) * 2 == bytes_of(wide.frozen)
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.trained)} == {jnp.dtype("float32")}
    assert update(wide, 2) == update(narrow, 2)
    assert_equal(narrow.trained, wide.trained)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)], ids=["data", "data x fsdp x tensor"])
def test_eight_devices_give_the_update_of_one(mesh: tuple[int, int, int]) -> None:
    one, eight = make(), make(mesh=mesh)
    assert update(eight)["policy/grad_norm"] == pytest.approx(update(one)["policy/grad_norm"], rel=1e-4)
    assert len(eight.trained["blocks"]["q_lora_a"].sharding.device_set) == 8
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), jax.device_get(eight.trained), jax.device_get(one.trained)
    )


# ---------------------------------------------------------------------- the reference


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=["one", "eight"])
def test_the_reference_is_the_score_before_training_bit_for_bit(mesh: tuple[int, int, int]) -> None:
    learner, batch = make(mesh=mesh, params=adapters_off(tiny.params(CONFIG))), random_batch()
    before = learner.score(batch)
    np.testing.assert_array_equal(learner.score(batch, reference=True), before)
    update(learner, 2)
    assert np.abs(learner.score(batch) - before).max() > 1e-3
    np.testing.assert_array_equal(learner.score(batch, reference=True), before)
    assert learner._score._cache_size() == 1  # no second program


def test_the_reference_is_the_plain_policy_without_adapters() -> None:
    learner, batch = make(), random_batch()
    blocks = {name: w for name, w in tiny.params(CONFIG)["blocks"].items() if not is_adapter(name)}
    plain = make(unadapted(CONFIG), params={**tiny.params(CONFIG), "blocks": blocks})
    np.testing.assert_allclose(learner.score(batch, reference=True), plain.score(batch), atol=1e-5)
    assert np.abs(learner.score(batch) - plain.score(batch)).max() > 1e-2


def test_a_base_that_is_trained_itself_is_no_reference() -> None:
    with pytest.raises(ValueError, match=r"it is trained itself \(blocks\.attn_norm and 4 more\): set lora\.rank"):
        make(train_only="*norm").score(random_batch(), reference=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [CONFIG, unadapted(CONFIG)], ids=["adapters", "all weights"])
def test_a_kept_reference_scores_as_the_policy_did(config: Any, dtype: str) -> None:
    """Also over adapters that said something when it was kept, as after a warm-up."""
    params = tiny.params(config)
    learner, batch = make(config, dtype=dtype, params=params), random_batch()
    before = learner.score(batch)
    learner.keep_reference()
    update(learner, 2)
    assert np.abs(learner.score(batch) - before).max() > 1e-3
    np.testing.assert_array_equal(learner.score(batch, reference=True), before)
    kept = learner.state()["reference"]
    assert jax.tree.structure(kept) == jax.tree.structure(learner.trained)
    assert {w.dtype.name for w in jax.tree.leaves(kept)} == {dtype}


def test_a_reference_is_saved_and_comes_back() -> None:
    learner, batch = make(params=tiny.params(CONFIG)), random_batch()
    learner.keep_reference()
    before = learner.score(batch)
    update(learner)
    state = jax.tree.map(jnp.copy, learner.state())
    other = make(params=tiny.params(CONFIG, seed=1))
    other.keep_reference()
    other.restore({**state, "frozen": other.weights()["frozen"]}, updates=1)
    jax.tree.map(np.testing.assert_array_equal, other.state()["reference"], state["reference"])
    np.testing.assert_array_equal(learner.score(batch, reference=True), before)


# ---------------------------------------------------------------------- the engine


def sampled(engine: Engine, fed: list[int], seed: int) -> tuple[list[int], list[float]]:
    request = SampleRequest(f"t{seed}", tuple(fed), 0, sampling_key(0, "t", seed), (3,), Sampling(max_tokens=12))
    sample = asyncio.run(engine.generate(request))
    engine.release(request.trajectory)
    return list(sample.tokens), list(sample.logprobs)


@pytest.fixture
def engine() -> Any:
    options = EngineOptions(slots=2, slot_tokens=32, chunk=8, decode_tokens=4, append_rows=1, append_tokens=(4,))
    made = Engine(CONFIG, options, tiny.mesh())
    yield made
    made.close()


def test_the_engine_samples_from_the_merged_policy_and_the_learner_agrees(engine: Engine) -> None:
    learner = make()
    update(learner)
    engine.publish(learner.params, version=1)
    held = flatten_dict({"blocks": engine._params["blocks"][0]}, sep=".")
    assert not [name for name in held if is_adapter(name)]
    gaps, others = [], []
    base = learner.trained, learner.frozen
    for seed in range(4):
        tokens, logprob = sampled(engine, [1, 2, seed], seed)
        n = 3 + len(tokens)
        row = Row([1, 2, seed, *tokens], [False] * 3 + [True] * len(tokens), [0.0] * 3 + logprob, *[[1.0] * n] * 3)
        (batch,) = pack([row], batch_rows=8, row_tokens=32)
        gaps.append(np.abs(learner.score(batch) - batch.logprob)[batch.mask].max())
        others.append(np.abs(learner.score(batch, reference=True) - batch.logprob)[batch.mask].max())
    assert max(gaps) < 1e-4
    assert max(others) > 1e-2  # without the adapters it would be another policy
    assert (learner.trained, learner.frozen) == base


# ---------------------------------------------------------------------- checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Any:
    made = Checkpoints(tmp_path, keep=9)
    yield made
    made.close()


def test_a_learner_goes_on_from_a_checkpoint_that_holds_no_base(checkpoints: Checkpoints) -> None:
    straight, stopped, resumed = make(), make(), make(mesh=(1, 1, 1))
    update(straight, 4)
    update(stopped, 2)
    assert bytes_of(stopped.state()) < bytes_of(stopped.frozen)
    checkpoints.save(2, stopped.state(), {})
    checkpoints.wait()
    resumed.restore(checkpoints.trees(2, resumed.state()), 2)
    update(resumed, 2, start=2)
    assert_equal(resumed.state(), straight.state())


def test_a_checkpoint_over_another_base_is_refused(checkpoints: Checkpoints) -> None:
    learner, other = make(), make(params=tiny.params(CONFIG, seed=1))
    checkpoints.save(1, learner.state(), {})
    checkpoints.wait()
    with pytest.raises(
        ValueError, match=r"trained over other frozen weights \(digest [0-9a-f]{8}\) than init_from and seed give"
    ):
        other.restore(checkpoints.trees(1, other.state()), 1)


def test_a_pattern_that_fits_no_weight_is_told_at_construction() -> None:
    with pytest.raises(ValueError, match=r"learner\.freeze = 'blocks\.w': 'blocks\.w' matches none of the weights"):
        make(tiny.config(), freeze="blocks.w")


def test_a_step_over_a_frozen_base_computes_no_gradient_of_it() -> None:
    """Forward, and the gradient of activations: two of the three matrix products that training everything takes."""

    def work(learner: Learner) -> float:
        arguments = learner.trained, learner.frozen, learner._new_acc(), learner._put(random_batch()), np.bool_(False)
        return learner._accumulate.lower(*arguments).compile().cost_analysis()["flops"]

    wide = {"width": 64, "ffn_width": 256, "vocab_size": 40}
    small = tiny.config(**wide, lora=LoraSpec(1, 1.0, ("q",)))
    assert work(make(small)) < 0.75 * work(make(unadapted(small)))
