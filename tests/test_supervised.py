"""Imitation and preference as steps of the learner: against the formula written out, however the rows are laid out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from jaxagent.algos.table import TABLE
from jaxagent.data.pack import Row
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.transformer import params_of
from jaxagent.selection import Pair, imitated
from jaxagent.supervised import answer_logprobs, imitate, prefer

CONFIG = tiny.config()
OPTIONS = LearnerOptions(batch_rows=2, row_tokens=32, head_chunk=64)
PLAIN = OptimizerOptions(lr=1e-2, lr_final=1e-3, warmup_steps=0, b1=0.0, clip_norm=1e9)  # the first moment is the gradient
BETA = 0.3


@pytest.fixture(scope="module")
def learners() -> dict[str, Learner]:
    return {name: Learner(CONFIG, tiny.params(CONFIG), tiny.mesh(), TABLE[name], OPTIONS) for name in ("grpo", "gspo")}


def fresh(learner: Learner) -> Learner:
    learner.trained = jax.device_put(tiny.params(CONFIG), jax.tree.map(lambda p: p.sharding, learner.trained))
    learner.begin(PLAIN, 3)
    return learner


def answers(count: int, seed: int) -> list[Pair]:
    """Pairs with a common prompt, answers of unequal lengths with an observation inside, one of them in two segments."""
    rng = np.random.default_rng(seed)

    def row(prompt: list[int], n: int) -> Row:
        mask = [False] * 3 + [True] * 2 + [False] + [True] * n
        return imitated([*prompt, *rng.integers(0, CONFIG.vocab_size, 3 + n).tolist()], mask)

    found = []
    for p in range(count):
        prompt = rng.integers(0, CONFIG.vocab_size, 3).tolist()
        found.append(Pair([row(prompt, 2 + p)], [row(prompt, 5)] + [row(prompt, 1)] * (p == 1)))
    return found


ROWS, WIDTH = 16, 16


def padded(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and masks of all rows, each alone and padded at its end, and [P, 2, ROWS], which rows an answer has."""
    tokens, mask = np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH), bool)
    whose, at = np.zeros((4, 2, ROWS), np.float32), 0
    for p, pair in enumerate(pairs):
        for a, side in enumerate((pair.chosen, pair.rejected)):
            for row in side:
                tokens[at, : len(row.tokens)], mask[at, : len(row.mask)] = row.tokens, row.mask
                whose[p, a, at] = 1.0
                at += 1
    return tokens, mask, whose


def answered(params: Any, tokens: Any, mask: Any, whose: Any) -> jax.Array:
    """log p of the answers by a plain forward pass, [4, 2]."""
    policy = nnx.merge(params_of(tiny.policy(CONFIG))[0], params)
    log_p = jax.nn.log_softmax(policy(tokens)[:, :-1])
    each = jnp.take_along_axis(log_p, tokens[:, 1:, None], 2)[..., 0]
    return whose @ jnp.where(mask[:, 1:], each, 0.0).sum(1)


@jax.jit
def pairwise(params: Any, reference_P2: Any, tokens: Any, mask: Any, whose: Any) -> tuple[jax.Array, Any]:
    """The loss of four whole pairs, and its gradient by autodiff."""

    def loss(params: Any) -> jax.Array:
        ratio = answered(params, tokens, mask, whose) - reference_P2
        return jnp.mean(-jax.nn.log_sigmoid(BETA * (ratio[:, 0] - ratio[:, 1])))

    return jax.value_and_grad(loss)(params)


def logprobs(pairs: list[Pair]) -> np.ndarray:
    return np.asarray(jax.jit(answered)(tiny.params(CONFIG), *padded(pairs)))[: len(pairs)]


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_the_gradient_of_preferences_is_that_of_the_pairwise_loss_written_out(
    learners: dict[str, Learner], algorithm: str
) -> None:
    learner, pairs = fresh(learners[algorithm]), answers(4, seed=1)
    reference_P2 = np.random.default_rng(2).normal(-20, 3, (4, 2))
    wanted, want = pairwise(tiny.params(CONFIG), np.float32(reference_P2), *padded(pairs))
    metrics = prefer(learner, pairs, reference_P2, BETA)
    got = optax.tree.get(learner.opt_state, "mu")
    assert metrics["dpo/loss"] == pytest.approx(float(wanted), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4), jax.device_get(got), jax.device_get(want))
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(want)) > 1e-2


def test_answers_are_scored_as_the_plain_forward_scores_them(learners: dict[str, Learner]) -> None:
    pairs = answers(4, seed=1)
    np.testing.assert_allclose(answer_logprobs(fresh(learners["grpo"]), pairs), logprobs(pairs), atol=1e-4)


def test_under_its_own_weights_as_reference_a_policy_starts_at_log_two_and_the_margin_grows(
    learners: dict[str, Learner],
) -> None:
    learner, pairs = fresh(learners["grpo"]), answers(4, seed=3)
    reference_P2 = answer_logprobs(learner, pairs)
    told = [prefer(learner, pairs, reference_P2, BETA) for _ in range(3)]
    assert told[0]["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert told[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-5)
    assert told[0]["dpo/margin"] < told[1]["dpo/margin"] < told[2]["dpo/margin"]
    assert told[2]["dpo/accuracy"] == 1.0


def test_what_is_not_sampled_has_no_part_in_a_preference(learners: dict[str, Learner]) -> None:
    """Answers that differ in an observation after their last sampled token only give the same numbers."""
    row = imitated([1, 2, 3, 4, 5, 6, 7], [False, False, True, True, False, False, False])
    other = imitated([1, 2, 3, 4, 9, 9, 9], row.mask)
    both = answer_logprobs(fresh(learners["grpo"]), [Pair([row], [other])])
    assert both[0, 0] == pytest.approx(both[0, 1], abs=1e-6)


def test_a_step_of_imitation_tells_the_cross_entropy_of_the_sampled_tokens(learners: dict[str, Learner]) -> None:
    pairs = answers(3, seed=5)
    rows = [pair.chosen[0] for pair in pairs]
    total = -float(logprobs(pairs)[:, 0].sum())
    told = imitate(fresh(learners["grpo"]), rows)
    sampled = sum(sum(row.mask) for row in rows)
    assert told["sft/tokens"] == sampled
    assert told["sft/nll"] == pytest.approx(total / sampled, rel=1e-5)
