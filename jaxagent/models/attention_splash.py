"""Attention of packed rows by JAX's splash kernels for TPU, visiting only the blocks in which a segment meets itself.

The kernels take a table of the blocks to visit. JAX's own constructors make it from a static mask, and then every segment
pays for all that stands before it in the row; here it comes from the data (attention_blocked.py), as do the positions of
the queries. So one compiled kernel serves packed rows, windows, and shards of a row wherever they begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Int

from jaxagent.models.attention import AttentionSpec
from jaxagent.models.attention_blocked import Rows, active_blocks, of_layer, pad_length, pad_rows, round_up

LANES = 128  # a TPU register's width: block sizes and key positions are multiples of it
BLOCK = 512  # queries and keys of a block, at most


@dataclass(frozen=True)
class Reach:
    """Which keys a query sees by position: those up to its own, in a sliding layer the last `window` of them."""

    window: int = 0

    def __call__(self, q_pos: Array, k_pos: Array) -> Array:
        seen = q_pos >= k_pos
        return seen & (q_pos - k_pos < self.window) if self.window else seen


@dataclass(frozen=True)
class Splash:
    """The TPU kernel; a `Kernel` of attention_blocked.py.

    All rows of a device are laid end to end into one sequence, so that one launch serves them. The tables of blocks lie in
    scalar memory: 3 bytes for each pair of a query block and a key block of its row.
    """

    spec: AttentionSpec
    interpret: bool = False  # runs on any platform, for tests
    block: int = BLOCK

    def __call__(self, q: Array, k: Array, v: Array, rows: Rows, sliding: bool | Array) -> Array:
        return of_layer(self._attend, bool(self.spec.window) and sliding, q, k, v, rows)

    def _attend(self, q: Array, k: Array, v: Array, rows: Rows, sliding: bool) -> Array:
        batch, length, heads, width = q.shape
        keys = k.shape[1]
        block_q, block_kv = self._block(length), self._block(keys)
        padded_q, padded_k = round_up(length, block_q), round_up(keys, block_kv)
        rows = pad_rows(rows, padded_q, padded_k)
        kernel = self._kernel(rows, sliding, block_q, block_kv)
        dtype_of_rows = q.dtype
        dtype = jnp.float32 if self.interpret else q.dtype  # XLA on CPU has no bf16 x bf16 -> f32
        q = _end_to_end(pad_length((q * self.spec.scale).astype(dtype), padded_q))
        k, v = (_end_to_end(pad_length(x.astype(dtype), padded_k)) for x in (k, v))
        out = kernel(q, k, v, splash.SegmentIds(rows.segment_BT.reshape(-1), rows.segment_BS.reshape(-1)))
        assert isinstance(out, jax.Array)  # as no residuals are asked for
        return out.reshape(heads, batch, padded_q, width).transpose(1, 2, 0, 3)[:, :length].astype(dtype_of_rows)

    def _block(self, length: int) -> int:
        return min(self.block, round_up(length, LANES))

    def _kernel(self, rows: Rows, sliding: bool, block_q: int, block_kv: int) -> splash.SplashAttentionKernel:
        batch, keys = rows.segment_BS.shape
        window = self.spec.window if sliding else keys
        active = active_blocks(rows, window, block_q, block_kv)
        # So many blocks at most lie in the window of a block; without one any number can.
        wide = min(active.shape[2], -(-(window + block_q - 2) // block_kv) + 1)
        tall = min(active.shape[1], -(-(window + block_kv - 2) // block_q) + 1)
        q_pos = (rows.pos_T + jnp.arange(batch)[:, None] * keys).reshape(-1)  # in the sequence of all rows
        by_q, visits_q = _visits(active, wide)
        by_k, visits_k = _visits(active.swapaxes(1, 2), tall)
        forward = MaskInfo(by_q, None, visits_q, None, q_pos)  # type: ignore[arg-type]  # traced arrays do as well
        backward = MaskInfo(by_k.swapaxes(1, 2), None, visits_k.swapaxes(1, 2), None, q_pos)  # type: ignore[arg-type]
        sizes = splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        )
        return splash.SplashAttentionKernel(
            forward,
            forward,
            backward,
            block_sizes=sizes,
            is_mqa=False,
            save_residuals=False,
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=self.spec.softcap or None,
            residual_checkpoint_name="attention",
            mask_function=Reach(self.spec.window if sliding else 0),
            interpret=self.interpret,
        )


def _end_to_end(x_BTNH: Array) -> Array:
    """[B, T, N, H] -> [N, B T, H]."""
    batch, length, heads, width = x_BTNH.shape
    return x_BTNH.transpose(2, 0, 1, 3).reshape(heads, batch * length, width)


def _visits(active: Bool[Array, "B I J"], width: int) -> tuple[Int[Array, "1 BI W"], Int[Array, "1 BI W"]]:
    """For every block of all rows the blocks to visit in their order, in at most `width` steps, and which steps are real.

    The steps after the last real one stay on its block, so that nothing is fetched for them.
    """
    batch, count, others = active.shape
    first_idle = jnp.argsort(~active, axis=-1, stable=True)[..., :width]
    visits = active.sum(-1, keepdims=True)
    step = jnp.arange(width)
    at = jnp.take_along_axis(first_idle, jnp.clip(step, 0, jnp.maximum(visits - 1, 0)), axis=-1)
    at = at + jnp.arange(batch)[:, None, None] * others
    real = step < visits
    return at.reshape(1, batch * count, width).astype(jnp.int16), real.reshape(1, batch * count, width).astype(jnp.int8)
