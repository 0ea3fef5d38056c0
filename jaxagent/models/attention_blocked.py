"""Attention of long packed rows without their square of scores: which blocks matter, and the XLA form that visits only them.

The reference (attention.py) holds T x T scores of a row; here a block of queries meets one block of keys at a time. Which
blocks can meet is computed from the data, so that neither the causal future, nor what lies before a window, nor another
segment of the row costs anything; attention_splash.py feeds the same table to its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from jaxagent.models.attention import NEGATIVE, AttentionSpec, dot, group_queries, soft_cap

BLOCK = 512  # queries and keys that meet at once
_LAST = 2**30  # where padding sorts among segments: behind all


class Rows(NamedTuple):
    """Where the queries of a call stand among its keys, which may be more: a shard of a row has the keys of all of it."""

    pos_T: Array  # i32, a query's own key, one after the other; it sees the keys up to there
    segment_BT: Array  # i32, of each query
    segment_BS: Array  # i32, of each key; a query sees its own segment


class Kernel(Protocol):
    """Attention of queries [B, T, N, H] to keys and values [B, S, K, H] on one device."""

    def __call__(self, q: Array, k: Array, v: Array, rows: Rows, sliding: bool | Array) -> Array: ...


def active_blocks(rows: Rows, window: int | Array, q_block: int, kv_block: int) -> Bool[Array, "B I J"]:
    """Which blocks of queries may see which blocks of keys; lengths are multiples of the blocks.

    Exact for order and window; of segments it asks whether their ranges overlap, which no block that matters fails, and no
    other block passes where segments are numbered in their order.

    Args:
        window: keys that a query sees, its own among them; at least the number of keys is no window.
    """
    batch, keys = rows.segment_BS.shape
    pos = rows.pos_T.reshape(-1, q_block)
    first = jnp.arange(0, keys, kv_block)
    near = (first <= pos.max(1)[:, None]) & (first + kv_block > pos.min(1)[:, None] - window + 1)
    of_q, of_k = (
        jnp.where(segment == 0, _LAST, segment).reshape(batch, -1, size)
        for segment, size in ((rows.segment_BT, q_block), (rows.segment_BS, kv_block))
    )
    shared = (of_q.min(2)[:, :, None] <= of_k.max(2)[:, None]) & (of_q.max(2)[:, :, None] >= of_k.min(2)[:, None])
    return near & shared


def pad_rows(rows: Rows, queries: int, keys: int) -> Rows:
    """Fills up to so many queries and keys, which see nothing of the others."""
    more_q, more_k = queries - rows.pos_T.shape[0], keys - rows.segment_BS.shape[1]
    # Positions go on, so that those of a block stay neighbours and its window stays as wide as it is elsewhere.
    pos = jnp.concatenate([rows.pos_T, rows.pos_T[-1] + 1 + jnp.arange(more_q)])
    q_segment = jnp.pad(rows.segment_BT, ((0, 0), (0, more_q)), constant_values=_LAST)
    return Rows(pos, q_segment, jnp.pad(rows.segment_BS, ((0, 0), (0, more_k)), constant_values=_LAST))


def pad_length(x: Array, length: int) -> Array:
    """Zeros behind dimension 1."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))


def of_layer(attend: Callable[..., Array], sliding: bool | Array, *args: Any) -> Array:
    """`attend(*args, sliding=...)`; where that is data both are compiled and one runs."""
    if isinstance(sliding, bool):
        return attend(*args, sliding=sliding)
    return jax.lax.cond(sliding, partial(attend, sliding=True), partial(attend, sliding=False), *args)


def round_up(length: int, block: int) -> int:
    return -(-length // block) * block


@dataclass(frozen=True)
class Blocked:
    """The XLA kernel: online softmax over the keys' blocks (Milakov and Gimelshein 2018), memory O(T x block).

    The backward pass computes a block's scores again from the saved log-sum-exp (Dao et al. 2022, algorithm 4). The loop of
    a query block runs from the first to the last active key block of any row on this device.
    """

    spec: AttentionSpec
    block: int = BLOCK

    def __call__(self, q: Array, k: Array, v: Array, rows: Rows, sliding: bool | Array) -> Array:
        length, keys = q.shape[1], k.shape[1]
        block = min(self.block, round_up(max(length, keys), 8))
        padded_q, padded_k = round_up(length, block), round_up(keys, block)
        window = jnp.where(sliding, self.spec.window, padded_k) if self.spec.window else jnp.asarray(padded_k)
        args = pad_length(q, padded_q), pad_length(k, padded_k), pad_length(v, padded_k)
        return _attend(*args, pad_rows(rows, padded_q, padded_k), window, self.spec, block)[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q: Array, k: Array, v: Array, rows: Rows, window: Array, spec: AttentionSpec, block: int) -> Array:
    return _forward(q, k, v, rows, window, spec, block)[0]


def _q_blocks(x_BTNH: Array, kv_heads: int, block: int, scale: float = 1.0) -> Array:
    """[B, T, N, H] as [I, B, K, Z, Q, H]: a block of queries is one slice."""
    x = group_queries(x_BTNH, kv_heads, scale)
    batch, heads, length, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, heads, length // block, block, *rest), 2, 0)


def _from_blocks(x: Array, shape: tuple[int, ...]) -> Array:
    return x.transpose(1, 0, 3, 2, 4, 5).reshape(shape)  # I B K Z Q H -> B I Z K Q H -> B T N H


def _schedule(rows: Rows, window: Array, block: int) -> tuple[Array, Array, Array, Int[Array, "I"], Int[Array, "I"]]:
    """Per block of queries: positions, segments, and the range of key blocks to visit."""
    active = active_blocks(rows, window, block, block).any(0)
    count = active.shape[1]
    first = jnp.argmax(active, 1)
    end = jnp.where(active.any(1), count - jnp.argmax(active[:, ::-1], 1), 0)
    segments = jnp.moveaxis(rows.segment_BT.reshape(rows.segment_BT.shape[0], -1, block), 1, 0)
    return rows.pos_T.reshape(-1, block), segments, jnp.arange(active.shape[0]), first, end


def _visible(pos: Array, segment: Array, rows: Rows, window: Array, j: Array, block: int) -> Bool[Array, "B 1 Z 1 S"]:
    distance = pos[:, None] - (j * block + jnp.arange(block))
    same = segment[:, :, None] == _cut(rows.segment_BS, j, block, 1)[:, None]
    return (same & (distance >= 0) & (distance < window))[:, None, :, None]


def _cut(x: Array, j: Array, block: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, j * block, block, axis)


def _forward(
    q: Array, k: Array, v: Array, rows: Rows, window: Array, spec: AttentionSpec, block: int
) -> tuple[Array, tuple[Any, ...]]:
    kv_heads = k.shape[2]
    k_BKSH, v_BKSH = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    q_blocks = _q_blocks(q, kv_heads, block, spec.scale)

    def one(given: tuple[Array, ...]) -> tuple[Array, Array]:
        q, pos, segment, _, first, end = given

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            scores = soft_cap(dot("BKZQH,BKSH->BKZQS", q, _cut(k_BKSH, j, block)), spec.softcap)
            scores = jnp.where(_visible(pos, segment, rows, window, j, block), scores, NEGATIVE)
            new_top = jnp.maximum(top, scores.max(-1))
            decay, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
            mixed = dot("BKZQS,BKSH->BKZQH", weights.astype(v.dtype), _cut(v_BKSH, j, block))
            return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + mixed

        start = jnp.full(q.shape[:-1], NEGATIVE), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape, jnp.float32)
        top, total, acc = jax.lax.fori_loop(first, end, step, start)
        total = jnp.maximum(total, 1e-30)  # of padding queries, which visit nothing
        return (acc / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(one, (q_blocks, *_schedule(rows, window, block)))
    out = checkpoint_name(_from_blocks(out, q.shape), "attention")
    return out, (q, k, v, rows, window, out, checkpoint_name(lse, "attention"))


def _backward(spec: AttentionSpec, block: int, saved: tuple[Any, ...], d_out: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, rows, window, out, lse = saved
    kv_heads = k.shape[2]
    k_BKSH, v_BKSH = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    shift = jnp.sum((d_out.astype(jnp.float32) * out.astype(jnp.float32)), -1, keepdims=True)
    blocks = (_q_blocks(q, kv_heads, block, spec.scale), _q_blocks(d_out, kv_heads, block), _q_blocks(shift, kv_heads, block))

    def one(grads: tuple[Array, Array], given: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        q, d_out, shift, lse, pos, segment, _, first, end = given

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            key, value = _cut(k_BKSH, j, block), _cut(v_BKSH, j, block)
            capped = soft_cap(dot("BKZQH,BKSH->BKZQS", q, key), spec.softcap)
            visible = _visible(pos, segment, rows, window, j, block)
            weights = jnp.where(visible, jnp.exp(jnp.where(visible, capped, NEGATIVE) - lse[..., None]), 0.0)
            d_scores = weights * (dot("BKZQH,BKSH->BKZQS", d_out, value) - shift)
            if spec.softcap:
                d_scores = d_scores * (1 - jnp.square(capped / spec.softcap))
            d_scores = d_scores.astype(q.dtype)
            d_q = d_q + dot("BKZQS,BKSH->BKZQH", d_scores, key)
            d_k = _add(d_k, dot("BKZQS,BKZQH->BKSH", d_scores, q), j, block)
            d_v = _add(d_v, dot("BKZQS,BKZQH->BKSH", weights.astype(d_out.dtype), d_out), j, block)
            return d_q, d_k, d_v

        d_q, d_k, d_v = jax.lax.fori_loop(first, end, step, (jnp.zeros(q.shape, jnp.float32), *grads))
        return (d_k, d_v), d_q

    start = jnp.zeros(k_BKSH.shape, jnp.float32), jnp.zeros(v_BKSH.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(one, start, (*blocks, lse, *_schedule(rows, window, block)))
    d_q = (_from_blocks(d_q, q.shape) * spec.scale).astype(q.dtype)
    return d_q, d_k.transpose(0, 2, 1, 3).astype(k.dtype), d_v.transpose(0, 2, 1, 3).astype(v.dtype), None, None


def _add(total: Array, part: Array, j: Array, block: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(total, _cut(total, j, block) + part, j * block, 2)


_attend.defvjp(_forward, _backward)
