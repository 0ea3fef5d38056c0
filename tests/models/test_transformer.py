"""The decoder against itself: causal, packed, scanned, recomputed; and the names of its dimensions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxagent.models.attention import packed
from jaxagent.models.layers import rms_norm
from jaxagent.models.lora import LoraSpec
from jaxagent.models.moe import mix_experts
from jaxagent.models.rope import RopeScaling
from jaxagent.models.transformer import (
    Decoder,
    DecoderConfig,
    embed,
    experts_output_first,
    head_logits,
    head_table,
    heads_first,
    join,
    joined,
    logical_axes,
    output_first,
    params_of,
)

GEMMA = {
    "activation": "gelu_tanh",
    "plus_one_norms": True,
    "post_norms": True,
    "scaled_embed": True,
    "sliding": (True, False),
    "window": 3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-like, tied": {},
    "qwen2-like, untied": {"qk_norm": False, "qkv_bias": True, "tied_head": False},
    "llama-like": {"qk_norm": False, "rope_scaling": RopeScaling("llama3", 8.0, 16), "o_bias": True},
    "mistral-like": {"qk_norm": False, "sliding": (True, True), "window": 3},
    "gemma2-like": {**GEMMA, "qk_norm": False, "attn_softcap": 2.0, "logit_softcap": 3.0},
    "gemma3-like": {**GEMMA, "local_rope_theta": 20.0, "rope_scaling": RopeScaling("linear", 8.0), "attn_scale": 0.1},
    "a mixture": {"experts": 4, "experts_per_token": 2, "normalised_experts": True},
    "with adapters": {"lora": LoraSpec(2, 3.0, ("q", "v", "o", "gate", "down"))},
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return tiny.config(**request.param)


LENGTH = 9


@jax.jit
def forward(policy: Decoder, tokens: jax.Array, position: jax.Array, segment: jax.Array) -> jax.Array:
    return policy.logits(policy.hidden(tokens, position, packed(segment, policy.config.attention))[0])


def alone(policy: Decoder, tokens: np.ndarray) -> jax.Array:
    """The logits of one row, which is padded at its end."""
    short = LENGTH - tokens.shape[1]
    segment = np.pad(np.ones_like(tokens), ((0, 0), (0, short)))
    return forward(policy, np.pad(tokens, ((0, 0), (0, short))), np.arange(LENGTH)[None], segment)[:, : tokens.shape[1]]


def test_a_later_token_changes_no_earlier_logit(config: DecoderConfig) -> None:
    policy, tokens = tiny.policy(config), tiny.tokens(config, 1, LENGTH)
    other = tokens.copy()
    other[0, 5] = (other[0, 5] + 1) % config.vocab_size
    before, after = alone(policy, tokens), alone(policy, other)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.any(before[:, 5:] != after[:, 5:], axis=-1))


def test_calling_a_policy_gives_the_logits_of_whole_rows(config: DecoderConfig) -> None:
    policy, tokens = tiny.policy(config), tiny.tokens(config, 1, LENGTH)
    np.testing.assert_allclose(nnx.jit(policy)(tokens), alone(policy, tokens), atol=1e-5)


def test_packed_rows_give_the_logits_of_the_rows_alone(config: DecoderConfig) -> None:
    policy = tiny.policy(config)
    rows = [tiny.tokens(config, 1, n, seed=n) for n in (3, 4)]
    tokens = np.concatenate([*rows, np.zeros((1, 2), np.int32)], axis=1)
    segment, position = np.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0]]), np.asarray([[0, 1, 2, 0, 1, 2, 3, 0, 0]])
    together = forward(policy, tokens, position, segment)
    np.testing.assert_allclose(together[:, :3], alone(policy, rows[0]), atol=1e-5)
    np.testing.assert_allclose(together[:, 3:7], alone(policy, rows[1]), atol=1e-5)


def test_the_scan_over_layers_equals_a_loop_over_unstacked_ones(config: DecoderConfig) -> None:
    policy = tiny.policy(config)
    tokens, pos = tiny.tokens(config, 1, LENGTH), jnp.arange(LENGTH)[None]
    graph = nnx.split(policy.blocks)[0]

    @jax.jit
    def loop(params: Any) -> jax.Array:
        x, attend = embed(params["embed"], tokens, config), packed(jnp.ones_like(tokens), config.attention)
        for i in range(config.layers):
            weights = jax.tree.map(lambda w: w[i], params["blocks"])  # noqa: B023 (used at once)
            x = nnx.merge(graph, weights)(x, config.rotations(pos), attend, None, config.slides(i))[0]
        hidden = rms_norm(x, params["norm"], config.norm_eps, config.plus_one_norms)
        return head_logits(head_table(params, config), hidden, config)

    np.testing.assert_allclose(alone(policy, tokens), loop(params_of(policy)[1]), atol=1e-5)


def test_linear_maps_laid_as_matrices_give_the_same() -> None:
    config = tiny.config(o_bias=True, qkv_bias=True)
    policy = tiny.policy(config)
    x, pos = jax.random.normal(jax.random.key(0), (2, LENGTH, config.width)), jnp.arange(LENGTH)[None]
    attend = packed(jnp.ones((2, LENGTH), jnp.int32), config.attention)
    layer = jax.tree.map(lambda w: w[1], params_of(policy)[1]["blocks"])

    def run(layer: Any) -> jax.Array:
        return nnx.merge(nnx.split(policy.blocks)[0], layer)(x, config.rotations(pos), attend, None)[0]

    want = jax.jit(run)(layer)
    laid = output_first(layer)
    assert laid["q"].shape == (config.heads * config.head_width, config.width)
    assert laid["o"].shape == (config.width, config.heads * config.head_width)
    assert laid["gate"].shape == laid["down"].shape[::-1] == (config.ffn_width, config.width)
    policy.blocks.output_first = True
    np.testing.assert_allclose(jax.jit(run)(laid), want, atol=1e-5)
    policy.blocks.output_first, policy.blocks.heads_first = False, True
    laid = heads_first(layer)
    assert laid["k"].shape == (config.kv_heads * config.head_width, config.width)
    assert laid["o"].shape == (config.heads * config.head_width, config.width)
    np.testing.assert_allclose(jax.jit(run)(laid), want, atol=1e-5)


def test_experts_laid_by_their_outputs_give_the_same() -> None:
    config = tiny.config(experts=4, experts_per_token=2)
    policy = tiny.policy(config)
    attend = packed(jnp.ones((2, LENGTH), jnp.int32), config.attention)
    layer = jax.tree.map(lambda w: w[1], params_of(policy)[1]["blocks"])
    x, pos = jax.random.normal(jax.random.key(0), (2, LENGTH, config.width)), jnp.arange(LENGTH)[None]

    def run(layer: Any, dense: bool) -> jax.Array:
        mix = partial(mix_experts, spec=config.mixture, mesh=None, dense=dense)
        return nnx.merge(nnx.split(policy.blocks)[0], layer)(x, config.rotations(pos), attend, None, False, mix)[0]

    want = [run(layer, dense) for dense in (False, True)]
    laid = experts_output_first(layer)
    assert laid["gate"].shape == laid["up"].shape == (config.experts, config.ffn_width, config.width) == laid["down"].shape
    policy.blocks.experts_output_first = True
    for dense in (False, True):
        np.testing.assert_allclose(run(laid, dense), want[dense], atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"qkv_bias": True}, {"experts": 4, "experts_per_token": 2, "qk_norm": True}], ids=["biases", "experts"]
)
def test_maps_of_one_input_joined_give_the_same(changes: dict[str, Any]) -> None:
    config = tiny.config(**changes)
    policy = tiny.policy(config)
    x, pos = jax.random.normal(jax.random.key(0), (2, LENGTH, config.width)), jnp.arange(LENGTH)[None]
    attend = packed(jnp.ones((2, LENGTH), jnp.int32), config.attention)
    layer = jax.tree.map(lambda w: w[1], params_of(policy)[1]["blocks"])

    def run(layer: Any) -> jax.Array:
        return nnx.merge(nnx.split(policy.blocks)[0], layer)(x, config.rotations(pos), attend, None)[0]

    want = jax.jit(run)(layer)
    join(policy.blocks)
    laid = joined(layer)
    wide = (config.heads + 2 * config.kv_heads) * config.head_width
    assert laid["qkv"].shape == (config.width, wide) and not {"q", "k_bias"} & set(laid)
    assert ("qkv_bias" in laid) == config.qkv_bias and ("gate_up" in laid) == (not config.experts)
    np.testing.assert_allclose(jax.jit(run)(laid), want, atol=1e-5)


def gradient(config: DecoderConfig, tokens: np.ndarray, remat: str) -> Any:
    graph, params = params_of(tiny.policy(config))

    def loss(params: Any) -> jax.Array:
        policy = nnx.merge(graph, params)
        segment = jnp.ones_like(tokens)
        attend = packed(segment, config.attention)
        return jnp.sum(jnp.sin(policy.logits(policy.hidden(tokens, segment.cumsum(1) - 1, attend, remat=remat)[0])))

    return jax.jit(jax.grad(loss))(params)


def test_every_weight_has_a_gradient_and_recomputing_layers_does_not_change_it(config: DecoderConfig) -> None:
    tokens = tiny.tokens(config, 1, LENGTH)
    grads = gradient(config, tokens, remat="none")
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        rows = np.any(np.reshape(grad, (grad.shape[0], -1)) != 0, axis=-1)
        unused = config.vocab_size - len(np.unique(tokens)) if path[0].key == "embed" and not config.tied_head else 0
        assert np.sum(~rows) == unused, path
    for remat in ("dots", "attention", "full") if config == tiny.config() else ():  # one kind is enough to compile again
        again = gradient(config, tokens, remat=remat)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, again)


def test_every_dimension_of_every_weight_has_a_name(config: DecoderConfig) -> None:
    policy = tiny.policy(config)
    params, axes = params_of(policy)[1], logical_axes(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    sizes = {
        "vocab": config.vocab_size,
        "embed": config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head": config.head_width,
        "ffn": config.ffn_width,
        "layers": config.layers,
        "vector": config.width,
        "experts": config.experts,
        "expert_embed": config.width,
        "rank": config.lora and config.lora.rank,
        None: config.experts,
    }
    jax.tree.map(lambda w, names: np.testing.assert_equal(w.shape, tuple(sizes[name] for name in names)), params, axes)


def test_a_fresh_policy_depends_on_its_seed_only() -> None:
    draw = jax.jit(lambda key: params_of(Decoder(tiny.config(layers=1), nnx.Rngs(key)))[1])
    one, same, other = (draw(jax.random.key(seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert np.any(one["embed"] != other["embed"])


def test_impossible_heads_are_refused_with_their_numbers() -> None:
    with pytest.raises(ValueError, match="heads=4, kv_heads=3"):
        tiny.config(kv_heads=3)
    with pytest.raises(ValueError, match=r"even.*got 7"):
        tiny.config(head_width=7)
