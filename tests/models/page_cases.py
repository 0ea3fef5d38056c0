"""Rows of keys and values in pages, as the kernels that read pages are tried on."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxagent.models.attention import AttentionSpec, attend_masked

SIZE, ROOM, WIDTH = 16, 3, 16  # tokens of a page, pages of a row, head width


@dataclass(frozen=True)
class Held:
    """Rows that hold `start` tokens and are given `count` of `fed` more."""

    start: tuple[int, ...]
    count: tuple[int, ...]
    fed: int = 1
    heads: int = 4
    kv_heads: int = 2
    softcap: float = 0.0
    window: int = 0
    dtype: str = "float32"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(0.3, self.softcap, self.window)

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == "float32" else 0.03

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Queries of what is fed; all keys and values as they lie in order [B, ROOM x SIZE, K, H]; a table of pages."""
        batch, total = len(self.start), SIZE * ROOM
        keys, values = (normal(i, batch, total, self.kv_heads, WIDTH).astype(self.dtype) for i in (0, 1))
        q = normal(2, batch, self.fed, self.heads, WIDTH).astype(self.dtype)
        order = np.random.default_rng(3).permutation(batch * ROOM + 3)[: batch * ROOM]
        return q, keys, values, 1 + jnp.asarray(order.reshape(batch, ROOM))

    def fed_of(self, x: Array) -> Array:
        """What is fed of keys or values."""
        pos = jnp.asarray(self.start)[:, None] + jnp.arange(self.fed)
        return jnp.take_along_axis(x, jnp.minimum(pos, SIZE * ROOM - 1)[..., None, None], 1)

    def wanted(self, q: Array, keys: Array, values: Array) -> Array:
        """By the reference, zero where nothing is asked."""
        pos = jnp.asarray(self.start)[:, None] + jnp.arange(self.fed)
        distance = pos[..., None] - jnp.arange(SIZE * ROOM)
        seen = (distance >= 0) & (distance < self.window) if self.window else distance >= 0
        real = (jnp.arange(self.fed) < jnp.asarray(self.count)[:, None])[..., None, None]
        return jnp.where(real, attend_masked(q, keys, values, seen, self.spec), 0)


CASES = {
    "decode, ragged": Held(start=(5, 0, 30, 17), count=(1, 1, 1, 1)),
    "decode at the edges of pages": Held(start=(15, 16, 31, 47), count=(1, 1, 1, 1), kv_heads=1),
    "decode with empty rows": Held(start=(5, 0, 30, 0), count=(1, 0, 1, 0)),
    "append, ragged, an empty row": Held(start=(0, 5, 7, 20), count=(6, 1, 0, 4), fed=6),
    "window and soft cap": Held(start=(5, 12, 30, 17), count=(1, 1, 1, 1), window=5, softcap=0.8),
    "append, bfloat16, a head each": Held(start=(0, 9), count=(3, 5), fed=5, kv_heads=4, dtype="bfloat16"),
}


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))
