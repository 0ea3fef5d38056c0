"""How long an episode is expected to last, by its siblings and by earlier visits of its task; and who goes first.

Where places are scarce, slots of the engine above all, the last episode to end is a long one that began late. So the long ones
begin first: of n places the time is then about max(work / n, longest) instead of up to their sum. What is known before is
little: the first rollout of a group is sent ahead of all others, to tell of the rest, and while it has not ended, that tells
as well.

Who goes first changes nobody's draws: these are fixed by the group, the rollout and the place in the row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from jaxagent.types import Rank, Sample, Sampler, SampleRequest

REMEMBERED = 100_000  # tasks: of a world without end none comes twice


class Lengths:
    """What is known of the lengths of episodes, in seconds from the first turn to the end: for so long a slot is held."""

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self._tasks: dict[Hashable, tuple[int, float]] = {}  # how many episodes, and their mean
        self._all = (0, 0.0)

    @property
    def mean(self) -> float:
        return self._all[1]

    def of_task(self, task: Hashable) -> float | None:
        """The mean of earlier visits; None where there was none."""
        return self._tasks[task][1] if task in self._tasks else None

    def learn(self, task: Hashable, seconds: float) -> None:
        """One more episode. Means follow the policy: after 16 episodes the oldest count less and less."""
        self._all = _moved(self._all, seconds, 1024)
        self._tasks[task] = _moved(self._tasks.pop(task, (0, 0.0)), seconds, 16)
        if len(self._tasks) > REMEMBERED:
            del self._tasks[next(iter(self._tasks))]


def _moved(mean: tuple[int, float], x: float, most: int) -> tuple[int, float]:
    count = min(mean[0] + 1, most)
    return count, mean[1] + (x - mean[1]) / count


@dataclass
class Siblings:
    """The episodes of one group. `wave` is the call that started them: what was asked for earlier is wanted earlier."""

    lengths: Lengths
    task: Hashable
    wave: int
    earlier: float | None = None  # mean length of the task's earlier visits, when the group began
    waiting: list[Member] = field(default_factory=list)  # not over, in the order of the rollouts
    over: int = 0
    over_s: float = 0.0  # in all
    running: int = 0
    began_s: float = 0.0  # of those that run, in all

    def __post_init__(self) -> None:
        self.earlier = self.lengths.of_task(self.task)

    @property
    def expected(self) -> float | None:
        """The mean over what is known: one that has run for x seconds and is not over is taken for one of 2 x."""
        count, total = self.over + self.running, self.over_s + 2 * (self.running * self.lengths.now() - self.began_s)
        if self.earlier is not None:
            count, total = count + 1, total + self.earlier
        return total / count if count else None


class Member:
    """One episode among its siblings. Its rank may be asked in any thread."""

    def __init__(self, siblings: Siblings):
        self.siblings, self.began_s = siblings, -1.0
        siblings.waiting.append(self)

    def rank(self) -> Rank:
        """Earlier waves first; in one the first of a group that nothing is known of, then by the expected rest."""
        of = self.siblings
        expected = of.expected
        if expected is None:
            first = next(iter(of.waiting), None) is self
            return -of.wave, float("inf") if first else of.lengths.mean
        if self.began_s < 0:
            return -of.wave, expected
        held = of.lengths.now() - self.began_s
        return -of.wave, max(expected - held, held)

    def begin(self) -> None:
        """Its first turn is sampled: it has a place."""
        if self.began_s < 0:
            self.began_s = self.siblings.lengths.now()
            self.siblings.running += 1
            self.siblings.began_s += self.began_s

    def end(self, counts: bool) -> None:
        """An attempt is over; what the infrastructure broke says nothing of lengths."""
        if self.began_s < 0:
            return
        of, seconds = self.siblings, self.siblings.lengths.now() - self.began_s
        of.running -= 1
        of.began_s -= self.began_s
        self.began_s = -1.0
        if counts:
            of.over += 1
            of.over_s += seconds
            of.lengths.learn(of.task, seconds)

    def leave(self) -> None:
        """There will be no further attempt."""
        self.siblings.waiting.remove(self)


class Ranked:
    """A sampler that is told the rank of who asks. Implements `types.Sampler`, for one episode."""

    def __init__(self, sampler: Sampler, member: Member):
        self.sampler, self.member = sampler, member

    async def generate(self, request: SampleRequest) -> Sample:
        sample = await self.sampler.generate(replace(request, rank=self.member.rank))
        self.member.begin()
        return sample

    def release(self, trajectory: str) -> None:
        self.sampler.release(trajectory)


class Gate:
    """So many at once, and of those who wait the one of highest rank next; of equals who came first."""

    def __init__(self, places: int):
        self.free = places
        self._waiting: list[tuple[Callable[[], Rank], asyncio.Future[None]]] = []

    @asynccontextmanager
    async def place(self, rank: Callable[[], Rank]) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        if not self.free:
            mine = rank, asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            try:
                await mine[1]
            except asyncio.CancelledError:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                elif not mine[1].cancelled():  # it had got one
                    self._pass_on()
                raise
        else:
            self.free -= 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        if not self._waiting:
            self.free += 1
            return
        _, future = self._waiting.pop(max(range(len(self._waiting)), key=lambda i: self._waiting[i][0]()))
        if not future.done():
            future.set_result(None)
        else:  # whoever waited was cancelled, and is about to be told
            self._pass_on()
