"""The pieces of a decoder against their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.layers import project, rms_norm
from jaxagent.models.rope import rotary, rotate


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_rms_norm_divides_by_the_root_mean_square_and_scales() -> None:
    x, scale = normal(0, 3, 8), normal(1, 8)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-6), want, rtol=1e-5)


def test_rms_norm_of_bfloat16_takes_its_mean_in_float32() -> None:
    x = jnp.full((1, 4096), 1.0078125, jnp.bfloat16)  # squares summed in bfloat16 would stop growing at 256
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4096, jnp.bfloat16), 0.0).astype(jnp.float32), 1.0, atol=0.01)


def test_rotation_turns_the_pairs_of_the_two_halves_by_position_times_frequency() -> None:
    x, theta = normal(0, 1, 1, 1, 4), 100.0
    cos, sin = rotary(jnp.asarray([[3]]), 4, theta)
    a, b, c, d = x[0, 0, 0]
    fast, slow = 3.0, 3.0 * theta**-0.5
    want = [
        a * np.cos(fast) - c * np.sin(fast),
        b * np.cos(slow) - d * np.sin(slow),
        c * np.cos(fast) + a * np.sin(fast),
        d * np.cos(slow) + b * np.sin(slow),
    ]
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin)[0, 0, 0], want, rtol=1e-5)


def test_position_zero_is_not_rotated() -> None:
    x = jnp.asarray(normal(0, 1, 1, 2, 8))
    np.testing.assert_array_equal(rotate(x, *rotary(jnp.asarray([[0]]), 8, 1e4)), x)


def test_scores_of_rotated_heads_depend_on_the_distance_only() -> None:
    q, k = jnp.asarray(normal(0, 1, 1, 1, 8)), jnp.asarray(normal(1, 1, 1, 1, 8))

    def score(at_q: int, at_k: int) -> float:
        turned_q, turned_k = (rotate(x, *rotary(jnp.asarray([[at]]), 8, 50.0)) for x, at in ((q, at_q), (k, at_k)))
        return float(jnp.sum(turned_q * turned_k))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize(
    ("equation", "x_shape", "kernel_shape"),
    [("BTD,DNH->BTNH", (2, 3, 4), (4, 2, 6)), ("BTNH,NHD->BTD", (2, 3, 2, 6), (2, 6, 4)), ("BTD,DF->BTF", (2, 3, 4), (4, 5))],
)
def test_the_gradients_of_project_are_those_of_einsum(
    equation: str, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]
) -> None:
    x, kernel = jnp.asarray(normal(0, *x_shape)), jnp.asarray(normal(1, *kernel_shape))
    out, back = jax.vjp(lambda x, kernel: project(equation, x, kernel), x, kernel)
    want, wanted = jax.vjp(lambda x, kernel: jnp.einsum(equation, x, kernel), x, kernel)
    ct = jnp.asarray(normal(2, *out.shape))
    np.testing.assert_array_equal(out, want)
    for g, w in zip(back(ct), wanted(ct), strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5)
