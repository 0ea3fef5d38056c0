"""Tiny decoders whose weights all matter: norms are not one, biases not zero, so that a forgotten one shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxagent.models.transformer import Decoder, DecoderConfig, Params, params_of
from jaxagent.sharding import DeviceMesh


def config(**changes: Any) -> DecoderConfig:
    sizes = {"vocab_size": 40, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 24}
    return DecoderConfig(**{**sizes, "rope_theta": 100.0, "qk_norm": True, **changes})


def policy(decoder: DecoderConfig, seed: int = 0) -> Decoder:
    graph, shapes = params_of(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        noise = 0.3 * rng.standard_normal(shape.shape, np.float32)
        return jnp.asarray(noise + ("norm" in path[-1].key))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))


def params(decoder: DecoderConfig, seed: int = 0) -> Params:
    return params_of(policy(decoder, seed))[1]


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, context: int = 1) -> DeviceMesh:
    return DeviceMesh.build(data, fsdp, tensor, expert, context)


def put_together(parts: Iterable[Sequence[Params]]) -> list[Params]:
    """Weights that came part by part, for each replica as one tree with its layers stacked."""
    found = [list(own) for own in zip(*parts, strict=True)]
    whole = []
    for own in found:
        layers = [part["blocks"] for part in own if "blocks" in part]
        blocks = {name: np.concatenate([layer[name] for layer in layers]) for name in layers[0]}
        whole.append({name: w for part in own for name, w in part.items()} | {"blocks": blocks})
    return whole


def tokens(decoder: DecoderConfig, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, decoder.vocab_size, shape).astype(np.int32)
