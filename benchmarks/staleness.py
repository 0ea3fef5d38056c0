"""Which corrections keep learning stable when rollouts are old: `python benchmarks/staleness.py`, a policy of shared weights.

Twelve tasks of 16 turns: in each turn the policy searches or it does not, and an episode succeeds if it has searched as often
as its task asks for, within 2. Too much is as wrong as too little, as with the length of an answer or the number of calls. The
policy is told the task only, as 6 numbers that go through one hidden layer of 32: what it does is one probability per task, and
no task has weights of its own. Its best is to search with the probability asked / 16, which fails now and then, so that groups
go on to differ. Its success is known exactly, from binomial distributions, and told as a share of that best one.

A step has 8 groups of 8 and four minibatches, by the losses and rows of the trainer and its Adam, at a constant rate after ten
updates; at a staleness of n it trains on what the policy of n steps before has sampled. Ratios are to the trainer's log-probs
at the start of the step, and the row corrects for what lies between these and the sampler's; "clip to the sampler" has neither
(train.old_logprob="sampler"): the ratio that is clipped is to what sampled.

Told: the share over the last third of the steps, that of the worst seed, how many seeds hold nine tenths of what the same seed
has at staleness 0 without a correction, the share over all steps, the mean |log(policy / sampler)| in the last minibatch of a
step, and the share of tokens there that a mask or a filter drops. Intervals are 95 % over the seeds.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from credit import interval

from jaxagent.algos import losses
from jaxagent.algos.advantages import COMPARE
from jaxagent.algos.table import Algorithm, choose
from jaxagent.learner import OptimizerOptions, _apply, adamw
from jaxagent.objective import PolicyObjective

TASKS, NUMBERS, WIDTH, TURNS, WITHIN = 12, 6, 32, 16, 2
GROUPS, ROLLOUTS, MINIBATCHES, STEPS = 8, 8, 4, 150
HELD = 0.9
CLIPPED = "none, clip to the sampler"
ROWS: dict[str, Algorithm] = {
    "none": choose("grpo"),
    CLIPPED: choose("grpo"),
    "token": choose("grpo", importance="token"),
    "decoupled": choose("decoupled", aggregate="sequence_mean"),
    **{name: choose(name) for name in ("tis", "icepop", "sequence_tis", "sequence_mis", "geometric", "off_policy_mask")},
}
Arrays = dict[str, Any]


def logit(params: Arrays, x: Any) -> jax.Array:
    """Of searching."""
    return jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def success(odds: np.ndarray, asked: np.ndarray) -> float:
    """Of episodes whose turns search with these probabilities, over the tasks."""
    sums = np.ones((len(odds), 1))  # the distribution of the number of searches, turn by turn
    for _ in range(TURNS):
        sums = np.pad(sums * (1 - odds)[:, None], ((0, 0), (0, 1))) + np.pad(sums * odds[:, None], ((0, 0), (1, 0)))
    right = np.abs(np.arange(TURNS + 1) - asked[:, None]) <= WITHIN
    return float((sums * right).sum(1).mean())


class Searches:
    """The tasks, and the policy that plays them."""

    def __init__(self, seed: int):
        rng = np.random.default_rng([seed, 1])
        self.x = rng.normal(size=(TASKS, NUMBERS)).astype(np.float32)
        self.asked = rng.integers(WITHIN, TURNS + 1 - WITHIN, TASKS)
        weights = {"in": rng.normal(size=(NUMBERS, WIDTH)) / NUMBERS**0.5, "bias": np.zeros(WIDTH), "out": np.zeros(WIDTH)}
        self.params: Arrays = {name: jnp.asarray(x, jnp.float32) for name, x in weights.items()}
        self.rng = np.random.default_rng([seed, 2])
        self.best = success(self.asked / TURNS, self.asked)

    @property
    def odds(self) -> np.ndarray:
        return np.asarray(jax.nn.sigmoid(logit(self.params, self.x)), np.float64)

    def play(self, algorithm: Algorithm) -> Arrays:
        """A step's episodes with what they are to teach, a row each."""
        task = np.repeat(self.rng.choice(TASKS, GROUPS, replace=False), ROLLOUTS)
        odds = self.odds[task][:, None]
        searched = self.rng.random((len(task), TURNS)) < odds
        won = np.abs(searched.sum(1) - self.asked[task]) <= WITHIN
        group = np.repeat(np.arange(GROUPS), ROLLOUTS)
        advantage = COMPARE[algorithm.advantage](won.astype(float), group, np.ones(len(won), bool))
        weight, share = losses.aggregation(algorithm.aggregate, [1] * TURNS, algorithm.length)[0]
        logprob = np.log(np.where(searched, odds, 1 - odds)).astype(np.float32)
        shape, whole = searched.shape, np.zeros(searched.shape, np.int32)
        return {
            "x": self.x[task],
            "tokens": searched,
            "segment": whole + 1,
            "position": whole + np.arange(TURNS),
            "mask": np.ones(shape, bool),
            "logprob": logprob,
            "old_logprob": logprob,
            "turn": whole,
            "age": whole,
            "weight": np.full(shape, weight, np.float32),
            "share": np.full(shape, share, np.float32),
            "advantage": np.broadcast_to(advantage[:, None], shape),
        }


def outputs(params: Arrays, batch: Arrays) -> Arrays:
    """What a language head would say of the turns."""
    z = logit(params, batch["x"])[:, None]
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    entropy = -(jnp.exp(yes) * yes + jnp.exp(no) * no)
    return {"logprob": jnp.where(batch["tokens"], yes, no), "entropy": jnp.broadcast_to(entropy, batch["tokens"].shape)}


@cache
def programs(algorithm: Algorithm) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(the update with a minibatch, the log-probs of a batch)."""
    objective = PolicyObjective(algorithm)

    def loss(params: Arrays, batch: Arrays) -> Any:
        return objective.loss(outputs(params, batch), batch, jnp.bool_(False))

    def update(params: Arrays, moments: Any, batch: Arrays, numbers: Any) -> Any:
        grads, sums = jax.grad(loss, has_aux=True)(params, batch)
        return *_apply(params, moments, {"grads": grads, "sums": sums}, jnp.float32(0), numbers)[:2], sums

    return jax.jit(update), jax.jit(lambda params, batch: outputs(params, batch)["logprob"])


@dataclass
class Learnt:
    """One training: per step, what share of the best success the policy has, and of the last minibatch what the header says."""

    share: np.ndarray
    gap: float
    dropped: float

    @property
    def end(self) -> float:
        return float(self.share[-len(self.share) // 3 :].mean())


def learn(row: str, staleness: int, seed: int, rate: float, steps: int = STEPS) -> Learnt:
    """One training by a row of ROWS."""
    algorithm, world = ROWS[row], Searches(seed)
    update, score = programs(algorithm)
    optimizer = OptimizerOptions(lr=rate, lr_final=rate)
    schedule, moments = optimizer.schedule(steps * MINIBATCHES), adamw(optimizer.numbers(0.0)).init(world.params)
    waiting, share, gap, dropped, updates = deque[Arrays](), [], [], [], 0
    group = np.repeat(np.arange(GROUPS), ROLLOUTS)
    for _ in range(steps):
        share.append(success(world.odds, world.asked) / world.best)
        waiting.append(world.play(algorithm))
        if len(waiting) <= staleness:
            continue
        batch = waiting.popleft()
        if row != CLIPPED:
            batch["old_logprob"] = np.asarray(score(world.params, batch))
        for part in np.array_split(world.rng.permutation(GROUPS), MINIBATCHES):
            some = {name: x[np.isin(group, part)] for name, x in batch.items()}
            numbers = optimizer.numbers(float(schedule(updates)))
            world.params, moments, sums = update(world.params, moments, some, numbers)
            updates += 1
        gap.append(float(sums["gap"] / sums["tokens"]))
        dropped.append(float(jnp.maximum(sums["masked"], sums["filtered"]) / sums["tokens"]))
    return Learnt(np.asarray(share), float(np.mean(gap)), float(np.mean(dropped)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and prints a table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=(0.01, 0.03))
    parser.add_argument("--staleness", type=int, nargs="+", default=(0, 4))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    for rate in options.rates:
        fresh = [learn("none", 0, seed, rate, options.steps) for seed in range(options.seeds)]
        print(f"\n| rate {rate} | staleness | last third | worst | held | all steps | gap | dropped |\n|---|" + "---:|" * 7)
        for staleness in options.staleness:
            for row in options.rows:
                of = [learn(row, staleness, seed, rate, options.steps) for seed in range(options.seeds)]
                held = sum(run.end >= HELD * before.end for run, before in zip(of, fresh, strict=True))
                ends = [run.end for run in of]
                cells = [str(staleness), interval(ends, 2), f"{min(ends):.2f}", f"{held} of {len(of)}"]
                cells += [interval([run.share.mean() for run in of], 2)]
                cells += [f"{np.mean([getattr(run, key) for run in of]):.2f}" for key in ("gap", "dropped")]
                print(f"| {row} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{time.process_time():.0f} CPU-s")


if __name__ == "__main__":
    main()
