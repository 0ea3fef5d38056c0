"""The pieces every decoder is made of: weights with logical axes, projections, RMS norm, activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


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
