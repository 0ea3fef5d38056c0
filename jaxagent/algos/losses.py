"""Per-token losses: how the ratio is taken and how far it may go. Aggregation is two numbers per token, `weight` and `share`.

The loss of a step is sum(weight * loss) / sum(share), divided once after all micro-batches and hosts are in, so that one
batch, four micro-batches and two hosts give the same number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Tokens = Float[Array, "B T"]

MAX_LOG_RATIO = 20.0  # before the exponential, as in verl


def token_ratio(new: Tokens, old: Tokens, mask: Bool[Array, "B T"], segment: Int[Array, "B T"]) -> Tokens:
    """u_t = pi(t) / pi_old(t), one ratio per token (PPO, arXiv:1707.06347, eq. 6); 1 where the mask is false."""
    return jnp.exp(jnp.clip(jnp.where(mask, new - old, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_ratio(new: Tokens, old: Tokens, mask: Bool[Array, "B T"], segment: Int[Array, "B T"]) -> Tokens:
    """s_i = exp(mean_t log u_t) with the gradient of each token: GSPO-token (arXiv:2507.18071, eq. 14).

    With an advantage that is constant over the sequence this is GSPO. Only sampled tokens count in the mean.
    """
    log_ratio = jnp.where(mask, new - old, 0.0)
    same = (segment[:, :, None] == segment[:, None, :]).astype(new.dtype)
    total = jnp.einsum("BTS,BS->BT", same, log_ratio)
    count = jnp.einsum("BTS,BS->BT", same, mask.astype(new.dtype))
    mean = jnp.clip(total / jnp.maximum(count, 1.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(jax.lax.stop_gradient(mean) + log_ratio - jax.lax.stop_gradient(log_ratio))


def clipped(ratio: Tokens, advantage: Tokens, new: Tokens, low: float, high: float) -> Tokens:
    """-min(u A, clip(u, 1 - low, 1 + high) A) (PPO, eq. 7; low < high is DAPO's clip-higher, arXiv:2503.14476, eq. 10)."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def capped_weight(ratio: Tokens, advantage: Tokens, new: Tokens, low: float, high: float) -> Tokens:
    """-sg(clip(u, 1 - low, 1 + high)) A log pi (CISPO, arXiv:2506.13585, eq. 4): no token loses its gradient."""
    return -jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high)) * advantage * new


def unbounded(ratio: Tokens, advantage: Tokens, new: Tokens, low: float, high: float) -> Tokens:
    """-u A: the policy gradient as it is; at u = 1 its gradient is that of -A log pi."""
    return -ratio * advantage


def aggregation(mode: str, mask_rows: list[int], constant: float) -> tuple[list[float], list[float]]:
    """(weight, share) of the tokens of each rollout, from the rollouts' numbers of sampled tokens.

    token_mean: sum of all losses / number of tokens (DAPO). sequence_mean: mean over rollouts of the mean over tokens (GRPO).
    sequence_sum: mean over rollouts of the sum over tokens (REINFORCE). sequence_sum_norm: the same over a constant (Dr.GRPO).
    """
    lengths = [max(n, 1) for n in mask_rows]
    weight = {
        "token_mean": [1.0 for _ in lengths],
        "sequence_mean": [1.0 / n for n in lengths],
        "sequence_sum": [1.0 for _ in lengths],
        "sequence_sum_norm": [1.0 / constant for _ in lengths],
    }[mode]
    share = [1.0 for _ in lengths] if mode == "token_mean" else [1.0 / n for n in lengths]
    return weight, share
