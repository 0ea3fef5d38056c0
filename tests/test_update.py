"""A step's update while its groups come in: the numbers of the plain loop, whoever comes first and whenever there is time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxagent.algos.table import TABLE, choose
from jaxagent.credit import training_rows
from jaxagent.data.pack import fill, pack
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.types import Group, Sample, StopReason, Trajectory
from jaxagent.update import Update, UpdateOptions

CONFIG = tiny.config()
GROUPS = 9


def group(number: int) -> Group:
    """Four rollouts of unequal lengths and rewards; in every third group all rewards are equal."""
    rng, rows = np.random.default_rng(number), []
    for rollout in range(4):
        row = Trajectory("t", 0, f"g{number}", rollout, stop=StopReason.ANSWERED)
        for _ in range(rng.integers(1, 4)):
            fed, n, held = rng.integers(1, 40, 2).tolist(), int(rng.integers(1, 7)), len(row.tokens)
            row.feed(fed)
            sample = Sample(rng.integers(1, 40, n).tolist(), (-rng.random(n)).tolist(), [0] * n, True, held, fed)
            row.sampled(sample, "", "").reward = 0.0
        row.turns[-1].reward = float(rng.random()) if number % 3 else 1.0
        rows.append(row)
    return Group(f"g{number}", rows)


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    jax.config.update("jax_disable_most_optimizations", True)
    options = LearnerOptions(batch_rows=2, row_tokens=48, head_chunk=48)
    made = Learner(CONFIG, tiny.params(CONFIG), tiny.mesh(), TABLE["tis"], options)
    yield made
    jax.config.update("jax_disable_most_optimizations", False)


def updated(
    learner: Learner, arrivals: Sequence[int], gaps: Sequence[int], old: str = "sampler", ordered: bool = True
) -> tuple[Any, Any, dict[str, float]]:
    """(gradient, new weights, metrics) of a step whose groups are finished in this order, with so much time after each."""
    learner.begin(OptimizerOptions(lr=1e-2, warmup_steps=0, b1=0.0, clip_norm=1e9), 1)
    fresh = jax.device_put(tiny.params(CONFIG), jax.tree.map(lambda p: p.sharding, learner.params))
    learner.restore({"params": fresh, "opt_state": jax.tree.map(jnp.zeros_like, learner.opt_state)}, updates=0)
    options = UpdateOptions(old_logprob=old, ordered=ordered)
    update = Update(learner, None, (), options, place=(0, 0), baselines={})
    groups = [group(i) for i in range(GROUPS)]
    for arrival, gap in zip(arrivals, gaps, strict=True):
        update.add(groups[arrival])
        for _ in range(gap):
            update.work()
    metrics = update.finish(groups)
    return *jax.device_get((optax.tree.get(learner.opt_state, "mu"), learner.params)), metrics


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("old", ["sampler", "trainer"])
def test_whatever_is_computed_early_every_bit_is_that_of_the_plain_loop(learner: Learner, old: str) -> None:
    gradient, params, metrics = updated(learner, [], [], old)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradient))
    assert metrics["feed/streamed"] == 0
    streamed = []
    for gaps in ([9] * GROUPS, [0, 0, 1, 0, 2, 0, 0, 1, 9], [0, 0, 0, 0, 0, 1, 0, 0, 0]):
        other = updated(learner, range(GROUPS), gaps, old)
        assert_equal(other[:2], (gradient, params))
        streamed.append(other[2].pop("feed/streamed"))
        assert other[2] == {name: value for name, value in metrics.items() if name != "feed/streamed"}
    assert streamed[0] > streamed[2] > 0
    assert streamed[0] > 0.5


def test_the_gradient_is_that_of_all_rows_packed_at_once(learner: Learner) -> None:
    gradient, _, metrics = updated(learner, [], [])
    rows, idle = training_rows([group(i) for i in range(GROUPS)], learner.algorithm)
    fresh = jax.device_put(tiny.params(CONFIG), jax.tree.map(lambda p: p.sharding, learner.params))
    learner.restore({"params": fresh, "opt_state": jax.tree.map(jnp.zeros_like, learner.opt_state)}, updates=0)
    batches = pack(rows, batch_rows=2, row_tokens=48)
    for batch in batches:
        learner.accumulate(batch)
    told = learner.apply(idle)
    want = jax.device_get(optax.tree.get(learner.opt_state, "mu"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), gradient, want)
    assert {name: metrics[name] for name in told} == pytest.approx(told, rel=1e-4, abs=1e-6)
    assert metrics["train/row_fill"] >= 0.85 * fill(batches)


def test_in_the_order_of_arrival_the_gradient_is_the_same_up_to_rounding(learner: Learner) -> None:
    gradient, _, metrics = updated(learner, [], [])
    shuffled = np.random.default_rng(1).permutation(GROUPS).tolist()
    other, _, streamed = updated(learner, shuffled, [1] * GROUPS, ordered=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), other, gradient)
    same = {"policy/tokens", "policy/denominator", "credit/advantage_mean", "credit/advantage_std"}
    assert {name: streamed[name] for name in same} == pytest.approx({name: metrics[name] for name in same}, rel=1e-6)
    assert streamed["feed/streamed"] > 0


def test_algorithms_that_look_at_the_whole_step_wait_for_it() -> None:
    waiting = {name for name, row in TABLE.items() if not row.by_group}
    whiten = {"gdpo", "reinforce_pp_baseline", "reinforce_pp", "ppo", "ppo_dual"}
    assert waiting == {*whiten, "ppo_turn", "spiral", "agent_prm", "anchor_gae"}
    assert not choose("rloo", kl_coef=0.01).by_group  # the distance is in the reward
    assert choose("grpo", kl_coef=0.01).by_group


def test_what_must_wait_is_not_begun(learner: Learner) -> None:
    update = Update(learner, None, (), UpdateOptions(minibatches=2), place=(0, 0), baselines={})
    for i in range(GROUPS):
        update.add(group(i))
    assert not update.waiting and not update.work()
