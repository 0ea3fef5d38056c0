"""How long an episode is expected to last, by its siblings and by earlier visits of its task; and who goes first.

Where places are scarce, slots of the engine above all, the last episode to end is a long one that began late. So the long ones
begin first: of n places the time is then about max(work / n, longest) instead of up to their sum. What is known before is
little: the first rollout of a group is sent ahead of all others, to tell of the rest, and while it has not ended, that tells
as well.

Who goes first changes nobody's draws: these are fixed by the group, the rollout and the place in the row.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from bisect import insort
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from jaxagent.types import Rank, Sample, Sampler, SampleRequest

REMEMBERED = 100_000  # tasks: of a world without end none comes twice
RERANK_S = 0.25  # ranks move with time and with what siblings tell; for so long those are good that were asked for last


class Lengths:
    """What is known of the lengths of episodes, in seconds from the first slot to the end: for so long it is held."""

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self._tasks: dict[Hashable, tuple[int, float]] = {}  # how many episodes, and their mean
        self._all = (0, 0.0)

    @property
    def mean(self) -> float:
        return self._all[1]

    def of_task(self, task: Hashable) -> float | None:
        """The mean of earlier visits; None where there was none."""
        known = self._tasks.get(task)  # one look: episodes end in another thread
        return known and known[1]

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
    over: tuple[int, float] = (0, 0.0)  # how many, and their lengths in all
    running: tuple[int, float] = (0, 0.0)  # how many, and when they began in all
    changing: threading.Lock = field(default_factory=threading.Lock)  # an episode begins in the engine's thread

    def __post_init__(self) -> None:
        self.earlier = self.lengths.of_task(self.task)

    @property
    def expected(self) -> float | None:
        """The mean over what is known: one that has run for x seconds and is not over is taken for one of 2 x."""
        (over, over_s), (running, began_s) = self.over, self.running
        count, total = over + running, over_s + 2 * (running * self.lengths.now() - began_s)
        if self.earlier is not None:
            count, total = count + 1, total + self.earlier
        return total / count if count else None


class Member:
    """One episode among its siblings. Its rank may be asked in any thread."""

    def __init__(self, siblings: Siblings):
        self.siblings, self.began_s, self.attempt = siblings, -1.0, 1
        siblings.waiting.append(self)

    def rank(self) -> Rank:
        """Earlier waves first; in one the first of a group that nothing is known of, then by the expected rest."""
        of = self.siblings
        expected = of.expected
        if expected is None:
            first = next(iter(of.waiting), None) is self
            return -of.wave, float("inf") if first else of.lengths.mean
        if (began_s := self.began_s) < 0:
            return -of.wave, expected
        held = of.lengths.now() - began_s
        return -of.wave, max(expected - held, held)

    def begin(self, attempt: int | None = None) -> None:
        """It has a slot; any thread may say so. Of an attempt that is over nobody wants to hear it."""
        of = self.siblings
        with of.changing:
            if self.began_s < 0 and attempt in (None, self.attempt):
                self.began_s = of.lengths.now()
                of.running = of.running[0] + 1, of.running[1] + self.began_s

    def end(self, counts: bool) -> None:
        """An attempt is over; what the infrastructure broke says nothing of lengths."""
        of = self.siblings
        with of.changing:
            began_s, self.began_s = self.began_s, -1.0
            self.attempt += 1
            if began_s < 0:
                return
            seconds = of.lengths.now() - began_s
            of.running = of.running[0] - 1, of.running[1] - began_s
            if counts:
                of.over = of.over[0] + 1, of.over[1] + seconds
                of.lengths.learn(of.task, seconds)

    def leave(self) -> None:
        """There will be no further attempt."""
        self.siblings.waiting.remove(self)


class Ranked:
    """A sampler that is told the rank of who asks, and tells when that has a slot. Implements `types.Sampler`.

    It is of one attempt of one episode.
    """

    def __init__(self, sampler: Sampler, member: Member):
        self.sampler, self.member, self._begin = sampler, member, partial(member.begin, member.attempt)

    async def generate(self, request: SampleRequest) -> Sample:
        sample = await self.sampler.generate(replace(request, rank=self.member.rank, begun=self._begin))
        self._begin()  # not every sampler tells
        return sample

    def release(self, trajectory: str) -> None:
        self.sampler.release(trajectory)


class Gate:
    """So many at once, and of those who wait the one of highest rank next; of equals who came first."""

    def __init__(self, places: int):
        self.free = places
        self._came = itertools.count(0, -1)
        # The highest rank last, as it was when it was asked for: thousands wait, and a rank moves little in RERANK_S.
        self._waiting: list[tuple[Rank, int, Callable[[], Rank], asyncio.Future[None]]] = []
        self._ranked_s = 0.0

    @asynccontextmanager
    async def place(self, rank: Callable[[], Rank]) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        if self.free:
            self.free -= 1
        else:
            mine = asyncio.get_running_loop().create_future()
            insort(self._waiting, (rank(), next(self._came), rank, mine))
            try:
                await mine
            except BaseException:
                if not mine.cancel() and not mine.cancelled():  # it had got one
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._waiting and now - self._ranked_s >= RERANK_S:
            self._waiting = sorted((rank(), came, rank, waits) for _, came, rank, waits in self._waiting if not waits.done())
            self._ranked_s = now
        while self._waiting:
            *_, waits = self._waiting.pop()
            if not waits.done():  # else it was cancelled, and is about to be told
                waits.set_result(None)
                return
        self.free += 1
