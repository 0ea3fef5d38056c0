"""Attention of new tokens to keys and values kept in pages, as a Pallas kernel for NVIDIA GPUs, by way of Triton.

Each row's own pages are read and no more, where they lie: no copy is made of what decoding reads. What one token's query has
to read is shared out among several programs of the GPU, and what they found is joined by their log-sum-exps (Flash-Decoding:
Dao et al. 2023). How many they are goes by shapes and by the row's own length, so no bit of a row depends on its neighbours.
Inference only: no backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxagent.models.attention import NEGATIVE, AttentionSpec, group_queries, soft_cap
from jaxagent.models.attention_blocked import pad_length
from jaxagent.models.attention_paged import Pages, attend_new, widen
from jaxagent.models.rope import Rotation, rotate
from jaxagent.sharding import DeviceMesh

LEAST = 16  # rows and columns of a product on matrix units
PROGRAMS = 512  # that a call is shared out among, a few for each multiprocessor
KEYS = 64  # that a program reads at once
TILE_ROWS = 64  # of a tile where several tokens are fed, queries times the heads that share a key head


@dataclass(frozen=True)
class _Tile:
    """What the kernel must know while it is compiled."""

    spec: AttentionSpec
    window: int  # 0: none
    queries: int  # of a tile
    sharing: int  # query heads of a key head
    rows: int  # queries x sharing, and repetitions of the last up to a power of two
    size: int  # tokens of a page
    keys: int  # read at once; a page is a multiple
    parts: int  # programs that share a tile's keys
    decode: bool  # one token a row, whose key and value come beside the pages and are put into them
    turned: int  # numbers of a head that are still to be rotated; 0: they have been
    interpret: bool


@dataclass(frozen=True)
class PagedGpu:
    """The kernel over pages. On several devices each has its own heads, and a key head that several need is there for each."""

    spec: AttentionSpec
    mesh: DeviceMesh | None = None  # a replica's; None is one device
    interpret: bool = False  # runs on any platform, for tests
    programs: int = PROGRAMS
    tile_rows: int = TILE_ROWS
    keys: int = KEYS
    warps: int = 4
    stages: int = 3  # of loads under way

    def new(self, pages: int, page_tokens: int, kv_heads: int, head_width: int, dtype: jnp.dtype) -> Pages:
        """Empty pages of one layer, heads filled with zeros up to a power of two."""
        shards = self.mesh.size["tensor"] if self.mesh else 1
        shape = (pages, max(kv_heads, shards), page_tokens, power_of_two(head_width))
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    @property
    def rotates(self) -> bool:
        """Whether `attend` takes a rotation."""
        return self.mesh is None or self.mesh.size["tensor"] == 1

    def attend(
        self,
        new: tuple[Array, Array, Array],
        pages: Pages,
        of_rows: tuple[Array, Array, Array],
        sliding: bool,
        rope: Rotation | None = None,
    ) -> tuple[Float[Array, "B T N H"], Pages]:
        """Writes the keys and values of new tokens, and lets their queries attend.

        Args:
            new: q, k and v.
            of_rows: table, start and count.
            rope: by what q and k are still to be rotated.
        """
        if rope and new[0].shape[1] > 1:
            new, rope = (rotate(new[0], *rope), rotate(new[1], *rope), new[2]), None

        def one(new: tuple[Array, Array, Array], pages: Pages, table: Array, start: Array, count: Array) -> tuple[Array, Pages]:
            if new[0].shape[1] == 1:
                return self._decode(new, pages, (table, start, count), sliding, rope)
            written = write_pages(pages, *new[1:], table, start, count)
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
        kv_heads, width = pages[0].shape[1], pages[0].shape[-1]
        tile = self._tile(q_BTNH, pages, table_BM, sliding)
        tiles, used = -(-length // tile.queries), tile.queries * tile.sharing
        q = group_queries(widen(pad_length(q_BTNH, tiles * tile.queries), width), kv_heads, self.spec.scale)
        q = q.reshape(batch, kv_heads, tiles, used, width)
        of_tile = pl.BlockSpec((None, None, None, used, width), lambda row, head, n: (row, head, n // tile.parts, 0, 0))
        out, _ = self._run(tile, [q], [of_tile], pages, (table_BM, start_B, count_B))
        out = out.reshape(batch, kv_heads, tiles * tile.queries, tile.sharing, width).transpose(0, 2, 1, 3, 4)
        out = out.reshape(batch, -1, heads, width)[:, :length, :, :head_width].astype(q_BTNH.dtype)
        real = jnp.arange(length) < count_B[:, None]
        return jnp.where(real[..., None, None], out, 0)

    def _decode(
        self,
        new: tuple[Array, Array, Array],
        pages: Pages,
        of_rows: tuple[Array, Array, Array],
        sliding: bool,
        rope: Rotation | None,
    ) -> tuple[Float[Array, "B 1 N H"], Pages]:
        """As `attend` of one token a row, which the kernel itself rotates and puts into its page: one launch, not five."""
        batch, _, _, head_width = new[0].shape
        width = pages[0].shape[-1]
        tile = self._tile(new[0], pages, of_rows[0], sliding, decode=True, turned=head_width if rope else 0)
        # One array, or XLA would make a kernel for each of the three, which reads the whole product that they come from.
        given = [widen(jnp.concatenate(new, axis=2)[:, 0], width)]
        if rope:
            cos, sin = (x.reshape(batch, -1) for x in rope)
            given += [widen(jnp.concatenate(halves, axis=1), width) for halves in ((cos, cos), (-sin, sin))]
        specs = [pl.BlockSpec((None, *x.shape[1:]), lambda row, *_, rank=x.ndim: (row,) + (0,) * (rank - 1)) for x in given]
        out, written = self._run(tile, given, specs, pages, of_rows)
        return out.reshape(batch, 1, -1, width)[..., :head_width].astype(new[0].dtype), written

    def _tile(
        self, q_BTNH: Array, pages: Pages, table_BM: Array, sliding: bool, *, decode: bool = False, turned: int = 0
    ) -> _Tile:
        batch, length, heads, _ = q_BTNH.shape
        _, kv_heads, size, _ = pages[0].shape
        sharing = heads // kv_heads
        rows = power_of_two(min(length * sharing, max(sharing, self.tile_rows)))
        queries = min(rows // sharing, length)
        keys = min(size, self.keys)
        if size % keys or keys < LEAST or keys & (keys - 1):
            raise ValueError(f"a page holds {LEAST}, 32 or a multiple of {self.keys} tokens (engine.chunk), got {size}")
        tiles = -(-length // queries)
        parts = max(1, min(self.programs // (batch * kv_heads * tiles), table_BM.shape[1] * size // keys))
        window = self.spec.window if sliding else 0
        return _Tile(self.spec, window, queries, sharing, rows, size, keys, parts, decode, turned, self.interpret)

    def _run(
        self, tile: _Tile, given: list[Array], specs: list[pl.BlockSpec], pages: Pages, of_rows: tuple[Array, Array, Array]
    ) -> tuple[Float[Array, "B K C R H"], Pages]:
        """R queries of C tiles, and the pages, which decoding has changed. `given` is q, in decoding what _kernel says."""
        batch, tiles = given[0].shape[0], 1 if tile.decode else given[0].shape[2]
        total, kv_heads, size, width = pages[0].shape
        shape = (batch, kv_heads, tiles * tile.parts, tile.queries * tile.sharing)
        whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)  # noqa: E731
        of_head = pl.BlockSpec((total, None, size, width), lambda row, head, n: (0, head, 0, 0))
        of_part = pl.BlockSpec((None, None, None, shape[-1], width), lambda row, head, n: (row, head, n, 0, 0))
        of_lse = pl.BlockSpec((None, None, None, shape[-1]), lambda row, head, n: (row, head, n, 0))
        changed = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages] if tile.decode else []
        out, lse, *written = pl.pallas_call(
            partial(_kernel, tile=tile),
            grid=shape[:3],
            in_specs=[*map(whole, of_rows), *specs, of_head, of_head],
            out_specs=[of_part, of_lse, *[of_head] * len(changed)],
            out_shape=[
                jax.ShapeDtypeStruct((*shape, width), given[0].dtype if tile.parts == 1 else jnp.float32),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                *changed,
            ],
            input_output_aliases={3 + len(given): 2, 4 + len(given): 3} if changed else {},
            compiler_params=plgpu.CompilerParams(num_warps=self.warps, num_stages=self.stages),
            interpret=self.interpret,
        )(*(x.astype(jnp.int32) for x in of_rows), *given, *pages)
        if tile.parts > 1:
            lse = lse.reshape(batch, kv_heads, tiles, tile.parts, -1, 1)
            share = jnp.exp(lse - lse.max(3, keepdims=True))
            out = (out.reshape(*lse.shape[:-1], width) * share).sum(3) / share.sum(3)
        return out, (written[0], written[1]) if changed else pages


def write_pages(
    pages: Pages,
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    table_BM: Int[Array, "B M"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
) -> Pages:
    """Puts the first `count` tokens of each row at its positions from `start` on; the others are dropped."""
    total, _, size, width = pages[0].shape
    ahead = jnp.arange(k_BTKH.shape[1])
    valid = ahead < count_B[:, None]
    pos = jnp.where(valid, start_B[:, None] + ahead, 0)
    page = jnp.where(valid, jnp.take_along_axis(table_BM, pos // size, axis=1), total)  # beyond the last: dropped
    keys, values = (
        held.at[page, :, pos % size].set(widen(new, width).astype(held.dtype), mode="drop")
        for held, new in zip(pages, (k_BTKH, v_BTKH), strict=True)
    )
    return keys, values


def power_of_two(n: int) -> int:
    """The next one, and no less than the matrix units take."""
    return max(LEAST, 1 << (n - 1).bit_length())


def _kernel(
    *refs: Any,  # table, start, count; q; keys, values; out, lse
    tile: _Tile,
) -> None:
    """In decoding q holds queries, keys and values; cosines and signed sines may follow; and pages are outputs too."""
    changed = refs[-2:] if tile.decode else ()
    table, start, count, q_ref, *ropes, k_ref, v_ref, out_ref, lse_ref = refs[: len(refs) - len(changed)]
    row, head, number = (pl.program_id(i) for i in range(3))
    part = jax.lax.rem(number, tile.parts)
    ahead = jax.lax.div(number, tile.parts) * tile.queries
    first = start[row] + ahead  # position of the tile's first query
    reach = 0 if tile.decode else jnp.minimum(count[row] - ahead, tile.queries)
    end = jnp.where(count[row] > ahead, first + reach, 0)  # of the keys it sees in pages
    begin = jax.lax.div(jnp.maximum(first - tile.window + 1, 0), tile.keys) if tile.window else 0
    blocks = jnp.maximum(jax.lax.div(end + tile.keys - 1, tile.keys) - begin, 0)
    share = jax.lax.div(blocks + tile.parts - 1, tile.parts)
    mine = begin + part * share
    # A tile has a power of two of rows. Those too many are its last once more, and find, and write, what that one does.
    place = jnp.minimum(jnp.arange(tile.rows), tile.queries * tile.sharing - 1)

    def heads(which: Array) -> Array:
        """Some rows of q, rotated."""
        x = q_ref[which, :]
        if not tile.turned:
            return x
        half, c = tile.turned // 2, jnp.arange(q_ref.shape[-1])
        c = jnp.where(c < half, c + half, jnp.where(c < tile.turned, c - half, c))
        other = q_ref[which[:, None], c[None, :]]
        cos, sin = (rope[...][None, :] for rope in ropes)
        return (x.astype(jnp.float32) * cos + other.astype(jnp.float32) * sin).astype(x.dtype)

    q = heads(place + head * tile.sharing) if tile.decode else q_ref[place, :]
    if tile.decode:
        q = (q.astype(jnp.float32) * tile.spec.scale).astype(q.dtype)
    at = first + jax.lax.div(place, tile.sharing)
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # not the matrix units' own 19 bits

    def product(a: Array, b: Array, dimensions: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
        if tile.interpret:  # XLA on CPU has no bf16 x bf16 -> f32
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jax.lax.dot_general(a, b, (dimensions, ((), ())), precision=exact, preferred_element_type=jnp.float32)

    def visit(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        pos = j * tile.keys
        page = table[row, jax.lax.div(pos, tile.size)]
        here = pl.ds(jax.lax.rem(pos, tile.size), tile.keys)
        scores = soft_cap(product(q, k_ref[page, here, :], ((1,), (1,))), tile.spec.softcap)
        distance = at[:, None] - (pos + jnp.arange(tile.keys))[None, :]
        visible = distance > 0 if tile.decode else distance >= 0
        if tile.window:
            visible &= distance < tile.window
        scores = jnp.where(visible, scores, NEGATIVE)
        new_top = jnp.maximum(top, scores.max(1))
        decay, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        v = v_ref[page, here, :]
        mixed = product(weights.astype(v.dtype), v, ((1,), (0,)))
        return new_top, total * decay + weights.sum(1), acc * decay[:, None] + mixed

    begin_with = jnp.full(tile.rows, NEGATIVE, jnp.float32), jnp.zeros(tile.rows, jnp.float32)
    acc = jnp.zeros((tile.rows, q.shape[1]), jnp.float32)
    if tile.decode:  # the token itself is the first that part 0 sees
        kv_heads = pl.num_programs(1)
        own = kv_heads * tile.sharing + head + jnp.zeros_like(place)  # behind all queries; as many times as there are rows
        k, v = heads(own).astype(k_ref.dtype), q_ref[own + kv_heads, :].astype(v_ref.dtype)
        alive = (count[row] > 0) & (part == 0)
        score = soft_cap(jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1), tile.spec.softcap)
        begin_with = jnp.where(alive, score, NEGATIVE), jnp.where(alive, 1.0, begin_with[1])
        acc = jnp.where(alive, v.astype(jnp.float32), 0.0)
        # Interpreted, a masked store takes indices for all dimensions or for none.
        page, token = table[row, jax.lax.div(first, tile.size)], jax.lax.rem(first, tile.size)
        column = jnp.broadcast_to(jnp.arange(k.shape[1])[None, :], k.shape)
        into = jnp.broadcast_to(page, k.shape), jnp.broadcast_to(token, k.shape), column
        for new, pages in zip((k, v), changed, strict=True):
            plgpu.store(pages.at[into], new, mask=jnp.broadcast_to(alive, new.shape))
    top, total, acc = jax.lax.fori_loop(mine, jnp.minimum(mine + share, begin + blocks), visit, (*begin_with, acc))
    seen = jnp.where(total == 0, 1.0, total)
    out_ref[place, :] = (acc / seen[:, None]).astype(out_ref.dtype)
    lse_ref[place] = top + jnp.log(seen)
