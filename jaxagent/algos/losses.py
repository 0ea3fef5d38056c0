"""Per-token losses: how the ratio is taken, how far it may go, what a stale or mismatched sampler costs.

Aggregation is two numbers per token, `weight` and `share`: the loss of a step is sum(weight * loss) / sum(share), divided once
after all micro-batches and hosts are in, so that one batch, four micro-batches and two hosts give the same number.

All arrays are [B, T], aligned to the token. A sequence is what has one number in `segment`, and of it the sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Tokens = Float[Array, "B T"]
Mask = Bool[Array, "B T"]
Segments = Int[Array, "B T"]

MAX_LOG_RATIO = 20.0  # before the exponential, as in verl


def _exp(log_ratio: Tokens) -> Tokens:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_sum(x: Tokens, segment: Segments) -> Tokens:
    """The sum of x over each token's own sequence. Linear in memory: no row holds more sequences than tokens."""
    rows, slots = jnp.arange(x.shape[0])[:, None], jnp.zeros((x.shape[0], x.shape[1] + 1), x.dtype)
    return slots.at[rows, segment].add(x)[rows, segment]


def sequence_mean(x: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """The mean of x over the sampled tokens of each token's own sequence; 0 where none was sampled."""
    count = sequence_sum(mask.astype(x.dtype), segment)
    return sequence_sum(jnp.where(mask, x, 0.0), segment) / jnp.maximum(count, 1.0)


# ---------------------------------------------------------------------- ratios


def token_ratio(new: Tokens, old: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """u_t = pi(t) / pi_old(t), one ratio per token (PPO, arXiv:1707.06347, eq. 6); 1 where the mask is false."""
    return _exp(jnp.where(mask, new - old, 0.0))


def sequence_ratio(new: Tokens, old: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """s_i = exp(mean_t log u_t) at every token of the sequence (GSPO, arXiv:2507.18071).

    Every token's gradient is the mean over the sequence: advantages that differ within it are averaged.
    """
    return _exp(sequence_mean(new - old, mask, segment))


def sequence_token_ratio(new: Tokens, old: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """sg(s_i) pi / sg(pi): the value of GSPO's ratio with the gradient of each token (GSPO-token, arXiv:2507.18071, eq. 14).

    With an advantage that is constant over the sequence this is GSPO; advantages of turns and tokens keep their own.
    """
    log_ratio = jnp.where(mask, new - old, 0.0)
    held = jax.lax.stop_gradient(log_ratio)
    mean = jnp.clip(sequence_mean(held, mask, segment), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(mean + log_ratio - held)


RATIO: dict[str, Callable[[Tokens, Tokens, Mask, Segments], Tokens]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}


# ---------------------------------------------------------------------- bounds


def clipped(ratio: Tokens, advantage: Tokens, new: Tokens, low: float, high: float) -> Tokens:
    """-min(u A, clip(u, 1 - low, 1 + high) A) (PPO, eq. 7; low < high is DAPO's clip-higher, arXiv:2503.14476, eq. 10)."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def capped(ratio: Tokens, advantage: Tokens, new: Tokens, low: float, high: float) -> Tokens:
    """-sg(clip(u, 1 - low, 1 + high)) A log pi (CISPO, arXiv:2506.13585, eq. 4): no token loses its gradient."""
    return -jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high)) * advantage * new


def unbounded(ratio: Tokens, advantage: Tokens, new: Tokens, low: float, high: float) -> Tokens:
    """-u A: the policy gradient as it is; at u = 1 its gradient is that of -A log pi."""
    return -ratio * advantage


BOUND: dict[str, Callable[[Tokens, Tokens, Tokens, float, float], Tokens]] = {
    "unbounded": unbounded,
    "clipped": clipped,
    "capped": capped,
}


def dual_clipped(loss: Tokens, advantage: Tokens, cap: float) -> Tokens:
    """min(loss, -c A) where A < 0: how much one bad token may cost (dual clip, arXiv:1912.09729; c = 3)."""
    return jnp.where(advantage < 0, jnp.minimum(loss, -cap * advantage), loss)


# ---------------------------------------------------------------------- a stale or mismatched sampler

Bounds = tuple[float, float]


def importance_weight(kind: str, bounds: Bounds, log_rho: Tokens, mask: Mask, segment: Segments) -> Tokens:
    """The constant weight of every token for rho_t = pi_old(t) / pi_behaviour(t), with the bounds (low, high).

    none: 1. token: rho_t, decoupled PPO (arXiv:2110.00641). token_truncated: min(rho_t, high), TIS. token_masked: rho_t
    where low <= rho_t <= high, else 0, MIS or IcePop. sequence_truncated and sequence_masked: the same of the product over
    the sequence. What is masked stays in the denominator: otherwise the rest would weigh more.
    """
    log_rho = jax.lax.stop_gradient(jnp.where(mask, log_rho, 0.0))
    if kind == "none":
        return jnp.ones_like(log_rho)
    low, high = bounds
    rho = _exp(sequence_sum(log_rho, segment) if kind.startswith("sequence") else log_rho)
    if kind.endswith("truncated"):
        return jnp.minimum(rho, high)
    return jnp.where((low <= rho) & (rho <= high), rho, 0.0) if kind.endswith("masked") else rho


def kept_sequences(
    kind: str, bounds: Bounds, logprobs: tuple[Tokens, Tokens, Tokens], advantage: Tokens, mask: Mask, segment: Segments
) -> Mask:
    """Which tokens' sequences are near enough to what sampled them. A filter, no weight; independent of their length.

    none: all. geometric: low <= exp(mean log rho) <= high. k2, k3: the mean of log^2(rho) / 2, or of rho - 1 - log rho, is at
    most high. unlikely_negative: drops tokens with A < 0 of sequences with mean(log pi_behaviour - log pi) > high
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Args:
        logprobs: of the policy now, at the start of the step, and of the sampler.
    """
    if kind == "none":
        return jnp.ones_like(mask)
    new, old, behaviour = (jax.lax.stop_gradient(x) for x in logprobs)
    log_rho = jnp.where(mask, old - behaviour, 0.0)
    if kind == "geometric":
        mean = _exp(sequence_mean(log_rho, mask, segment))
        return (bounds[0] <= mean) & (mean <= bounds[1])
    if kind == "unlikely_negative":
        return (advantage >= 0) | (sequence_mean(behaviour - new, mask, segment) <= bounds[1])
    return sequence_mean(kl_estimate(kind, -log_rho), mask, segment) <= bounds[1]


def kl_estimate(kind: str, d: Tokens) -> Tokens:
    """An estimate of KL(pi, ref) from d = log pi - log ref of a sample of pi (Schulman, "Approximating KL divergence").

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. Differentiated as a loss, k1 is pure noise, k2 has the gradient of the KL, k3
    that of KL(ref, pi).
    """
    if kind == "k1":
        return d
    return d**2 / 2 if kind == "k2" else _exp(-d) + d - 1


def value_loss(value: Tokens, old: Tokens, target: Tokens, clip: float) -> Tokens:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 (the clipped value loss of PPO's reference code).

    Args:
        clip: 0 is off.
    """
    loss = (value - target) ** 2
    if clip:
        loss = jnp.maximum(loss, (old + jnp.clip(value - old, -clip, clip) - target) ** 2)
    return loss / 2


# ---------------------------------------------------------------------- averaging


def aggregation(mode: str, lengths: Sequence[int], constant: float) -> list[tuple[float, float]]:
    """(weight, share) of a token of each turn of one rollout, from the turns' numbers of sampled tokens.

    token_mean: sum of all losses / number of tokens (DAPO). sequence_mean: mean over rollouts of the mean over tokens (GRPO).
    sequence_sum: mean over rollouts of the sum over tokens (REINFORCE). sequence_sum_norm: the same over a constant (Dr.GRPO).
    turn_mean: mean over all turns of the mean over the turn's tokens, one vote per decision.
    """
    whole = 1.0 / max(sum(lengths), 1)
    if mode == "turn_mean":
        return [(1.0 / max(n, 1), 1.0 / max(n, 1)) for n in lengths]
    pair = {
        "token_mean": (1.0, 1.0),
        "sequence_mean": (whole, whole),
        "sequence_sum": (1.0, whole),
        "sequence_sum_norm": (1.0 / constant, whole),
    }[mode]
    return [pair] * len(lengths)
