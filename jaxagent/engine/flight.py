"""Decode calls that were sent and not read yet, when the next one is sent, and what goes before it. Plain Python, no JAX."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from jaxagent.engine.slots import Row
from jaxagent.types import SampleRequest

FADE = 0.95  # what earlier calls count beside the last one
PREFILLED = 2.0  # tokens between two decode calls, for each that these have where all slots decode
SOON = 0.75  # of a call's expected time, in which there is no hurry to send the next


def most_prefilled(slots: int, decode_tokens: int, decoding: int) -> float:
    """Tokens that may be prefilled before the next decode call, which so many rows of these slots wait for.

    PREFILLED slots decode_tokens (slots / decoding): the less, the more rows a long answer of others would hold up; and as many
    as there are where nobody waits.
    """
    return PREFILLED * slots * decode_tokens * slots / decoding if decoding else math.inf


@dataclass(frozen=True)
class Flight:
    """A decode call on its way: whose turns it steps, where in its arrays, and what it will give."""

    turns: list[tuple[Row, SampleRequest]]
    places: list[int]
    version: int  # of the weights
    sent: float
    tokens: Any  # [W, N], like the others not ready yet
    logprobs: Any
    routing: Any
    top: Any
    drafts: Any = None  # [n, K], -1 behind their ends, where it verifies some

    def going_on(self) -> list[tuple[Row, int]]:
        """The rows whose turns have not ended or been released since, each with its place."""
        pairs = zip(self.turns, self.places, strict=True)
        return [(row, at) for (row, request), at in pairs if row.request is request]


class Pace:
    """What calls take of the device and of the host, and how many turns end in one.

    If the next call is sent before the last one's tokens are read, the device never waits for the host: that spares host /
    device of a call. But the turns that ended in the last are stepped once more, frozen, and whatever follows them begins a
    call later: that costs the share of turns that end in a call. So it is sent ahead where the first is the larger share.
    """

    def __init__(self, overlap: bool | None):
        self._overlap = overlap
        self._host_s = self._device_s = self._turns = self._ended = 0.0
        self._recent = deque([0.01], maxlen=4)
        self._read = 0.0  # when tokens were read last
        self.noted: list[tuple[float, float]] | None = None  # when calls began and ended, of the monotonic clock, if asked for

    @property
    def call_s(self) -> float:
        """What a call takes of the device, as far as is known: the shortest of the last ones."""
        return min(self._recent)

    @property
    def ahead(self) -> bool:
        """Whether the next call should be sent before the last one's tokens are read."""
        if self._overlap is not None:
            return self._overlap
        return self._host_s * self._turns > self._device_s * self._ended

    def worked(self, seconds: float) -> None:
        """The host was busy for so long."""
        self._host_s += seconds

    def read(self, sent: float, now: float) -> float:
        """The tokens of a call are here; returns for how long the device was on it."""
        took = now - max(sent, self._read)
        if self.noted is not None:
            self.noted.append((now - took, now))
        self._recent.append(took)
        self._read = now
        self._device_s += took
        return took

    def ended(self, turns: int, ended: int) -> None:
        """Of so many turns that a call stepped, so many ended in it. What was known before fades."""
        self._turns, self._ended = self._turns + turns, self._ended + ended
        for name in ("_host_s", "_device_s", "_turns", "_ended"):
            setattr(self, name, FADE * getattr(self, name))
