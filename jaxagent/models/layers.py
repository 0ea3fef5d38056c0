"""The pieces every decoder is made of: weights with logical axes, RMS norm, rotary embedding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], scale: float) -> nnx.Param:
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


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """x / rms(x) * scale, with the mean taken in float32 (Zhang and Sennrich 2019, eq. 4)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


def rotary(pos_BT: Int[Array, "B T"], width: int, theta: float) -> tuple[Float[Array, "B T 1 H2"], Float[Array, "B T 1 H2"]]:
    """Cosine and sine of the rotation at each position (Su et al. 2021); the halves rotate, as in transformers."""
    half = width // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = pos_BT[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: Float[Array, "B T N H"], cos: Array, sin: Array) -> Float[Array, "B T N H"]:
    """Rotates the two halves of each head."""
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
