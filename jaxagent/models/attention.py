"""Attention without caches or weights: the reference against which every back end is tested, and its chunked form.

A block hands its queries, keys and values to a function `attend(q, k, v, cache) -> (out, cache)`, so that the same block
serves packed training rows (no cache) and the engine's slots (a cache that grows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

NEGATIVE = -1e30  # masks a score; finite, so that a row with nothing to attend to gives numbers and not NaN


@dataclass(frozen=True)
class AttentionSpec:
    """What the scores of a model go through, the same in every layer."""

    scale: float  # of q @ k, mostly H ** -0.5
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap) (Gemma 2); 0 is off
    window: int = 0  # keys that a sliding layer's query sees, its own among them; 0: no layer slides


class Attend(Protocol):
    """How a block attends: queries [B, T, N, H], keys and values [B, T, K, H], all rotated, queries not yet scaled.

    What its backward pass needs it names "attention", so that a layer may keep just that (REMAT in transformer.py).
    `sliding` says whether this layer sees only the window: known while tracing, or data in a scan over mixed layers.
    One with a true attribute `rotates` takes q and k as they were made, and their rotation as one argument more.
    """

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, sliding: bool | Array) -> tuple[Array, Any]: ...


def dot(equation: str, a: Array, b: Array) -> Array:
    """An einsum accumulated in float32. XLA on CPU lacks bf16 x bf16 -> f32, so the inputs are widened there.

    What it is compiled for decides, not what it is traced on: a CPU compiles for other machines too.
    """
    accumulate = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if a.dtype == b.dtype == jnp.float32:
        return accumulate(a, b)
    widened = lambda a, b: accumulate(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(a, b, cpu=widened, default=accumulate)


def group_queries(q_BTNH: Float[Array, "B T N H"], kv_heads: int, scale: float) -> Float[Array, "B K T Q H"]:
    """Scales the queries and gathers those that share a key head."""
    batch, length, heads, width = q_BTNH.shape
    scaled = (q_BTNH * scale).reshape(batch, length, kv_heads, heads // kv_heads, width)
    return scaled.transpose(0, 2, 1, 3, 4)


def soft_cap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap), or x where the cap is 0 (Gemma 2, section 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_masked(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
    spec: AttentionSpec,
) -> Float[Array, "B T N H"]:
    """Softmax attention over the keys that the mask allows; scores and softmax in float32.

    The backward pass computes the scores again from the saved log-sum-exp: storing them for every layer costs more (Dao et
    al. 2022, section 3.1, without the tiling).
    """
    return _attend_forward(q_BTNH, k_BSKH, v_BSKH, mask_BTS, spec)[0]


def _scores(q_BKTQH: Array, k_BSKH: Array, mask_BTS: Array, softcap: float) -> Float[Array, "B K T Q S"]:
    scores = soft_cap(dot("BKTQH,BSKH->BKTQS", q_BKTQH, k_BSKH), softcap)
    return jnp.where(mask_BTS[:, None, :, None], scores, NEGATIVE)


def _attend_forward(q: Array, k: Array, v: Array, mask: Array, spec: AttentionSpec) -> tuple[Array, tuple[Array, ...]]:
    scores = _scores(group_queries(q, k.shape[2], spec.scale), k, mask, spec.softcap)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = dot("BKTQS,BSKH->BKTQH", weights.astype(v.dtype), v) / total
    out = checkpoint_name(out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype), "attention")
    return out, (q, k, v, mask, out, checkpoint_name(top + jnp.log(total), "attention"))


def _attend_backward(spec: AttentionSpec, saved: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, out, lse = saved
    kv_heads = k.shape[2]
    split = (*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])
    d_out_g, out_g = (x.reshape(split).transpose(0, 2, 1, 3, 4) for x in (d_out, out))
    q_g = group_queries(q, kv_heads, spec.scale)
    scores = _scores(q_g, k, mask, spec.softcap)
    weights = jnp.exp(scores - lse)
    d_weights = dot("BKTQH,BSKH->BKTQS", d_out_g, v)
    shift = jnp.sum((d_out_g * out_g).astype(jnp.float32), -1, keepdims=True)
    d_scores = weights * (d_weights - shift)
    if spec.softcap:  # d tanh(x) = 1 - tanh(x)^2; where the mask holds, the weight is 0 already
        d_scores = d_scores * (1 - jnp.square(jnp.where(scores == NEGATIVE, 0.0, scores) / spec.softcap))
    d_scores = d_scores.astype(q.dtype)
    d_v = dot("BKTQS,BKTQH->BSKH", weights.astype(v.dtype), d_out_g)
    d_k = dot("BKTQS,BKTQH->BSKH", d_scores, q_g)
    d_q = dot("BKTQS,BSKH->BTKQH", d_scores, k).reshape(q.shape) * spec.scale
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


attend_masked.defvjp(_attend_forward, _attend_backward)


def packed(segment_BT: Int[Array, "B T"], spec: AttentionSpec) -> Attend:
    """Causal attention inside each segment of a packed row; segment 0 is padding."""
    ahead = jnp.arange(segment_BT.shape[1])
    distance = ahead[:, None] - ahead
    mask_BTT = (segment_BT[:, :, None] == segment_BT[:, None, :]) & (distance >= 0)

    def attend(q: Array, k: Array, v: Array, cache: None, sliding: bool | Array) -> tuple[Array, None]:
        near = distance < spec.window
        mask = mask_BTT & (near if sliding is True else near | ~jnp.asarray(sliding)) if spec.window else mask_BTT
        return attend_masked(q, k, v, mask, spec), cache

    return attend


def attend_cached(
    q_BTNH: Float[Array, "B T N H"],
    read: Callable[[Array | int], tuple[Float[Array, "B K H Z"], Float[Array, "B K Z H"]]],
    pos_BT: Int[Array, "B T"],
    kv_heads: int,
    length: int,
    chunk: int,
    spec: AttentionSpec,
    sliding: bool = False,
) -> Float[Array, "B T N H"]:
    """Attention over a cache of `length` positions, read in fixed chunks with an online softmax.

    Reading stops at the longest row of the call, and of a sliding layer begins at the first chunk that any row's window
    touches. A chunk of which a row sees nothing is an exact no-op for it, so its bits do not depend on its neighbours.

    Args:
        read: gives keys (width first) and values of chunk i.
        pos_BT: each query's own position; it sees the keys at positions up to it.
    """
    q = group_queries(q_BTNH, kv_heads, spec.scale)
    shape = q.shape[:-1]  # B K T Q
    offsets = jnp.arange(chunk)

    def step(i: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        k, v = read(i)
        distance = pos_BT[..., None] - (i * chunk + offsets)  # B T Z
        visible = (distance >= 0) & (distance < spec.window) if sliding else distance >= 0
        scores = jnp.where(visible[:, None, :, None], soft_cap(dot("BKTQH,BKHZ->BKTQZ", q, k), spec.softcap), -jnp.inf)
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
        first = jnp.maximum(jnp.min(pos_BT) - spec.window + 1, 0) // chunk if sliding else 0
        _, total, acc = jax.lax.fori_loop(first, jnp.max(pos_BT) // chunk + 1, step, start)
    out = acc / total[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q_BTNH.shape).astype(q_BTNH.dtype)
