"""Which back end is chosen where, what it says, and what it refuses."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

from jaxagent.models.attention import AttentionSpec
from jaxagent.models.attention_choice import Facts, choose
from jaxagent.sharding import DeviceMesh

ONE = AttentionSpec(0.3)
CPU = Facts(ONE, 64, 1024, "float32", "cpu")
TPU = Facts(ONE, 64, 1024, "bfloat16", "tpu")
H100 = Facts(ONE, 128, 32768, "bfloat16", "gpu", 9.0)
A100 = Facts(ONE, 128, 32768, "bfloat16", "gpu", 8.0)


def changed(facts: Facts, **changes: object) -> Facts:
    return Facts(**{**facts.__dict__, **changes})


@pytest.mark.parametrize(
    ("facts", "context", "name", "says"),
    [
        (CPU, 1, "xla", "XLA on cpu with all scores of a row at once"),
        (changed(CPU, row_tokens=8192), 1, "xla", "XLA on cpu in blocks"),
        (TPU, 1, "splash", "TPU's splash kernels"),
        (TPU, 4, "context", "rows cut in 4, keys gathered, the TPU's splash kernels"),
        (CPU, 2, "context", "rows cut in 2, keys gathered, XLA on cpu in blocks"),
        (H100, 1, "cudnn", "each segment of a packed row by itself"),
        (H100, 2, "context", "rows cut in 2, keys gathered, XLA"),
        (changed(H100, head_width=256), 1, "cudnn", "the GPU's kernels"),
        (changed(A100, head_width=256), 1, "xla", "head widths up to 128"),
        (changed(H100, head_width=100), 1, "xla", "in steps of 8 here, this model has 100"),
        (changed(H100, dtype="float32"), 1, "xla", "learner.dtype is float32"),
        (changed(H100, spec=AttentionSpec(0.3, 50.0)), 1, "xla", "no soft cap on scores, this model has 50"),
        (changed(H100, capability=0.0), 1, "xla", "it needs an NVIDIA GPU"),
    ],
)
def test_the_best_that_can_work_is_taken_and_says_why(facts: Facts, context: int, name: str, says: str) -> None:
    choice = choose("auto", facts, DeviceMesh.build(1, context=context))
    assert choice.name == name
    assert choice.note.startswith(f"attention {name}: ")
    assert says in choice.note


def test_a_back_end_that_is_asked_for_is_taken_where_it_can_work() -> None:
    assert choose("xla", TPU, tiny.mesh()).note == "attention xla: as asked, XLA on tpu with all scores of a row at once"
    assert choose("xla", changed(CPU, row_tokens=8192), DeviceMesh.build(1, context=2)).name == "xla"


@pytest.mark.parametrize(
    ("name", "facts", "context", "complaint"),
    [
        ("splash", CPU, 1, "attention=splash: its kernels are for TPUs and this is a cpu; here xla can, and auto takes xla"),
        ("cudnn", TPU, 1, "it needs an NVIDIA GPU and this is a tpu; here xla or splash can, and auto takes splash"),
        ("cudnn", H100, 2, "mesh.context=2 cuts rows; here xla or context can, and auto takes context"),
        ("context", CPU, 1, "mesh.context=1 cuts no rows"),
        ("flash", CPU, 1, "'flash' is not a back end of attention; there are auto, xla, splash, cudnn, context"),
        ("auto", changed(CPU, row_tokens=1023), 2, "row_tokens=1023 must be a multiple of mesh.context=2"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(name: str, facts: Facts, context: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        choose(name, facts, DeviceMesh.build(1, context=context))


def test_the_facts_are_read_from_the_mesh() -> None:
    assert Facts.of(ONE, 64, 1024, "float32", tiny.mesh()) == CPU


def test_both_forms_of_xla_give_the_same_attention() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 24, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    segment = np.repeat([[1, 2, 0]], (10, 9, 5), axis=1)
    outs = [
        choose("xla", changed(CPU, row_tokens=length), tiny.mesh()).attend(segment)(q, k, v, None, False)[0]
        for length in (24, 8192)
    ]
    np.testing.assert_allclose(*outs, atol=1e-6)
