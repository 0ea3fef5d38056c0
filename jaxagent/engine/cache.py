"""The engine's resident memory on the device: per-layer keys and values of every slot, and how a block reads and writes them.

Per layer, keys are [C, K, H, S] and values [C, K, S, H]: both matmuls of attention then read their operand as it lies, which
XLA on CPU does 1.7 times faster than with equal layouts. Donated by every program that changes it; writes of frozen and
padding rows are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxagent.engine.options import EngineOptions
from jaxagent.models.attention import NEGATIVE, Attend, AttentionSpec, attend_cached, dot, group_queries, soft_cap
from jaxagent.models.attention_paged import Paged, PagedReference
from jaxagent.models.attention_triton import PagedGpu
from jaxagent.models.rope import Rotation
from jaxagent.models.transformer import DecoderConfig

LayerCache = tuple[Array, Array]  # keys [C, K, H, S], values [C, K, S, H]; or as a form of pages has them
PageForm = Paged | PagedGpu | PagedReference
Cache = tuple[LayerCache, ...]


def new_cache(config: DecoderConfig, slots: int, length: int, dtype: jnp.dtype) -> Cache:
    """Zeroed keys and values for `slots` rows of `length` tokens."""
    heads, width = config.kv_heads, config.head_width
    keys, values = (slots, heads, width, length), (slots, heads, length, width)
    return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(config.layers))


def cache_of(config: DecoderConfig, options: EngineOptions, form: PageForm | None) -> Cache:
    """An engine's empty cache: slots, or pages, which slots take as they grow (pages.py)."""
    o, dtype = options, jnp.dtype(options.dtype)
    if form is None:
        return new_cache(config, o.slots, o.slot_tokens, dtype)
    return tuple(form.new(o.pages, o.chunk, config.kv_heads, config.head_width, dtype) for _ in range(config.layers))


@dataclass(frozen=True)
class AttendPages:
    """Writes the first `count` of a call's keys and values from `start` on into the row's pages, then attends to these.

    Args:
        of_rows: table [B, M], each row's pages in order, and start and count [B].
    """

    form: PageForm
    of_rows: tuple[Array, Array, Array]

    @property
    def rotates(self) -> bool:
        """Whether it is to be given q and k as they were made, and their rotation."""
        return self.form.rotates

    def __call__(
        self, q: Array, k: Array, v: Array, cache: LayerCache, sliding: bool | Array, *rope: Rotation
    ) -> tuple[Array, LayerCache]:
        assert isinstance(sliding, bool)  # layers are unrolled here
        return self.form.attend((q, k, v), cache, self.of_rows, sliding, *rope)


def copy_pages(cache: Cache, src_R: Int[Array, "R"], dst_R: Int[Array, "R"]) -> Cache:
    """Copies page src[i] to page dst[i]; a dst beyond the last is dropped."""
    return jax.tree.map(lambda held: held.at[dst_R].set(held[src_R], mode="drop"), cache)


def read_pages(cache: Cache, page_n: Int[Array, "n"]) -> Cache:
    """The contents of some pages."""
    return jax.tree.map(lambda held: held[page_n], cache)


def put_pages(cache: Cache, page_n: Int[Array, "n"], stash: Cache) -> Cache:
    """Puts what `read_pages` gave into other pages; a page beyond the last is dropped."""
    return jax.tree.map(lambda held, kept: held.at[page_n].set(kept, mode="drop"), cache, stash)


def attend_slots(
    slot_B: Int[Array, "B"] | None, pos_BT: Int[Array, "B T"], valid_BT: Bool[Array, "B T"], chunk: int, spec: AttentionSpec
) -> Attend:
    """Writes a call's keys and values at their positions, then attends to the slot's cache up to each query's position.

    Args:
        slot_B: the slot of each row, or None where row i is slot i, which spares a gather.
        valid_BT: tokens whose keys and values are kept; the others are dropped.
        chunk: cache positions read at once; the reading stops at the longest row of the call.
    """

    def attend(q: Array, k: Array, v: Array, cache: LayerCache, sliding: bool | Array) -> tuple[Array, LayerCache]:
        keys, values = cache
        slots, length = keys.shape[0], keys.shape[3]
        row = jnp.arange(slots) if slot_B is None else slot_B
        where = jnp.where(valid_BT, row[:, None], slots)  # beyond the last slot: dropped
        keys = keys.at[where, :, :, pos_BT].set(k.astype(keys.dtype), mode="drop")
        values = values.at[where, :, pos_BT].set(v.astype(values.dtype), mode="drop")

        def read(i: Array | int) -> LayerCache:
            k, v = keys, values
            if chunk < length:
                k = jax.lax.dynamic_slice_in_dim(keys, i * chunk, chunk, axis=3)
                v = jax.lax.dynamic_slice_in_dim(values, i * chunk, chunk, axis=2)
            return (k, v) if slot_B is None else (k[slot_B], v[slot_B])

        assert isinstance(sliding, bool)  # layers are unrolled here
        return attend_cached(q, read, pos_BT, keys.shape[1], length, chunk, spec, sliding), (keys, values)

    return attend


def working_copy(cache: Cache, slot_W: Int[Array, "W"], used: int, ahead: int) -> Cache:
    """The first `used` positions of some slots, and room for the `ahead` tokens of one decode call behind them.

    A slot beyond the last stands for no row; what it copies is never seen.
    """
    room = (0, ahead)
    read = partial(jnp.take, indices=slot_W, axis=0, mode="clip")
    return tuple(
        (
            jnp.pad(read(keys[..., :used]), ((0, 0), (0, 0), (0, 0), room)),
            jnp.pad(read(values[:, :, :used]), ((0, 0), (0, 0), room, (0, 0))),
        )
        for keys, values in cache
    )


def attend_working_copy(start_W: Int[Array, "W"], step: Int[Array, ""], used: int, tokens: int, spec: AttentionSpec) -> Attend:
    """Attention of one step of a decode call over its working copy, one query a row, in one pass.

    The call's own keys and values lie behind the `used` positions, at the same place for all rows: no step scatters, none
    reads more than is in use. Bits depend on where the call began, and so on the neighbours; `attend_slots` is the one whose
    bits do not.

    Args:
        start_W: positions of each row that were in the cache when the call began; none is above `used`.
        step: steps of the call before this one, of `tokens`.
    """
    index = jnp.arange(used + tokens)
    # How far before the query each key lies; W U+N.
    distance = jnp.where(index < used, start_W[:, None] + step - index, used + step - index)
    held = (index < used) & (index < start_W[:, None])
    visible = held | ((index >= used) & (distance >= 0))

    def attend(q: Array, k: Array, v: Array, cache: LayerCache, sliding: bool | Array) -> tuple[Array, LayerCache]:
        keys, values = cache
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype).transpose(0, 2, 3, 1), used + step, 3)
        values = jax.lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype).transpose(0, 2, 1, 3), used + step, 2)
        mask = visible & (distance < spec.window) if sliding else visible
        grouped = group_queries(q, keys.shape[1], spec.scale)
        scores = soft_cap(dot("BKTQH,BKHZ->BKTQZ", grouped, keys), spec.softcap)
        scores = jnp.where(mask[:, None, None, None], scores, NEGATIVE)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out = dot("BKTQZ,BKZH->BKTQH", weights.astype(v.dtype), values) / weights.sum(-1, keepdims=True)
        return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype), (keys, values)

    return attend


def keep_new(
    cache: Cache, copy: Cache, slot_W: Int[Array, "W"], used: int, start_W: Int[Array, "W"], count_W: Int[Array, "W"]
) -> Cache:
    """Writes the first count tokens behind the `used` positions of a working copy into their slots, from `start` on."""
    slots, ahead = cache[0][0].shape[0], jnp.arange(copy[0][0].shape[3] - used)
    where = jnp.where(ahead < count_W[:, None], slot_W[:, None], slots)  # beyond the last slot: dropped
    pos = start_W[:, None] + ahead
    return tuple(
        (
            keys.at[where, :, :, pos].set(new_keys[..., used:].transpose(0, 3, 1, 2), mode="drop"),
            values.at[where, :, pos].set(new_values[:, :, used:].transpose(0, 2, 1, 3), mode="drop"),
        )
        for (keys, values), (new_keys, new_values) in zip(cache, copy, strict=True)
    )


def read_slot(cache: Cache, slot: Int[Array, ""], used: int) -> Cache:
    """The first `used` positions of one slot, per layer keys [K, H, used] and values [K, used, H]."""
    return tuple((keys[slot, :, :, :used], values[slot, :, :used]) for keys, values in cache)


def write_slot(cache: Cache, slot: Int[Array, ""], stash: Cache) -> Cache:
    """Puts back what `read_slot` gave; a slot beyond the last is dropped."""
    used = stash[0][0].shape[2]
    return tuple(
        (keys.at[slot, :, :, :used].set(k, mode="drop"), values.at[slot, :, :used].set(v, mode="drop"))
        for (keys, values), (k, v) in zip(cache, stash, strict=True)
    )


def copy_prefix(cache: Cache, src_R: Int[Array, "R"], dst_R: Int[Array, "R"], used: int) -> Cache:
    """Copies the first `used` positions of slot src[i] into slot dst[i]; a dst beyond the last slot is dropped."""

    return tuple(
        (
            keys.at[dst_R, :, :, :used].set(keys[src_R, :, :, :used], mode="drop"),
            values.at[dst_R, :, :used].set(values[src_R, :, :used], mode="drop"),
        )
        for keys, values in cache
    )
