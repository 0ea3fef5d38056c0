"""Attention over a mesh of eight devices: heads, rows and the rows' positions cut, equal to one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import attention_cases
import jax
import pytest
from attention_cases import Case

from jaxagent.models.attention import AttentionSpec
from jaxagent.models.attention_blocked import Blocked, Kernel
from jaxagent.models.attention_context import _exchange, over_mesh
from jaxagent.models.attention_splash import Splash
from jaxagent.sharding import DeviceMesh

ROW = Case(lengths=((20, 3, 30),))  # segments that cross the borders of every cut


def blocked(spec: AttentionSpec) -> Kernel:
    return Blocked(spec, block=16)


def splash(spec: AttentionSpec) -> Kernel:
    return Splash(spec, interpret=True, block=128)


def mesh(**axes: int) -> DeviceMesh:
    return DeviceMesh.build(**{"data": 1, **axes})


@pytest.mark.parametrize(
    "case",
    [
        ROW,
        replace(ROW, window=9, sliding=True, traced=True),
        replace(ROW, lengths=((20, 31),), length=56),  # pieces of 7 tokens, which have no halves
        replace(ROW, dtype="bfloat16"),
    ],
    ids=["segments", "mixed layers", "odd pieces", "bfloat16"],
)
def test_rows_cut_in_eight_equal_the_reference(case: Case) -> None:
    attention_cases.check(case, over_mesh(blocked(case.spec), mesh(context=8)))


@pytest.mark.parametrize(
    "axes", [{"data": 2, "tensor": 2, "context": 2}, {"tensor": 4, "context": 2}, {"fsdp": 2, "tensor": 4}]
)
@pytest.mark.parametrize("kernel", [blocked, splash])
def test_rows_heads_and_positions_cut_together_equal_the_reference(
    axes: dict[str, int], kernel: Callable[[AttentionSpec], Kernel]
) -> None:
    case = replace(
        ROW, lengths=((20, 3, 30), (7, 41, 10)), window=9, sliding=True, softcap=0.8
    )  # two rows, four heads, two key heads, of which tensor=4 shares each
    attention_cases.check(case, over_mesh(kernel(case.spec), mesh(**axes)))


def test_splash_follows_a_shard_of_a_row() -> None:
    case = Case(lengths=((100, 170, 200),), length=512, heads=2, kv_heads=1)
    attention_cases.check(case, over_mesh(splash(case.spec), mesh(context=4)))


def test_three_shards_attend_in_their_own_order() -> None:
    case = replace(ROW, lengths=((20, 25),), length=48)
    devices = jax.devices()[:3]
    attention_cases.check(case, over_mesh(blocked(case.spec), DeviceMesh.build(1, context=3, devices=devices)))


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_every_shard_gets_as_much_of_a_causal_row_as_any_other(shards: int) -> None:
    pieces: dict[int, list[int]] = {shard: [] for shard in range(shards)}
    for first, route in enumerate(_exchange(shards)):
        assert len({target for _, target in route}) == shards  # one piece of each half, as ppermute wants
        for source, target in route:
            pieces[target].append(2 * source + first)
    assert {sum(found) for found in pieces.values()} == {2 * shards - 1}
