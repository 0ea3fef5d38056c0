"""Keys and values in pages under the TPU kernel, interpreted: equal to attention over a contiguous cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_cases import CASES, ROOM, SIZE, WIDTH, normal

from jaxagent.models.attention import AttentionSpec, attend_masked
from jaxagent.models.attention_paged import Paged, new_pages, write_pages

put = jax.jit(partial(write_pages, interpret=True))


def test_pages_that_no_whole_tile_of_memory_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of bfloat16 hold a multiple of 16 tokens, got 8"):
        pages = new_pages(2, 8, 1, WIDTH, jnp.dtype("bfloat16"))
        write_pages(pages, *[jnp.ones((1, 1, 1, WIDTH))] * 2, jnp.asarray([[1]]), jnp.zeros(1, int), jnp.ones(1, int))


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_over_a_contiguous_cache(name: str) -> None:
    held = CASES[name]
    q, keys, values, table = held.arrays()
    batch, start, count = len(held.start), jnp.asarray(held.start), jnp.asarray(held.count)

    empty = new_pages(batch * ROOM + 4, SIZE, held.kv_heads, WIDTH, jnp.dtype(held.dtype))
    pages = empty[0] + 7, empty[1] + 7  # what others left behind
    pages = put(pages, keys, values, table, jnp.zeros(batch, int), start)
    pages = put(pages, held.fed_of(keys), held.fed_of(values), table, start, count)
    run = jax.jit(Paged(held.spec, interpret=True), static_argnums=5)
    found = run(q, pages, table, start, count, held.window > 0)

    assert found.dtype == jnp.dtype(held.dtype)
    want = held.wanted(q, keys, values)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, want)), atol=held.tolerance)


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
