"""Advantages of the rollouts of a group, without a critic. Arrays are [P, G]: prompts by rollouts.

`valid` marks the rollouts that count: an episode that the infrastructure broke leaves the mean, the deviation and the loss.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Rewards = Float[Array, "P G"]
Valid = Bool[Array, "P G"]

STD_EPS = 1e-6  # verl's; TRL uses 1e-4
MIN_STD = 1e-6  # relative to rewards above 1; rewards that differ by float noise only teach nothing


def group_mean(reward_PG: Rewards, valid_PG: Valid) -> Float[Array, "P 1"]:
    count = jnp.maximum(valid_PG.sum(1, keepdims=True), 1)
    return jnp.where(valid_PG, reward_PG, 0.0).sum(1, keepdims=True) / count


def group_std(reward_PG: Rewards, valid_PG: Valid) -> Float[Array, "P 1"]:
    """The unbiased deviation (ddof 1), as in verl and TRL; 0 for groups of one."""
    centred = jnp.where(valid_PG, reward_PG - group_mean(reward_PG, valid_PG), 0.0)
    count = jnp.maximum(valid_PG.sum(1, keepdims=True) - 1, 1)
    return jnp.sqrt((centred**2).sum(1, keepdims=True) / count)


def reinforce(reward_PG: Rewards, valid_PG: Valid) -> Rewards:
    """A = R (Williams 1992): unbiased, without a baseline."""
    return jnp.where(valid_PG, reward_PG, 0.0)


def centred(reward_PG: Rewards, valid_PG: Valid) -> Rewards:
    """A_i = R_i - mean(R) (Dr.GRPO, arXiv:2503.20783, section 3.1)."""
    return jnp.where(valid_PG, reward_PG - group_mean(reward_PG, valid_PG), 0.0)


def normalised(reward_PG: Rewards, valid_PG: Valid) -> Rewards:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) (GRPO, arXiv:2402.03300, section 4.1.2), with the unbiased deviation.

    A group whose rewards are equal up to float noise gets zeros, not noise divided by noise.
    """
    std = group_std(reward_PG, valid_PG)
    scale = jnp.abs(jnp.where(valid_PG, reward_PG, 0.0)).max(1, keepdims=True, initial=1.0)
    return jnp.where(std > MIN_STD * scale, centred(reward_PG, valid_PG) / (std + STD_EPS), 0.0)


def leave_one_out(reward_PG: Rewards, valid_PG: Valid) -> Rewards:
    """A_i = R_i - mean of the others (RLOO, arXiv:2402.14740, eq. 2) = G / (G - 1) times `centred`."""
    count = valid_PG.sum(1, keepdims=True)
    scale = count / jnp.maximum(count - 1, 1)
    return jnp.where(count > 1, centred(reward_PG, valid_PG) * scale, 0.0)
