"""Keys and values in pages under the GPU kernel, interpreted: equal to attention over a contiguous cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from page_cases import CASES, ROOM, SIZE, WIDTH, Held

from jaxagent.models.attention import AttentionSpec
from jaxagent.models.attention_paged import Pages
from jaxagent.models.attention_triton import PagedGpu
from jaxagent.models.rope import rotary, rotate


def attend(held: Held, form: PagedGpu, given: tuple[Array, Array, Array, Array]) -> tuple[Array, Pages]:
    """Puts what rows hold into pages where others left something, then what they are fed, and attends."""
    q, keys, values, table = given
    start, count = jnp.asarray(held.start), jnp.asarray(held.count)
    empty = form.new(len(held.start) * ROOM + 4, SIZE, held.kv_heads, WIDTH, jnp.dtype(held.dtype))
    run = jax.jit(partial(form.attend, sliding=held.window > 0))
    before = jnp.zeros_like(keys, shape=(*keys.shape[:2], held.heads, WIDTH)), keys, values
    _, pages = run(before, (empty[0] + 7, empty[1] + 7), (table, jnp.zeros_like(start), start))
    return run((q, held.fed_of(keys), held.fed_of(values)), pages, (table, start, count))


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_over_a_contiguous_cache(name: str) -> None:
    held = CASES[name]
    given = held.arrays()
    found, _ = attend(held, PagedGpu(held.spec, interpret=True, programs=24), given)
    assert found.dtype == jnp.dtype(held.dtype)
    want = held.wanted(*given[:3])
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, want)), atol=held.tolerance)


@pytest.mark.parametrize("programs", [1, 8, 1000])
def test_however_many_programs_share_a_rows_keys_they_find_the_same(programs: int) -> None:
    held = replace(CASES["decode, ragged"], heads=6)
    given = held.arrays()
    found, _ = attend(held, PagedGpu(held.spec, interpret=True, programs=programs), given)
    np.testing.assert_allclose(found, held.wanted(*given[:3]), atol=1e-5)


def test_no_bit_of_a_row_depends_on_its_neighbours() -> None:
    held = CASES["decode, ragged"]
    q, keys, values, table = held.arrays()
    form = PagedGpu(held.spec, interpret=True, programs=24)
    found, _ = attend(held, form, (q, keys, values, table))
    others = replace(held, start=(47, 31, 30, 2), count=(1, 1, 1, 0))
    beside, _ = attend(others, form, (q.at[:2].mul(3), keys.at[3].add(1), values.at[1].add(1), table))
    np.testing.assert_array_equal(found[2], beside[2])
    assert np.abs(found[:2] - beside[:2]).max() > 0.01


def test_tokens_of_several_tiles_see_their_own_past_through_a_window() -> None:
    held = Held(start=(0, 3), count=(20, 13), fed=20, heads=32, kv_heads=1, window=11)
    given = held.arrays()
    form = PagedGpu(held.spec, interpret=True, programs=8, tile_rows=64)  # two queries a tile
    found, _ = attend(held, form, given)
    np.testing.assert_allclose(found, held.wanted(*given[:3]), atol=1e-5)


def test_heads_that_are_no_power_of_two_wide_are_filled_up() -> None:
    form = PagedGpu(AttentionSpec(0.3), interpret=True)
    empty = form.new(3, SIZE, 2, 80, jnp.dtype("bfloat16"))
    assert empty[0].shape == (3, 2, SIZE, 128)
    x = jnp.ones((1, 1, 2, 80), jnp.bfloat16)
    out, pages = form.attend((x, x, 2 * x), empty, (jnp.asarray([[1]]), jnp.asarray([0]), jnp.asarray([1])), False)
    np.testing.assert_array_equal(out, 2 * x)
    assert pages[1][1, :, 0, :80].min() == 2 and not pages[1][1, :, 0, 80:].any() and not pages[1][2].any()


def test_pages_that_no_whole_block_of_keys_fits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a page holds 16, 32 or a multiple of 64 tokens \(engine.chunk\), got 24"):
        form, ones = PagedGpu(AttentionSpec(1.0), interpret=True), jnp.ones((1, 1, 1, 16))
        form(ones, (jnp.ones((2, 1, 24, 16)),) * 2, jnp.asarray([[1]]), jnp.zeros(1, int), jnp.ones(1, int))


@pytest.mark.parametrize("width", [16, 24])  # 24 is filled up to 32
def test_rotates_what_it_is_fed(width: int) -> None:
    form = PagedGpu(AttentionSpec(0.3), interpret=True, programs=24)
    random = np.random.default_rng(5)
    q, k, v = (jnp.asarray(random.standard_normal((3, 1, n, width)), jnp.float32) for n in (6, 2, 2))
    empty = form.new(7, SIZE, 2, width, jnp.dtype("float32"))
    pages = tuple(x.at[..., :width].set(random.standard_normal((*x.shape[:-1], width))) for x in empty)
    of_rows = jnp.asarray([[1, 4], [2, 5], [3, 6]]), jnp.asarray([SIZE + 3, 0, 5]), jnp.asarray([1, 1, 0])
    rope = rotary(of_rows[1][:, None], width, 1e4)
    run = jax.jit(partial(form.attend, sliding=False))
    found, want = run((q, k, v), pages, of_rows, rope=rope), run((rotate(q, *rope), rotate(k, *rope), v), pages, of_rows)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), found, want)
    assert not found[0][2].any()
