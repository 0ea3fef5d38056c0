"""The slots' keys and values: what is written where, what is dropped, and what a fork copies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import tiny

from jaxagent.engine.cache import Cache, attend_slots, copy_prefix, new_cache
from jaxagent.models.attention import attend_masked

CONFIG = tiny.config()
SLOTS, LENGTH = 3, 8


def random_cache() -> Cache:
    rng = np.random.default_rng(0)
    fresh = new_cache(CONFIG, SLOTS, LENGTH, jnp.float32)
    return tuple(tuple(jnp.asarray(rng.standard_normal(x.shape, np.float32)) for x in layer) for layer in fresh)  # type: ignore[misc]


def normal(seed: int, *shape: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def test_a_new_cache_has_keys_and_values_for_every_layer_slot_and_position() -> None:
    cache = new_cache(CONFIG, SLOTS, LENGTH, jnp.bfloat16)
    assert len(cache) == CONFIG.layers
    for keys, values in cache:
        assert keys.shape == (SLOTS, CONFIG.kv_heads, CONFIG.head_width, LENGTH)
        assert values.shape == (SLOTS, CONFIG.kv_heads, LENGTH, CONFIG.head_width)
        assert keys.dtype == values.dtype == jnp.bfloat16


def test_valid_tokens_are_written_at_their_positions_and_nothing_else_changes() -> None:
    keys, values = random_cache()[0]
    pos, valid = jnp.asarray([[2, 3, 0], [5, 0, 0]]), jnp.asarray([[True, True, False], [True, False, False]])
    q, k, v = normal(1, 2, 3, 4, 8), normal(2, 2, 3, 2, 8), normal(3, 2, 3, 2, 8)
    _, (new_keys, new_values) = attend_slots(jnp.asarray([2, 0]), pos, valid, 4, CONFIG.attention)(
        q, k, v, (keys, values), False
    )
    want_keys, want_values = np.array(keys), np.array(values)
    for row, token, slot, at in ((0, 0, 2, 2), (0, 1, 2, 3), (1, 0, 0, 5)):
        want_keys[slot, :, :, at], want_values[slot, :, at] = k[row, token], v[row, token]
    np.testing.assert_array_equal(new_keys, want_keys)
    np.testing.assert_array_equal(new_values, want_values)


def test_queries_see_what_the_slot_held_and_what_they_brought() -> None:
    keys, values = random_cache()[0]
    q, k, v = normal(1, 1, 2, 4, 8), normal(2, 1, 2, 2, 8), normal(3, 1, 2, 2, 8)
    pos = jnp.asarray([[3, 4]])
    out, (keys, values) = attend_slots(jnp.asarray([1]), pos, jnp.ones((1, 2), bool), 4, CONFIG.attention)(
        q, k, v, (keys, values), False
    )
    seen = jnp.arange(LENGTH) <= pos[..., None]
    want = attend_masked(q, keys[1].transpose(2, 0, 1)[None], values[1].transpose(1, 0, 2)[None], seen, CONFIG.attention)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_a_fork_copies_the_prefix_into_the_new_slot_and_touches_nothing_else() -> None:
    cache = random_cache()
    nowhere = SLOTS  # fills up a call; must be dropped
    forked = copy_prefix(cache, jnp.asarray([1, 1]), jnp.asarray([0, nowhere]), 5)
    for (keys, values), (new_keys, new_values) in zip(cache, forked, strict=True):
        want_keys, want_values = np.array(keys), np.array(values)
        want_keys[0, :, :, :5], want_values[0, :, :5] = keys[1, :, :, :5], values[1, :, :5]
        np.testing.assert_array_equal(new_keys, want_keys)
        np.testing.assert_array_equal(new_values, want_values)
