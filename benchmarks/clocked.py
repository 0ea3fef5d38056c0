"""A clock that is not real, and an engine on it: what scheduling costs, without the machine that it runs on.

Time stands still while anything can be done, and goes on to the next moment at which something happens only when it is told to;
so a run does not depend on the machine's speed. The engine is the host's half of the real one: its table of slots, who is
admitted, how what is to be prefilled is cut into calls, and which rows a call decodes. Only the device's programs are
replaced by the seconds that they would take, by a roofline. A token here stands for `GRAIN` tokens of a model, which is one
call of decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxagent.engine.flight import most_prefilled
from jaxagent.engine.slots import Row, SlotTable
from jaxagent.engine.stops import end_of, sample_of
from jaxagent.types import Sample, SampleRequest

GRAIN = 16
QUIET_S = 0.01  # a pause of this length is one in which tools are waited for: engine.replicas.GAP_S
LINGER_S = 1e-4
LENGTH = 1 << 20  # of a slot, in tokens


class Clock(asyncio.SelectorEventLoop):
    """An event loop of such a time. One thread runs it; another says when time may go on, and waits for that."""

    def __init__(self) -> None:
        self._now = 0.0
        self._until: Callable[[], bool] | None = None
        self._reached = threading.Event()
        super().__init__(_Paused(selectors.DefaultSelector(), self._turn))  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now

    def go_on(self, until: Callable[[], bool]) -> None:
        """Moves to the next moment at which something happens, and on, until `until` says that it is enough.

        It is asked whenever all has been done that can be at that moment, now as well. Raises RuntimeError where nothing more
        can happen.
        """
        self._reached.clear()
        self.call_soon_threadsafe(setattr, self, "_until", until)
        self._reached.wait()
        if self._until:
            raise RuntimeError(f"nothing is left that could happen after {self._now:g} s of virtual time")

    def _turn(self, timeout: float | None) -> float | None:
        """Called where nothing can be done at this time: how long to wait in earnest; None: until another thread calls."""
        if self._until is None:
            return None
        if self._until():
            self._until = None
        if self._until is None or timeout is None:
            self._reached.set()
            return None
        self._now += timeout
        return 0.0


class _Paused:
    """A selector that asks before it waits."""

    def __init__(self, selector: selectors.BaseSelector, turn: Callable[[float | None], float | None]):
        self._selector, self._turn = selector, turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = self._selector.select(0)
        if ready or timeout == 0:
            return ready
        return self._selector.select(self._turn(timeout))


@dataclass(frozen=True)
class Device:
    """Seconds of programs with a model of 1.5 billion weights on one H200, at rates that are assumed and were not measured."""

    params: float = 1.54e9
    cached_bytes: float = 2 * 28 * 2 * 128 * 2  # of a token's keys and values
    attention: float = 4 * 28 * 12 * 128  # FLOP of a pair of query and key, forward
    bandwidth: float = 4.3e12
    prefill_flops: float = 0.55 * 790e12
    train_flops: float = 0.45 * 790e12
    step_s: float = 0.4e-3  # launch and sampling
    prefill_s: float = 3e-3
    weight: int = 1  # rows of a larger run that each row stands for
    read_bytes: float = 0.0  # of the weights, where not all multiply every token; 0: two for each

    def decode(self, rows: int, held: float) -> float:
        """One token for every row; they hold so many in all."""
        rows, held = rows * self.weight, held * self.weight
        read = ((self.read_bytes or 2 * self.params) + held * self.cached_bytes) / self.bandwidth
        return max(read, rows * 2 * self.params / self.prefill_flops) + self.step_s

    def prefill(self, tokens: float, pairs: float) -> float:
        flops = self.weight * (2 * self.params * tokens + self.attention * pairs) / self.prefill_flops
        return max(flops, (self.read_bytes or 2 * self.params) / self.bandwidth) + self.prefill_s

    def train(self, lengths: list[int]) -> float:
        """Forward, backward and forward again."""
        tokens, pairs = GRAIN * sum(lengths), GRAIN**2 * sum(n * n for n in lengths) / 2
        return self.weight * (8 * self.params * tokens + 4 * self.attention * pairs) / self.train_flops


class ClockedEngine:
    """Implements `types.Sampler`. `write` says how many tokens a turn has."""

    def __init__(self, clock: Clock, device: Device, slots: int, write: Callable[[SampleRequest], int]):
        self.clock, self.device, self.slots, self.write = clock, device, slots, write
        self.table = SlotTable(slots, LENGTH, fork_min=2)
        self.version, self.busy_s, self.held_until = 0, 0.0, 0.0
        self.idle_since = 0.0
        self._inbox: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._left: dict[str, int] = {}  # tokens that a turn will still have
        self._since: dict[str, float] = {}  # when a trajectory got its slot
        self.held_s: list[float] = []  # for how long slots were held by trajectories that are over
        self._task: asyncio.Task[None] | None = None

    async def generate(self, request: SampleRequest) -> Sample:
        self._task = self._task or self.clock.create_task(self._run())
        future: asyncio.Future[Sample] = self.clock.create_future()
        self._post(partial(self._accept, request, future))
        return await future

    def release(self, trajectory: str) -> None:
        self._post(partial(self._release, trajectory))

    @property
    def idle(self) -> bool:
        """Whether there has been nothing to decode for a while."""
        return not (self.table.sampling or self._inbox) and self.clock.time() - self.idle_since >= QUIET_S

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._wake.set()

    def _accept(self, request: SampleRequest, future: asyncio.Future[Sample]) -> None:
        if fault := self.table.check(request):
            future.set_exception(ValueError(fault))
            return
        self._left[request.trajectory] = self.write(request)
        self.table.enqueue(request, future)

    def _release(self, trajectory: str) -> None:
        if future := self.table.release(trajectory):
            future.cancel()
        if trajectory in self._since:
            self.held_s.append(self.clock.time() - self._since.pop(trajectory))

    async def _run(self) -> None:
        while True:
            work, self._inbox = self._inbox, []
            for item in work:
                item()
            self.table.admit()
            if not self.table.sampling:
                self.idle_since = self.clock.time()
                self._wake.clear()
                with contextlib.suppress(TimeoutError):  # so that there is a moment at which it has been idle long enough
                    await asyncio.wait_for(self._wake.wait(), 2 * QUIET_S)
                await self._wake.wait()
                await asyncio.sleep(LINGER_S)  # for company: what is asked for at this moment is decoded together
                continue
            await asyncio.sleep(max(0.0, self.held_until - self.clock.time()))  # training has the device
            prefill_s, (decode_s, ended) = self._prefill(), self._decode()
            self.busy_s += prefill_s + decode_s
            await asyncio.sleep(prefill_s + decode_s)
            for row in ended:
                future, sample = row.ticket, sample_of(row, len(row.tokens))
                self.table.end(row, self.clock.time())
                if not future.done():
                    future.set_result(sample)

    def _prefill(self) -> float:
        seconds, device = 0.0, self.device
        for row in self.table.rows.values():
            self._since.setdefault(row.trajectory, self.clock.time())
        budget = most_prefilled(self.slots, 1, sum(row.fed for row in self._turns()))
        for _, work in self.table.chunks((64, 512), rows_per_call=8, budget=budget):
            # What is shorter than its bucket is not charged.
            tokens = GRAIN * sum(len(ids) for _, ids in work)
            pairs = GRAIN**2 * sum(len(ids) * (row.cached + len(ids) / 2) for row, ids in work)
            seconds += device.prefill(tokens, pairs)
        for row in self.table.take_begun():
            if row.source:
                seconds += 2 * device.weight * GRAIN * row.cached * device.cached_bytes / device.bandwidth
                row.source = None
        return seconds

    def _turns(self) -> list[Row]:
        return [row for row in self.table.by_slot if row and row.request]

    def _decode(self) -> tuple[float, list[Row]]:
        """One token here for every row whose turn is in progress, and those whose turn has ended with it."""
        rows = [row for row in self._turns() if row.fed]
        held, ended = GRAIN * sum(row.known + len(row.tokens) + 0.5 for row in rows), []
        for row in rows:
            assert row.request
            self._left[row.trajectory] -= 1
            last = not self._left[row.trajectory]
            row.tokens.append(row.request.stop[-1] if last else 120)
            row.logprobs.append(-1.0)
            row.versions.append(self.version)
            if end_of(row.tokens, len(row.tokens) - 1, row.request, ()) is not None:
                ended.append(row)
        return GRAIN * self.device.decode(len(rows), held) if rows else 0.0, ended


def luck(*names: object) -> random.Random:
    """Draws that depend on these names only."""
    return random.Random("/".join(map(str, names)))
