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


@jax.custom_vjp
def attend_masked(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention over the keys that the mask allows; scores and softmax in float32.

    The backward pass computes the scores again from the saved log-sum-exp: storing them for every layer costs more (Dao et
    al. 2022, section 3.1, without the tiling).
    """
    return _attend_forward(q_BTNH, k_BSKH, v_BSKH, mask_BTS)[0]


def _scores(q_BKTQH: Array, k_BSKH: Array, mask_BTS: Array) -> Float[Array, "B K T Q S"]:
    return jnp.where(mask_BTS[:, None, :, None], dot("BKTQH,BSKH->BKTQS", q_BKTQH, k_BSKH), NEGATIVE)


def _attend_forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    scores = _scores(group_queries(q, k.shape[2]), k, mask)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = dot("BKTQS,BSKH->BKTQH", weights.astype(v.dtype), v) / total
    out = out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, mask, out, top + jnp.log(total))


def _attend_backward(saved: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, out, lse = saved
    scale, kv_heads = q.shape[-1] ** -0.5, k.shape[2]
    split = (*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])
    d_out_g, out_g = (x.reshape(split).transpose(0, 2, 1, 3, 4) for x in (d_out, out))
    q_g = group_queries(q, kv_heads)
    weights = jnp.exp(_scores(q_g, k, mask) - lse)
    d_weights = dot("BKTQH,BSKH->BKTQS", d_out_g, v)
    shift = jnp.sum((d_out_g * out_g).astype(jnp.float32), -1, keepdims=True)
    d_scores = (weights * (d_weights - shift)).astype(q.dtype)
    d_v = dot("BKTQS,BKTQH->BSKH", weights.astype(v.dtype), d_out_g)
    d_k = dot("BKTQS,BKTQH->BSKH", d_scores, q_g)
    d_q = dot("BKTQS,BSKH->BTKQH", d_scores, k).reshape(q.shape) * scale
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


attend_masked.defvjp(_attend_forward, _attend_backward)


def packed(segment_BT: Int[Array, "B T"]) -> Attend:
    """Causal attention inside each segment of a packed row; segment 0 is padding."""
    length = segment_BT.shape[1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    mask_BTT = (segment_BT[:, :, None] == segment_BT[:, None, :]) & causal

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        return attend_masked(q, k, v, mask_BTT), cache

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
