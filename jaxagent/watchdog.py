"""Who owns the deadlines of a run's own waits: a thread that ends the process when a phase does not end.

Episodes are ended one by one by `rollout.Rollouts`, and a step goes on without them. What the story itself waits for, an
engine, a gradient, a disk, another host, has nobody else: a wait that cannot be cancelled is ended with its process. It says
where the process stood and ends it so that it is started again (75), from the last checkpoint and the journal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxagent.metrics import Clock

AGAIN, STUCK = 75, 2  # how the process ends: to be started again, or not, since it did not get any further so
TRIES = 3  # of a phase of a step, until it is not started again
GIVEN_UP = "is not started again"  # a report's words for STUCK
TOLD = 8  # open episodes that the terminal is told of; the file has all
TELL_S = 3.0  # for each thing that a report needs: a disk, a terminal or a world may hang as well
UNHEARD_S = 30.0  # after a deadline, until the process ends though none of its Python threads gets to run


@dataclass(frozen=True)
class Budgets:
    """Seconds that a phase may take: what is declared and `floor_s` besides, for all that stands around it.

    A phase of which nothing is declared may take `first_s` the first two times, in which programs are compiled, and then
    `times` the longest that it took, or `least_s` if that is more. Both are long, since a healthy phase that is ended never
    gets any further: a gradient may take hours on what somebody has, and a step without anything to learn takes none.
    """

    first_s: float = 6 * 3600.0
    least_s: float = 3600.0
    floor_s: float = 900.0
    times: float = 10.0


@dataclass
class _Phase:
    name: str
    began: float
    budget_s: float


class Watchdog:
    """Watches one phase at a time, the innermost. Costs a thread while there is one, and nothing otherwise."""

    def __init__(
        self,
        path: Path,
        declared: Mapping[str, float] | None = None,
        budgets: Budgets = Budgets(),
        *,
        delay_s: float = 0.0,
        end: Callable[[int], Any] = os._exit,
    ):
        """Args:
        path: a file to which a report is added.
        declared: seconds that phases may take.
        delay_s: between the report and the end: hosts that wait for the same can all tell theirs before the first one ends.
        end: ends the process, without any cleaning up that could hang as well.
        """
        self.path, self.declared, self.budgets = path, dict(declared or {}), budgets
        self.place: Callable[[], str] = lambda: "the start"  # where the run is
        self.episodes: Callable[[], Sequence[str]] = lambda: ()  # those that are open, in words
        self._delay_s, self._end = delay_s, end
        self._calls: Counter[str] = Counter()
        self._longest: dict[str, float] = {}
        self._now: _Phase | None = None
        self._by, self._why = float("inf"), ""
        self._changed = threading.Condition()  # reentrant: `hurry` is called by a signal, which comes at any time
        self._thread: threading.Thread | None = None
        self._told, self._over = False, threading.Event()

    @property
    def phase(self) -> str:
        """What is watched now; empty outside of all phases."""
        return self._now.name if self._now else ""

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase. Around another one it is not watched, and begins anew after it."""
        outer = self._now
        self._enter(name)
        try:
            yield
        finally:
            if self._told:  # whatever ended the phase came too late, such as the end of another host
                self._over.wait()
            thread = self._thread
            self._enter(outer.name if outer else "")
            if not outer and thread:
                thread.join(1.0)

    def budget_s(self, name: str) -> float:
        """Seconds that the next phase of this name may take."""
        b = self.budgets
        if name in self.declared:
            return self.declared[name] + b.floor_s
        return b.first_s if self._calls[name] < 2 else max(b.least_s, b.times * self._longest[name])

    def hurry(self, seconds: float, why: str) -> None:
        """Whatever phase there is then, the process ends within so many seconds; may be called by a signal."""
        with self._changed:
            self._by, self._why = min(self._by, time.monotonic() + seconds), self._why or f"{seconds:g} s after {why}"
            self._rearm()

    def _enter(self, name: str) -> None:
        with self._changed:
            now, before = time.monotonic(), self._now
            if before:
                self._calls[before.name] += 1
                self._longest[before.name] = max(self._longest.get(before.name, 0.0), now - before.began)
            self._now = _Phase(name, now, self.budget_s(name)) if name else None
            if self._now and self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()
            self._rearm()

    def _ends(self, phase: _Phase) -> float:
        return min(phase.began + phase.budget_s, self._by)

    def _rearm(self) -> None:
        self._changed.notify()
        if self._end is not os._exit:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._now and sys.__stderr__:  # a library that keeps the interpreter's lock keeps our thread from running too
            left_s = max(0.0, self._ends(self._now) - time.monotonic()) + self._delay_s + UNHEARD_S
            with contextlib.suppress(ValueError, OSError):  # it is closed
                faulthandler.dump_traceback_later(left_s, exit=True, file=sys.__stderr__)

    def _watch(self) -> None:
        with self._changed:
            while (phase := self._now) and (left_s := self._ends(phase) - time.monotonic()) > 0:
                self._changed.wait(min(left_s, 3600.0))
            if phase is None:
                self._thread = None
                return
            self._told = True
        self._overrun(phase)

    def _overrun(self, phase: _Phase) -> None:
        code = AGAIN
        try:
            late, where = self._by <= phase.began + phase.budget_s, _tried(self.place) or "somewhere"
            place = f"{where}: {phase.name}"
            headline = f"{place} is not over {self._why if late else f'within its {phase.budget_s:g} s'}"
            tries = 1 + (_tried(lambda: self.path.read_text().count(f"\n{place} is not over within")) or 0)
            code = AGAIN if late or tries < TRIES else STUCK
            headline += "; the same command resumes" if code == AGAIN else f"; so it was {tries} times, and {GIVEN_UP}"
            episodes, stacks = _tried(lambda: list(self.episodes())) or [], "\n".join(_stacks())
            open_ = [f"{len(episodes)} episodes are open" + ":" * bool(episodes), *(f"  {one}" for one in episodes)]
            told = [*open_[: TOLD + 1], *[f"  and {len(open_) - TOLD - 1} more, in {self.path}"] * (len(open_) > TOLD + 1)]
            _tried(lambda: print(headline, *told, stacks, sep="\n", file=sys.stderr, flush=True))
            _tried(lambda: self._write("\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), headline, *open_, stacks, ""])))
            time.sleep(self._delay_s)
        finally:
            self._end(code)
            self._over.set()

    def _write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)


def overruns(workdir: Path) -> Callable[[], int]:
    """What says how a host should end that has lost another one: as that one, where its watchdog has ended it since; else 0."""

    def sizes() -> dict[Path, int]:
        return {path: path.stat().st_size for path in workdir.glob("overrun*.log")}

    before = sizes()

    def code() -> int:
        grown = [path.read_bytes()[before.get(path, 0) :] for path, size in sizes().items() if size > before.get(path, 0)]
        return (STUCK if any(GIVEN_UP.encode() in text for text in grown) else AGAIN) if grown else 0

    return lambda: _tried(code) or 0


def _tried(work: Callable[[], Any]) -> Any:
    """What `work` returns; None where it fails or is not over in time: what the process is ended for may hold it up as well."""
    got: list[Any] = []

    def attempt() -> None:
        with contextlib.suppress(Exception):
            got.append(work())

    thread = threading.Thread(target=attempt, name="watchdog's report", daemon=True)
    thread.start()
    thread.join(TELL_S)
    return got[0] if got else None


def _stacks() -> Iterator[str]:
    """Where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    gc.disable()  # what it frees may give the interpreter's lock away, and the next call holds the lock of all threads' frames
    frames = sys._current_frames()
    gc.enable()
    for ident, frame in frames.items():
        yield f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"


class Watched(Clock):
    """A clock whose parts are phases."""

    def __init__(self, watchdog: Watchdog):
        super().__init__()
        self._watchdog = watchdog

    @contextmanager
    def part(self, *what: str, **how: str) -> Iterator[None]:
        with self._watchdog.within(what[0]), super().part(*what, **how):
            yield
