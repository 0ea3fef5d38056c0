"""Keys and values in pages under the TPU kernel, interpreted: equal to attention over a contiguous cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.attention import AttentionSpec, attend_masked
from jaxagent.models.attention_paged import Paged, new_pages, write_pages

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


CASES = {
    "decode, ragged": Held(start=(5, 0, 30, 17), count=(1, 1, 1, 1)),
    "decode at the edges of pages": Held(start=(15, 16, 31, 47), count=(1, 1, 1, 1), kv_heads=1),
    "decode with empty rows": Held(start=(5, 0, 30, 0), count=(1, 0, 1, 0)),
    "append, ragged, an empty row": Held(start=(0, 5, 7, 20), count=(6, 1, 0, 4), fed=6),
    "window and soft cap": Held(start=(5, 12, 30, 17), count=(1, 1, 1, 1), window=5, softcap=0.8),
    "append, bfloat16, a head each": Held(start=(0, 9), count=(3, 5), fed=5, kv_heads=4, dtype="bfloat16"),
}


put = jax.jit(partial(write_pages, interpret=True))


def test_pages_that_no_whole_tile_of_memory_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of bfloat16 hold a multiple of 16 tokens, got 8"):
        pages = new_pages(2, 8, 1, WIDTH, jnp.dtype("bfloat16"))
        write_pages(pages, *[jnp.ones((1, 1, 1, WIDTH))] * 2, jnp.asarray([[1]]), jnp.zeros(1, int), jnp.ones(1, int))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_over_a_contiguous_cache(name: str) -> None:
    held = CASES[name]
    spec, batch, total = AttentionSpec(0.3, held.softcap, held.window), len(held.start), SIZE * ROOM
    start, count = jnp.asarray(held.start), jnp.asarray(held.count)
    keys, values = (normal(i, batch, total, held.kv_heads, WIDTH).astype(held.dtype) for i in (0, 1))
    q = normal(2, batch, held.fed, held.heads, WIDTH).astype(held.dtype)
    table = 1 + jnp.asarray(np.random.default_rng(3).permutation(batch * ROOM + 3)[: batch * ROOM].reshape(batch, ROOM))
    pos = start[:, None] + jnp.arange(held.fed)

    empty = new_pages(batch * ROOM + 4, SIZE, held.kv_heads, WIDTH, jnp.dtype(held.dtype))
    pages = empty[0] + 7, empty[1] + 7  # what others left behind
    pages = put(pages, keys, values, table, jnp.zeros(batch, int), start)
    new = [jnp.take_along_axis(x, jnp.minimum(pos, total - 1)[..., None, None], 1) for x in (keys, values)]
    pages = put(pages, *new, table, start, count)
    run = jax.jit(Paged(spec, interpret=True), static_argnums=5)
    found = run(q, pages, table, start, count, held.window > 0)

    distance = pos[..., None] - jnp.arange(total)
    seen = (distance >= 0) & (distance < held.window) if held.window else distance >= 0
    real = (jnp.arange(held.fed) < count[:, None])[..., None, None]
    want = jnp.where(real, attend_masked(q, keys, values, seen, spec), 0)
    assert found.dtype == jnp.dtype(held.dtype)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, want)), atol=1e-5 if held.dtype == "float32" else 0.03
    )


def test_tokens_beyond_a_rows_count_or_room_are_not_written() -> None:
    pages = new_pages(4, 8, 1, WIDTH, jnp.dtype("float32"))
    ones = jnp.ones((2, 3, 1, WIDTH))
    keys, values = put(pages, ones, 2 * ones, jnp.asarray([[1], [3]]), jnp.asarray([1, 7]), jnp.asarray([2, 3]))
    assert keys[:, 0, :, 0].astype(int).tolist() == [[0] * 8, [0, 1, 1, 0, 0, 0, 0, 0], [0] * 8, [0] * 7 + [1]]
    np.testing.assert_array_equal(values, 2 * keys)


def test_queries_of_several_tiles_see_their_own_pages() -> None:
    spec, length = AttentionSpec(0.3, window=11), 20
    q, keys, values = (normal(i, 1, length, heads, WIDTH) for i, heads in enumerate((32, 1, 1)))  # 8 queries a tile
    pages, table = new_pages(ROOM + 1, SIZE, 1, WIDTH, jnp.dtype("float32")), jnp.asarray([[3, 1, 2]])
    pages = put(pages, keys, values, table, jnp.zeros(1, int), jnp.full(1, length))
    found = Paged(spec, interpret=True, tile_rows=256)(q, pages, table, jnp.zeros(1, int), jnp.full(1, length), True)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    want = attend_masked(q, keys, values, ((distance >= 0) & (distance < 11))[None], spec)
    np.testing.assert_allclose(found, want, atol=1e-5)
