"""Which credit learns a long corridor soonest: rows of the table without a network. `credit.py` runs it and prints.

The world is a ring of rooms with three doors each, whose letters are shuffled per room: on, back, and a trap that leads to
the start. Reward 1 on reaching the goal within four times its distance, else nothing. The policy is a table of logits over
(goal, room). Advantages are those of jaxagent.algos, scaled to the same rms for all, so that directions and not sizes are
compared; Adam at 0.03; 8 groups of 8. Where turns are branched, groups have 6 rollouts, and 4 continuations of turns where
these differ, which takes no more turns than 8 rollouts.

Per distance: steps until the mean of five steps reaches 50 % and 90 %, the turns sampled until then in thousands,
continuations included, the CPU seconds to 90 %, and the mean success over all steps (the area under the curve). Over steps 5
to 40: Pearson's correlation between advantage and the exact Q - V (dynamic programming); blame, sum_k min(p_k, q_k) where p
is the negative part of the advantages of a step's turns divided by its sum, and q that of Q - V: the share of the blame that
lies where it belongs; and the gradient's noise to signal, tr Cov(g) / |g|^2 between the groups. "exact" is told Q - V itself:
what no credit can beat.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxagent.algos.advantages import COMPARE, Turns, gae, of_rollouts_and_turns
from jaxagent.algos.table import Algorithm, choose
from jaxagent.algos.values import Paths, anchored, branch_scores, chosen_turns, path_weights

GROUPS, ROLLOUTS, TRUNKS, BRANCHES = 8, 8, 6, 4
RATE, CRITIC_RATE = 0.03, 0.5
DISTANCES, STEPS = (2, 4, 6, 8, 10), 200
LOOKED = 5, 40  # steps over which credit is compared with the exact one

ROWS = {
    "reinforce_to_go": choose("reinforce_to_go", gamma=0.95),
    "grpo": choose("grpo"),
    "dr_grpo": choose("dr_grpo"),
    "gtpo": choose("gtpo"),
    "turn_grpo": choose("turn_grpo", gamma=0.95),
    "gigpo, F = 1": choose("gigpo"),
    "gigpo, F = std": choose("gigpo", advantage="normalised"),
    "ppo_turn": choose("ppo_turn"),
    "ppo_turn, lambda 0.5": choose("ppo_turn", gae_lambda=0.5),
    "anchor_gae": choose("anchor_gae"),
    "anchor_gae, branched": choose("anchor_gae"),
    "exact": choose("ppo_turn"),
}


@dataclass
class Episodes:
    """One step's episodes and continuations of some of their turns, [B, U]."""

    group_B: np.ndarray
    goal_B: np.ndarray  # 0 or 1
    start_B: np.ndarray
    trunk_B: np.ndarray  # see algos.values.Paths
    leave_B: np.ndarray
    room_BU: np.ndarray
    door_BU: np.ndarray
    mask_BU: np.ndarray
    reward_BU: np.ndarray

    @property
    def paths(self) -> Paths:
        return Paths(self.reward_BU, self.mask_BU, self.room_BU, self.group_B, self.trunk_B, self.leave_B)


class Corridor:
    """A ring of rooms, two goals, and the policy that walks it."""

    def __init__(self, distance: int, rng: np.random.Generator):
        self.rng, self.distance, self.budget = rng, distance, 4 * distance
        self.rooms = 2 * distance + 2
        ways = [[(i + 1) % self.rooms, (i - 1) % self.rooms, -1] for i in range(self.rooms)]
        self.next = np.asarray([rng.permutation(way) for way in ways])  # -1 leads to the start
        self.goals = np.asarray([0, self.rooms // 2])
        self.logits = np.zeros((2, self.rooms, 3))

    @property
    def policy(self) -> np.ndarray:
        p = np.exp(self.logits - self.logits.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def play(self, rollouts: int) -> Episodes:
        """Groups that share goal and start."""
        rng, nothing = self.rng, np.zeros(GROUPS * rollouts, int)
        goal = np.repeat(rng.integers(2, size=GROUPS), rollouts)
        away = rng.choice([-1, 1], GROUPS) * rng.integers(max(2, self.distance - 1), self.distance + 1, GROUPS)
        start = (self.goals[goal] + np.repeat(away, rollouts)) % self.rooms
        return self.walk(start, np.repeat(np.arange(GROUPS), rollouts), goal, start, nothing - 1, nothing)

    def branch(self, e: Episodes) -> Episodes:
        """The same with continuations of turns, drawn as the feed draws them."""
        scores = branch_scores(e.paths)
        of_group = [np.where((e.group_B == group)[:, None], scores, 0.0) for group in range(GROUPS)]
        drawn = [place for scores in of_group for place in chosen_turns(scores, BRANCHES, self.rng)]
        if not drawn:
            return e
        trunk, leave = np.asarray(drawn).T
        more = self.walk(e.room_BU[trunk, leave], e.group_B[trunk], e.goal_B[trunk], e.start_B[trunk], trunk, leave)
        return Episodes(*(np.concatenate([getattr(e, f.name), getattr(more, f.name)]) for f in fields(e)))

    def walk(
        self, here: np.ndarray, group: np.ndarray, goal: np.ndarray, start: np.ndarray, trunk: np.ndarray, leave: np.ndarray
    ) -> Episodes:
        """From `here`, where `leave` turns of the budget are spent."""
        rng, policy = self.rng, self.policy
        shape = (len(goal), self.budget)
        room, door = np.zeros(shape, int), np.zeros(shape, int)
        mask, reward = np.zeros(shape, bool), np.zeros(shape)
        alive = np.ones(len(goal), bool)
        for t in range(self.budget):
            alive = alive & (leave + t < self.budget)
            chosen = (policy[goal, here].cumsum(1) > rng.random((len(goal), 1))).argmax(1)
            room[:, t], door[:, t], mask[:, t] = here, chosen, alive
            ahead = self.next[here, chosen]
            here = np.where(alive, np.where(ahead < 0, start, ahead), here)
            arrived = alive & (here == self.goals[goal])
            reward[arrived, t] = 1.0
            alive = alive & ~arrived
        return Episodes(group, goal, start, trunk, leave, room, door, mask, reward)

    def exact_advantage(self, e: Episodes) -> np.ndarray:
        """Q - V of every turn taken, by dynamic programming over the turns that are left."""
        found, policy = np.zeros(e.room_BU.shape), self.policy
        for group in range(GROUPS):
            rows = np.nonzero(e.group_B == group)[0]
            goal, start = e.goal_B[rows[0]], e.start_B[rows[0]]
            ahead = np.where(self.next < 0, start, self.next)
            value = (np.arange(self.rooms) == self.goals[goal]).astype(float)
            for t in reversed(range(self.budget)):
                q = value[ahead]
                value = np.where(np.arange(self.rooms) == self.goals[goal], 1.0, (policy[goal] * q).sum(1))
                there = rows[e.leave_B[rows] <= t]
                place = there, t - e.leave_B[there]
                found[place] = q[e.room_BU[place], e.door_BU[place]] - value[e.room_BU[place]]
        return np.where(e.mask_BU, found, 0.0)

    def score(self, e: Episodes, advantage: np.ndarray) -> np.ndarray:
        """The policy gradient of every group, as a table each."""
        gradient = np.zeros((GROUPS, *self.logits.shape))
        place = e.group_B[:, None], e.goal_B[:, None], e.room_BU
        np.add.at(gradient, (*place, e.door_BU), advantage)
        visited = np.zeros(gradient.shape[:-1])
        np.add.at(visited, place, advantage)
        return (gradient - visited[..., None] * self.policy) / e.mask_BU.sum()


def credit(algorithm: Algorithm, e: Episodes, value: np.ndarray) -> np.ndarray:
    """Advantages of all turns; moves the critic's table where there is one."""
    if algorithm.anchored:
        return anchored(e.paths, algorithm.gamma)
    if algorithm.unit == "turn":
        at = e.goal_B[:, None], e.room_BU
        given = value[at] if algorithm.critic else np.zeros(e.reward_BU.shape)
        advantage, target = gae(e.reward_BU, given, e.mask_BU, algorithm.gamma, algorithm.gae_lambda)
        if algorithm.critic:
            count, total = np.zeros(value.shape), np.zeros(value.shape)
            np.add.at(count, at, e.mask_BU)
            np.add.at(total, at, np.where(e.mask_BU, target, 0.0))
            value += CRITIC_RATE * np.where(count > 0, total / np.maximum(count, 1) - value, 0.0)
        return advantage
    turns = Turns(e.reward_BU, e.mask_BU, e.room_BU, e.group_B, np.ones(len(e.group_B), bool))
    weights = algorithm.outcome_weight, algorithm.turn_weight
    return of_rollouts_and_turns(turns, COMPARE[algorithm.advantage], algorithm.turns, algorithm.gamma, *weights)


def blame(advantage: np.ndarray, exact: np.ndarray) -> float:
    """How much of the blame lies where it belongs, between 0 and 1."""
    p, q = (np.maximum(-x, 0.0) for x in (advantage, exact))
    return float(np.minimum(p / max(p.sum(), 1e-12), q / max(q.sum(), 1e-12)).sum())


def learn(name: str, distance: int, seed: int, rollouts: int = ROLLOUTS, steps: int = STEPS) -> dict[str, Any]:
    """One training; what the table says of it."""
    algorithm, branched = ROWS[name], name.endswith("branched")
    corridor = Corridor(distance, np.random.default_rng(seed))
    value, mean, square = np.zeros(corridor.logits.shape[:2]), np.zeros_like(corridor.logits), np.zeros_like(corridor.logits)
    curve, sampled, cpu, correlations, blames, noises = [], [], [], [], [], []
    for step in range(1, steps + 1):
        began = time.process_time()
        e = corridor.play(TRUNKS if branched else rollouts)
        curve.append(e.reward_BU.sum(1).mean())
        e = corridor.branch(e) if branched else e
        sampled.append(int(e.mask_BU.sum()))
        credited = corridor.exact_advantage(e) if name == "exact" else credit(algorithm, e, value)
        advantage = credited * path_weights(e.paths)
        advantage = advantage / (np.sqrt((advantage**2).sum() / e.mask_BU.sum()) + 1e-8)
        gradients = corridor.score(e, advantage)
        gradient = gradients.sum(0)
        looked = time.process_time()
        if LOOKED[0] <= step <= LOOKED[1] and np.abs(advantage).max() > 0:
            exact = corridor.exact_advantage(e)[e.mask_BU]
            blames.append(blame(credited[e.mask_BU], exact))
            correlations.append(np.corrcoef(exact, credited[e.mask_BU])[0, 1])
            spread = gradients.reshape(GROUPS, -1).var(0, ddof=1).sum() * GROUPS  # of the sum over groups
            noises.append(spread / (gradient**2).sum())
        cpu.append(looked - began)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        corridor.logits += RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    told = {"success": curve, "turns": sampled, "cpu_s": cpu, "correlation": np.nanmean(correlations), "blame": np.mean(blames)}
    return {**told, "noise": np.median(noises)}
