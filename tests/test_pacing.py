"""Groups ahead of their step, on a clock that is not real: the bound holds, nothing is lost, and nothing waits for ever."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
from toys import Parity

from jaxagent.feed import Feed, FeedOptions, Pacing, has_signal, stream_of
from jaxagent.types import Group, Sample, Sampling, StopReason, Trajectory


class Finite(Parity):
    sizes: ClassVar[dict[str, int]] = {"train": 9}


class Counted:
    """A stream of tasks that costs nothing: 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.at = 0

    def take(self, count: int) -> list[int]:
        self.at += count
        return list(range(self.at - count, self.at))

    def tell(self, index: int, solved: int, played: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def restore(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Schedule:
    """Plays episodes on a clock of its own: random turns, tools and places. It stands where `Rollouts` stands, and for the
    step's other work: whenever the feed has nothing to do but wait, the clock goes on to the next turn."""

    ordered, waiting = True, True

    def __init__(self, seed: int, concurrency: int):
        self.luck, self.concurrency = random.Random(seed), concurrency
        self.now, self.version = 0.0, 0
        self.queue: deque[tuple[Trajectory, int, Future[list[Trajectory]]]] = deque()
        self.events: list[tuple[float, int, Trajectory, int, Future[list[Trajectory]]]] = []
        self.number = itertools.count()
        self.started, self.seen = 0, 0

    def play(
        self, tasks: Iterable[tuple[str, Any]], rollouts: int, sampling: Sampling, journal: None = None
    ) -> list[list[Future[list[Trajectory]]]]:
        futures = []
        for group, task in tasks:
            members: list[Future[list[Trajectory]]] = [Future() for _ in range(rollouts)]
            for i, future in enumerate(members):
                self.queue.append((Trajectory(task["id"], task["seed"], group, i), self.luck.randint(1, 4), future))
            futures.append(members)
        self._start()
        return futures

    def _start(self) -> None:
        while self.queue and len(self.events) < self.concurrency:
            self._next(*self.queue.popleft())
            self.started += 1

    def _next(self, row: Trajectory, turns: int, future: Future[list[Trajectory]]) -> None:
        slow = self.luck.lognormvariate(0.0, 1.5)  # a few tools take very long
        heapq.heappush(self.events, (self.now + slow, next(self.number), row, turns, future))

    def turn(self) -> None:
        """The clock goes on to the end of the next turn, which the weights of that moment sampled."""
        assert self.events, "the feed waits for groups that nobody plays"
        self.now, _, row, turns, future = heapq.heappop(self.events)
        row.feed([1])
        row.sampled(Sample([2], [-1.0], [self.version], True, 0, [1]), "", "")
        if turns > 1:
            self._next(row, turns - 1, future)
            return
        fate = random.Random(f"{row.group}#{row.rollout}")  # of the place, not of the schedule
        row.stop = StopReason.INFRA_FAILURE if fate.random() < 0.05 else StopReason.ANSWERED
        row.turns[-1].reward = float(fate.random() < 0.4)
        self._start()
        future.set_result([row])

    def add(self, group: Group) -> None:
        self.seen += 1

    def work(self) -> bool:
        self.turn()
        return True

    def train(self, version: int) -> None:
        """The step takes its time, while episodes go on; then there are new weights."""
        until = self.now + self.luck.lognormvariate(0.5, 1.0)
        while self.events and self.events[0][0] < until:
            self.turn()
        self.now, self.version = max(self.now, until), version


def names(groups: list[Group]) -> list[tuple[str, str]]:
    return [(group.key, group.trajectories[0].task) for group in groups]


def trained(seed: int, options: FeedOptions, mixed: bool, steps: int, timing: int, stop: int = -1) -> list[list[Any]]:
    """Every step's groups; after step `stop` the feed is stopped and begun again from what it had written down."""
    world = Finite()
    sampling, found, state = Sampling(), [], ""
    schedule = Schedule(timing, concurrency=1 + timing % 7)

    def begin() -> Feed:
        stream = stream_of(world, seed, options) if options.max_repeats else Counted()
        return Feed(world, stream, schedule, sampling, options)  # type: ignore[arg-type]

    feed = begin()
    for step in range(steps):
        kept, sampled = feed.take(mixed=mixed, version=step, steps_left=steps - 1 - step, meanwhile=schedule)
        for group in sampled:
            versions = {v for row in group.trajectories for v, own in zip(row.version, row.mask, strict=True) if own}
            assert versions and step - options.max_staleness <= min(versions) <= max(versions) <= step
        assert kept == [group for group in sampled if not mixed or has_signal(group)]
        found.append([names(kept), names(sampled)])
        schedule.train(step + 1)
        if step == stop:
            state = json.dumps(feed.state())
            schedule = Schedule(timing + 1, concurrency=2)
            schedule.version = step + 1
            feed = begin()
            feed.restore(json.loads(state))
    assert not feed.ahead and not schedule.events and not schedule.queue  # nothing was played for nobody
    return found


def test_over_a_thousand_schedules_the_bound_holds_nothing_is_lost_and_nothing_waits_for_ever() -> None:
    ahead = 0
    for seed in range(1000):
        luck = random.Random(seed)
        mixed, repeats, steps = luck.random() < 0.4, luck.choice((0, 0, 0, 2)), luck.randint(1, 6)
        shape = {"prompts": luck.randint(1, 3), "rollouts": luck.randint(1, 3), "max_rounds": luck.randint(1, 3)}
        options = FeedOptions(**shape, max_staleness=luck.choice((0, 1, 2, 4)), max_repeats=repeats)
        found = trained(seed % 50, options, mixed, steps, timing=seed)
        keys = [key for _, sampled in found for key, _ in sampled]
        assert keys == [f"train/{i}" for i in range(len(keys))]  # each once, whole, in the order of the stream
        full = [len(kept) == options.prompts for kept, _ in found]
        assert all(full) or (mixed and all(len(sampled) >= options.prompts for _, sampled in found))
        if seed % 4 == 0:  # another timing, and a stop in between, train on the same groups in the same steps
            assert trained(seed % 50, options, mixed, steps, timing=seed + 5000) == found
            assert trained(seed % 50, options, mixed, steps, timing=seed, stop=luck.randrange(steps)) == found
        ahead += options.max_staleness > 0
    assert ahead > 500


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_a_bound_is_used_up_where_rollouts_are_fast_and_not_where_nobody_is_left_to_train_on_them(bound: int) -> None:
    world, options = Finite(), FeedOptions(prompts=2, rollouts=1, max_staleness=bound)
    schedule, steps = Schedule(0, concurrency=100), 8
    feed = Feed(world, stream_of(world, 0, options), schedule, Sampling(), options)  # type: ignore[arg-type]
    oldest = []
    for step in range(steps):
        _, sampled = feed.take(mixed=False, version=step, steps_left=steps - 1 - step, meanwhile=schedule)
        assert len(feed.ahead) == 2 * min(bound, steps - 1 - step)
        oldest.append(step - min(v for group in sampled for row in group.trajectories for v in row.version if v >= 0))
        while schedule.events:
            schedule.turn()
        schedule.version = step + 1
    assert oldest == [min(step, bound) for step in range(steps)]


@pytest.mark.parametrize(
    ("bound", "wanted", "held", "steps_left", "room"),
    [(0, 4, 0, 9, 4), (1, 4, 0, 9, 8), (1, 4, 4, 9, 4), (2, 1, 8, 9, 1), (2, 4, 12, 9, 0), (4, 4, 8, 1, 0), (4, 4, 0, 0, 4)],
)
def test_the_room_ahead_by_hand(bound: int, wanted: int, held: int, steps_left: int, room: int) -> None:
    assert Pacing(prompts=4, max_staleness=bound).room(wanted, held, steps_left) == room


def test_a_token_that_is_too_old_is_not_trained_on_in_silence() -> None:
    world, options = Finite(), FeedOptions(prompts=1, rollouts=1, max_staleness=1)
    schedule = Schedule(0, concurrency=1)
    feed = Feed(world, stream_of(world, 0, options), schedule, Sampling(), options)  # type: ignore[arg-type]
    schedule.version = 3
    with pytest.raises(RuntimeError, match=r"train/0, rollout 0: a token that version 3 .* on version 5, .* is 1: a fault"):
        feed.take(mixed=False, version=5, meanwhile=schedule)
