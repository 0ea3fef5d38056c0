"""Which corrections keep learning stable where every token is four versions old: `python benchmarks/staleness.py`.

The policy is a table of logits: six tokens of four letters for each of eight prompts; the reward is the share of right letters.
Groups of 8, one for each prompt, are drawn from the weights of `lag` steps ago. Advantages are those of jaxagent.algos, the
loss is the learner's own objective with all its corrections, the optimizer is Adam at a rate at which learning on fresh samples
is quick. Without a lag all rows but the first two are the same algorithm.

"old" is train.old_logprob: against which log-probs ratios are taken, the policy's at the start of the step or the sampler's.
Prints, over the seeds, mean and least success (share of right letters) at the end, the mean over all steps (the area under the
curve), the share of tokens without weight, and how far the policy was from its sampler in the mean, |log p - log p_sampler|.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxagent.algos.advantages import COMPARE, Turns, of_rollouts_and_turns
from jaxagent.algos.table import Algorithm, choose
from jaxagent.objective import PolicyObjective

PROMPTS, ROLLOUTS, TOKENS, LETTERS = 8, 8, 6, 4

# name: the row, and against which log-probs its ratios are taken
ROWS: dict[str, tuple[Algorithm, str]] = {
    "nothing": (choose("grpo"), "trainer"),
    "grpo, its clip": (choose("grpo"), "sampler"),
    "cispo": (choose("cispo"), "sampler"),
    "tis, token truncated at 2": (choose("tis"), "trainer"),
    "icepop, token masked to 0.5-5": (choose("icepop"), "trainer"),
    "decoupled, token masked above 5": (choose("decoupled"), "trainer"),
    "sequence_tis, truncated at 2": (choose("sequence_tis"), "trainer"),
    "sequence_mis, masked above 3": (choose("sequence_mis"), "trainer"),
    "geometric, 0.999-1.001": (choose("geometric"), "trainer"),
    "geometric, 0.8-1.25": (choose("geometric", filter_bounds=(0.8, 1.25)), "trainer"),
    "off_policy_mask, 0.1": (choose("off_policy_mask"), "trainer"),
}


def softmax(logits: jax.Array) -> np.ndarray:
    odds = np.exp(np.asarray(logits, np.float64))
    return odds / odds.sum(-1, keepdims=True)


def learn(name: str, lag: int, seed: int, steps: int, rate: float) -> dict[str, float]:
    """One training; what the table says of it."""
    (algorithm, old), rng = ROWS[name], np.random.default_rng(seed)
    objective, optimizer = PolicyObjective(algorithm), optax.adam(rate)
    right_PT = rng.integers(LETTERS, size=(PROMPTS, TOKENS))
    logits = jnp.zeros((PROMPTS, TOKENS, LETTERS))
    moments, kept = optimizer.init(logits), [logits]
    prompt_B = np.repeat(np.arange(PROMPTS), ROLLOUTS)
    shape = len(prompt_B), TOKENS
    fixed = {
        "segment": np.zeros(shape, np.int32),
        "mask": np.ones(shape, bool),
        "weight": np.full(shape, 1.0 / TOKENS, np.float32),
        "share": np.full(shape, 1.0 / TOKENS, np.float32),
    }

    def logprob(logits: jax.Array, letter_BT: np.ndarray) -> tuple[jax.Array, jax.Array]:
        every = jax.nn.log_softmax(logits)[prompt_B]
        return jnp.take_along_axis(every, letter_BT[..., None], -1)[..., 0], -(jnp.exp(every) * every).sum(-1)

    @jax.jit
    def update(logits, moments, letter_BT, behaviour, advantage):  # type: ignore[no-untyped-def]
        now = logprob(logits, letter_BT)[0]
        batch = {**fixed, "logprob": behaviour, "old_logprob": now if old == "trainer" else behaviour, "advantage": advantage}

        def loss(logits: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            new, entropy = logprob(logits, letter_BT)
            total, sums = objective.loss({"logprob": new, "entropy": entropy}, batch, jnp.asarray(False))
            return total / sums["share"], sums

        gradient, sums = jax.grad(loss, has_aux=True)(logits)
        change, moments = optimizer.update(gradient, moments)
        lost = (sums["masked"] + sums["filtered"] + sums["clip_low"] + sums["clip_high"]) / sums["tokens"]
        return optax.apply_updates(logits, change), moments, lost, sums["gap"] / sums["tokens"]

    curve, lost, gaps = [], [], []
    for _ in range(steps):
        sampler = kept[0]
        odds_BTA = softmax(sampler)[prompt_B]
        letter_BT = (odds_BTA.cumsum(-1) > rng.random((*shape, 1))).argmax(-1)
        reward_B1 = (letter_BT == right_PT[prompt_B]).mean(1, keepdims=True)
        turns = Turns(reward_B1, np.ones_like(reward_B1, bool), np.zeros_like(prompt_B)[:, None], prompt_B, np.ones(shape[0], bool))
        advantage_B1 = of_rollouts_and_turns(turns, COMPARE[algorithm.advantage], algorithm.turns, 1.0, 1.0, 1.0)
        advantage = np.broadcast_to(advantage_B1, shape).astype(np.float32)
        behaviour = np.log(np.take_along_axis(odds_BTA, letter_BT[..., None], -1)[..., 0]).astype(np.float32)
        logits, moments, without, gap = update(logits, moments, letter_BT, behaviour, advantage)
        kept = [*kept, logits][-lag - 1 :]
        curve.append(float(np.take_along_axis(softmax(logits), right_PT[..., None], -1).mean()))
        lost.append(float(without))
        gaps.append(float(gap))
    return {"end": curve[-1], "area": float(np.mean(curve)), "lost": float(np.mean(lost)), "gap": float(np.mean(gaps))}


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    began = time.process_time()
    for lag in options.lags:
        print(f"\n| lag {lag} | old | success at the end | the least | area | tokens without weight | distance |")
        print("|---|---|" + "---:|" * 5)
        for name in options.rows:
            runs = [learn(name, lag, seed, options.steps, options.rate) for seed in range(options.seeds)]
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            cells = [mean["end"], min(run["end"] for run in runs), mean["area"], mean["lost"], mean["gap"]]
            print(f"| {name} | {ROWS[name][1]} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)
    print(f"\n{time.process_time() - began:.0f} CPU-s")


if __name__ == "__main__":
    main()
