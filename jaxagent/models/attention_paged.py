"""Attention of new tokens to keys and values kept in pages, as a Pallas kernel for TPU.

A page holds some tokens of one slot; a table says which pages are a slot's, in order. Each row's own pages are read and no
more, where the XLA form (attention.attend_cached) reads all rows up to the longest, and slots share what they have in
common. Decoding and appending are the same call with one or with many tokens a row. Inference only: no backward pass.

JAX ships a ragged paged kernel that copies its pages by hand; no interpreter of jax 0.10 or 0.12 runs it, so it could not be
tested here, and it loses step at rows without keys. This one leaves the copies to the pipeline: a page is a block, and the
table is read ahead to say which comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxagent.models.attention import NEGATIVE, AttentionSpec, attend_cached, group_queries, soft_cap
from jaxagent.models.attention_blocked import pad_length, round_up
from jaxagent.sharding import DeviceMesh

Pages = tuple[Array, Array]  # keys and values [P, K, Z, H] of one layer

LANES = 128  # a TPU register's width
ROWS = 4096  # of a tile, queries times heads: what fits into fast memory. Each tile reads its row's pages once


def new_pages(pages: int, page_tokens: int, kv_heads: int, head_width: int, dtype: jnp.dtype) -> Pages:
    """Empty pages of one layer, narrow heads filled with zeros: at width 64 XLA copies the whole cache for every call."""
    shape = (pages, kv_heads, page_tokens, round_up(head_width, LANES))
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def _left_in_place(pages: Pages, interpret: bool) -> Pages:
    """Pages stay in main memory: a compiler that finds room for them in fast memory would bring them there whole, and back."""
    if interpret:
        return pages
    return pltpu.with_memory_space_constraint(pages[0], pltpu.HBM), pltpu.with_memory_space_constraint(pages[1], pltpu.HBM)


def _moves(size_bytes: int) -> pl.CostEstimate:
    """What the compiler is told of a kernel, which it cannot look into."""
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size_bytes)


def tile_tokens(dtype: jnp.dtype) -> int:
    """Tokens of one tile of TPU memory, the least that can be written of a page: 8 rows of 32 bits."""
    return 32 // jnp.dtype(dtype).itemsize


def write_pages(
    pages: Pages,
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    table_BM: Int[Array, "B M"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    interpret: bool = False,
) -> Pages:
    """Puts the first `count` tokens of each row at its positions from `start` on, in place; the others are dropped.

    A kernel, since XLA's scatter wants pages with heads innermost, and copies them all into that layout and back. Only the
    tiles that get a token are read and written. Where there is nothing to do, page 0 is read and written as it is.
    """
    _, kv_heads, size, width = pages[0].shape
    dtype, (batch, length) = pages[0].dtype, k_BTKH.shape[:2]
    tile, room = tile_tokens(dtype), size * table_BM.shape[1]
    if size % tile:
        raise ValueError(f"pages of {dtype} hold a multiple of {tile} tokens, got {size}")
    tiles = (length + tile - 2) // tile + 1  # that so many tokens touch, wherever they begin
    first_B = start_B - start_B % tile
    if length == 1:  # one token a row, which is spread over its tile when it is there
        source_BX, depth = jnp.zeros((batch, 1), jnp.int32), 1
    else:
        source_BX, depth = jnp.arange(tiles * tile) - (start_B - first_B)[:, None], tile

    def aligned(new: Array) -> Array:
        at = jnp.clip(source_BX, 0, length - 1)[:, :, None, None]
        return (
            widen(jnp.take_along_axis(new, at, axis=1), width)
            .astype(dtype)
            .reshape(batch, tiles, depth, kv_heads, width)
            .swapaxes(2, 3)
        )

    def tile_of(row: Any, j: Any, table: Any, first: Any, start: Any, end: Any) -> tuple[Any, ...]:
        pos = first[row] + j * tile
        used = (pos < end[row]) & (pos + tile > start[row]) & (pos < room)
        page = jax.lax.div(jnp.minimum(pos, room - 1), jnp.int32(size))
        place = jax.lax.div(jax.lax.rem(pos, jnp.int32(size)), jnp.int32(tile))
        return jnp.where(used, table[row, page], 0), 0, jnp.where(used, place, 0), 0

    def put(*refs: Any) -> None:
        _, first, start, end, *new_refs, k_in, v_in, k_out, v_out = refs
        row, j = pl.program_id(0), pl.program_id(1)
        pos = first[row] + j * tile + jax.lax.broadcasted_iota(jnp.int32, (kv_heads, tile, width), 1)
        real = (pos >= start[row]) & (pos < end[row]) & (pos < room)
        for new, old, out in zip(new_refs, (k_in, v_in), (k_out, v_out), strict=True):
            out[...] = jnp.where(real, jnp.broadcast_to(new[...], old.shape), old[...])

    of_new = pl.BlockSpec((None, None, kv_heads, depth, width), lambda row, j, *_: (row, j, 0, 0, 0))
    of_tile = pl.BlockSpec((None, kv_heads, tile, width), tile_of)
    scalars = [x.astype(jnp.int32) for x in (table_BM, first_B, start_B, start_B + count_B)]
    k, v = pl.pallas_call(
        put,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4, grid=(batch, tiles), in_specs=[of_new] * 2 + [of_tile] * 2, out_specs=[of_tile] * 2
        ),
        out_shape=[(jax.ShapeDtypeStruct if interpret else pltpu.HBM)(part.shape, dtype) for part in pages],
        input_output_aliases={6: 0, 7: 1},
        cost_estimate=_moves(6 * batch * tiles * kv_heads * tile * width * dtype.itemsize),
        interpret=interpret,
    )(*scalars, aligned(k_BTKH), aligned(v_BTKH), *_left_in_place(pages, interpret))
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
    """The kernel over pages. On several devices each has its own heads, and a key head that several need is there for each."""

    spec: AttentionSpec
    mesh: DeviceMesh | None = None  # a replica's; None is one device
    interpret: bool = False  # runs on any platform, for tests
    tile_rows: int = ROWS
    rotates: ClassVar[bool] = False

    def new(self, pages: int, page_tokens: int, kv_heads: int, head_width: int, dtype: jnp.dtype) -> Pages:
        """Empty pages of one layer."""
        shards = self.mesh.size["tensor"] if self.mesh else 1
        return new_pages(pages, page_tokens, max(kv_heads, shards), head_width, dtype)

    def attend(
        self, new: tuple[Array, Array, Array], pages: Pages, of_rows: tuple[Array, Array, Array], sliding: bool
    ) -> tuple[Float[Array, "B T N H"], Pages]:
        """Writes the keys and values of new tokens, and lets their queries attend.

        Args:
            new: q, k and v.
            of_rows: table, start and count.
        """

        def one(new: tuple[Array, Array, Array], pages: Pages, table: Array, start: Array, count: Array) -> tuple[Array, Pages]:
            written = write_pages(pages, *new[1:], table, start, count, self.interpret)
            return self(new[0], written, table, start, count, sliding), written

        return attend_new(one, self.mesh, new, pages, of_rows)

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
        queries = min(length, max(1, self.tile_rows // heads))
        tile = _Tile(self.spec, self.spec.window if sliding else 0, queries, sharing, size, self.interpret)
        padded = round_up(length, queries)
        q = group_queries(widen(pad_length(q_BTNH, padded), width), kv_heads, self.spec.scale)  # B K T Q H
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
            cost_estimate=_cost(q, pages, table_BM),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=self.interpret,
        )(*(x.astype(jnp.int32) for x in (table_BM, start_B, count_B)), q, *_left_in_place(pages, self.interpret))
        out = out.reshape(batch, -1, kv_heads, queries, sharing, width).transpose(0, 1, 3, 2, 4, 5)
        real = jnp.arange(length) < count_B[:, None]
        out = out.reshape(batch, padded, heads, width)[:, :length, :, :head_width]
        return jnp.where(real[..., None, None], out, 0)


@dataclass(frozen=True)
class PagedReference:
    """The same by XLA, for devices without a kernel: of every row the pages up to the longest row's are gathered.

    A page lies as a chunk of a slot does (engine/cache.py), and is read by the same operations: bits are those of slots.
    """

    spec: AttentionSpec
    rotates: ClassVar[bool] = False

    def new(self, pages: int, page_tokens: int, kv_heads: int, head_width: int, dtype: jnp.dtype) -> Pages:
        """Empty pages of one layer: keys [P, K, H, Z] and values [P, K, Z, H]."""
        return (
            jnp.zeros((pages, kv_heads, head_width, page_tokens), dtype),
            jnp.zeros((pages, kv_heads, page_tokens, head_width), dtype),
        )

    def attend(
        self, new: tuple[Array, Array, Array], pages: Pages, of_rows: tuple[Array, Array, Array], sliding: bool
    ) -> tuple[Float[Array, "B T N H"], Pages]:
        """As `Paged.attend`; the outputs of queries behind a row's count may be any numbers."""
        (q, k, v), (keys, values), (table_BM, start_B, count_B) = new, pages, of_rows
        total, kv_heads, _, size = keys.shape
        ahead = jnp.arange(q.shape[1])
        valid = ahead < count_B[:, None]
        pos = jnp.where(valid, start_B[:, None] + ahead, 0)
        page = jnp.where(valid, jnp.take_along_axis(table_BM, pos // size, axis=1), total)  # beyond the last: dropped
        keys = keys.at[page, :, :, pos % size].set(k.astype(keys.dtype), mode="drop")
        values = values.at[page, :, pos % size].set(v.astype(values.dtype), mode="drop")

        def read(i: Array | int) -> tuple[Array, Array]:
            of_row = table_BM[:, i]
            return keys[of_row], values[of_row]

        length = size * table_BM.shape[1]
        return attend_cached(q, read, pos, kv_heads, length, size, self.spec, sliding), (keys, values)


def attend_new(
    one: Callable[..., tuple[Array, Pages]],
    mesh: DeviceMesh | None,
    new: tuple[Array, Array, Array],
    pages: Pages,
    of_rows: tuple[Array, Array, Array],
) -> tuple[Float[Array, "B T N H"], Pages]:
    """Writes new keys and values into pages and attends to these, on every device of a replica its own heads.

    Args:
        one: (new, pages, table, start, count) -> outputs and pages, on one device.
        of_rows: table, start and count.
    """

    def on_a_device(q: Array, k: Array, v: Array, keys: Array, values: Array, *rows: Array) -> tuple[Array, Array, Array]:
        out, written = one((q, k, v), (keys, values), *rows)
        return out, *written

    copies = pages[0].shape[1] // new[1].shape[2]  # of each key head
    q, k, v = new[0], *(jnp.repeat(part, copies, axis=2) for part in new[1:])
    given = q, k, v, *pages, *of_rows
    if mesh is None or mesh.size["tensor"] == 1:
        out, *written = on_a_device(*given)
    else:
        heads, held = (None, None, "kv_heads", None), (None, "kv_heads", None, None)
        inputs = heads, heads, heads, held, held, (None, None), (None,), (None,)
        out, *written = mesh.per_device(on_a_device, inputs, (heads, held, held))(*given)
    return out, (written[0], written[1])


def _cost(q: Array, pages: Pages, table_BM: Array) -> pl.CostEstimate:
    """Every page of the table once for each tile of queries, as with full tables; queries and outputs."""
    held = 2 * pages[0].size // pages[0].shape[0] * table_BM.size * q.shape[1] * pages[0].dtype.itemsize
    return _moves(held + 2 * q.size * q.dtype.itemsize)


def widen(x: Array, width: int) -> Array:
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
