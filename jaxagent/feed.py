"""Who waits for whom. With `max_staleness` 0 this is synchronous training: a step's groups are sampled from its weights.

Above 0 the groups of the next steps are played meanwhile. Nothing is thrown away for being old: what is admitted is paced
(`Pacing`), and what is admitted is trained, in the order of the stream. Which groups a step is trained on therefore depends on
the seed only, and not on who finishes first: no step is made of the short episodes. What does depend on time, above 0, is which
of its turns an episode plays with weights that were published meanwhile; every token says which.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from jaxagent.algos.values import branch_scores, chosen_turns
from jaxagent.data.tasks import TaskStream, ValueStream
from jaxagent.envs.env import ENDLESS, Task, World, size_of
from jaxagent.journal import Journal
from jaxagent.rollout import STOP_POLL_S, RolloutOptions, Rollouts, Stopped, wait
from jaxagent.search import Tree, Value, search
from jaxagent.stem import paths_of, stem_of, want_one_agent
from jaxagent.types import Group, Peers, Sampling, Trajectory, sampling_key


@dataclass(frozen=True)
class FeedOptions:
    """The shape of a step's data.

    Args:
        prompts: groups of a step.
        rollouts: trajectories of a group.
        branches: continuations of a finished group's turns, drawn where the values of their states are uncertain; a group whose
            rollouts all came to the same has none. See algos/values.py.
        max_rounds: how often groups without a signal are replaced by new ones, for algorithms that select mixed groups.
        min_group: 0 waits for every rollout. Above, a step goes on when of every group so many are over, broken ones too, and
            the others have had a quarter more of the time that this took: these are dropped, which is data, and no reward. See
            docs/concepts/failures.md for what that biases.
        max_staleness: most versions between the weights that sampled a token and those that it is trained on.
        max_repeats: 0 draws tasks in a shuffled order; above, by their value p (1 - p), each at most so often in as many draws
            as there are tasks. For worlds with a fixed number of tasks.
    """

    prompts: int = 16
    rollouts: int = 8
    branches: int = 0
    max_rounds: int = 3
    min_group: int = 0
    max_staleness: int = 0
    max_repeats: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "rollouts", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"feed.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_staleness", "max_repeats", "branches"):
            if getattr(self, name) < 0:
                raise ValueError(f"feed.{name} must be at least 0, got {getattr(self, name)}")
        if self.min_group and not 2 <= self.min_group <= self.rollouts:
            most = f"feed.rollouts={self.rollouts}"
            raise ValueError(f"feed.min_group must be 0, or from 2, which can be compared, to {most}; got {self.min_group}")

    @property
    def most_at_once(self) -> int:
        """How many episodes of groups may be there at one time, played or waiting for a place."""
        return self.prompts * self.rollouts * (1 + self.max_staleness)

    def budget_s(self, options: RolloutOptions, *, mixed: bool) -> float:
        """Seconds within which the groups of a step are played, whatever hangs in them; `mixed` as in `Feed.take`."""
        each = options.budget_s(self.most_at_once)
        if self.branches:
            each += options.budget_s(self.most_at_once + self.prompts * self.branches)
        return each * (self.max_rounds if mixed else 1)


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


@dataclass(frozen=True)
class Pacing:
    """How many groups may be played ahead so that none is trained too late. Pure: it knows neither time nor threads.

    A step trains on the oldest admitted groups, `prompts` or more of them (more where groups without a signal are replaced).
    While a step that trains on version v still wants n groups, there may be n + max_staleness * prompts that are admitted and
    not trained. Number j of those that the step leaves is then trained by step v + 1 + j // prompts <= v + max_staleness, and
    its tokens are of version v or younger. No step waits for a group that is not admitted, so that nothing can lock up.
    """

    prompts: int
    max_staleness: int

    def room(self, wanted: int, held: int, steps_left: int) -> int:
        """How many groups to admit now.

        Args:
            wanted: groups that the step still trains on.
            held: groups that are admitted and not trained.
            steps_left: steps after this one: nothing is played that nobody would train on.
        """
        return max(0, wanted + min(self.max_staleness, steps_left) * self.prompts - held)


class Meanwhile(Protocol):
    """What can be done with a step's first groups while its last ones are played."""

    ordered: bool  # it wants the groups in the order of the stream, whoever finishes first

    @property
    def waiting(self) -> bool:
        """Whether there is something to do when the time is right."""
        ...

    def add(self, group: Group) -> None:
        """Takes a finished group that will be trained on."""
        ...

    def work(self) -> bool:
        """Does one piece of what there is to do; False if it is not the time for it, or there is nothing."""
        ...


@dataclass
class Admitted:
    """A group that is played: its place in the stream, the index of its task, its episodes."""

    number: int
    index: int
    episodes: list[Future[list[Trajectory]]]

    @property
    def key(self) -> str:
        return f"train/{self.number}"

    @property
    def finished(self) -> bool:
        return all(episode.done() for episode in self.episodes)


POLL_S = 0.005  # how often it is looked whether the device is free, while there is something to do on it


@dataclass(frozen=True)
class _Waiting:
    """How a step waits for its groups."""

    meanwhile: Meanwhile | None
    stop: Callable[[], bool] | None

    def finished(self, due: Sequence[Admitted]) -> Iterator[Admitted]:
        """Groups as they are finished, or in their order where `meanwhile` wants that; it works while others are played."""
        news, meanwhile, stop = threading.Event(), self.meanwhile, self.stop
        for episode in (episode for admitted in due for episode in admitted.episodes):
            episode.add_done_callback(lambda _: news.set())
        left = list(due)
        while left:
            news.clear()
            ready = [admitted for admitted in left if admitted.finished]
            if meanwhile is None or meanwhile.ordered:
                ready = ready[:1] if left[0].finished else []
            for admitted in ready:
                left.remove(admitted)
                yield admitted
            if left and stop and stop():
                raise Stopped
            if left and not ready and not (meanwhile and meanwhile.work()):
                news.wait(POLL_S if meanwhile and meanwhile.waiting else STOP_POLL_S if stop else None)


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
        journal: Journal | None = None,
    ):
        """Args: journal: keeps what is sampled; what it kept is not sampled again."""
        self.peers, self.journal = peers, journal
        self.world, self.tasks, self.rollouts = world, tasks, rollouts
        self.sampling, self.options = sampling, options
        self.pacing = Pacing(options.prompts, options.max_staleness)
        self.drawn = 0
        self.ahead: deque[Admitted] = deque()  # admitted and not trained, in the order of the stream
        self._owed: list[tuple[int, int]] = []  # places and tasks that were admitted before a stop, and are not played yet

    def take(
        self,
        *,
        mixed: bool,
        shape: Callable[[Group], None] | None = None,
        version: int = 0,
        steps_left: int = 0,
        meanwhile: Meanwhile | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[list[Group], list[Group]]:
        """(groups to train on, all groups sampled). `mixed` replaces groups whose rewards are all equal.

        Args:
            shape: shapes the rewards of a finished group, before it is asked whether they differ.
            version: of the weights that these groups are trained on, which are published.
            steps_left: steps after this one.
            meanwhile: what is done with groups while others are played.
            stop: whether this host is to stop. Raises Stopped where it says so, at once; of several hosts on all where one
                does, which gives up its episodes at once, the others when theirs are over. The feed is then as it was before.
        """
        before = self.state() if stop else {}
        try:
            return self._take(mixed, shape, version, steps_left, _Waiting(meanwhile, stop))
        except Stopped:
            self.restore(before)
            raise

    def _take(
        self, mixed: bool, shape: Callable[[Group], None] | None, version: int, steps_left: int, waiting: _Waiting
    ) -> tuple[list[Group], list[Group]]:
        kept: list[Group] = []
        sampled: list[Group] = []
        self._play(self._owed)
        self._owed = []
        for _ in range(self.options.max_rounds if mixed else 1):
            wanted = self.options.prompts - len(kept)
            self._admit(self.pacing.room(wanted, len(self.ahead), steps_left), len(kept))
            due = [self.ahead.popleft() for _ in range(wanted)]
            if self.options.min_group:
                self.rollouts.hurry([admitted.episodes for admitted in due if admitted.episodes], self.options.min_group)
            groups: dict[int, Group] = {}
            stopped = False
            try:
                for admitted in waiting.finished(due):
                    group = groups[admitted.number] = Group.of(admitted.key, wait(admitted.episodes))
                    if shape:
                        shape(group)
                    if waiting.meanwhile and (not mixed or has_signal(group)):
                        waiting.meanwhile.add(group)
                    self._check_age(group, version)
                if self.options.branches:
                    finished = [(groups[admitted.number], self.world.task("train", admitted.index)) for admitted in due]
                    self._branch(finished, waiting.stop)
            except Stopped:
                stopped = True
            endings = self._endings(groups.values(), stopped)
            for admitted in due:
                group, (solved, played, signal) = groups[admitted.number], endings[admitted.key]
                self.tasks.tell(admitted.index, solved, played)
                sampled.append(group)
                kept += [group] if not mixed or signal else []
            if len(kept) == self.options.prompts:
                break
        return kept, sampled

    def _admit(self, count: int, kept: int) -> None:
        """Draws tasks and starts their episodes, where the step that is due has so many groups already."""
        self._play(self._draw(count), kept)

    def _draw(self, count: int) -> list[tuple[int, int]]:
        """The next places in the stream and their tasks."""
        places = list(enumerate(self.tasks.take(count), self.drawn))
        self.drawn += count
        return places

    def _play(self, places: Sequence[tuple[int, int]], kept: int = 0) -> None:
        """Starts the episodes of groups that are this host's, those of a later step as such that are wanted later.

        Which step that is, only the place in the queue says: where groups are replaced, a step takes more of them than others.
        """
        queued = enumerate(places, kept + len(self.ahead))
        own = [(at, place) for at, place in queued if self.peers is None or self.peers.owns(place[0])]
        started: dict[tuple[int, int], list[Future[list[Trajectory]]]] = {}
        for _, step in groupby(own, lambda queued: queued[0] // self.options.prompts):
            together = [place for _, place in step]
            named = [(f"train/{number}", self.world.task("train", index)) for number, index in together]
            episodes = self.rollouts.play(named, self.options.rollouts, self.sampling, journal=self.journal)
            started |= zip(together, episodes, strict=True)
        self.ahead += [Admitted(*place, started.get(place, [])) for place in places]

    def _check_age(self, group: Group, version: int) -> None:
        """Raises RuntimeError for a token that is older than it may be: the pacing has failed."""
        for row in (row for row in group.trajectories if row.stop.counts):  # broken seats of earlier versions are among them
            oldest = min((v for v, sampled in zip(row.version, row.mask, strict=True) if sampled), default=version)
            if version - oldest > self.options.max_staleness:
                raise RuntimeError(
                    f"{group.key}, rollout {row.rollout}: a token that version {oldest} of the weights sampled would be "
                    f"trained on version {version}, but feed.max_staleness is {self.options.max_staleness}: a fault of jaxagent"
                )

    def _endings(self, groups: Iterable[Group], stopped: bool = False) -> dict[str, tuple[int, int, bool]]:
        """How many rollouts solved it, how many count, and whether it has a signal, of every group, whoever played it.

        Raises Stopped, on all hosts, where one of them has stopped.
        """
        ended: dict[str, tuple[int, int, bool]] = {}
        for group in (group for group in groups if group.rows):  # of the other hosts' groups nothing is here
            counted = [row for row in group.trajectories if row.stop.counts and not row.segment]
            ended[group.key] = sum(row.solved for row in counted), len(counted), has_signal(group)
        told: list[Any] = self.peers.gather([stopped, ended]) if self.peers else [[stopped, ended]]
        if any(stopped for stopped, _ in told):
            raise Stopped
        return {key: ending for _, others in told for key, ending in others.items()}

    def metrics(self) -> dict[str, float]:
        """How far the rollouts are ahead of the step: groups that later steps will train on, and how many of them are done."""
        own = [admitted for admitted in self.ahead if admitted.episodes]
        return {"feed/ahead": float(len(own)), "feed/ahead_finished": float(sum(admitted.finished for admitted in own))}

    def search(
        self,
        shape: Callable[[Group], None] | None = None,
        stop: Callable[[], bool] | None = None,
        value: Value | None = None,
    ) -> tuple[list[Group], list[Tree]]:
        """Groups of what a search over turns found for each task, `rollouts` simulations each, and the trees.

        Only the reward of what was found is shaped, not what the search goes by. `stop` is that of `take`, `value` search's.
        """
        before = self.state() if stop else {}
        places = self._draw(self.options.prompts)
        named = [(f"train/{number}", self.world.task("train", index)) for number, index in places]
        try:
            trees = search(self.rollouts, named, self.sampling, self.options.rollouts, value=value, stop=stop)
        except Stopped:
            self.restore(before)
            raise
        groups = [Group(tree.group, [*tree.episodes, *tree.lost]) for tree in trees]
        endings = self._endings(groups)
        for group, (_, index) in zip(groups, places, strict=True):
            self.tasks.tell(index, *endings[group.key][:2])
            if shape:
                shape(group)
        return groups, trees

    def _branch(self, finished: Sequence[tuple[Group, Task]], stop: Callable[[], bool] | None) -> None:
        """Has turns of finished groups continued, all at once. Raises ValueError for worlds of several agents."""
        started = []
        for group, task in finished:
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
            group.branches += wait(futures, stop)

    @property
    def first(self) -> int:
        """The number of the first group that was not trained on."""
        places = [admitted.number for admitted in self.ahead] + [number for number, _ in self._owed]
        return min(places, default=self.drawn)

    def state(self) -> dict[str, Any]:
        ahead = [(admitted.number, admitted.index) for admitted in self.ahead]
        return {"drawn": self.drawn, "tasks": self.tasks.state(), "ahead": [*ahead, *self._owed]}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state; groups that were admitted then are played again, under the keys that they had."""
        self.drawn = state["drawn"]
        self.tasks.restore(state["tasks"])
        self.ahead.clear()
        self._owed = [(number, index) for number, index in state["ahead"]]


def has_signal(group: Group) -> bool:
    """Whether the rewards of the rollouts that count differ, within a role: roles are not compared with each other."""
    counted = [t for t in group.trajectories if t.stop.counts and not t.segment]
    return len({(t.role, round(t.reward, 6)) for t in counted}) > len({t.role for t in counted})
