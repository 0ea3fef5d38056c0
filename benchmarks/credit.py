"""Which credit learns a long corridor soonest: `python benchmarks/credit.py` compares rows of the table without a network.

The world is a ring of rooms with three doors each, whose letters are shuffled per room: on, back, and a trap that leads to
the start. Reward 1 on reaching the goal within four times its distance, else nothing. The policy is a table of logits over
(goal, room). Advantages are those of jaxagent.algos, scaled to the same rms for all, so that directions and not sizes are
compared; Adam at 0.03; 8 groups of 8.

Prints, per distance: steps until the mean of five steps reaches 50 % and 90 %, the mean success over all steps (the area under
the curve), each with its 95 % interval over the seeds; Pearson's correlation between advantage and the exact Q - V (dynamic
programming), and the gradient's noise to signal, tr Cov(g) / |g|^2 between the groups, both over steps 5 to 40. A seed that
never arrives counts as the number of steps, with a >.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from jaxagent.algos.advantages import COMPARE, Turns, gae, of_rollouts_and_turns
from jaxagent.algos.table import Algorithm, choose

GROUPS, ROLLOUTS, RATE, CRITIC_RATE = 8, 8, 0.03, 0.5
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # of Student's distribution, by seeds

ROWS = {
    "reinforce_to_go": choose("reinforce_to_go", gamma=0.95),
    "grpo": choose("grpo"),
    "dr_grpo": choose("dr_grpo"),
    "gtpo": choose("gtpo"),
    "turn_grpo": choose("turn_grpo", gamma=0.95),
    "gigpo, F = 1": choose("gigpo"),
    "gigpo, F = std": choose("gigpo", advantage="normalised"),
    "ppo_turn": choose("ppo_turn"),
}


@dataclass
class Episodes:
    """One step's episodes, [B, U]."""

    goal_B: np.ndarray  # 0 or 1
    start_B: np.ndarray
    room_BU: np.ndarray
    door_BU: np.ndarray
    mask_BU: np.ndarray
    reward_BU: np.ndarray


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

    def play(self) -> Episodes:
        """Groups that share goal and start."""
        rng, policy = self.rng, self.policy
        goal = np.repeat(rng.integers(2, size=GROUPS), ROLLOUTS)
        away = rng.choice([-1, 1], GROUPS) * rng.integers(max(2, self.distance - 1), self.distance + 1, GROUPS)
        start = (self.goals[goal] + np.repeat(away, ROLLOUTS)) % self.rooms
        shape = (len(goal), self.budget)
        room, door = np.zeros(shape, int), np.zeros(shape, int)
        mask, reward = np.zeros(shape, bool), np.zeros(shape)
        here, alive = start.copy(), np.ones(len(goal), bool)
        for t in range(self.budget):
            chosen = (policy[goal, here].cumsum(1) > rng.random((len(goal), 1))).argmax(1)
            room[:, t], door[:, t], mask[:, t] = here, chosen, alive
            ahead = self.next[here, chosen]
            here = np.where(alive, np.where(ahead < 0, start, ahead), here)
            arrived = alive & (here == self.goals[goal])
            reward[arrived, t] = 1.0
            alive &= ~arrived
        return Episodes(goal, start, room, door, mask, reward)

    def exact_advantage(self, e: Episodes) -> np.ndarray:
        """Q - V of every turn taken, by dynamic programming over the turns that are left."""
        found, policy = np.zeros(e.room_BU.shape), self.policy
        for first in range(0, len(e.goal_B), ROLLOUTS):
            goal, start = e.goal_B[first], e.start_B[first]
            ahead = np.where(self.next < 0, start, self.next)
            value = (np.arange(self.rooms) == self.goals[goal]).astype(float)
            of_group = slice(first, first + ROLLOUTS)
            for t in reversed(range(self.budget)):
                q = value[ahead]
                value = np.where(np.arange(self.rooms) == self.goals[goal], 1.0, (policy[goal] * q).sum(1))
                rooms, doors = e.room_BU[of_group, t], e.door_BU[of_group, t]
                found[of_group, t] = q[rooms, doors] - value[rooms]
        return found

    def score(self, e: Episodes, advantage: np.ndarray) -> np.ndarray:
        """The policy gradient of every group, as a table each."""
        group = np.arange(len(e.goal_B)) // ROLLOUTS
        gradient = np.zeros((GROUPS, *self.logits.shape))
        place = group[:, None], e.goal_B[:, None], e.room_BU
        np.add.at(gradient, (*place, e.door_BU), advantage)
        visited = np.zeros(gradient.shape[:-1])
        np.add.at(visited, place, advantage)
        return (gradient - visited[..., None] * self.policy) / e.mask_BU.sum()


def credit(algorithm: Algorithm, e: Episodes, value: np.ndarray) -> np.ndarray:
    """Advantages of all turns; moves the critic's table where there is one."""
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
    group = np.arange(len(e.goal_B)) // ROLLOUTS
    turns = Turns(e.reward_BU, e.mask_BU, e.room_BU, group, np.ones(len(group), bool))
    weights = algorithm.outcome_weight, algorithm.turn_weight
    return of_rollouts_and_turns(turns, COMPARE[algorithm.advantage], algorithm.turns, algorithm.gamma, *weights)


def learn(algorithm: Algorithm, distance: int, seed: int, steps: int) -> dict[str, float]:
    """One training; what the table says of it."""
    corridor = Corridor(distance, np.random.default_rng(seed))
    value, mean, square = np.zeros(corridor.logits.shape[:2]), np.zeros_like(corridor.logits), np.zeros_like(corridor.logits)
    curve, correlations, noises = [], [], []
    for step in range(1, steps + 1):
        e = corridor.play()
        curve.append(e.reward_BU.sum(1).mean())
        advantage = credit(algorithm, e, value)
        advantage = advantage / (np.sqrt((advantage**2).sum() / e.mask_BU.sum()) + 1e-8)
        gradients = corridor.score(e, advantage)
        gradient = gradients.sum(0)
        if 5 <= step <= 40 and np.abs(advantage).max() > 0:
            exact = corridor.exact_advantage(e)[e.mask_BU]
            correlations.append(np.corrcoef(exact, advantage[e.mask_BU])[0, 1])
            spread = gradients.reshape(GROUPS, -1).var(0, ddof=1).sum() * GROUPS  # of the sum over groups
            noises.append(spread / (gradient**2).sum())
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        corridor.logits += RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    smooth = np.convolve(curve, np.ones(5) / 5, "valid")

    def until(level: float) -> float:
        reached = np.nonzero(smooth >= level)[0]
        return float(reached[0] + 5) if len(reached) else float("inf")

    told = {"50 %": until(0.5), "90 %": until(0.9), "area": float(np.mean(curve))}
    return told | {"correlation": float(np.nanmean(correlations)), "noise": float(np.median(noises))}


def interval(values: list[float], digits: int, most: float = float("inf")) -> str:
    """Mean and half of the 95 % interval; what was never reached counts as `most`."""
    capped = np.minimum(values, most)
    half = T_95.get(len(values), 1.96) * capped.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{'> ' * bool(np.isinf(values).any())}{capped.mean():.{digits}f} ± {half:.{digits}f}"


def main() -> None:
    """Trains all rows at all distances and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distances", type=int, nargs="+", default=[2, 4, 6, 8, 10])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    began = time.process_time()
    for distance in options.distances:
        print(f"\n| distance {distance}, budget {4 * distance} | steps to 50 % | steps to 90 % | area | correlation | noise |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, algorithm in ROWS.items():
            runs = [learn(algorithm, distance, seed, options.steps) for seed in range(options.seeds)]
            of = {key: [run[key] for run in runs] for key in runs[0]}
            steps = [interval(of[key], 0, options.steps) for key in ("50 %", "90 %")]
            rest = [interval(of["area"], 3), interval(of["correlation"], 2), f"{np.median(of['noise']):.1f}"]
            print(f"| {name} | " + " | ".join([*steps, *rest]) + " |", flush=True)
    print(f"\n{time.process_time() - began:.0f} CPU-s")


if __name__ == "__main__":
    main()
