"""The engine's resident memory on the device: per-layer keys and values of every slot, and how a block reads and writes them.

Per layer, keys are [C, K, H, S] and values [C, K, S, H]: both matmuls of attention then read their operand as it lies, which
XLA on CPU does 1.7 times faster than with equal layouts. Donated by every program that changes it; writes of frozen and
padding rows are dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxagent.models.attention import Attend, AttentionSpec, attend_cached
from jaxagent.models.transformer import DecoderConfig

LayerCache = tuple[Array, Array]  # keys [C, K, H, S], values [C, K, S, H]
Cache = tuple[LayerCache, ...]


def new_cache(config: DecoderConfig, slots: int, length: int, dtype: jnp.dtype) -> Cache:
    """Zeroed keys and values for `slots` rows of `length` tokens."""
    heads, width = config.kv_heads, config.head_width
    keys, values = (slots, heads, width, length), (slots, heads, length, width)
    return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(config.layers))


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


def copy_prefix(cache: Cache, src_R: Int[Array, "R"], dst_R: Int[Array, "R"], used: int) -> Cache:
    """Copies the first `used` positions of slot src[i] into slot dst[i]; a dst beyond the last slot is dropped."""

    return tuple(
        (
            keys.at[dst_R, :, :, :used].set(keys[src_R, :, :, :used], mode="drop"),
            values.at[dst_R, :, :used].set(values[src_R, :, :used], mode="drop"),
        )
        for keys, values in cache
    )
