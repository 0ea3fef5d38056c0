"""Advantages of rollouts, turns and tokens. Arrays are padded, [B] rollouts or [B, U] turns; nothing has a gradient.

numpy and not jax: batches are ragged, and every new shape would compile every operation anew.

Who is compared with whom is told by ids of any integers, never by places. `valid` marks what counts: an episode that the
infrastructure broke leaves the mean, the deviation and the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Values = Float[np.ndarray, "*shape"]
Ids = Int[np.ndarray, "*shape"]
Valid = Bool[np.ndarray, "*shape"]
Compare = Callable[[Values, Ids, Valid], Values]

STD_EPS = 1e-6  # verl's; TRL uses 1e-4
MIN_STD = 1e-6  # relative to rewards above 1; rewards that differ by float noise only teach nothing
WHITEN_EPS = 1e-8


class _Groups:
    """Sums over the members of everyone's group."""

    def __init__(self, group: Ids, valid: Valid):
        self.valid = valid
        self._place = np.unique(group, return_inverse=True)[1].reshape(-1)
        self.count = self.sum(np.ones(group.shape))

    def sum(self, x: Values) -> Values:
        kept = np.where(self.valid, x, 0.0).astype(np.float64).reshape(-1)
        return np.bincount(self._place, kept)[self._place].reshape(x.shape) if x.size else kept.reshape(x.shape)

    def mean(self, x: Values) -> Values:
        return self.sum(x) / np.maximum(self.count, 1)

    def max(self, x: Values) -> Values:
        kept = np.where(self.valid, x, -np.inf).reshape(-1)
        most = np.full(self._place.max(initial=-1) + 1, -np.inf)
        np.maximum.at(most, self._place, kept)
        return most[self._place].reshape(x.shape)

    def std(self, x: Values) -> Values:
        """The unbiased deviation (ddof 1), as in verl and TRL; 0 for groups of one."""
        return np.sqrt(self.sum((x - self.mean(x)) ** 2) / np.maximum(self.count - 1, 1))


def _kept(x: Values, keep: Valid) -> Values:
    return np.where(keep, x, 0.0).astype(np.float32)


def plain(x: Values, group: Ids, valid: Valid) -> Values:
    """A = R (Williams 1992): unbiased, without a baseline."""
    return _kept(x, valid)


def centred(x: Values, group: Ids, valid: Valid) -> Values:
    """A_i = R_i - mean(R) (Dr.GRPO, arXiv:2503.20783, section 3.1)."""
    return _kept(x - _Groups(group, valid).mean(x), valid)


def normalised(x: Values, group: Ids, valid: Valid) -> Values:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) (GRPO, arXiv:2402.03300, section 4.1.2), with the unbiased deviation.

    A group whose rewards are equal up to float noise gets zeros, not noise divided by noise.
    """
    groups = _Groups(group, valid)
    std = groups.std(x)
    scale = np.maximum(groups.max(np.abs(x)), 1.0)
    return _kept((x - groups.mean(x)) / (std + STD_EPS), valid & (std > MIN_STD * scale))


def leave_one_out(x: Values, group: Ids, valid: Valid) -> Values:
    """A_i = R_i - mean of the others (RLOO, arXiv:2402.14740, eq. 2) = G / (G - 1) times `centred`; 0 without others."""
    groups = _Groups(group, valid)
    return _kept((x - groups.mean(x)) * groups.count / np.maximum(groups.count - 1, 1), valid & (groups.count > 1))


COMPARE: dict[str, Compare] = {
    "plain": plain,
    "centred": centred,
    "normalised": normalised,
    "leave_one_out": leave_one_out,
}


class Turns(NamedTuple):
    """The turns of a step's rollouts."""

    reward_BU: Float[np.ndarray, "B U"]
    mask_BU: Bool[np.ndarray, "B U"]  # false where a rollout has no such turn
    state_BU: Int[np.ndarray, "B U"]  # id of the environment state that the turn was taken in
    group_B: Int[np.ndarray, " B"]  # of rollouts with the same task, initial state and role
    valid_B: Bool[np.ndarray, " B"]


def returns_to_go(reward: Values, mask: Valid, gamma: float) -> Values:
    """G_k = r_k + gamma G_{k+1} along the last axis; what `mask` leaves out is passed through unchanged."""
    return gae(reward, np.zeros_like(reward), mask, gamma, 1.0)[0]


def gae(reward: Values, value: Values, mask: Valid, gamma: float, lam: float | Values) -> tuple[Values, Values]:
    """(A, A + V) with A_t = d_t + gamma lambda A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438, eq. 11 and 16).

    A lambda per step is that of the state which the step begins in: A_t = d_t + gamma lambda_{t+1} A_{t+1}.

    Along the last axis; after the last step V is 0. Where `mask` is false (tool tokens, padding) nothing happens: t + 1 is
    the next step that was taken, and both results are 0.
    """
    advantage, lam = np.zeros(reward.shape, np.float64), np.broadcast_to(lam, reward.shape)
    following, value_after = np.zeros(reward.shape[:-1]), np.zeros(reward.shape[:-1])
    for t in reversed(range(reward.shape[-1])):
        delta = reward[..., t] + gamma * value_after - value[..., t]
        advantage[..., t] = np.where(mask[..., t], delta + gamma * following, 0.0)
        following = np.where(mask[..., t], lam[..., t] * advantage[..., t], following)
        value_after = np.where(mask[..., t], value[..., t], value_after)
    return _kept(advantage, mask), _kept(advantage + value, mask)


def of_rollouts_and_turns(
    turns: Turns, compare: Compare, scope: str, gamma: float, outcome_weight: float, turn_weight: float
) -> Float[np.ndarray, "B U"]:
    """A_{i,k} = w_out compare_i(R_i) + w_turn compare_{group, key}(G_{i,k}), G_{i,k} = sum_{u >= k} gamma^{u - k} r_{i,u}.

    R_i is the undiscounted sum of the rollout's rewards. GiGPO (arXiv:2505.10978) is the scope "state", GTPO
    (arXiv:2511.14846) the scope "index" without the outcome; gamma = 0 compares the turn's own reward (MT-GRPO,
    arXiv:2505.11821).

    Args:
        scope: what else than the group is shared by the turns that a turn is compared with. "none" leaves the second term
            out, "index" compares turns of the same number, "state" those taken in the same state, "all" all of the group.
    """
    reward = np.where(turns.mask_BU, turns.reward_BU, 0.0)
    valid_BU = turns.mask_BU & turns.valid_B[:, None]
    outcome = compare(reward.sum(1), turns.group_B, turns.valid_B)
    advantage = outcome_weight * np.broadcast_to(outcome[:, None], reward.shape)
    if scope != "none":
        key = {"index": np.arange(reward.shape[1])[None], "state": turns.state_BU, "all": np.zeros((1, 1), int)}[scope]
        pairs = np.stack([np.broadcast_to(turns.group_B[:, None], reward.shape), np.broadcast_to(key, reward.shape)])
        ids = np.unique(pairs.reshape(2, -1), axis=1, return_inverse=True)[1].reshape(reward.shape)
        advantage = advantage + turn_weight * compare(returns_to_go(reward, turns.mask_BU, gamma), ids, valid_BU)
    return _kept(advantage, valid_BU)


def whitened(advantage: Values, mask: Valid) -> Values:
    """(A - mean) / sqrt(var + 1e-8) over all that `mask` marks, with the unbiased variance (REINFORCE++, arXiv:2501.03262).

    Advantages that are all equal become zeros.
    """
    kept = advantage[mask].astype(np.float64)
    if len(kept) < 2 or np.ptp(kept) <= MIN_STD * max(1.0, float(np.abs(kept).max())):
        return np.zeros_like(advantage, np.float32)
    return _kept((advantage - kept.mean()) / np.sqrt(kept.var(ddof=1) + WHITEN_EPS), mask)


def moving_baseline(reward_B: Float[np.ndarray, " B"], baseline: float, decay: float) -> tuple[Float[np.ndarray, " B"], float]:
    """(R - b, the new b) of one role: b <- decay b + (1 - decay) R (SPIRAL, arXiv:2506.24119).

    All games of a step are compared with the b from before it, so that their order does not matter and no game is in its own
    baseline; then b moves by each of them, towards their mean.
    """
    if not len(reward_B):
        return reward_B, baseline
    kept = decay ** len(reward_B)
    return (reward_B - baseline).astype(np.float32), kept * baseline + (1 - kept) * float(reward_B.mean())
