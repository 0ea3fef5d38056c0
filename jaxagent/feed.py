"""Who waits for whom. With `max_staleness` 0 this is synchronous training: a step's groups are sampled from its weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxagent.data.tasks import TaskStream, ValueStream
from jaxagent.envs.env import ENDLESS, World, size_of
from jaxagent.rollout import Rollouts
from jaxagent.types import Group, Peers, Sampling, Trajectory


@dataclass(frozen=True)
class FeedOptions:
    """The shape of a step's data.

    Args:
        prompts: groups of a step.
        rollouts: trajectories of a group.
        max_rounds: how often groups without a signal are replaced by new ones, for algorithms that select mixed groups.
        max_staleness: versions between sampling and training; only 0 is built.
        max_repeats: 0 draws tasks in a shuffled order; above, by their value p (1 - p), each at most so often in as many draws
            as there are tasks. For worlds with a fixed number of tasks.
    """

    prompts: int = 16
    rollouts: int = 8
    max_rounds: int = 3
    max_staleness: int = 0
    max_repeats: int = 0

    def __post_init__(self) -> None:
        if self.max_staleness:
            raise ValueError(f"feed.max_staleness must be 0 (asynchronous feeding is not built), got {self.max_staleness}")
        for name in ("prompts", "rollouts", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"feed.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_repeats < 0:
            raise ValueError(f"feed.max_repeats must be at least 0, got {self.max_repeats}")


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
    """Draws tasks, has them played, and hands out whole groups in the order of the stream.

    Of several hosts each draws all tasks and plays its own. Groups of the others are there in their places, without
    trajectories: so that hosts agree on the order, and on what was drawn and selected.
    """

    def __init__(
        self,
        world: World,
        tasks: TaskStream | ValueStream,
        rollouts: Rollouts,
        sampling: Sampling,
        options: FeedOptions,
        peers: Peers | None = None,
    ):
        self.peers = peers
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
            indices, groups = self._sample(self.options.prompts - len(kept))
            for group in groups if shape else ():
                shape(group)
            sampled += groups
            ended = self._endings(groups)
            for index, (solved, played, _) in zip(indices, ended, strict=True):
                self.tasks.tell(index, solved, played)
            kept += [group for group, (_, _, signal) in zip(groups, ended, strict=True) if not mixed or signal]
            if len(kept) == self.options.prompts:
                break
        return kept, sampled

    def _sample(self, count: int) -> tuple[list[int], list[Group]]:
        """(the tasks that were drawn, their groups)."""
        indices = self.tasks.take(count)
        drawn = dict(enumerate(indices, start=self.drawn))
        self.drawn += count
        own = [number for number in drawn if self.peers is None or self.peers.owns(number)]
        named = [(f"train/{number}", self.world.task("train", drawn[number])) for number in own]
        futures = self.rollouts.play(named, self.options.rollouts, self.sampling)
        played = dict(zip(own, futures, strict=True))
        return indices, [Group(f"train/{number}", wait(played.get(number, []))) for number in drawn]

    def _endings(self, groups: list[Group]) -> list[tuple[int, int, bool]]:
        """(how many rollouts solved it, how many count, whether it has a signal) of every group, whoever played it."""
        ended: dict[str, tuple[int, int, bool]] = {}
        for group in (group for group in groups if group.trajectories):
            counted = [row for row in group.trajectories if row.stop.counts and not row.segment]
            ended[group.key] = sum(row.solved for row in counted), len(counted), has_signal(group)
        for others in self.peers.gather(ended) if self.peers else ():
            ended |= others
        return [ended[group.key] for group in groups]

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "tasks": self.tasks.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.tasks.restore(state["tasks"])


def wait(futures: list[Future[list[Trajectory]]]) -> list[Trajectory]:
    """The rows of a group's episodes, in the order of its rollouts."""
    return [row for future in futures for row in future.result()]


def has_signal(group: Group) -> bool:
    """Whether the rewards of the rollouts that count differ, within a role: roles are not compared with each other."""
    counted = [t for t in group.trajectories if t.stop.counts and not t.segment]
    return len({(t.role, round(t.reward, 6)) for t in counted}) > len({t.role for t in counted})
