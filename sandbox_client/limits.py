"""How much is asked of a server at once: a window that shrinks when the server refuses, a pace for new connections, and
the count of connections that this process can afford.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

try:
    import resource
except ModuleNotFoundError:  # Windows has none
    resource = None  # type: ignore[assignment]

_SPARED_FILES = 64  # descriptors left to everything else in the process
_SHRINK = 0.7
_LEAST_S = 0.1  # one storm of refusals is one reason to shrink

log = logging.getLogger("sandbox_client")
Clock = Callable[[], float]


class Window:
    """At most `limit` calls at once, first come first served; the limit follows the server.

    Additive increase, multiplicative decrease: `limit += 1 / limit` for every success while the window is full,
    `limit *= 0.7` for a refusal (V. Jacobson, Congestion avoidance and control, 1988; the factor is CUBIC's).
    """

    def __init__(self, most: int, clock: Clock = time.monotonic) -> None:
        self.most = most
        self.limit = float(most)
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._clock = clock
        self._shrunk = -_LEAST_S

    @contextlib.asynccontextmanager
    async def enter(self, timeout_s: float) -> AsyncIterator[None]:
        """Raises TimeoutError when no turn comes in time."""
        if self.in_flight < int(self.limit) and not self._waiting:
            self.in_flight += 1
        else:
            await self._wait(timeout_s)
        try:
            yield
        finally:
            self.in_flight -= 1
            self._admit()

    async def _wait(self, timeout_s: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.in_flight -= 1  # it came too late for us: the next one takes it
            elif turn in self._waiting:
                self._waiting.remove(turn)
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self.in_flight < int(self.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def succeeded(self) -> None:
        """A call went well: a full window grows."""
        if self.in_flight >= int(self.limit) and self.limit < self.most:
            self.limit = min(self.most, self.limit + 1 / self.limit)
            self._admit()

    def refused(self) -> None:
        """The server refused for load: the window shrinks, once per storm."""
        now = self._clock()
        if now - self._shrunk >= _LEAST_S:
            self._shrunk = now
            self.limit = max(1.0, self.limit * _SHRINK)


class Pacer:
    """At most `rate` events a second, evenly after a burst of a tenth of a second's worth."""

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self._rate, self._burst = rate, max(1.0, rate / 10)
        self._next = 0.0
        self._clock = clock

    async def wait(self) -> None:
        """Returns when the next event is due."""
        pause_s = self.due_in_s()
        if pause_s > 0:
            await asyncio.sleep(pause_s)

    def due_in_s(self) -> float:
        """Books the next event and returns how long to wait for it."""
        now = self._clock()
        self._next = max(self._next, now - self._burst / self._rate) + 1 / self._rate
        return self._next - now


class Gauge(Protocol):
    """What counts the open descriptors."""

    def __call__(self) -> int: ...


def open_files() -> int:
    """Returns how many descriptors this process has open, 0 where that cannot be told."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names alone, no paths)
    return 0


def affordable_connections(wanted: int, count: Gauge = open_files) -> int:
    """Returns `wanted`, or as many connections as the limit of open files leaves room for. Raises OSError for none."""
    if resource is None:
        return wanted
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return wanted
    room = most - count() - min(_SPARED_FILES, most // 4)
    if room < 1:
        raise OSError(f"wanted room for {wanted} connections, but {most} files may be open and {count()} are: raise ulimit -n")
    if room < wanted:
        log.warning("at most %d connections instead of %d: only %d files may be open (ulimit -n)", room, wanted, most)
    return min(wanted, room)
