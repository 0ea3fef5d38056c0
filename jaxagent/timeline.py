"""When what of a step was: episodes with their turns, tool calls, calls of the engines, the learner's early work, as spans.

All of it was noted where it happened, on the monotonic clock, and is put together here once a step, if an echo asks for it
(`echoes.py`: otel, trace). Nothing of it is stored: two equal runs differ in no file but the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from jaxagent.metrics import Clock, Span
from jaxagent.types import ToolRecord, Trajectory, Turn

Interval = tuple[float, float]  # began and ended, of the monotonic clock
Told = Mapping[str, str | float]
_PAUSE_S = 0.001  # calls of an engine with less between them are one stretch in which it was busy


class Timeline:
    """The spans of a step beside its parts. Of several rollouts, and tool calls, at once each has a row of its own."""

    def __init__(self, clock: Clock):
        """Args: clock: of the parts, so that all agree on what time it is."""
        self._clock = clock
        self._spans: list[Span] = []
        self._free: dict[str, list[float]] = {"rollout": [], "tool": []}  # when each row of a lane is free again

    def take(self) -> list[Span]:
        """What was added since the last call; a span stands behind the one that it is part of."""
        spans, self._spans = self._spans, []
        return spans

    def learner(self, early: Iterable[Interval]) -> None:
        """Micro-batches whose gradient was computed while rollouts were played."""
        for interval in early:
            self._add("micro-batch", interval, "learner")

    def engines(self, calls: Sequence[Sequence[Interval]]) -> None:
        """Calls that decode, in the order of time, of every engine."""
        for number, own in enumerate(calls, 1):
            stretches: list[tuple[float, float, int]] = []
            for began, ended in own:
                if stretches and began - stretches[-1][1] < _PAUSE_S:
                    first, _, count = stretches.pop()
                    stretches.append((first, ended, count + 1))
                else:
                    stretches.append((began, ended, 1))
            for began, ended, count in stretches:
                self._add("busy", (began, ended), "engine", number, told={"calls": count})

    def episodes(self, rows: Iterable[Trajectory]) -> None:
        """Episodes that are over. Those that a journal kept have no times and are left out."""
        together: dict[tuple[str, int, int], list[Trajectory]] = {}
        for row in rows:
            if row.began_s:
                together.setdefault((row.group, row.rollout, row.trunk_turns), []).append(row)
        calls: list[tuple[Interval, ToolRecord, Span]] = []
        for episode in sorted(together.values(), key=lambda episode: episode[0].began_s):
            whole = self._episode(episode)
            calls += [(when, record, whole) for row in episode for turn in row.turns for when, record in _calls(turn)]
        for interval, record, whole in sorted(calls, key=lambda call: call[0][0]):
            told: Told = {"outcome": record.outcome, "size_bytes": record.size_bytes}
            self._add(record.name or "?", interval, "tool", self._row_of("tool", interval), whole, told)

    def _episode(self, rows: Sequence[Trajectory]) -> Span:
        """Adds an episode and its turns."""
        first = rows[0]
        interval = first.began_s, first.began_s + first.seconds
        told: Told = {"task": first.task, "stop": str(first.stop), "attempts": first.attempts}
        told = {**told, "reward": first.reward} if math.isfinite(first.reward) else told
        number = self._row_of("rollout", interval)
        whole = self._add(f"{first.group}#{first.rollout}", interval, "rollout", number, None, told)
        turns = sorted((turn for row in rows for turn in row.turns), key=lambda turn: turn.asked_s)  # of all seats
        for place, turn in enumerate(turns, first.trunk_turns + 1):
            if turn.sampled_s:
                asked, tokens = (turn.asked_s, turn.sampled_s), turn.end - turn.start
                self._add(f"turn {place}", asked, "rollout", number, whole, {"tokens": tokens})
        return whole

    def _row_of(self, lane: str, interval: Interval) -> int:
        """The first row of a lane that is free in this interval, from 1 on; taken from now on."""
        free = self._free[lane]
        at = next((i for i, since in enumerate(free) if since <= interval[0]), len(free))
        free[at : at + 1] = [interval[1]]
        return at + 1

    def _add(
        self, name: str, interval: Interval, lane: str, number: int = 0, within: Span | None = None, told: Told | None = None
    ) -> Span:
        began_s, ended_s = (self._clock.zero_s + moment for moment in interval)  # whose difference is exact
        span = Span(name, began_s, ended_s - began_s, lane, number, within, told or {})
        self._spans.append(span)
        return span


def _calls(turn: Turn) -> list[tuple[Interval, ToolRecord]]:
    """A turn's tool calls and when they were; where their world does not say, one after another since it was asked."""
    found, at = [], turn.sampled_s
    for record in turn.tools:
        began = record.began_s or at
        if began:
            found.append(((began, began + record.latency_s), record))
            at = began + record.latency_s
    return found
