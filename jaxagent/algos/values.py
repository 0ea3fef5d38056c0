"""Values of states from the episodes of one group, without a critic; and what continuations of chosen turns add to them.

A group has trunks, which were played from the beginning, and branches: continuations that share a trunk's first turns and go on
from there with draws of their own. Both are paths here, a row each with its own turns. All paths are of one policy.

**Values.** For turn k of path i, taken in state s, let O be the other paths: all but i and, of the branches of trunk i, those
that leave it after k, which follow the action of turn k. Of every path of O that visits s (the same state key; first visit
only) the return to go from there is a sample of the value of s, and

    V_ik = mean of them,  n_ik = how many.

Given that a path gets to s, what follows is independent of how it got there: each sample has the mean V(s) if the key says all
that matters for the future, the turns that are left included. A branch that leaves in s is always one of them. None depends on
the action of turn k, so V_ik is a baseline that leaves the gradient unbiased, whether the key says enough or not.

**Advantages.** One's own future is one more sample of V(s), which counts `OWN` visits:

    T_k = r_k + gamma W_{k+1},   W_k = (n_k V_k + OWN T_k) / (n_k + OWN),   A_k = T_k - V_k.

That is GAE (arXiv:1506.02438) with a lambda for every state: A_k = r_k + gamma V_{k+1} - V_k + gamma lambda_{k+1} A_{k+1} with
lambda_k = OWN / (n_k + OWN), returns where nobody else was, values where many were. By induction from the last turn E[W_k |
s_k] = V(s_k), so E[A_k | s_k, a_k] = Q(s_k, a_k) - E[V_k]: unbiased but for keys that say too little. Where n_k = 0, V_k drops
out of all earlier advantages and is a baseline only: the path's last one, else 0.

Apart from the pooling this is VinePPO's estimate (arXiv:2410.01679), where every turn costs several continuations; here those
of one turn serve all visits of the states that they pass through. GiGPO (arXiv:2505.10978) compares returns to go of the same
visits, one's own included, and bootstraps from none.

**Weights.** A trunk's turns from k on and its m branches at k are m + 1 samples of one future. Each counts 1 / (m + 1), so that
the gradient is that of trunks alone, with the future averaged (`path_weights`).

**Where to branch.** `branch_scores` is the standard error of V_k, with one more return of the group counted as a visit. It uses
other paths only: what followed a turn must not decide whether it is branched. Two ties are left, both of one path among all of
a group: a draw in proportion to the scores divides by their sum, in which one's own later turns stand; and a path has its say
in how often others are branched, whose returns are then in its baseline.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxagent.algos.advantages import gae, returns_to_go

OWN = 3.0  # one's own future is itself averaged from its first visit of a known state on, so it says more than one return


class Paths(NamedTuple):
    """The turns of trunks and branches, a row each; of a branch only its own."""

    reward_BU: Float[np.ndarray, "B U"]
    mask_BU: Bool[np.ndarray, "B U"]  # false where a path has no such turn
    state_BU: Int[np.ndarray, "B U"]  # id of the state that the turn was taken in; compared within a group
    group_B: Int[np.ndarray, " B"]
    trunk_B: Int[np.ndarray, " B"]  # the row of a branch's trunk, -1 for a trunk
    leave_B: Int[np.ndarray, " B"]  # how many turns a branch shares with its trunk


class Visits(NamedTuple):
    """What the other paths say of the state of every turn."""

    value_BU: Float[np.ndarray, "B U"]
    count_BU: Float[np.ndarray, "B U"]
    square_BU: Float[np.ndarray, "B U"]  # the mean of the squares of their returns


def visits(paths: Paths, gamma: float) -> Visits:
    """V_ik and n_ik of the other paths; 0 where nobody else was."""
    found = np.zeros((3, *paths.mask_BU.shape))
    for group in np.unique(paths.group_B):
        rows = np.nonzero(paths.group_B == group)[0]
        place = np.full(len(paths.group_B), -1)
        place[rows] = np.arange(len(rows))
        trunk_B = np.where(paths.trunk_B[rows] < 0, -1, place[paths.trunk_B[rows]])
        found[:, rows] = _of_group(paths._replace(trunk_B=trunk_B, **{n: getattr(paths, n)[rows] for n in _OTHERS}), gamma)
    count, total, squares = np.where(paths.mask_BU, found, 0.0)
    many = np.maximum(count, 1)
    return Visits(total / many, count, squares / many)


_OTHERS = [name for name in Paths._fields if name != "trunk_B"]


def _of_group(paths: Paths, gamma: float) -> Float[np.ndarray, "3 B U"]:
    """Number, sum and sum of squares of the others' returns, for the paths of one group."""
    shape = paths.mask_BU.shape
    state = np.unique(paths.state_BU, return_inverse=True)[1].reshape(shape)
    rows = np.broadcast_to(np.arange(shape[0])[:, None], shape)
    place = np.where(paths.mask_BU, rows * (state.max(initial=0) + 1) + state, -1)
    first = np.zeros(place.size, bool)
    first[np.unique(place, return_index=True)[1]] = True
    first = first.reshape(shape) & paths.mask_BU
    to_go = returns_to_go(paths.reward_BU, paths.mask_BU, gamma).astype(np.float64)
    of_path = np.zeros((3, shape[0], state.max(initial=0) + 1))
    of_path[:, rows[first], state[first]] = np.stack([np.ones(shape), to_go, to_go**2])[:, first]
    others = of_path.sum(1)[:, state] - of_path[:, rows, state]
    for branch in np.nonzero(paths.trunk_B >= 0)[0]:
        trunk, leave = paths.trunk_B[branch], paths.leave_B[branch]
        others[:, trunk, :leave] -= of_path[:, branch, state[trunk, :leave]]
    return others


def anchored(paths: Paths, gamma: float) -> Float[np.ndarray, "B U"]:
    """A_k of every turn of every path, as the formulas above say."""
    found = visits(paths, gamma)
    value, before = found.value_BU.copy(), np.zeros(len(paths.group_B))
    for u in range(value.shape[1]):
        value[:, u] = before = np.where(found.count_BU[:, u] > 0, value[:, u], before)
    return gae(paths.reward_BU, value, paths.mask_BU, gamma, OWN / (found.count_BU + OWN))[0]


def path_weights(paths: Paths) -> Float[np.ndarray, "B U"]:
    """What each turn of each path counts, so that a future that was sampled several times counts once."""
    weight = np.ones(paths.mask_BU.shape)
    branches = np.nonzero(paths.trunk_B >= 0)[0]
    ends = {(int(paths.trunk_B[b]), int(paths.leave_B[b])) for b in branches}
    for trunk, leave in ends:
        weight[trunk, leave:] /= 1 + ((paths.trunk_B == trunk) & (paths.leave_B == leave)).sum()
    for b in branches:
        weight[b] = weight[paths.trunk_B[b], paths.leave_B[b]]
    return np.where(paths.mask_BU, weight, 0.0)


def branch_scores(paths: Paths) -> Float[np.ndarray, "B U"]:
    """sqrt((n v_k + v) / (n + 1) / (n + 1)): how uncertain the value of every turn's state is.

    v_k is the variance of the others' returns from this state, v that of the other trunks of the group; 0 for a group whose
    other trunks all came to the same.
    """
    found = visits(paths, 1.0)
    spread = np.maximum(found.square_BU - found.value_BU**2, 0.0)
    total = np.where(paths.mask_BU, paths.reward_BU, 0.0).sum(1)
    alone = paths.trunk_B < 0
    of_group = np.zeros(len(total))
    for row in np.nonzero(alone)[0]:
        others = total[alone & (paths.group_B == paths.group_B[row]) & (np.arange(len(total)) != row)]
        of_group[row] = others.var() if len(others) else 0.0
    n = found.count_BU
    score = np.sqrt((n * spread + of_group[:, None]) / (n + 1) / (n + 1))
    return np.where(paths.mask_BU & alone[:, None] & (of_group > 1e-12)[:, None], score, 0.0)


def chosen_turns(scores: Float[np.ndarray, "B U"], count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """`count` draws of (row, turn) in proportion to the scores, with replacement; none where all are 0."""
    total = scores.sum()
    if not total:
        return []
    places = rng.choice(scores.size, count, p=scores.reshape(-1) / total)
    return [(int(place // scores.shape[1]), int(place % scores.shape[1])) for place in places]
