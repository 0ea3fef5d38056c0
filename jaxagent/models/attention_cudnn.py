"""Attention of packed rows by cuDNN on a GPU: the row is taken apart into its segments, attended, and put together again.

JAX's public call takes lengths but no segments, so each segment becomes a row of its own. How many there are and how long
is data, but shapes must be static, and a bucket per segment as long as the row would need their product. Segments sorted by
length cannot be long without being few: the k-th longest of a row of T tokens has at most T / k. So the longest goes into
a bucket of T, the next two into buckets of T / 2, the next four into T / 4: every class holds T tokens, whatever the
lengths. Segments of at most SHORT tokens are left to XLA, where blocks of SHORT queries meet their own block and the one
before it; then log2(T / SHORT) classes hold all others.

Cost beside the kernel: log2(T / SHORT) copies of q, k, v and the output (6 for 32K tokens), and 2 SHORT scores per token. cuDNN
skips what lies behind a length, so the arithmetic is that of the segments themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from jaxagent.models.attention import AttentionSpec, attend_masked
from jaxagent.models.attention_blocked import Rows, of_layer, pad_length, round_up

SHORT = 512  # longest segment that XLA attends to, tokens


@dataclass(frozen=True)
class Cudnn:
    """The GPU kernel; a `Kernel` of attention_blocked.py for whole rows. Takes bfloat16 or float16, no soft cap.

    Args:
        implementation: of jax.nn.dot_product_attention; "xla" runs anywhere, for tests.
    """

    spec: AttentionSpec
    implementation: Literal["cudnn", "xla"] = "cudnn"
    short: int = SHORT

    def __post_init__(self) -> None:
        if self.spec.softcap:
            raise ValueError(f"cuDNN has no soft cap on scores, and this model has one of {self.spec.softcap}: use xla")

    def __call__(self, q: Array, k: Array, v: Array, rows: Rows, sliding: bool | Array) -> Array:
        return of_layer(self._attend, bool(self.spec.window) and sliding, q, k, v, rows.segment_BT)

    def _attend(self, q: Array, k: Array, v: Array, segment_BT: Array, sliding: bool) -> Array:
        batch, length = segment_BT.shape
        first_BT, size_BT = spans(segment_BT)
        out = self._attend_short(q, k, v, segment_BT, sliding)
        out = jnp.where((size_BT <= self.short)[:, :, None, None], out, 0).reshape(batch * length, *q.shape[2:])
        # Where segments begin, the longest first; all other tokens have size 0 and come last. Long padding gets zeros.
        begins = (first_BT == jnp.arange(length)) & (size_BT > self.short) & (segment_BT > 0)
        heads = jnp.where(begins, size_BT, 0)
        starts = jnp.argsort(-heads, axis=1, stable=True)
        taken, most = 0, length // (self.short + 1)  # so many segments can be longer than SHORT
        while taken < most:
            bucket, count = round_up(length // (taken + 1), 8), min(taken + 1, most - taken)  # cuDNN takes no odd length
            chosen = starts[:, taken : taken + count]
            sizes = jnp.take_along_axis(heads, chosen, 1)
            out = self._attend_class(out, (q, k, v), chosen, sizes, bucket, sliding)
            taken += count
        return checkpoint_name(out.reshape(q.shape), "attention")

    def _attend_class(
        self, out: Array, qkv: tuple[Array, ...], starts_BG: Array, sizes_BG: Array, bucket: int, sliding: bool
    ) -> Array:
        """Adds the outputs of the segments that begin at `starts` to `out`; a size of 0 is no segment."""
        batch, length = qkv[0].shape[:2]
        ahead = jnp.arange(bucket)
        inside = ahead < sizes_BG[..., None]
        at = starts_BG[..., None] + jnp.arange(batch)[:, None, None] * length + ahead
        at = jnp.where(inside, at, batch * length).reshape(-1, bucket)  # beyond the end: zeros are read, nothing is written
        q, k, v = (x.reshape(batch * length, *x.shape[2:]).at[at].get(mode="fill", fill_value=0) for x in qkv)
        lengths = jnp.maximum(sizes_BG.reshape(-1), 1).astype(jnp.int32)  # of nothing, one zero
        part = jax.nn.dot_product_attention(
            (q * self.spec.scale).astype(q.dtype),
            k,
            v,
            scale=1.0,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            local_window_size=(self.spec.window - 1, 0) if sliding else None,
            implementation=self.implementation,
        )
        return out.at[at].add(part, mode="drop")

    def _attend_short(self, q: Array, k: Array, v: Array, segment_BT: Array, sliding: bool) -> Array:
        """Right for segments of at most SHORT tokens: each block of queries sees its own keys and those of the block before."""
        batch, length = segment_BT.shape
        block = min(self.short, round_up(length, 8))
        padded = round_up(length, block)
        segment = jnp.pad(segment_BT, ((0, 0), (0, padded - length)))
        q, k, v = (pad_length(x, padded).reshape(-1, block, *x.shape[2:]) for x in (q, k, v))
        blocks = segment.reshape(batch, -1, block)
        before = jnp.pad(blocks, ((0, 0), (1, 0), (0, 0)), constant_values=-1)[:, :-1]
        seen = jnp.concatenate([before, blocks], 2).reshape(-1, 1, 2 * block)
        distance = jnp.arange(block)[:, None] + block - jnp.arange(2 * block)
        near = (distance >= 0) & (distance < self.spec.window) if sliding else distance >= 0
        mask = (blocks.reshape(-1, block, 1) == seen) & near
        k, v = (jnp.concatenate([jnp.roll(x, 1, axis=0), x], 1) for x in (k, v))  # a row's first block sees none before it
        out = attend_masked(q, k, v, mask, self.spec)
        return out.reshape(batch, padded, *q.shape[2:])[:, :length]


def spans(segment_BT: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Of every token where its segment begins in the row, and how long it is; padding counts as one."""
    at = jnp.arange(segment_BT.shape[1])
    other = segment_BT[:, 1:] != segment_BT[:, :-1]
    begins = jnp.pad(other, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(other, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, at, segment_BT.shape[1]), axis=1, reverse=True)
    return first, last - first + 1
