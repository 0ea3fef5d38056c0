"""The decoder against itself: causal, packed, scanned, recomputed; and the names of its dimensions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxagent.models.attention import packed
from jaxagent.models.layers import rms_norm, rotary
from jaxagent.models.transformer import Decoder, DecoderConfig, head_table, logical_axes, params_of, unstack

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-like, tied": {},
    "qwen2-like, untied": {"qk_norm": False, "qkv_bias": True, "tied_head": False},
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return tiny.config(**request.param)


def test_a_later_token_changes_no_earlier_logit(config: DecoderConfig) -> None:
    forward = nnx.jit(tiny.policy(config))
    tokens = tiny.tokens(config, 1, 8)
    other = tokens.copy()
    other[0, 5] = (other[0, 5] + 1) % config.vocab_size
    before, after = forward(tokens), forward(other)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.any(before[:, 5:] != after[:, 5:], axis=-1))


def test_packed_rows_give_the_logits_of_the_rows_alone(config: DecoderConfig) -> None:
    policy = tiny.policy(config)
    rows = [tiny.tokens(config, 1, n, seed=n) for n in (3, 4)]
    tokens = jnp.concatenate([*rows, jnp.zeros((1, 2), jnp.int32)], axis=1)
    segment, position = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0]]), jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0, 0]])
    together = policy.logits(policy.hidden(tokens, position, packed(segment)))
    np.testing.assert_allclose(together[:, :3], policy(rows[0]), atol=1e-5)
    np.testing.assert_allclose(together[:, 3:7], policy(rows[1]), atol=1e-5)


def test_the_scan_over_layers_equals_a_loop_over_unstacked_ones(config: DecoderConfig) -> None:
    policy = tiny.policy(config)
    tokens = tiny.tokens(config, 2, 6)
    params = unstack(params_of(policy)[1], config.layers)
    graph, pos = nnx.split(policy.blocks)[0], jnp.broadcast_to(jnp.arange(6), (2, 6))
    x, rope, attend = params["embed"][tokens], rotary(pos, config.head_width, config.rope_theta), packed(jnp.ones((2, 6), int))
    for weights in params["blocks"]:
        x, _ = nnx.merge(graph, weights)(x, rope, attend, None)
    logits = rms_norm(x, params["norm"], config.norm_eps) @ head_table(params, config).T
    np.testing.assert_allclose(policy(tokens), logits, atol=1e-5)


def test_recomputing_layers_in_the_backward_pass_changes_no_gradient(config: DecoderConfig) -> None:
    graph, params = params_of(tiny.policy(config))
    tokens, pos = tiny.tokens(config, 1, 6), jnp.arange(6)[None]

    def loss(params: Any, remat: bool) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params).hidden(tokens, pos, packed(jnp.ones((1, 6), int)), remat=remat) ** 2)

    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(params, remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, again)


def test_every_weight_has_a_gradient(config: DecoderConfig) -> None:
    graph, params = params_of(tiny.policy(config))
    tokens = tiny.tokens(config, 2, 6)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graph, p)(tokens)))))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        rows = np.any(np.reshape(grad, (grad.shape[0], -1)) != 0, axis=-1)
        unused = config.vocab_size - len(np.unique(tokens)) if path[0].key == "embed" and not config.tied_head else 0
        assert np.sum(~rows) == unused, path


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
    }
    jax.tree.map(lambda w, names: np.testing.assert_equal(w.shape, tuple(sizes[name] for name in names)), params, axes)


def test_a_fresh_policy_depends_on_its_seed_only() -> None:
    draw = lambda seed: params_of(Decoder(tiny.config(), nnx.Rngs(seed)))[1]  # noqa: E731
    one, same, other = draw(1), draw(1), draw(2)
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert np.any(one["embed"] != other["embed"])


def test_impossible_heads_are_refused_with_their_numbers() -> None:
    with pytest.raises(ValueError, match="heads=4, kv_heads=3"):
        tiny.config(kv_heads=3)
    with pytest.raises(ValueError, match=r"even.*got 7"):
        tiny.config(head_width=7)
