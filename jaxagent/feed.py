"""Who waits for whom. With `max_staleness` 0 this is synchronous training: a step's groups are sampled from its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxagent.algos.values import branch_scores, chosen_turns
from jaxagent.data.tasks import TaskStream, ValueStream
from jaxagent.envs.env import ENDLESS, Task, World, size_of
from jaxagent.rollout import Rollouts, wait
from jaxagent.search import Tree, search
from jaxagent.stem import paths_of, stem_of, want_one_agent
from jaxagent.types import Group, Sampling, sampling_key


@dataclass(frozen=True)
class FeedOptions:
    """The shape of a step's data.

    Args:
        prompts: groups of a step.
        rollouts: trajectories of a group.
        branches: continuations of a finished group's turns, drawn where the values of their states are uncertain; a group whose
            rollouts all came to the same has none. See algos/values.py.
        max_rounds: how often groups without a signal are replaced by new ones, for algorithms that select mixed groups.
        max_staleness: versions between sampling and training; only 0 is built.
        max_repeats: 0 draws tasks in a shuffled order; above, by their value p (1 - p), each at most so often in as many draws
            as there are tasks. For worlds with a fixed number of tasks.
    """

    prompts: int = 16
    rollouts: int = 8
    branches: int = 0
    max_rounds: int = 3
    max_staleness: int = 0
    max_repeats: int = 0

    def __post_init__(self) -> None:
        if self.max_staleness:
            raise ValueError(f"feed.max_staleness must be 0 (asynchronous feeding is not built), got {self.max_staleness}")
        for name in ("prompts", "rollouts", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"feed.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_repeats", "branches"):
            if getattr(self, name) < 0:
                raise ValueError(f"feed.{name} must be at least 0, got {getattr(self, name)}")


def stream_of(world: World, seed: int, options: FeedOptions) -> TaskStream | ValueStream:
    """The order in which a world's training tasks come. Raises ValueError where it cannot be by value."""
    size = size_of(world, "train")
    if not options.max_repeats:
        return TaskStream(size, seed)
    if size == ENDLESS:
        raise ValueError(
            f"feed.max_repeats={options.max_repeats} draws tasks by what is known of them, but this world makes a new task "
            "every time: set it to 0, or choose a world with a fixed number of tasks (`sizes`)"
        )
    return ValueStream(size, seed, options.max_repeats)


class Feed:
    """Draws tasks, has them played, and hands out whole groups in the order of the stream."""

    def __init__(
        self,
        world: World,
        tasks: TaskStream | ValueStream,
        rollouts: Rollouts,
        sampling: Sampling,
        options: FeedOptions,
    ):
        self.world, self.tasks, self.rollouts = world, tasks, rollouts
        self.sampling, self.options = sampling, options
        self.drawn = 0

    def take(self, *, mixed: bool, shape: Callable[[Group], None] | None = None) -> tuple[list[Group], list[Group]]:
        """(groups to train on, all groups sampled). `mixed` replaces groups whose rewards are all equal.

        Args:
            shape: shapes the rewards of a finished group, before it is asked whether they differ.
        """
        kept: list[Group] = []
        sampled: list[Group] = []
        for _ in range(self.options.max_rounds if mixed else 1):
            groups = self._sample(self.options.prompts - len(kept))
            for group in groups if shape else ():
                shape(group)
            sampled += groups
            kept += [group for group in groups if not mixed or has_signal(group)]
            if len(kept) == self.options.prompts:
                break
        return kept, sampled

    def _sample(self, count: int) -> list[Group]:
        indices, named = self._draw(count)
        futures = self.rollouts.play(named, self.options.rollouts, self.sampling)
        groups = [Group(name, wait(members)) for (name, _), members in zip(named, futures, strict=True)]
        self._tell(indices, groups)
        if self.options.branches:
            self._branch(groups, [task for _, task in named])
        return groups

    def search(self, shape: Callable[[Group], None] | None = None) -> tuple[list[Group], list[Tree]]:
        """Groups of what a search over turns found for each task, `rollouts` simulations each, and the trees.

        Only the reward of what was found is shaped, not what the search goes by.
        """
        indices, named = self._draw(self.options.prompts)
        trees = search(self.rollouts, named, self.sampling, self.options.rollouts)
        groups = [Group(tree.group, [*tree.episodes, *tree.lost]) for tree in trees]
        self._tell(indices, groups)
        for group in groups if shape else ():
            shape(group)
        return groups, trees

    def _draw(self, count: int) -> tuple[list[int], list[tuple[str, Task]]]:
        indices = self.tasks.take(count)
        named = [(f"train/{self.drawn + i}", self.world.task("train", index)) for i, index in enumerate(indices)]
        self.drawn += count
        return indices, named

    def _tell(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        """What the stream of tasks learns from groups of its tasks."""
        for index, group in zip(indices, groups, strict=True):
            counted = [row for row in group.trajectories if row.stop.counts and not row.segment]
            self.tasks.tell(index, sum(row.solved for row in counted), len(counted))

    def _branch(self, groups: list[Group], tasks: list[Task]) -> None:
        """Has turns of finished groups continued, all at once. Raises ValueError for worlds of several agents."""
        started = []
        for group, task in zip(groups, tasks, strict=True):
            want_one_agent(group.trajectories)
            rows = [row for row in group.trajectories if row.stop.counts and not row.segment and row.turns]
            rewards = [np.asarray([turn.reward for turn in row.turns]) for row in rows]
            for reward, row in zip(rewards, rows, strict=True):
                reward[-1] += row.elsewhere
            rng = np.random.default_rng(sampling_key(self.rollouts.seed, f"{group.key}@", 0))
            scores = branch_scores(paths_of([[row] for row in rows], rewards, [0] * len(rows)))
            places = chosen_turns(scores, self.options.branches, rng)
            for place in sorted(set(places)):
                stem, numbers = stem_of(rows[place[0]], place[1]), range(places.count(place))
                started.append((group, self.rollouts.branch(stem, task, numbers, self.sampling)))
        for group, futures in started:
            group.branches += wait(futures)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "tasks": self.tasks.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.tasks.restore(state["tasks"])


def has_signal(group: Group) -> bool:
    """Whether the rewards of the rollouts that count differ, within a role: roles are not compared with each other."""
    counted = [t for t in group.trajectories if t.stop.counts and not t.segment]
    return len({(t.role, round(t.reward, 6)) for t in counted}) > len({t.role for t in counted})
