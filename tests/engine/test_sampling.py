"""Draws against the distribution they promise: by chi-square, by the exact sets of top-k and top-p, by their log-probs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxagent.engine.sampling import draw_inverse_cdf, restrict, sample, uniforms
from jaxagent.engine.steps import new_rows

run, draw = jax.jit(sample), jax.jit(draw_inverse_cdf)


def logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return 2 * np.random.default_rng(seed).standard_normal((rows, vocab), np.float32)


def keys(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (rows, 2), np.uint32)


def settings(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "temperature": np.full(rows, temperature, np.float32),
        "top_k": np.full(rows, top_k, np.int32),
        "top_p": np.full(rows, top_p, np.float32),
    }


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z.astype(np.float64) - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kept(z: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The set that is sampled from, by sorting: what ties with the last one in is in."""
    inside = z >= np.sort(z)[::-1][top_k - 1] if top_k else np.ones(z.shape, bool)
    p = np.where(inside, softmax(z[None])[0], 0.0)
    if top_p < 1:
        values = np.unique(p)[::-1]
        enough = next(v for v in values if p[p >= v].sum() >= top_p * p.sum())
        inside &= p >= enough
    return inside


@pytest.mark.parametrize("vocab", [7, 128, 300])  # within a block of the search, exactly one, and several
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_many_draws_are_distributed_as_the_softmax(vocab: int, temperature: float) -> None:
    rows = 20_000
    one = logits(1, vocab)
    u = uniforms(keys(rows), np.full((rows, 1), 5, np.int32))[:, 0]
    token, _ = run(np.broadcast_to(one, (rows, vocab)), u, settings(rows, temperature))
    expected = rows * softmax(one / temperature)[0]
    observed = np.bincount(token, minlength=vocab)
    rare = expected < 5  # joined, for the test wants some in every class
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_a_uniform_is_a_function_of_key_and_position_alone() -> None:
    key, pos = keys(6), np.arange(12, dtype=np.int32).reshape(6, 2)
    together = np.asarray(uniforms(key, pos))
    np.testing.assert_array_equal(together[4:5], uniforms(key[4:5], pos[4:5]))
    np.testing.assert_array_equal(together[::-1], uniforms(key[::-1], pos[::-1]))
    assert len(np.unique(uniforms(np.tile(key[:1], (50, 1)), np.arange(50)[:, None]))) == 50
    assert len(np.unique(uniforms(keys(50), np.zeros((50, 1), np.int32)))) == 50
    assert np.all((together > 0) & (together <= 1))


@pytest.mark.parametrize("vocab", [7, 300])
def test_the_token_is_the_one_whose_interval_of_the_cumulative_distribution_holds_u(vocab: int) -> None:
    z, u = logits(500, vocab), np.random.default_rng(1).random(500).astype(np.float32)
    token = np.asarray(draw(jnp.asarray(z), jnp.asarray(u))[0])
    cdf, rows = np.cumsum(softmax(z), -1), np.arange(500)
    assert np.all(cdf[rows, token] >= u - 1e-5)
    assert np.all(np.where(token > 0, cdf[rows, token - 1], 0.0) <= u + 1e-5)


@pytest.mark.parametrize("u", [1e-38, 0.5, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    for vocab in (7, 300):
        for allowed in range(vocab):
            z = np.full((1, vocab), -np.inf, np.float32)
            z[0, allowed] = -3.0
            token, logprob = draw(jnp.asarray(z), jnp.asarray([u], jnp.float32))
            assert (int(token[0]), float(logprob[0])) == (allowed, 0.0)
            if allowed == 9:
                break  # the others are alike, and slow


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (0, 0.5), (0, 0.9), (0, 0.999), (4, 0.7), (40, 1.0)])
@pytest.mark.parametrize("coarse", [False, True], ids=["all different", "with ties"])
def test_the_restricted_set_is_exactly_that_of_sorting(top_k: int, top_p: float, coarse: bool) -> None:
    z = logits(64, 40)
    z = np.round(z) if coarse else z
    set_ = settings(64, top_k=top_k, top_p=top_p)
    restricted = np.asarray(jax.jit(restrict)(z, set_["top_k"], set_["top_p"]))
    for row, got in zip(z, restricted, strict=True):
        np.testing.assert_array_equal(np.isfinite(got), kept(row, top_k, top_p))
        np.testing.assert_array_equal(got[np.isfinite(got)], row[np.isfinite(got)])


def test_equal_logits_all_stay_in_top_1() -> None:
    z = jnp.asarray([[1.0, 2.0, 2.0, 0.0, 2.0]])
    restricted = restrict(z, jnp.asarray([1]), jnp.asarray([1.0], jnp.float32))
    np.testing.assert_array_equal(np.isfinite(restricted[0]), [False, True, True, False, True])


def test_a_tiny_nucleus_keeps_the_likeliest_token() -> None:
    restricted = restrict(jnp.asarray(logits(5, 40)), jnp.zeros(5, int), jnp.full(5, 1e-6))
    np.testing.assert_array_equal(np.isfinite(restricted).sum(-1), 1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 5, 1.0), (1.3, 6, 0.8)])
def test_the_logprob_is_that_of_the_distribution_that_was_sampled_from(temperature: float, top_k: int, top_p: float) -> None:
    z, u = logits(200, 300), np.random.default_rng(2).random(200).astype(np.float32)
    token, logprob = run(z, u, settings(200, temperature, top_k, top_p))
    for row, t, lp in zip(z / np.float32(temperature), np.asarray(token), np.asarray(logprob), strict=True):
        inside = kept(row, top_k, top_p)
        assert inside[t]
        p = np.where(inside, softmax(row[None])[0], 0.0)
        assert lp == pytest.approx(np.log(p[t] / p.sum()), abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token_with_logprob_zero() -> None:
    z = logits(50, 300)
    token, logprob = run(z, np.linspace(0.01, 1, 50, dtype=np.float32), settings(50, temperature=0.0))
    np.testing.assert_array_equal(token, z.argmax(-1))
    np.testing.assert_array_equal(logprob, 0.0)


def test_the_settings_of_a_row_do_not_change_a_bit_of_its_neighbours() -> None:
    z, u = logits(4, 40), np.asarray([0.2, 0.4, 0.6, 0.8], np.float32)
    plain = run(z, u, settings(4))
    others = settings(4)
    others["temperature"][1], others["top_k"][2], others["top_p"][3] = 0.0, 3, 0.5
    mixed = run(z, u, others)
    for a, b in zip(plain, mixed, strict=True):
        assert a[0] == b[0]
    assert mixed[0][1] == z[1].argmax()
    assert kept(z[2], 3, 1.0)[mixed[0][2]]
    assert kept(z[3], 0, 0.5)[mixed[0][3]]


def test_no_branch_of_a_draw_gives_an_array_over_the_vocabulary() -> None:
    rows = new_rows(4, 1)
    traced = jax.make_jaxpr(sample)(jnp.zeros((4, 512)), jnp.ones(4), rows)
    branches = [equation for equation in traced.eqns if equation.primitive.name == "cond"]
    assert branches and all(512 not in out.aval.shape for equation in branches for out in equation.outvars)
