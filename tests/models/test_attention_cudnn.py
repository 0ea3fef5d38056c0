"""Packed rows taken apart into segments for cuDNN, with XLA behind the same public call: equal to the reference."""

from __future__ import annotations

import attention_cases
import jax.numpy as jnp
import pytest
import tiny
from attention_cases import Case

from jaxagent.models.attention import AttentionSpec
from jaxagent.models.attention_context import over_mesh
from jaxagent.models.attention_cudnn import Cudnn, spans

CASES = {name: case for name, case in attention_cases.CASES.items() if not case.softcap}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    attention_cases.check(case, over_mesh(Cudnn(case.spec, implementation="xla", short=16), tiny.mesh()))


@pytest.mark.parametrize("short", [7, 64])
def test_segments_of_every_length_find_a_place(short: int) -> None:
    case = Case(lengths=((9, 9, 9, 9, 9, 9, 9), (8, 32, 16, 7)), length=64)
    attention_cases.check(case, over_mesh(Cudnn(case.spec, implementation="xla", short=short), tiny.mesh()))


def test_every_token_knows_where_its_segment_begins_and_how_long_it_is() -> None:
    first, size = spans(jnp.asarray([[1, 1, 2, 3, 3, 3, 0, 0]]))
    assert first.tolist() == [[0, 0, 2, 3, 3, 3, 6, 6]]
    assert size.tolist() == [[2, 2, 1, 3, 3, 3, 2, 2]]


def test_a_soft_cap_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ValueError, match=r"no soft cap on scores, and this model has one of 50"):
        Cudnn(AttentionSpec(0.3, softcap=50.0))
