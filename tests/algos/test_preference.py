"""Preferences: the loss by hand, and its pull against autodiff."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algos.preference import dpo


def test_the_loss_of_one_pair_by_hand() -> None:
    loss, margin, pull = dpo(jnp.asarray([0.4]), jnp.asarray([-0.2]), 0.1)
    assert margin[0] == pytest.approx(0.06, abs=1e-7)
    assert loss[0] == pytest.approx(0.663597, abs=1e-6)
    assert pull[0] == pytest.approx(0.1 / (1 + np.exp(0.06)), abs=1e-7)


def test_a_pair_on_which_the_policy_has_not_moved_costs_log_two_and_pulls_by_half_of_beta() -> None:
    loss, margin, pull = dpo(jnp.zeros(3), jnp.zeros(3), 0.5)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(pull, 0.25, rtol=1e-6)
    assert not margin.any()


def test_the_pull_is_the_gradient_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    chosen, rejected = (jnp.asarray(rng.normal(0, 20, 50), jnp.float32) for _ in range(2))
    grads = jax.grad(lambda c, r: dpo(c, r, 0.3)[0].sum(), argnums=(0, 1))(chosen, rejected)
    pull = dpo(chosen, rejected, 0.3)[2]
    np.testing.assert_allclose(grads[0], -pull, atol=1e-6)
    np.testing.assert_allclose(grads[1], pull, atol=1e-6)


def test_the_loss_of_a_hopeless_pair_is_finite() -> None:
    loss, _, pull = dpo(jnp.asarray([-1e4, 1e4]), jnp.asarray([1e4, -1e4]), 1.0)
    np.testing.assert_allclose(loss, [2e4, 0.0])
    np.testing.assert_allclose(pull, [1.0, 0.0])
