"""The blocked XLA form of attention: equal to the reference, small in memory, and blind to blocks that cannot matter."""

from __future__ import annotations

import dataclasses

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxagent.models.attention import AttentionSpec, packed
from jaxagent.models.attention_blocked import Blocked, Rows, active_blocks
from jaxagent.models.attention_context import over_mesh
from jaxagent.models.transformer import REMAT


@pytest.mark.parametrize("name", attention_cases.CASES)
def test_equals_the_reference(name: str) -> None:
    case = attention_cases.CASES[name]
    attention_cases.check(case, over_mesh(Blocked(case.spec, block=16), tiny.mesh()))


def test_a_block_longer_than_the_row_equals_the_reference() -> None:
    case = attention_cases.Case()
    attention_cases.check(case, over_mesh(Blocked(case.spec, block=512), tiny.mesh()))


def test_every_pair_that_can_meet_is_in_an_active_block() -> None:
    case = attention_cases.Case(lengths=((20, 3, 30), (7, 41)))
    segment, pos = case.segments(), jnp.arange(64)
    distance = pos[:, None] - pos
    for window in (1, 5, 16, 17, 64):
        meet = (segment[:, :, None] == segment[:, None]) & (distance >= 0) & (distance < window)
        needed = meet.reshape(2, 8, 8, 4, 16).any((2, 4))
        active = active_blocks(Rows(pos, segment, segment), window, 8, 16)
        assert not np.any(needed & ~active)
        assert np.mean(active) < 0.5  # causal order alone leaves 0.56
        if window == 64:  # segments are numbered in their order: no block is visited in vain
            np.testing.assert_array_equal(needed, active)


def test_memory_grows_with_the_row_and_not_with_its_square() -> None:
    def temporary_bytes(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        segment = jax.ShapeDtypeStruct((1, length), jnp.int32)
        attend = over_mesh(Blocked(AttentionSpec(0.3), block=64), tiny.mesh())
        gradient = jax.grad(lambda q, k, v, s: attend(s)(q, k, v, None, False)[0].sum(), (0, 1, 2))
        return jax.jit(gradient).lower(x, x, x, segment).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) < 2.5 * temporary_bytes(1024)


def test_a_query_far_behind_its_keys_start_sees_them_by_position() -> None:
    """What a shard of a row does: queries 32..47 of 64 keys."""
    case = dataclasses.replace(attention_cases.Case(), softcap=0.8)
    q, k, v, _ = case.tensors()
    segment, here = case.segments(), slice(32, 48)
    kernel = jax.jit(Blocked(case.spec, block=16), static_argnums=4)
    whole = kernel(q, k, v, Rows(jnp.arange(64), segment, segment), False)
    rows = Rows(jnp.arange(32, 48), segment[:, here], segment)
    np.testing.assert_allclose(kernel(q[:, here], k, v, rows, False), whole[:, here], atol=1e-6)


@pytest.mark.parametrize("name", ["packed", "blocked"])
def test_a_layer_that_keeps_its_attention_does_not_attend_again_in_the_backward_pass(name: str) -> None:
    case = attention_cases.Case()
    q, k, v, _ = case.tensors()
    back_end = {
        "packed": lambda segment: packed(segment, case.spec),
        "blocked": over_mesh(Blocked(case.spec, block=16), tiny.mesh()),
    }[name]

    def times(remat: str) -> int:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.square(back_end(case.segments())(q, k, v, None, False)[0]).sum()

        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=REMAT[remat])))(q)).count(" exp ")

    assert 0 < times("attention") < times("full")
