"""The learner on a mixture of experts: balance losses, router metrics, and the sampler's experts taken again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from jaxagent.algos.table import TABLE
from jaxagent.data.pack import Batch, Row, pack
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.moe import aux_loss, z_loss
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.types import Sample, SampleRequest, Sampling, Trajectory

CONFIG = tiny.config(experts=6, experts_per_token=2, normalised_experts=True)
OPTIONS = LearnerOptions(batch_rows=2, row_tokens=16, head_chunk=64)
PLAIN = OptimizerOptions(lr=1e-2, lr_final=1e-3, warmup_steps=0, b1=0.0, clip_norm=1e9)


def learner(**options: Any) -> Learner:
    made = Learner(CONFIG, tiny.params(CONFIG), tiny.mesh(), TABLE["reinforce"], replace(OPTIONS, **options))
    made.begin(PLAIN, 3)
    return made


def rows(advantage: float = 1.0) -> list[Row]:
    drawn = []
    for length in (9, 16, 5):
        tokens, mask = tiny.tokens(CONFIG, length, seed=length).tolist(), [False] + [True] * (length - 1)
        drawn.append(Row(tokens, mask, [-3.0] * length, [advantage] * length, [1.0] * length, [1.0] * length))
    return drawn


def batches(given: list[Row]) -> list[Batch]:
    return pack(given, batch_rows=OPTIONS.batch_rows, row_tokens=OPTIONS.row_tokens)


def gradient(made: Learner, given: list[Batch]) -> tuple[Any, dict[str, float]]:
    for batch in given:
        made.accumulate(batch, on_policy=True)
    metrics = made.apply()
    return jax.device_get(optax.tree.get(made.opt_state, "mu")), metrics


@jax.jit
def stats_of(params: Any, tokens: jax.Array, position: jax.Array, segment: jax.Array) -> tuple[Any, jax.Array]:
    """The router's sums over all layers, and the experts of every token, [L, B, T, k]."""
    policy: Decoder = nnx.merge(params_of(tiny.policy(CONFIG))[0], params)
    attend = learner().attention.attend(segment)
    routing = policy.hidden(tokens, position, attend, valid=segment > 0)[1]
    assert routing is not None
    return jax.tree.map(lambda x: x.sum(0), routing.stats), routing.experts_BTk


def test_the_balance_losses_add_their_own_gradient_and_leave_the_rest() -> None:
    (batch,) = batches(rows())
    params = tiny.params(CONFIG)

    def balance(params: Any) -> jax.Array:
        stats = stats_of(params, batch.tokens, batch.position, batch.segment)[0]
        return 0.3 * aux_loss(stats, CONFIG.mixture) + 0.2 * z_loss(stats)

    plain, _ = gradient(learner(), [batch])
    got, metrics = gradient(learner(router_aux_coef=0.3, router_z_coef=0.2), [batch])
    wanted = jax.grad(balance)(params)
    assert np.abs(wanted["blocks"]["router"]).max() > 1e-3
    jax.tree.map(lambda g, p, w: np.testing.assert_allclose(g, p + w, atol=3e-6, rtol=1e-4), got, plain, wanted)
    assert metrics["router/max_load"] >= 1
    assert 0 < metrics["router/entropy"] <= np.log(CONFIG.experts)


def test_the_experts_that_are_given_are_taken() -> None:
    (batch,) = batches(rows())
    plain, _ = gradient(learner(), [batch])
    own = np.asarray(stats_of(tiny.params(CONFIG), batch.tokens, batch.position, batch.segment)[1]).transpose(1, 2, 0, 3)
    replaying = learner(replay_routing=True)
    free, _ = gradient(replaying, [replace(batch)])  # none is given: the router chooses
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), free, plain)
    same, _ = gradient(learner(replay_routing=True), [replace(batch, routing=own.astype(np.int16))])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), same, plain)
    shifted = np.where(own < 0, -1, (own + 1) % CONFIG.experts).astype(np.int16)
    other, _ = gradient(learner(replay_routing=True), [replace(batch, routing=shifted)])
    assert np.abs(other["blocks"]["gate"] - plain["blocks"]["gate"]).max() > 1e-3


def test_sampled_rows_train_through_the_experts_of_their_sampler_though_the_router_has_moved() -> None:
    options = EngineOptions(slots=2, slot_tokens=16, decode_tokens=4, append_rows=2, append_tokens=(8,), chunk=8)
    engine = Engine(CONFIG, replace(options, record_routing=True), tiny.mesh())

    async def sampled() -> Sample:
        return await engine.generate(SampleRequest("a", (3, 1, 4, 1), 0, (0, 1), (), Sampling(max_tokens=8)))

    try:
        engine.publish(tiny.params(CONFIG), version=0)
        sample = asyncio.run(sampled())
    finally:
        engine.close()
    trajectory = Trajectory("t", 0, "g", 0)
    trajectory.feed([3, 1, 4, 1])
    trajectory.sampled(sample, "", "")
    ones = [1.0] * len(trajectory.tokens)
    routing = np.concatenate(trajectory.routing)
    batch = batches([Row(trajectory.tokens, trajectory.mask, trajectory.logprob, ones, ones, ones, routing)])[0]
    made = learner(replay_routing=True)
    at_first = made.score(batch)[batch.mask]
    np.testing.assert_allclose(at_first, sample.logprobs, atol=1e-5)
    # A router turned upside down chooses others; with the recorded ones the rest of the model is as it was sampled.
    upside_down = jax.tree.map(jnp.copy, made.params)
    upside_down["blocks"]["router"] = -upside_down["blocks"]["router"]
    made.trained = upside_down
    assert np.abs(made.score(replace(batch, routing=None))[batch.mask] - at_first).max() > 1e-2
    chosen = made.score(batch)[batch.mask]
    assert np.isfinite(chosen).all()
    routed = stats_of(made.params, batch.tokens, batch.position, batch.segment)[1]
    assert (np.sort(np.asarray(routed)[:, 0, : len(routing)], -1) != np.sort(routing.transpose(1, 0, 2), -1)).any()


def test_what_is_for_mixtures_is_refused_for_a_dense_model() -> None:
    dense = tiny.config()
    for name, value in (("replay_routing", True), ("router_aux_coef", 0.1), ("router_z_coef", 0.1)):
        with pytest.raises(ValueError, match=rf"learner\.{name}={value} wants a mixture of experts"):
            Learner(dense, tiny.params(dense), tiny.mesh(), TABLE["reinforce"], replace(OPTIONS, **{name: value}))
