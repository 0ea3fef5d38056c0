"""Attention: its own backward pass, packed rows, and the chunked reading of a cache, each against the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.attention import AttentionSpec, attend_cached, attend_masked, packed

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SPEC = AttentionSpec(WIDTH**-0.5)
CAPPED = AttentionSpec(0.7, softcap=1.5, window=3)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def qkv(rows: int, queries: int, keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(0, rows, queries, HEADS, WIDTH),
        normal(1, rows, keys, KV_HEADS, WIDTH),
        normal(2, rows, keys, KV_HEADS, WIDTH),
    )


@partial(jax.jit, static_argnums=4)
def plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec = SPEC) -> jax.Array:
    """softmax(cap(scale q k)) v, one query head at a time, each with the key head it shares."""
    outs = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = jnp.einsum("bth,bsh->bts", q[:, :, head], k[:, :, shared]) * spec.scale
        scores = spec.softcap * jnp.tanh(scores / spec.softcap) if spec.softcap else scores
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        outs.append(jnp.einsum("bts,bsh->bth", weights, v[:, :, shared]))
    return jnp.stack(outs, axis=2)


def some_mask(rows: int, queries: int, keys: int) -> jax.Array:
    mask = np.random.default_rng(3).random((rows, queries, keys)) < 0.6
    mask[:, :, 0] = True  # every query sees something
    return jnp.asarray(mask)


@pytest.mark.parametrize("spec", [SPEC, CAPPED])
def test_values_equal_the_plain_formula(spec: AttentionSpec) -> None:
    args = (*qkv(2, 5, 7), some_mask(2, 5, 7), spec)
    np.testing.assert_allclose(attend_masked(*args), plain(*args), atol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, CAPPED])
def test_the_custom_backward_pass_equals_autodiff_of_the_plain_formula(spec: AttentionSpec) -> None:
    q, k, v = qkv(2, 5, 7)
    mask, ct = some_mask(2, 5, 7), normal(4, 2, 5, HEADS, WIDTH)

    def gradients(attention: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v, mask, spec) * ct), (0, 1, 2)))(q, k, v)

    for ours, theirs in zip(gradients(attend_masked), gradients(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_large_scores_neither_overflow_nor_lose_the_gradient() -> None:
    q, k, v = qkv(1, 4, 4)
    mask = jnp.tril(jnp.ones((1, 4, 4), bool))
    value, grads = jax.value_and_grad(lambda q: attend_masked(300 * q, k, v, mask, SPEC).sum())(q)
    np.testing.assert_allclose(value, plain(300 * q, k, v, mask).sum(), rtol=1e-4)
    assert np.isfinite(grads).all()


def test_a_query_that_sees_nothing_gives_numbers_and_gradients_that_are_finite() -> None:
    q, k, v = qkv(1, 3, 3)
    mask = jnp.zeros((1, 3, 3), bool)
    value, grads = jax.value_and_grad(lambda args: attend_masked(*args, mask, SPEC).sum())((q, k, v))
    assert np.isfinite(value)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_bfloat16_inputs_give_bfloat16_outputs_and_gradients_near_those_of_float32() -> None:
    wide, mask = qkv(2, 6, 6), jnp.tril(jnp.ones((2, 6, 6), bool))
    narrow = tuple(x.astype(jnp.bfloat16) for x in wide)

    def run(args: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, back = jax.vjp(lambda *args: attend_masked(*args, mask, SPEC), *args)
        return out, back(jnp.ones_like(out))

    (out, grads), (want, wanted) = run(narrow), run(wide)
    assert {x.dtype for x in (out, *grads)} == {jnp.dtype("bfloat16")}
    for x, y in zip((out, *grads), (want, *wanted), strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.1)


def test_segments_of_a_packed_row_attend_as_if_each_stood_alone() -> None:
    q, k, v = qkv(1, 9, 9)
    segment = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0]])
    together = packed(segment, SPEC)(q, k, v, None, False)[0]
    for span in (slice(0, 4), slice(4, 7)):
        n = span.stop - span.start
        alone = packed(jnp.ones((1, n), int), SPEC)(q[:, span], k[:, span], v[:, span], None, False)[0]
        np.testing.assert_allclose(together[:, span], alone, atol=1e-6)


def test_a_segment_has_no_gradient_from_its_neighbours() -> None:
    q, k, v = qkv(1, 6, 6)
    segment = jnp.asarray([[1, 1, 1, 2, 2, 2]])
    grad = jax.grad(lambda v: packed(segment, SPEC)(q, k, v, None, False)[0][:, 3:].sum())(v)
    assert not np.any(grad[:, :3])
    assert np.all(np.any(grad[:, 3:] != 0, axis=(2, 3)))


def test_a_query_of_a_sliding_layer_sees_its_window_of_its_own_segment() -> None:
    q, k, v = qkv(1, 9, 9)
    segment = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 2]])
    at = np.arange(9)
    mask = (segment[0][:, None] == segment[0]) & (at[:, None] >= at) & (at[:, None] - at < CAPPED.window)
    attend = packed(segment, CAPPED)
    np.testing.assert_allclose(attend(q, k, v, None, True)[0], plain(q, k, v, mask[None], CAPPED), atol=1e-5)
    for sliding in (True, False):  # as data, in a scan over mixed layers
        told = jax.jit(lambda s: attend(q, k, v, None, s)[0])(jnp.asarray(sliding))
        np.testing.assert_allclose(told, attend(q, k, v, None, sliding)[0], atol=1e-6)


def cached(
    q: jax.Array, k: jax.Array, v: jax.Array, pos: jax.Array, chunk: int, spec: AttentionSpec = SPEC, sliding: bool = False
) -> jax.Array:
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)

    def read(i: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        if chunk == k.shape[1]:
            return keys, values
        return (
            jax.lax.dynamic_slice_in_dim(keys, i * chunk, chunk, 3),
            jax.lax.dynamic_slice_in_dim(values, i * chunk, chunk, 2),
        )

    return attend_cached(q, read, pos, KV_HEADS, k.shape[1], chunk, spec, sliding)


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_a_cache_read_in_chunks_equals_full_attention(chunk: int) -> None:
    q, k, v = qkv(3, 2, 16)
    pos = jnp.asarray([[0, 1], [6, 7], [14, 15]])  # within the first chunk, at an edge, at the end
    visible = jnp.arange(16) <= pos[..., None]
    np.testing.assert_allclose(cached(q, k, v, pos, chunk), plain(q, k, v, visible), atol=1e-5)


def test_a_long_neighbour_does_not_change_a_bit_of_a_short_row() -> None:
    q, k, v = qkv(4, 1, 64)
    run = jax.jit(lambda pos: cached(q, k, v, pos, 8))
    short = run(jnp.asarray([[5], [5], [5], [5]]))
    beside_long = run(jnp.asarray([[5], [63], [30], [8]]))
    np.testing.assert_array_equal(short[0], beside_long[0])
    assert np.any(short[1] != beside_long[1])


def test_what_lies_in_the_cache_beyond_a_row_is_never_seen() -> None:
    q, k, v = qkv(1, 1, 16)
    pos = jnp.asarray([[5]])
    dirty_k, dirty_v = k.at[:, 6:].set(1e4), v.at[:, 6:].set(-1e4)
    np.testing.assert_array_equal(cached(q, k, v, pos, 4), cached(q, dirty_k, dirty_v, pos, 4))


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_a_sliding_layer_reads_its_window_of_the_cache(chunk: int) -> None:
    q, k, v = qkv(2, 2, 16)
    pos = jnp.asarray([[3, 4], [14, 15]])
    distance = pos[..., None] - jnp.arange(16)
    want = plain(q, k, v, (distance >= 0) & (distance < CAPPED.window), CAPPED)
    np.testing.assert_allclose(cached(q, k, v, pos, chunk, CAPPED, sliding=True), want, atol=1e-5)
    far = pos.at[0].set(jnp.asarray([12, 13]))  # then no row's window touches the first chunks
    alone = cached(q, k, v, far, chunk, CAPPED, sliding=True)[1]
    np.testing.assert_array_equal(alone, cached(q, k, v, pos, chunk, CAPPED, sliding=True)[1])
