"""Which credit learns a long corridor soonest: `python benchmarks/credit.py` compares rows of the table without a network.

The world is a ring of rooms with three doors each, whose letters are shuffled per room: on, back, and a trap that leads to
the start. Reward 1 on reaching the goal within four times its distance, else nothing. The policy is a table of logits over
(goal, room). Advantages are those of jaxagent.algos, scaled to the same rms for all, so that directions and not sizes are
compared; Adam at 0.03; 8 groups of 8. Where turns are branched, groups have 6 rollouts, and 4 continuations of turns where
these differ, which takes no more turns than 8 rollouts.

Prints, per distance: steps until the mean of five steps reaches 50 % and 90 %, the turns sampled until then in thousands,
continuations included, and the mean success over all steps (the area under the curve), each with its 95 % interval over the
seeds; Pearson's correlation between advantage and the exact Q - V (dynamic programming), and the gradient's noise to signal,
tr Cov(g) / |g|^2 between the groups, both over steps 5 to 40. A seed that never arrives counts as all steps, with a >.
"exact" is told Q - V itself: what no credit can beat.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields

import numpy as np

from jaxagent.algos.advantages import COMPARE, Turns, gae, of_rollouts_and_turns
from jaxagent.algos.table import Algorithm, choose
from jaxagent.algos.values import Paths, anchored, branch_scores, chosen_turns, path_weights

GROUPS, ROLLOUTS, TRUNKS, BRANCHES = 8, 8, 6, 4
RATE, CRITIC_RATE = 0.03, 0.5
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


def learn(name: str, distance: int, seed: int, steps: int, rollouts: int) -> dict[str, float]:
    """One training; what the table says of it."""
    algorithm, branched = ROWS[name], name.endswith("branched")
    corridor = Corridor(distance, np.random.default_rng(seed))
    value, mean, square = np.zeros(corridor.logits.shape[:2]), np.zeros_like(corridor.logits), np.zeros_like(corridor.logits)
    curve, sampled, correlations, noises = [], [], [], []
    for step in range(1, steps + 1):
        e = corridor.play(TRUNKS if branched else rollouts)
        curve.append(e.reward_BU.sum(1).mean())
        e = corridor.branch(e) if branched else e
        sampled.append(e.mask_BU.sum() / 1000)
        credited = corridor.exact_advantage(e) if name == "exact" else credit(algorithm, e, value)
        advantage = credited * path_weights(e.paths)
        advantage = advantage / (np.sqrt((advantage**2).sum() / e.mask_BU.sum()) + 1e-8)
        gradients = corridor.score(e, advantage)
        gradient = gradients.sum(0)
        if 5 <= step <= 40 and np.abs(advantage).max() > 0:
            exact = corridor.exact_advantage(e)[e.mask_BU]
            correlations.append(np.corrcoef(exact, credited[e.mask_BU])[0, 1])
            spread = gradients.reshape(GROUPS, -1).var(0, ddof=1).sum() * GROUPS  # of the sum over groups
            noises.append(spread / (gradient**2).sum())
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        corridor.logits += RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    smooth, spent = np.convolve(curve, np.ones(5) / 5, "valid"), np.cumsum(sampled)

    def until(level: float) -> tuple[float, float]:
        reached = np.nonzero(smooth >= level)[0]
        return (float(reached[0] + 5), float(spent[reached[0] + 4])) if len(reached) else (float("inf"), float("inf"))

    told = {"50 %": until(0.5)[0], "90 %": until(0.9)[0], "turns 50 %": until(0.5)[1], "turns 90 %": until(0.9)[1]}
    told |= {"area": float(np.mean(curve)), "all turns": float(spent[-1])}
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
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="of a group without branches")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all")
    options = parser.parse_args()
    began = time.process_time()
    for distance in options.distances:
        wanted = "steps to 50 % | steps to 90 % | turns to 50 %, 1000 | turns to 90 %, 1000"
        print(f"\n| distance {distance}, budget {4 * distance} | {wanted} | area | correlation | noise |")
        print("|---|" + "---:|" * 7)
        for name in options.rows or ROWS:
            runs = [learn(name, distance, seed, options.steps, options.rollouts) for seed in range(options.seeds)]
            of = {key: [run[key] for run in runs] for key in runs[0]}
            steps = [interval(of[key], 0, options.steps) for key in ("50 %", "90 %")]
            turns = [interval(of[key], 1, float(np.mean(of["all turns"]))) for key in ("turns 50 %", "turns 90 %")]
            rest = [interval(of["area"], 3), interval(of["correlation"], 2), f"{np.median(of['noise']):.1f}"]
            print(f"| {name} | " + " | ".join([*steps, *turns, *rest]) + " |", flush=True)
    print(f"\n{time.process_time() - began:.0f} CPU-s")


if __name__ == "__main__":
    main()
