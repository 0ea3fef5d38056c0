"""One step's update: from groups to new weights, and what of it can be done while other groups are still played.

A gradient is a sum over micro-batches that is divided once, at the end, and a group's advantages need no other group. So the
micro-batches of finished groups are computed in the gaps in which the engines wait for tools, and the weights change when all
groups are in: the plain loop, with its training hidden in the waiting.

Not all can be done early. Algorithms whose advantages look at the whole step wait for it (`Algorithm.by_group`), and so do
several optimizer steps over one set of groups (`minibatches` above 1), whose shares of the groups are drawn from all, and
several hosts.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxagent.algos.losses import kl_estimate
from jaxagent.credit import Credit, assign, counted, credit_metrics, plain_rows, rows_of
from jaxagent.data.pack import Batch, Packer, fill, pack, unpack
from jaxagent.engine.replicas import Replicas
from jaxagent.hosts import ALONE, Hosts
from jaxagent.learner import Learner
from jaxagent.metrics import Mean
from jaxagent.process import Process
from jaxagent.types import Group


@dataclass(frozen=True)
class UpdateOptions:
    """How a step's groups become updates.

    Args:
        minibatches: optimizer steps per set of groups.
        old_logprob: against which ratios are taken: the "sampler"'s log-probs, or the "trainer"'s at the start of the step.
        ordered: micro-batches are made and added in the order of the stream, whoever finishes first, so that every bit is
            that of the plain loop. Otherwise in the order of arrival, which is the same sum in another order.
        policy_moves: False while only the critic learns.
    """

    minibatches: int = 1
    old_logprob: str = "sampler"
    ordered: bool = True
    policy_moves: bool = True


class Update:
    """The update of one step. Implements `feed.Meanwhile`: groups are added as they come; `finish` takes the step."""

    def __init__(
        self,
        learner: Learner,
        critic: Learner | None,
        engines: Sequence[Replicas],
        options: UpdateOptions,
        *,
        place: tuple[int, int],
        baselines: dict[str, float],
        process: Process | None = None,
        hosts: Hosts = ALONE,
    ):
        """Args:
        engines: all that decode on the learner's devices: what is done early is done while none of them does.
        place: seed and step, of which the minibatches are drawn; the step is the version of the weights that are trained.
        baselines: moving means of the roles' returns, for algorithms that have them; moved on.
        process: what the critic is taught, and what it pays, where it is a process reward model.
        hosts: a micro-batch is a program of all of them, which they can only begin together: nothing is early then.
        """
        self.learner, self.critic, self.engines, self.options = learner, critic, engines, options
        self.algorithm, self.ordered = learner.algorithm, options.ordered
        self.place, self.baselines, self.process = place, baselines, process
        self.hosts = hosts
        self.early = self.algorithm.by_group and options.minibatches == 1 and hosts.count == 1
        self._shape = {"batch_rows": learner.own_rows, "row_tokens": learner.options.row_tokens}
        self._told: dict[str, Any] = {"keep_idle": self.algorithm.beyond_advantage, "version": place[1]}  # of every row
        self._packer, self._ready = Packer(**self._shape), deque[Batch]()
        self._credits: dict[str, list[Credit]] = {}
        self._idle: dict[str, float] = {}
        self._fills: list[float] = []  # of the micro-batches that are done
        self.early_s: list[tuple[float, float]] = []  # when those of them that were early began and ended, monotonic

    # ------------------------------------------------------------------ while others are played

    @property
    def waiting(self) -> bool:
        return bool(self._ready)

    def add(self, group: Group) -> None:
        if self.early:
            (credits,) = assign([group], self.algorithm)
            rows, idle = rows_of(credits, **self._told)
            self._credits[group.key], self._idle[group.key] = credits, idle
            self._ready += self._packer.add(rows)

    def work(self) -> bool:
        """One micro-batch, if no engine has anything to decode."""
        if not self._ready or not all(engines.idle() for engines in self.engines):
            return False
        with self._hold():
            began_s = time.monotonic()
            self._accumulate(self._ready.popleft())
            self.learner.wait()
            self.early_s.append((began_s, time.monotonic()))
        return True

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for engines in self.engines:
                held.enter_context(engines.hold())
            yield

    def _accumulate(self, batch: Batch) -> None:
        self._look_back(batch)
        self.learner.accumulate(batch)
        self._fills.append(fill([batch]))

    def _look_back(self, batch: Batch) -> None:
        """What other weights say of a micro-batch: those of the start of the step, and the reference."""
        if self.options.old_logprob == "trainer":
            batch.old_logprob = self.learner.score(batch)
        if self.algorithm.kl_in_loss:
            batch.reference = self.learner.score(batch, reference=True)

    # ------------------------------------------------------------------ when all are in

    def finish(self, groups: Sequence[Group]) -> dict[str, float]:
        """Updates the weights with all groups of the step; returns the metrics of those minibatches that had tokens."""
        with self._hold():
            return self._rest(groups) if self.early else self._all(groups)

    def _rest(self, groups: Sequence[Group]) -> dict[str, float]:
        done = len(self._fills)
        for group in groups:
            if group.key not in self._credits:
                self.add(group)
        self._ready += self._packer.rest()
        while self._ready:
            self._accumulate(self._ready.popleft())
        result = self.learner.apply(sum(self._idle[group.key] for group in groups))
        metrics = credit_metrics([credit for group in groups for credit in self._credits[group.key]], self.algorithm)
        if not result["policy/tokens"]:
            return metrics
        early = {"feed/streamed": done / len(self._fills), "train/row_fill": sum(self._fills) / len(self._fills)}
        return {**metrics, **result, **early}

    def _all(self, groups: Sequence[Group]) -> dict[str, float]:
        """One pass over the groups in `minibatches` optimizer steps."""
        learner, critic = self.learner, self.critic
        credits, metrics = self._credited(groups)
        order = np.random.default_rng(self.place).permutation(len(groups))
        minibatches = []
        for part in np.array_split(order, min(self.options.minibatches, max(1, len(groups)))) if groups else ():
            rows, idle = rows_of([credit for i in part for credit in credits[i]], **self._told)
            minibatches.append((pack(rows, **self._shape), idle))
        minibatches = self.hosts.level(minibatches, learner.empty)  # as many micro-batches on every host
        for batch in (batch for batches, _ in minibatches for batch in batches if self.options.policy_moves):
            self._look_back(batch)
        results, criticised = [], []
        for number, (batches, idle) in enumerate(minibatches):
            if critic:
                for batch in [*batches, *self._searched(number, len(groups))]:
                    critic.accumulate(batch)
                criticised.append(critic.apply())
            if self.options.policy_moves:
                for batch in batches:
                    learner.accumulate(batch)
                results.append(learner.apply(idle))
        metrics |= joined([result for result in criticised if result["critic/tokens"]])
        taught = [result for result in results if result["policy/tokens"]]
        if not taught:
            return metrics
        metrics |= joined(taught)
        # Only the first minibatch is scored by the weights that sampled it: later ones would show the update, not a mismatch.
        for name in (name for name in taught[0] if name.startswith(("policy/sampler_logprob_gap", "off_policy/"))):
            metrics[name] = results[0][name] if results[0]["policy/tokens"] else math.nan
        return {**metrics, "train/row_fill": fill([batch for batches, _ in minibatches for batch in batches])}

    def _searched(self, minibatch: int, count: int) -> list[Batch]:
        """What a process reward model is taught besides the rollouts: as many rows from elsewhere as there are groups."""
        turn = self.place[1] * self.options.minibatches + minibatch
        return pack(self.process.rows(turn, count) if self.process else [], **self._shape)

    def _credited(self, groups: Sequence[Group]) -> tuple[list[list[Credit]], dict[str, float]]:
        """What every row is to learn, after what critic and reference have to say of it."""
        learner, critic, algorithm = self.learner, self.critic, self.algorithm
        asked = critic is not None or algorithm.kl_in_reward
        trajectories = counted(groups) if asked else []
        rows = plain_rows(trajectories)
        batches = self.hosts.level([(pack(rows, **self._shape), 0.0)], learner.empty)[0][0]

        def by_row(score: Callable[[Batch], np.ndarray]) -> dict[int, np.ndarray]:
            scores = unpack(rows, [score(batch) for batch in batches], **self._shape)
            return {id(row): x for row, x in zip(trajectories, scores, strict=True)}

        def distance(batch: Batch) -> np.ndarray:
            now = learner.score(batch) if self.options.old_logprob == "trainer" else batch.logprob
            return np.asarray(kl_estimate(algorithm.kl_estimate, now - learner.score(batch, reference=True))) * batch.mask

        kl = by_row(distance) if algorithm.kl_in_reward else {}
        said = by_row(critic.score) if critic else {}
        told = self.process.pay(groups, said, algorithm.gamma) if self.process else {}
        credits = assign(
            groups,
            algorithm,
            penalty={row: algorithm.kl_coef * x for row, x in kl.items()},
            value=said if algorithm.critic else None,
            baselines=self.baselines,
        )
        every = [credit for of_group in credits for credit in of_group]
        metrics = told | credit_metrics(every, algorithm)
        if self.process:
            metrics |= self.process.teach(groups, every, algorithm.gamma)
        if kl:
            sampled = sum(sum(t.mask) for t in trajectories)
            metrics["policy/kl_reference"] = Mean(sum(float(x.sum()) for x in kl.values()), sampled)
        return credits, self.hosts.combined(metrics)


def joined(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """The step's metrics from those of its minibatches."""
    names = dict.fromkeys(name for result in results for name in result)
    return {name: _joining(name)([result[name] for result in results if name in result]) for name in names}


def _joining(name: str) -> Callable[[list[float]], Any]:
    """How the minibatches' values of a metric become the step's."""
    if name.endswith(("/tokens", "/skipped")):
        return sum
    return max if name.endswith("_max") else lambda values: sum(values) / len(values)
