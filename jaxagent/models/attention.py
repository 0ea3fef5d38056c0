"""Attention without caches or weights: the reference against which every back end is tested, and its chunked form.

A block hands its queries, keys and values to a function `attend(q, k, v, cache) -> (out, cache)`, so that the same block
serves packed training rows (no cache) and the engine's slots (a cache that grows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

NEGATIVE = -1e30  # masks a score; finite, so that a row with nothing to attend to gives numbers and not NaN


def dot(equation: str, a: Array, b: Array) -> Array:
    """An einsum accumulated in float32. XLA on CPU lacks bf16 x bf16 -> f32, so the inputs are widened there."""
    if jax.default_backend() == "cpu":
        return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def group_queries(q_BTNH: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K T Q H"]:
    """Scales the queries and gathers those that share a key head."""
    batch, length, heads, width = q_BTNH.shape
    scaled = (q_BTNH * width**-0.5).reshape(batch, length, kv_heads, heads // kv_heads, width)
    return scaled.transpose(0, 2, 1, 3, 4)


def attend_masked(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention over the keys that the mask allows; scores and softmax in float32."""
    q = group_queries(q_BTNH, k_BSKH.shape[2])
    scores = dot("BKTQH,BSKH->BKTQS", q, k_BSKH)
    scores = jnp.where(mask_BTS[:, None, :, None], scores, NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    out = dot("BKTQS,BSKH->BTKQH", weights, v_BSKH)
    return out.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def packed(segment_BT: Int[Array, "B T"]) -> Attend:
    """Causal attention inside each segment of a packed row; segment 0 is padding."""
    length = segment_BT.shape[1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    mask_BTT = (segment_BT[:, :, None] == segment_BT[:, None, :]) & causal

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        # The backward pass recomputes the scores: storing them for every layer costs more than computing them again.
        return jax.checkpoint(attend_masked)(q, k, v, mask_BTT), cache

    return attend


def attend_cached(
    q_BTNH: Float[Array, "B T N H"],
    read: Callable[[Array | int], tuple[Float[Array, "B K H Z"], Float[Array, "B K Z H"]]],
    pos_BT: Int[Array, "B T"],
    kv_heads: int,
    length: int,
    chunk: int,
) -> Float[Array, "B T N H"]:
    """Attention over a cache of `length` positions, read in fixed chunks with an online softmax.

    Reading stops at the longest row of the call. A chunk beyond a row's own position is an exact no-op for that row, so a
    row's bits do not depend on how long its neighbours are.

    Args:
        read: gives keys (width first) and values of chunk i.
        pos_BT: each query's own position; it sees the keys at positions up to it.
    """
    q = group_queries(q_BTNH, kv_heads)
    shape = q.shape[:-1]  # B K T Q
    offsets = jnp.arange(chunk)

    def step(i: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        k, v = read(i)
        visible = ((i * chunk + offsets) <= pos_BT[..., None])[:, None, :, None]  # B 1 T 1 Z
        scores = jnp.where(visible, dot("BKTQH,BKHZ->BKTQZ", q, k), -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe = jnp.where(jnp.isinf(new_top), 0.0, new_top)
        decay = jnp.where(jnp.isinf(top), 0.0, jnp.exp(top - safe))
        weights = jnp.exp(scores - safe[..., None])
        mixed = dot("BKTQZ,BKZH->BKTQH", weights.astype(v.dtype), v)
        return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + mixed

    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    if chunk == length:  # one pass over the whole slot spares the loop and its copies
        _, total, acc = step(0, start)
    else:
        _, total, acc = jax.lax.fori_loop(0, jnp.max(pos_BT) // chunk + 1, step, start)
    out = acc / total[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q_BTNH.shape).astype(q_BTNH.dtype)
