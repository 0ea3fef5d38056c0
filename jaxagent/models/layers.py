"""The pieces every decoder is made of: weights with logical axes, projections, RMS norm, activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxagent.sharding import RULES, DeviceMesh


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], scale: float) -> nnx.Param:
    """A normal weight of deviation `scale`; `axes` names each dimension for the sharding table."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * scale, axes=axes)


def constant(shape: tuple[int, ...], axes: tuple[str, ...], value: float) -> nnx.Param:
    """A weight that starts as a constant: norms at one, biases at zero."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(equation: str, x: Array, kernel: Array) -> Array:
    """An einsum of activations with a weight, with the order of operands fixed in the backward pass.

    JAX would multiply (cotangent, activations) for the weight's gradient. XLA on CPU transposes the left operand of that
    product and evaluates whatever produced the cotangent inside the transposing copy, element by element along the wrong
    axis: half of a training step. With the activations on the left it transposes an array that is in memory already.
    """
    return jnp.einsum(equation, x, kernel)


def _project_forward(equation: str, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.einsum(equation, x, kernel), (x, kernel)


def _project_backward(equation: str, saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    x, kernel = saved
    operands, out = equation.split("->")
    left, right = operands.split(",")
    return jnp.einsum(f"{out},{right}->{left}", ct, kernel), jnp.einsum(f"{left},{out}->{right}", x, ct)


project.defvjp(_project_forward, _project_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: Float[Array, "V D"], tokens: Int[Array, "B T"], mesh: DeviceMesh | None) -> Float[Array, "B T D"]:
    """table[tokens], with the gradient of a token's row summed in float32.

    Where a mesh cuts the table, it stays where it is: every device looks all tokens up in its own rows and columns, and the
    columns travel to where the tokens are, T D numbers instead of V D. The gradient goes the same way back.
    """
    if mesh is None:
        return table[tokens]
    return mesh.per_device(_look_up_part, (("vocab", "embed"), ("rows", "length")), ("rows", "length", None))(table, tokens)


def _own_rows(tokens: Array, rows: int) -> Array:
    """The tokens of all devices that cut the table's width [devices, B, T] as rows of this one's part; others are `rows`."""
    own = jax.lax.all_gather(tokens, RULES["embed"]) - jax.lax.axis_index(RULES["vocab"]) * rows
    return jnp.where((own >= 0) & (own < rows), own, rows)


def _look_up_part(table: Array, tokens: Array) -> Array:
    found = table.at[_own_rows(tokens, table.shape[0])].get(mode="fill", fill_value=0)
    found = jax.lax.all_to_all(found, RULES["embed"], split_axis=0, concat_axis=3, tiled=True)[0]
    return jax.lax.psum(found, RULES["vocab"])


def _look_up_forward(table: Array, tokens: Array, mesh: DeviceMesh | None) -> tuple[Array, tuple[Array, Array]]:
    return look_up(table, tokens, mesh), (table, tokens)


def _look_up_backward(mesh: DeviceMesh | None, saved: tuple[Array, Array], ct: Array) -> tuple[Array, None]:
    table, tokens = saved
    if mesh is None:
        return jnp.zeros(table.shape, jnp.float32).at[tokens].add(ct.astype(jnp.float32)).astype(table.dtype), None

    def part(table: Array, tokens: Array, ct: Array) -> Array:
        columns = jax.lax.all_to_all(ct[None], RULES["embed"], split_axis=3, concat_axis=0, tiled=True)
        summed = jnp.zeros(table.shape, jnp.float32)
        summed = summed.at[_own_rows(tokens, table.shape[0])].add(columns.astype(jnp.float32), mode="drop")
        return jax.lax.psum(summed, "data").astype(table.dtype)

    axes = ("vocab", "embed"), ("rows", "length"), ("rows", "length", None)
    return mesh.per_device(part, axes, ("vocab", "embed"))(table, tokens, ct), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float, plus_one: bool = False) -> Float[Array, "... D"]:
    """x / rms(x) * scale, with the mean taken in float32 (Zhang and Sennrich 2019, eq. 4).

    With `plus_one` the stored weight is the scale's distance from one, and the product too is taken in float32 (Gemma).
    """
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if plus_one:
        return (normed * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * scale


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}
