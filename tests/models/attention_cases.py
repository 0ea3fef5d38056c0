"""The rows on which every back end of attention must equal the reference, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.models.attention import Attend, AttentionSpec, packed


@dataclass(frozen=True)
class Case:
    """A batch of packed rows: `lengths` of the segments of each; what is left of a row is padding."""

    lengths: tuple[tuple[int, ...], ...] = ((20, 3, 30), (7, 41, 10))
    length: int = 64
    heads: int = 4
    kv_heads: int = 2
    softcap: float = 0.0
    window: int = 0
    sliding: bool = False
    traced: bool = False  # `sliding` is data, as in a scan over mixed layers
    dtype: str = "float32"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(0.3, self.softcap, self.window)

    def segments(self) -> jax.Array:
        rows = np.zeros((len(self.lengths), self.length), np.int32)
        for row, lengths in zip(rows, self.lengths, strict=True):
            numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            row[: len(numbers)] = numbers
        return jnp.asarray(rows)

    def tensors(self) -> Sequence[jax.Array]:
        """Queries, keys, values, and the gradient of the outputs, which padding has none of."""
        rng = np.random.default_rng(0)
        shapes = [
            (len(self.lengths), self.length, heads, 8) for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        q, k, v, d_out = (jnp.asarray(rng.standard_normal(shape, np.float32)).astype(self.dtype) for shape in shapes)
        return q, k, v, jnp.where(self.segments()[:, :, None, None] > 0, d_out, 0)


CASES = {  # few, for each is compiled for every back end
    "one key head, odd length": Case(lengths=((20, 30, 14), (3, 65)), length=69, kv_heads=1),
    "a head each, bfloat16": Case(kv_heads=4, dtype="bfloat16"),
    "window": Case(window=9, sliding=True),
    "mixed layers in a scan, sliding": Case(window=9, sliding=True, traced=True),
    "mixed layers in a scan, full": Case(window=9, traced=True),
    "soft cap": Case(softcap=0.8),
    "window and soft cap, full rows": Case(lengths=((64,), (33, 31)), softcap=0.8, window=1, sliding=True),
    "many short segments": Case(lengths=(tuple([3] * 21), tuple([1] * 60))),
    "only padding": Case(lengths=((), (12,))),
}


def values_and_gradients(case: Case, back_end: Callable[[jax.Array], Attend]) -> list[np.ndarray]:
    """Outputs where there are tokens, and the gradients of queries, keys and values, compiled together."""
    q, k, v, d_out = case.tensors()
    segment = case.segments()

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, sliding: jax.Array) -> Any:
        def attended(*qkv: jax.Array) -> jax.Array:
            return back_end(segment)(*qkv, None, sliding if case.traced else case.sliding)[0]

        out, back = jax.vjp(attended, q, k, v)
        return out, *back(d_out)

    found = run(q, k, v, jnp.asarray(case.sliding))
    assert {x.dtype for x in found} == {jnp.dtype(case.dtype)}
    out, *grads = (np.asarray(x, np.float32) for x in found)
    assert np.isfinite(out).all(), "padding must give numbers"
    return [np.where(segment[:, :, None, None] > 0, out, 0), *grads]


_REFERENCE: dict[Case, list[np.ndarray]] = {}


def check(case: Case, back_end: Callable[[jax.Array], Attend]) -> None:
    """Asserts that a back end equals the reference."""
    if case not in _REFERENCE:
        _REFERENCE[case] = values_and_gradients(case, lambda segment: packed(segment, case.spec))
    tolerance = 2e-5 if case.dtype == "float32" else 6e-2
    found = values_and_gradients(case, back_end)
    for name, ours, want in zip(("out", "dq", "dk", "dv"), found, _REFERENCE[case], strict=True):
        np.testing.assert_allclose(ours, want, atol=tolerance, rtol=tolerance, err_msg=name)
