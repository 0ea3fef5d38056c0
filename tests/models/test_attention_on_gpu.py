"""The kernels that only a GPU has, on one: equal to the reference at the shapes of real models. Elsewhere they are skipped.

The other tests run on CPUs (conftest.py): on a GPU these alone, `PYTHONPATH=.:tests pytest --noconftest` with this file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import page_cases
import pytest
from attention_cases import Case
from page_cases import ROOM, SIZE, WIDTH, Held

from jaxagent.models.attention import AttentionSpec, packed
from jaxagent.models.attention_context import over_mesh
from jaxagent.models.attention_cudnn import Cudnn
from jaxagent.models.attention_paged import PagedReference
from jaxagent.models.attention_triton import PagedGpu
from jaxagent.models.rope import rotary, rotate
from jaxagent.sharding import DeviceMesh

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
CUDNN = {name: case for name, case in attention_cases.CASES.items() if case.dtype == "bfloat16" and not case.softcap} | {
    "long, middle and short segments": Case(
        lengths=((1500, 300, 200, 20), (513, 512, 1, 600)), length=2048, heads=14, dtype="bfloat16"
    ),
    "one segment": Case(lengths=((1024,), (1023,)), length=1024, dtype="bfloat16"),
    "odd length": Case(lengths=((700, 321), (1021,)), length=1021, dtype="bfloat16"),
    "window": Case(lengths=((900, 100),), length=1024, window=256, sliding=True, dtype="bfloat16"),
    "mixed layers in a scan": Case(lengths=((900, 100),), length=1024, window=256, sliding=True, traced=True, dtype="bfloat16"),
}


def relative(found: Any, want: Any) -> float:
    """The greatest difference, of the greatest number."""
    found, want = (np.asarray(x, np.float32) for x in (found, want))
    assert np.isfinite(found).all()
    return float(np.abs(found - want).max() / np.abs(want).max())


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", CUDNN)
def test_segments_by_cudnn_equal_the_reference(name: str, width: int) -> None:
    case, mesh = CUDNN[name], DeviceMesh.build(1)
    rng, segment = np.random.default_rng(0), case.segments()
    there = segment[:, :, None, None] > 0
    shapes = [(*segment.shape, heads, width) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    q, k, v, d_out = (jnp.asarray(rng.standard_normal(shape, np.float32)).astype(case.dtype) for shape in shapes)
    d_out, spec = jnp.where(there, d_out, 0), AttentionSpec(width**-0.5, 0.0, case.window)

    @partial(jax.jit, static_argnums=0)
    def run(back_end: Any, sliding: Any, *tensors: jax.Array) -> Any:
        attended = lambda *qkv: back_end(segment)(*qkv, None, sliding if case.traced else case.sliding)[0]  # noqa: E731
        out, back = jax.vjp(attended, *tensors[:3])
        return jnp.where(there, out, 0), *back(tensors[3])

    found = run(over_mesh(Cudnn(spec), mesh), jnp.asarray(case.sliding), q, k, v, d_out)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (q, k, v, d_out)]
        want = run(lambda segment: packed(segment, spec), jnp.asarray(case.sliding), *wide)
    for name_of, ours, theirs in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
        assert ours.dtype == jnp.bfloat16
        assert relative(ours, theirs) < 0.02, name_of


@pytest.mark.parametrize("name", page_cases.CASES)
def test_the_compiled_kernel_over_pages_equals_the_reference(name: str) -> None:
    held = page_cases.CASES[name]
    q, keys, values, table = held.arrays()
    form = PagedGpu(held.spec)
    found = fed(form, held, (q, keys, values, table), form.new(len(held.start) * ROOM + 4, SIZE, held.kv_heads, WIDTH, q.dtype))
    with jax.default_matmul_precision("highest"):
        want = held.wanted(q, keys, values)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, want)), atol=held.tolerance)


def fed(form: Any, held: Held, given: tuple[jax.Array, ...], empty: Any, *, turn: bool = False) -> jax.Array:
    """What is attended to when rows hold their start and are fed the rest, which with `turn` is to be rotated."""
    q, keys, values, table = given
    start, count = jnp.asarray(held.start), jnp.asarray(held.count)
    run, late = jax.jit(partial(form.attend, sliding=held.window > 0)), getattr(form, "rotates", False) and turn
    nothing = jnp.zeros((*keys.shape[:2], held.heads, keys.shape[-1]), keys.dtype)
    _, pages = run((nothing, keys, values), empty, (table, jnp.zeros_like(start), start))
    mine = start[:, None] + jnp.arange(held.fed)
    new = [jnp.take_along_axis(x, jnp.minimum(mine, x.shape[1] - 1)[..., None, None], 1) for x in (keys, values)]
    rope = rotary(mine, q.shape[-1], 1e4) if turn else None
    if rope and not late:
        q, new[0] = rotate(q, *rope), rotate(new[0], *rope)
    out: jax.Array = run((q, *new), pages, (table, start, count), **({"rope": rope} if late else {}))[0]
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(14, 2, 64), (12, 2, 128), (28, 4, 128), (8, 8, 64), (6, 2, 80)])
@pytest.mark.parametrize(("tokens", "turn"), [(1, False), (1, True), (40, True)])
def test_pages_of_models_shapes_equal_those_gathered(heads: int, kv_heads: int, width: int, tokens: int, turn: bool) -> None:
    held = Held(start=(0, 5, 127, 128, 300, 470), count=(tokens, 0, 1, tokens, tokens, tokens), fed=tokens, heads=heads)
    held = replace(held, kv_heads=kv_heads, dtype="bfloat16")
    rng, batch, room, size = np.random.default_rng(0), len(held.start), 4, 128
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32)).astype(held.dtype)  # noqa: E731
    q, keys, values = draw(batch, tokens, heads, width), *(draw(batch, room * size, kv_heads, width) for _ in "kv")
    table, spec = jnp.asarray(rng.permutation(batch * room).reshape(batch, room)), AttentionSpec(width**-0.5)
    forms, given = (PagedGpu(spec), PagedReference(spec)), (q, keys, values, table)
    real = (jnp.arange(tokens) < jnp.asarray(held.count)[:, None])[..., None, None]
    ours, theirs = (
        jnp.where(real, fed(form, held, given, form.new(batch * room, size, kv_heads, width, q.dtype), turn=turn), 0)
        for form in forms
    )
    assert relative(ours, theirs) < 0.02
