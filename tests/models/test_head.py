"""Chunked log-probs and entropies against the plain log-softmax, values and gradients, on one device and on eight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.attention import soft_cap
from jaxagent.models.head import token_logprobs
from jaxagent.sharding import DeviceMesh

B, T, D, V = 4, 6, 8, 24
MESHES = {
    "fsdp": {"data": 1, "fsdp": 4},
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"data": 1, "tensor": 8},
    "expert x context x tensor": {"data": 1, "expert": 2, "context": 2, "tensor": 2},
}


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden, table = rng.standard_normal((B, T, D), np.float32), rng.standard_normal((V, D), np.float32)
    return jnp.asarray(hidden), jnp.asarray(table), jnp.asarray(rng.integers(0, V, (B, T)))


def plain(
    hidden: jax.Array, table: jax.Array, target: jax.Array, temperature: float, softcap: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    log_p = jax.nn.log_softmax(soft_cap(hidden @ table.T, softcap) / temperature)
    return jnp.take_along_axis(log_p, target[..., None], -1)[..., 0], -jnp.sum(jnp.exp(log_p) * log_p, -1)


@pytest.mark.parametrize("chunk", [1, 5, 24, 32])  # one by one, with a remainder, exactly all, more than there are
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_equal_the_plain_log_softmax(chunk: int, temperature: float) -> None:
    hidden, table, target = inputs()
    for ours, theirs in zip(
        token_logprobs(hidden, table, target, temperature, chunk), plain(hidden, table, target, temperature), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_entropy_of_one_half_three_and_two_tenths() -> None:
    logits = jnp.log(jnp.asarray([[0.5], [0.3], [0.2]]))
    logprob, entropy = token_logprobs(jnp.ones((1, 1, 1)), logits, jnp.asarray([[1]]), 1.0, 4)
    assert (float(entropy[0, 0]), float(logprob[0, 0])) == pytest.approx((1.029653, np.log(0.3)), abs=1e-6)


def assert_gradients_are_plain(chunk: int, parts: tuple[float, float], softcap: float, mesh: DeviceMesh | None) -> None:
    hidden, table, target = inputs()
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((B, T), np.float32))

    def weighted(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.sum((parts[0] * each[0] + parts[1] * each[1]) * ct)

    def ours(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return weighted(token_logprobs(hidden, table, target, 0.7, chunk, softcap, mesh))

    def theirs(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return weighted(plain(hidden, table, target, 0.7, softcap))

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, table) for f in (ours, theirs))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-5, rtol=1e-5), got, want)


@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0)], ids=["logprob", "entropy"])
def test_the_custom_backward_pass_equals_autodiff_of_the_plain_formula(chunk: int, parts: tuple[float, float]) -> None:
    assert_gradients_are_plain(chunk, parts, 0.0, None)


@pytest.mark.parametrize("asked", MESHES.values(), ids=list(MESHES))
def test_a_mesh_gives_the_values_and_gradients_of_the_plain_formula(asked: dict[str, int]) -> None:
    assert_gradients_are_plain(5, (1.0, 0.3), 3.0, DeviceMesh.build(**asked))


def test_no_device_ever_holds_more_logits_than_a_chunk_of_its_range() -> None:
    hidden, table, target = (jnp.tile(x, (1, 8, 1)[: x.ndim]) if x.shape[0] == B else x for x in inputs())
    mesh = DeviceMesh.build(2, 2, 2)
    placed = [
        mesh.place(x, axes) for x, axes in ((hidden, ("rows", "length")), (table, ("vocab", "embed")), (target, ("rows",)))
    ]

    def loss(hidden: jax.Array, table: jax.Array, target: jax.Array) -> jax.Array:
        return sum(x.sum() for x in token_logprobs(hidden, table, target, 1.0, 5, 0.0, mesh))

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*placed).compile().as_text()
    assert f"f32[5,{V // 2}]" in text  # a chunk of five of a device's tokens, its half of the vocabulary
    assert f",{V}]" not in text


def test_the_logprobs_of_all_targets_are_a_distribution() -> None:
    hidden, table, _ = inputs()
    everything = jnp.arange(V)[None]
    one = jnp.broadcast_to(hidden[0, 0], (1, V, D))
    logprob, entropy = token_logprobs(one, table, everything, 1.0, 8)
    np.testing.assert_allclose(jnp.exp(logprob).sum(), 1.0, atol=1e-5)
    np.testing.assert_allclose(entropy[0], -jnp.sum(jnp.exp(logprob) * logprob), atol=1e-5)


def test_bfloat16_weights_get_bfloat16_gradients_and_float32_logprobs() -> None:
    hidden, table, target = inputs()
    narrow = hidden.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    (logprob, entropy), back = jax.vjp(lambda h, w: token_logprobs(h, w, target, 1.0, 4), *narrow)
    grads = back((jnp.ones_like(logprob), jnp.zeros_like(entropy)))
    assert logprob.dtype == entropy.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_allclose(logprob, plain(hidden, table, target, 1.0)[0], atol=0.1)
