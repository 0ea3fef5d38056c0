"""Steps that learn from given tokens instead of rewards: imitation, and preference between two answers.

Both stories use them: the warm-up of train.py, and finetune.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxagent.algos.preference import dpo
from jaxagent.chat.template import Template, render
from jaxagent.data.pack import Batch, Place, Row, pack, places
from jaxagent.envs.env import World
from jaxagent.hosts import ALONE, Hosts
from jaxagent.learner import Learner, OptimizerOptions
from jaxagent.selection import Pair, imitated
from jaxagent.types import Message, ToolSpec


def warmup_optimizer(lr: float = 3e-3, lr_final: float = 3e-4, warmup_steps: int = 0) -> OptimizerOptions:
    """AdamW of a warm-up: its second moments forget sooner than those of reinforcement, and weights decay a little."""
    return OptimizerOptions(lr, lr_final, warmup_steps, b1=0.9, b2=0.98, weight_decay=0.01, clip_norm=1.0)


def demonstrations(world: World, count: int, seed: int) -> list[list[Message]]:
    """`count` dialogues of the world's demonstrator, on tasks that are neither trained on nor tested."""
    rng = random.Random(f"{seed}/demonstrations")
    first, games = seed * count, getattr(world, "sizes", {}).get("demo") or (seed + 1) * count
    return [world.demonstrate(world.task("demo", (first + i) % games), rng) for i in range(count)]


def supervised_row(template: Template, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Row:
    """A dialogue as a training row: every token the assistant wrote counts once, observations never."""
    return imitated(*render(template, messages, tools))


def supervise(
    learner: Learner, rows: Sequence[Row], batch: int, draw: tuple[int, int], hosts: Hosts = ALONE
) -> dict[str, float]:
    """One step of cross-entropy on `batch` rows, chosen by the seeds `draw`; returns the step's metrics."""
    chosen = np.random.default_rng(draw).integers(0, len(rows), batch)
    return imitate(learner, [rows[i] for i in chosen], hosts)


def imitate(learner: Learner, rows: Sequence[Row], hosts: Hosts = ALONE) -> dict[str, float]:
    """One step of cross-entropy on the rows, the mean over their sampled tokens; returns the step's metrics.

    Every host knows all rows, and works through its share.
    """
    packed = pack(hosts.share(rows), batch_rows=learner.own_rows, row_tokens=learner.options.row_tokens)
    for micro in hosts.level([(packed, 0.0)], learner.empty)[0][0]:
        learner.accumulate(micro, on_policy=True)
    metrics = learner.apply()
    return {
        **{f"sft/{name}": metrics[f"policy/{name}"] for name in ("nll", "lr", "tokens", "grad_norm")},
        "policy/skipped": metrics["policy/skipped"],
    }


def answer_logprobs(learner: Learner, pairs: Sequence[Pair]) -> np.ndarray:
    """log pi of both answers of every pair under the learner's weights, summed over their sampled tokens: [P, 2]."""
    return _scored(learner, pairs)[1]


def prefer(learner: Learner, pairs: Sequence[Pair], reference_P2: np.ndarray, beta: float) -> dict[str, float]:
    """One step of DPO, the mean over the pairs; returns the step's metrics.

    The answers are scored, and then learnt from with the pull that `algos.preference.dpo` gives them: the same gradient as
    differentiating the loss of whole pairs, for the price of one more forward pass, and a pair may be cut over rows,
    micro-batches and devices in any way.

    Args:
        reference_P2: what `answer_logprobs` gave under the reference policy.
    """
    batches, now_P2, found = _scored(learner, pairs)
    ratio_P2 = now_P2 - reference_P2
    each = dpo(jnp.asarray(ratio_P2[:, 0]), jnp.asarray(ratio_P2[:, 1]), beta)
    loss_P, margin_P, pull_P = (np.asarray(x, np.float64) for x in each)
    for (p, answer, place), row in zip(found, _rows(pairs), strict=True):
        batch, at = batches[place.batch], (place.m, place.span)
        own = np.asarray(row.mask)
        batch.advantage[at] = np.where(own, pull_P[p] if answer == 0 else -pull_P[p], 0.0)
        batch.weight[at] = own
        # The shares of a pair sum to one, whatever its lengths: the mean is over pairs.
        batch.share[at] = np.where(own, 1.0 / max(1, _sampled(pairs[p].chosen)), 0.0) if answer == 0 else 0.0
    for batch in batches:
        learner.accumulate(batch, on_policy=True)
    metrics = learner.apply()
    return {
        "dpo/loss": float(loss_P.mean()),
        "dpo/margin": float(margin_P.mean()),
        "dpo/accuracy": float((margin_P > 0).mean()),
        "dpo/chosen_logratio": float(ratio_P2[:, 0].mean()),
        "dpo/rejected_logratio": float(ratio_P2[:, 1].mean()),
        "dpo/lr": metrics["policy/lr"],
        "dpo/tokens": metrics["policy/tokens"],
        "dpo/grad_norm": metrics["policy/grad_norm"],
        "policy/skipped": metrics["policy/skipped"],
    }


def _rows(pairs: Sequence[Pair]) -> list[Row]:
    return [row for pair in pairs for rows in (pair.chosen, pair.rejected) for row in rows]


def _sampled(rows: Sequence[Row]) -> int:
    return sum(sum(row.mask) for row in rows)


def _scored(learner: Learner, pairs: Sequence[Pair]) -> tuple[list[Batch], np.ndarray, list[tuple[int, int, Place]]]:
    """The packed rows, the answers' log-probs [P, 2], and of every row its pair, its answer (0 chosen) and its place."""
    o, rows = learner.options, _rows(pairs)
    shape = {"batch_rows": o.batch_rows, "row_tokens": o.row_tokens}
    batches = pack(rows, **shape)
    scores = [learner.score(batch) for batch in batches]
    whose = [(p, a) for p, pair in enumerate(pairs) for a, side in enumerate((pair.chosen, pair.rejected)) for _ in side]
    logprob_P2 = np.zeros((len(pairs), 2))
    found = []
    for (p, answer), row, place in zip(whose, rows, places([len(row.tokens) for row in rows], **shape), strict=True):
        # Sums of hundreds of float32 numbers in float64: their difference to the reference is small.
        logprob_P2[p, answer] += scores[place.batch][place.m, place.span][np.asarray(row.mask)].sum(dtype=np.float64)
        found.append((p, answer, place))
    return batches, logprob_P2, found
