"""The health of one endpoint: smoothed latency and failures, and a breaker that stops asking what does not answer."""

import random
import time
from collections import deque
from collections.abc import Callable

Clock = Callable[[], float]

_WEIGHT = 0.1  # of the newest sample in the moving averages
_FAILURES_IN_A_ROW = 5
_FAILURE_SHARE = 0.5
_SHARE_COUNT = 20  # calls before a share is believed
_OPEN_S, _OPEN_MAX_S = 0.25, 8.0
_PROBE_POLL_S = 0.05


class Breaker:
    """Closed: all pass. Open: none, for a time that doubles. Half open: one, whose fate decides."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.latency_s = 0.0  # moving average of what was answered
        self.failure_share = 0.0
        self.answered = 0
        self._clock = clock
        self._count = 0
        self._in_a_row = 0
        self._open_until: float | None = None
        self._open_s = _OPEN_S
        self._probing = False

    @property
    def state(self) -> str:
        """closed, open or half-open."""
        if self._open_until is None:
            return "closed"
        return "half-open" if self._clock() >= self._open_until else "open"

    def admits_in_s(self) -> float:
        """Returns 0 when a call may pass now, else how long to wait before asking again."""
        if self._open_until is None:
            return 0.0
        if self._probing:
            return _PROBE_POLL_S
        return max(0.0, self._open_until - self._clock())

    def begin(self) -> bool:
        """A call passes; returns whether it is the probe, which must `end` whatever becomes of it."""
        if self._open_until is None:
            return False
        self._probing = True
        return True

    def end(self, probe: bool) -> None:
        """A call is over, by any way at all."""
        if probe:
            self._probing = False

    def succeeded(self, latency_s: float) -> None:
        """It was answered, if only with a refusal: the endpoint lives."""
        self._sample(0.0)
        self.latency_s += (latency_s - self.latency_s) * (_WEIGHT if self.answered else 1.0)
        self.answered += 1
        self._in_a_row = 0
        if self._open_until is not None:
            self._open_until, self._open_s = None, _OPEN_S
            self.failure_share, self._count = 0.0, 0

    def failed(self, latency_s: float = 0.0) -> None:
        """It was not answered, or by the wreck of a server."""
        self._sample(1.0)
        self._in_a_row += 1
        if latency_s > self.latency_s and self.answered:
            self.latency_s += (latency_s - self.latency_s) * _WEIGHT
        broken = self._in_a_row >= _FAILURES_IN_A_ROW
        broken |= self._count >= _SHARE_COUNT and self.failure_share > _FAILURE_SHARE
        now = self._clock()
        if self._open_until is None and broken:
            self._open_until = now + self._open_s * random.uniform(0.5, 1.0)
        elif self._open_until is not None and now >= self._open_until:
            self._open_s = min(2 * self._open_s, _OPEN_MAX_S)
            self._open_until = now + self._open_s * random.uniform(0.5, 1.0)  # clients must not probe in step

    def _sample(self, failed: float) -> None:
        self._count += 1
        self.failure_share += (failed - self.failure_share) * _WEIGHT


class Hedges:
    """When a pure call is sent a second time: after the 95th percentile of latency, for at most 2 % of the calls."""

    def __init__(self, share: float = 0.02, kept: int = 512, least: int = 50) -> None:
        self._share, self._least = share, least
        self._latencies: deque[float] = deque(maxlen=kept)
        self._delay_s: float | None = None
        self.calls = 0
        self.sent = 0

    def begin(self) -> float | None:
        """A pure call begins; returns after how long it may be hedged, None for never."""
        self.calls += 1
        if len(self._latencies) < self._least or self.sent + 1 > self._share * self.calls:
            return None
        if self._delay_s is None or self.calls % 32 == 0:
            self._delay_s = sorted(self._latencies)[int(0.95 * (len(self._latencies) - 1))]
        return self._delay_s

    def take(self) -> bool:
        """Returns whether the budget still allows the second sending, and books it."""
        allowed = self.sent + 1 <= self._share * self.calls
        self.sent += allowed
        return allowed

    def answered(self, latency_s: float) -> None:
        """Remembers how long a pure call took."""
        self._latencies.append(latency_s)
