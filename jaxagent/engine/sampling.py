"""Draws one token per row by inverse CDF: one uniform per row, never a random number per vocabulary entry.

The uniform for the token at position p of a trajectory is folded from the trajectory's key and p, so a draw depends on
neither the neighbours nor the schedule. Log-probs are those of the distribution that was sampled from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxagent.engine.controls import Grammars, Rows, adjust, drop_unlikely, effective_temperature

BLOCK = 128  # vocabulary entries per block of the two-level search


def uniforms(key_C2: UInt32[Array, "C 2"], pos_CN: Int[Array, "C N"]) -> Float[Array, "C N"]:
    """One uniform in (0, 1] per row and position, a function of the row's key and the position only."""

    def draw(key: Array, pos: Array) -> Array:
        return 1.0 - jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), pos))

    return jax.vmap(jax.vmap(draw, (None, 0)))(key_C2, pos_CN)


def threshold(score_CV: Float[Array, "C V"], weight_CV: Float[Array, "C V"], want_C: Float[Array, "C"]) -> Array:
    """The largest s such that the entries with score >= s carry at least the wanted weight, for scores in (0, 1].

    Found bit by bit: the order of positive floats is that of their bit patterns, so 30 passes give the exact value
    without a sort.
    """
    bits = jax.lax.bitcast_convert_type(score_CV, jnp.int32)

    def step(i: Array, low: Array) -> Array:
        trial = low | (1 << (29 - i))
        enough = jnp.sum(jnp.where(bits >= trial[:, None], weight_CV, 0.0), axis=-1) >= want_C
        return jnp.where(enough, trial, low)

    found = jax.lax.fori_loop(0, 30, step, jnp.zeros(score_CV.shape[0], jnp.int32))
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def restrict(z_CV: Float[Array, "C V"], top_k_C: Int[Array, "C"], top_p_C: Float[Array, "C"]) -> Float[Array, "C V"]:
    """Sends the entries outside top-k, and then outside the nucleus of what is left, to -inf; ties are kept."""
    score = jnp.exp(z_CV - z_CV.max(-1, keepdims=True))
    k = jnp.where(top_k_C > 0, top_k_C, z_CV.shape[-1]).astype(jnp.float32)
    # The nucleus of top_p = 1 is everything: float sums must not cut its tail.
    within = top_p_C < 1

    def drop_beyond_k(score: Array) -> Array:
        return jnp.where(score >= threshold(score, jnp.ones_like(score), k)[:, None], score, 0.0)

    def nucleus(score: Array) -> Array:
        return jnp.where(within, threshold(score, score, jnp.where(within, top_p_C * score.sum(-1), 0.0)), 0.0)

    score = jax.lax.cond(jnp.any(top_k_C > 0), drop_beyond_k, lambda score: score, score)
    cut = jax.lax.cond(jnp.any(within), nucleus, lambda score: jnp.zeros_like(top_p_C), score)
    return jnp.where((score > 0) & (score >= cut[:, None]), z_CV, -jnp.inf)


def draw_inverse_cdf(z_CV: Float[Array, "C V"], u_C: Float[Array, "C"]) -> tuple[Int[Array, "C"], Float[Array, "C"]]:
    """The token whose interval of the cumulative distribution holds u, and its log-prob. Never a token of probability 0."""
    rows, vocab = z_CV.shape
    z = jnp.pad(z_CV, ((0, 0), (0, -vocab % BLOCK)), constant_values=-jnp.inf)
    top = z.max(-1, keepdims=True)
    mass = jnp.exp(z - top).reshape(rows, -1, BLOCK)
    block_cdf = jnp.cumsum(mass.sum(-1), axis=-1)
    total = block_cdf[:, -1]
    target = u_C * total
    block = jnp.minimum(jnp.sum(block_cdf < target[:, None], -1), block_cdf.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(block_cdf, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    inside = jnp.take_along_axis(mass, block[:, None, None], 1)[:, 0]
    within = jnp.sum(before[:, None] + jnp.cumsum(inside, -1) < target[:, None], -1)
    within = jnp.minimum(within, BLOCK - 1)
    # Rounding may leave the search on an entry without mass; the block's likeliest entry is then within an ulp of right.
    empty = jnp.take_along_axis(inside, within[:, None], 1)[:, 0] <= 0
    within = jnp.where(empty, jnp.argmax(inside, -1), within)
    token = block * BLOCK + within
    logprob = jnp.take_along_axis(z, token[:, None], 1)[:, 0] - top[:, 0] - jnp.log(total)
    return token.astype(jnp.int32), logprob


def scores(logits_CV: Float[Array, "C V"], rows: Rows, grammars: Grammars | None = None) -> Float[Array, "C V"]:
    """What is drawn from, as unnormalised log-probs: `types.Sampling` has the formula. Every setting is data.

    Rows that set nothing but a temperature get logits / temperature bit for bit, and where all rows are such the rest is not
    computed.
    """
    z_CV = _cooled(logits_CV, rows)
    truncated = jnp.any(_truncates(rows))
    if "controlled" not in rows:
        return jax.lax.cond(truncated, lambda z: restrict(z, rows["top_k"], rows["top_p"]), lambda z: z, z_CV)
    controlled = jnp.any(rows["controlled"])

    def make(z: Array) -> Array:
        z = jax.lax.cond(controlled, lambda z: adjust(z, rows, grammars), lambda z: z, z)
        z = jax.lax.cond(truncated, lambda z: restrict(z, rows["top_k"], rows["top_p"]), lambda z: z, z)
        return jax.lax.cond(controlled, lambda z: drop_unlikely(z, rows), lambda z: z, z)

    return jax.lax.cond(controlled | truncated, make, lambda z: z, z_CV)


def _cooled(logits_CV: Array, rows: Rows) -> Float[Array, "C V"]:
    return logits_CV / effective_temperature(rows["temperature"])[:, None]


def _truncates(rows: Rows) -> Bool[Array, "C"]:
    return (rows["top_k"] > 0) | (rows["top_p"] < 1)


def choose(
    z_CV: Float[Array, "C V"], u_C: Float[Array, "C"], temperature_C: Float[Array, "C"]
) -> tuple[Int[Array, "C"], Float[Array, "C"]]:
    """One token and its log-prob per row. Temperature 0 takes the likeliest token, log-prob 0."""
    greedy = temperature_C <= 0
    token, logprob = draw_inverse_cdf(z_CV, u_C)

    def take_likeliest(token: Array, logprob: Array) -> tuple[Array, Array]:
        likeliest = jnp.argmax(z_CV, -1).astype(jnp.int32)
        return jnp.where(greedy, likeliest, token), jnp.where(greedy, 0.0, logprob)

    return jax.lax.cond(jnp.any(greedy), take_likeliest, lambda token, logprob: (token, logprob), token, logprob)


def likeliest(
    logits_CV: Float[Array, "C V"], rows: Rows, grammars: Grammars | None, count: int
) -> tuple[Int[Array, "C n"], Float[Array, "C n"]]:
    """The `count` likeliest tokens and their log-probs, best first, where a row in progress asks for them; else zeros.

    Of a greedy row: those at temperature 1.
    """

    def find(logits: Array) -> tuple[Array, Array]:
        z = scores(logits, rows, grammars)
        value, token = jax.lax.top_k(z, count)
        return token.astype(jnp.int32), value - jax.nn.logsumexp(z, axis=-1, keepdims=True)

    shape = logits_CV.shape[0], count
    none = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return jax.lax.cond(jnp.any(rows["top"] & rows["controlled"] & rows["live"]), find, lambda logits: none, logits_CV)


def sample(
    logits_CV: Float[Array, "C V"], u_C: Float[Array, "C"], rows: Rows, grammars: Grammars | None = None
) -> tuple[Int[Array, "C"], Float[Array, "C"]]:
    """One token and its log-prob per row.

    Where no row sets more than a temperature the draw reads the logits as they are: what leaves a branch is small, since an
    array over the vocabulary that did would be written once more, and on a GPU that takes as long as reading it.
    """
    settings = (rows["temperature"] <= 0) | _truncates(rows)
    if "controlled" in rows:
        settings |= rows["controlled"]
    return jax.lax.cond(
        jnp.any(settings),
        lambda logits: choose(scores(logits, rows, grammars), u_C, rows["temperature"]),
        lambda logits: draw_inverse_cdf(_cooled(logits, rows), u_C),
        logits_CV,
    )
