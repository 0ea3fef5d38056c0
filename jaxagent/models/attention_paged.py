"""Attention of new tokens to keys and values kept in pages, as a Pallas kernel for TPU.

A page holds some tokens of one slot; a table says which pages are a slot's, in order. Each row's own pages are read and no
more, where the XLA form (attention.attend_cached) reads all rows up to the longest, and slots share what they have in
common. Decoding and appending are the same call with one or with many tokens a row. Inference only: no backward pass.

JAX ships a ragged paged kernel that copies its pages by hand; no interpreter of jax 0.10 or 0.12 runs it, so it could not be
tested here, and it loses step at rows without keys. This one leaves the copies to the pipeline: a page is a block, and the
table is read ahead to say which comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxagent.models.attention import NEGATIVE, AttentionSpec, group_queries, soft_cap
from jaxagent.models.attention_blocked import pad_length, round_up

Pages = tuple[Array, Array]  # keys and values [P, K, Z, H] of one layer

LANES = 128  # a TPU register's width
QUERIES = 256  # rows of a tile: queries times the heads that share a key head


def new_pages(pages: int, page_tokens: int, kv_heads: int, head_width: int, dtype: jnp.dtype) -> Pages:
    """Empty pages of one layer, narrow heads filled with zeros: at width 64 XLA copies the whole cache for every call."""
    shape = (pages, kv_heads, page_tokens, round_up(head_width, LANES))
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def write_pages(
    pages: Pages,
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    table_BM: Int[Array, "B M"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
) -> Pages:
    """Puts the first `count` tokens of each row at its positions from `start` on; the others are dropped."""
    total, _, size, _ = pages[0].shape
    ahead = jnp.arange(k_BTKH.shape[1])
    pos = start_B[:, None] + ahead
    page = jnp.take_along_axis(table_BM, jnp.minimum(pos // size, table_BM.shape[1] - 1), axis=1)
    page = jnp.where((ahead < count_B[:, None]) & (pos < size * table_BM.shape[1]), page, total)
    k, v = (
        held.at[page, :, pos % size].set(_widen(new, held.shape[3]).astype(held.dtype), mode="drop")
        for held, new in zip(pages, (k_BTKH, v_BTKH), strict=True)
    )
    return k, v


@dataclass(frozen=True)
class _Tile:
    """What the kernel must know while it is compiled."""

    spec: AttentionSpec
    window: int  # 0: none
    queries: int  # of a tile
    sharing: int  # query heads of a key head
    size: int  # tokens of a page
    interpret: bool

    def pages(self, row: Any, tile: Any, start_B: Any, count_B: Any) -> tuple[Any, Any]:
        """The first and the last page that a tile of queries sees; last < first where it has no queries."""
        first = start_B[row] + tile * self.queries
        ahead = jnp.minimum(count_B[row] - tile * self.queries, self.queries)
        # lax.div: `//` takes signs, for which the compiler asks what device this process has, and it may have another.
        last = jnp.where(ahead > 0, jax.lax.div(first + jnp.maximum(ahead, 1) - 1, jnp.int32(self.size)), -1)
        return (jax.lax.div(jnp.maximum(first - self.window + 1, 0), jnp.int32(self.size)) if self.window else 0), last


@dataclass(frozen=True)
class Paged:
    """The kernel over pages."""

    spec: AttentionSpec
    interpret: bool = False  # runs on any platform, for tests

    def __call__(
        self,
        q_BTNH: Float[Array, "B T N H"],
        pages: Pages,
        table_BM: Int[Array, "B M"],
        start_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
        sliding: bool = False,
    ) -> Float[Array, "B T N H"]:
        """Each query sees the keys of its row up to its own position, which must have been written.

        Args:
            table_BM: the pages of each row, in order; entries behind its length may be any page.
            start_B: position of the first query; those of a row follow each other.
            count_B: how many of the T queries are real; the outputs of the others are zero, 0 is an empty row.
        """
        batch, length, heads, head_width = q_BTNH.shape
        _, kv_heads, size, width = pages[0].shape
        sharing = heads // kv_heads
        queries = min(length, max(1, QUERIES // sharing))
        tile = _Tile(self.spec, self.spec.window if sliding else 0, queries, sharing, size, self.interpret)
        padded = round_up(length, queries)
        q = group_queries(_widen(pad_length(q_BTNH, padded), width), kv_heads, self.spec.scale)  # B K T Q H
        q = q.reshape(batch, kv_heads, padded // queries, queries * sharing, width).swapaxes(1, 2)
        rows = (kv_heads, queries * sharing)

        def page_of(row: Any, c: Any, j: Any, table: Any, start: Any, count: Any) -> tuple[Any, ...]:
            first, last = tile.pages(row, c, start, count)  # steps outside stay on a page, so that nothing is fetched
            return table[row, jnp.maximum(jnp.minimum(jnp.maximum(j, first), last), 0)], 0, 0, 0

        of_page = pl.BlockSpec((None, kv_heads, size, width), page_of)
        of_tile = pl.BlockSpec((None, None, *rows, width), lambda row, c, j, *_: (row, c, 0, 0, 0))
        out = pl.pallas_call(
            partial(_kernel, tile=tile),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(batch, padded // queries, table_BM.shape[1]),
                in_specs=[of_tile, of_page, of_page],
                out_specs=of_tile,
                scratch_shapes=[pltpu.VMEM((*rows, n), jnp.float32) for n in (LANES, LANES, width)],
            ),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=self.interpret,
        )(*(x.astype(jnp.int32) for x in (table_BM, start_B, count_B)), q, *pages)
        out = out.reshape(batch, -1, kv_heads, queries, sharing, width).transpose(0, 1, 3, 2, 4, 5)
        real = jnp.arange(length) < count_B[:, None]
        out = out.reshape(batch, padded, heads, width)[:, :length, :, :head_width]
        return jnp.where(real[..., None, None], out, 0)


def _widen(x: Array, width: int) -> Array:
    """Zeros behind the last dimension."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _kernel(
    *refs: Any,  # table, start, count; q, keys, values; out; top, total, sum: what an online softmax carries
    tile: _Tile,
) -> None:
    _, start, count, q_ref, k_ref, v_ref, out_ref, top_ref, total_ref, acc_ref = refs
    row, number, j = (pl.program_id(i) for i in range(3))
    first, last = tile.pages(row, number, start, count)

    @pl.when(j == 0)
    def begin() -> None:
        top_ref[...] = jnp.full_like(top_ref, NEGATIVE)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when((j >= first) & (j <= last))
    def visit() -> None:
        shape = (q_ref.shape[1], tile.size)
        at = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(tile.sharing))
        distance = start[row] + number * tile.queries + at - j * tile.size - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = (distance >= 0) & (distance < tile.window) if tile.window else distance >= 0
        for head in range(q_ref.shape[0]):
            q, k, v = q_ref[head], k_ref[head], v_ref[head]
            if tile.interpret:  # XLA on CPU has no bf16 x bf16 -> f32
                q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            scores = jnp.where(visible, soft_cap(scores, tile.spec.softcap), NEGATIVE)
            top = top_ref[head, :, :1]
            new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
            decay, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
            mixed = jax.lax.dot_general(
                weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            total = total_ref[head, :, :1] * decay + weights.sum(-1, keepdims=True)
            top_ref[head] = jnp.broadcast_to(new_top, top_ref.shape[1:])
            total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])
            acc_ref[head] = acc_ref[head] * decay + mixed

    @pl.when(j == pl.num_programs(2) - 1)
    def end() -> None:
        total = total_ref[...][:, :, :1]
        out_ref[...] = (acc_ref[...] / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)
