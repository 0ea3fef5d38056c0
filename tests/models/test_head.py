"""Chunked log-probs and entropies against the plain log-softmax, values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.head import token_logprobs

T, D, V = 11, 6, 23


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden, table = rng.standard_normal((T, D), np.float32), rng.standard_normal((V, D), np.float32)
    return jnp.asarray(hidden), jnp.asarray(table), jnp.asarray(rng.integers(0, V, T))


def plain(hidden: jax.Array, table: jax.Array, target: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    log_p = jax.nn.log_softmax(hidden @ table.T / temperature)
    return log_p[jnp.arange(target.shape[0]), target], -jnp.sum(jnp.exp(log_p) * log_p, -1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 32])  # one by one, with a remainder, exactly all, more than there are
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_equal_the_plain_log_softmax(chunk: int, temperature: float) -> None:
    hidden, table, target = inputs()
    for ours, theirs in zip(
        token_logprobs(hidden, table, target, temperature, chunk), plain(hidden, table, target, temperature), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 32])
@pytest.mark.parametrize("part", [0, 1], ids=["logprob", "entropy"])
def test_the_custom_backward_pass_equals_autodiff_of_the_plain_formula(chunk: int, part: int) -> None:
    hidden, table, target = inputs()
    ct = jnp.asarray(np.random.default_rng(1).standard_normal(T, np.float32))

    def ours(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.sum(token_logprobs(hidden, table, target, 0.7, chunk)[part] * ct)

    def theirs(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.sum(plain(hidden, table, target, 0.7)[part] * ct)

    got, want = (jax.jit(jax.grad(f, (0, 1)))(hidden, table) for f in (ours, theirs))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5)


def test_the_logprobs_of_all_targets_are_a_distribution() -> None:
    hidden, table, _ = inputs()
    everything = jnp.arange(V)
    one = jnp.broadcast_to(hidden[:1], (V, D))
    logprob, entropy = token_logprobs(one, table, everything, 1.0, 8)
    np.testing.assert_allclose(jnp.exp(logprob).sum(), 1.0, atol=1e-5)
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(logprob) * logprob), atol=1e-5)


def test_bfloat16_weights_get_bfloat16_gradients_and_float32_logprobs() -> None:
    hidden, table, target = inputs()
    narrow = hidden.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    (logprob, entropy), back = jax.vjp(lambda h, w: token_logprobs(h, w, target, 1.0, 4), *narrow)
    grads = back((jnp.ones_like(logprob), jnp.zeros_like(entropy)))
    assert logprob.dtype == entropy.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_allclose(logprob, plain(hidden, table, target, 1.0)[0], atol=0.1)
