"""What is sampled, written down as it happens: a run that is killed goes on with it instead of sampling anew.

Sampled anew, under weights or in arithmetic that differ a little, the episodes that were long would be the ones that change,
since the short ones had ended: what is learnt from would lean towards the short. So every turn of an episode is kept when it is
sampled, and every episode when it ends. A finished one is taken as it is. Of an unfinished one the turns are said again by the
journal and its world is played again with them: only what the world answers must be what it answered then. If not, the episode
broke, and begins again under the same key.

A line is the CRC-32 of what follows, in hex, and a JSON object; one that is torn or damaged counts as never written. There is a
file for every stretch between two saves, and it is kept as long as a checkpoint that a run may go on from needs what is in it.
Every host writes files of its own and reads those of all: a run may go on with more or fewer of them.

Kept are the rollouts of training groups. Continuations of their turns, what a search plays, and evaluations in training are
played anew; `jaxagent eval` has a journal of its own, of whole episodes that count.
"""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxagent.types import Sample, Sampler, SampleRequest, Trajectory


class Diverged(Exception):
    """An episode that is played again is not what it was."""


class Journal:
    """The turns and episodes of a run's training groups. Groups are numbered in the order in which they are trained on."""

    def __init__(self, folder: Path, *, redraw: bool, own: str = "", topology: str = "", keep_broken: bool = True):
        """Args:
        folder: of all hosts' files.
        redraw: turns that are known are sampled again and compared, since every bit of them is fixed by their key and the
            weights: what is cached of them is then also what it was. Otherwise they are prefilled, as they all are where some
            were sampled in another topology.
        own: the folder in it that this host writes to.
        topology: names what may round otherwise than another does: the number of hosts and their devices.
        keep_broken: episodes that the infrastructure broke count as finished, so that a step is trained on what it was. Where
            they do not, only whole episodes that count are kept, no turns: what broke is to be played as if it had never been.
        """
        self.keep_broken = keep_broken
        self.folder, self.own, self.redraw, self.topology = folder, folder / own, redraw, topology
        self.fault: OSError | None = None  # why nothing can be written any more
        self._episodes: dict[tuple[str, int], list[Trajectory]] = {}
        self._turns: dict[tuple[str, int], dict[str, Any]] = {}
        self._highest: dict[Path, int] = {}  # the last group in every file of this host's own
        self._needed = 0  # the first group that the save before the last one needs
        self._file: io.FileIO | None = None  # without a buffer: what was written survives the process
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ files

    def begin(self, first: int) -> tuple[int, int]:
        """Takes up what is there of groups from number `first` on; returns how many episodes and unfinished turns that is."""
        self.own.mkdir(parents=True, exist_ok=True)
        self._needed = first
        for path in sorted(self.folder.rglob("*.jsonl")):
            numbers = [-1]
            for record in read(path):
                number = _number(record["group"])
                numbers.append(number)
                if number < first:
                    continue
                if "rows" in record:
                    rows = [Trajectory.from_json(row) for row in record["rows"]]
                    self._episodes[record["group"], record["rollout"]] = rows
                else:
                    self._turns[record["trajectory"], record["turn"]] = record
                    self.redraw &= record["topology"] == self.topology
            if path.parent == self.own:
                self._highest[path] = max(numbers)
        self._open()
        known = {(row[0].group, row[0].rollout) for row in self._episodes.values()}
        open_turns = sum((r["group"], r["rollout"]) not in known for r in self._turns.values())
        return len(self._episodes), open_turns

    def rotate(self, first: int) -> None:
        """A save needs groups from number `first` on: begins a new file, and drops those that the save before has no use for.

        When a save begins, the one before it is whole.
        """
        with self._lock:
            if self._file is None:
                return
            self._file.close()
            for path in [path for path, highest in self._highest.items() if highest < self._needed]:
                path.unlink(missing_ok=True)
                del self._highest[path]
            self._needed = first
            self._open()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _open(self) -> None:
        names = [int(path.stem) for path in self._highest]
        path = self.own / f"{max(names, default=-1) + 1:08d}.jsonl"
        self._file, self._highest[path] = io.FileIO(path, "x"), -1
        self._path = path

    def _write(self, record: dict[str, Any]) -> None:
        """Appends a record. One that cannot be written ends the journal: `fault` says why, and the story stops at its step."""
        text = json.dumps(record).encode()
        line = b"%08x %b\n" % (zlib.crc32(text), text)
        with self._lock:
            if self._file is None or self.fault:
                return
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self.fault = error
            self._highest[self._path] = max(self._highest[self._path], _number(record["group"]))

    # ------------------------------------------------------------------ what is known, and what is new

    def episode(self, group: str, rollout: int, task: Mapping[str, Any]) -> list[Trajectory]:
        """The rows of an episode that was finished before the run was stopped; none where its task is another now."""
        rows = self._episodes.pop((group, rollout), [])
        return rows if rows and (rows[0].task, rows[0].seed) == (task["id"], task["seed"]) else []

    def finish(self, rows: list[Trajectory]) -> None:
        """Keeps a finished episode. Not where experts were recorded: these are not stored, and would be missing."""
        first = rows[0]
        if (self.keep_broken or first.stop.counts) and not any(row.routing for row in rows):
            self._write({"group": first.group, "rollout": first.rollout, "rows": [row.to_json() for row in rows]})

    def turn(self, place: dict[str, Any], trajectory: str) -> dict[str, Any] | None:
        """A turn that was sampled before the run was stopped, in an episode of the same task."""
        kept = self._turns.get((trajectory, place["turn"]))
        return kept if kept and (kept["task"], kept["seed"]) == (place["task"], place["seed"]) else None

    def sampled(self, place: dict[str, Any], request: SampleRequest, sample: Sample) -> None:
        """Keeps a sampled turn, before its world knows of it."""
        if sample.routing is None:
            told = {name: getattr(sample, name) for name in ("tokens", "logprobs", "versions", "stopped")}
            self._write(
                {**place, "topology": self.topology, "trajectory": request.trajectory, "fed": list(request.tokens), **told}
            )


class Recorded:
    """The sampler of one attempt at an episode: it keeps turns, and says those again that were kept. Implements `Sampler`."""

    def __init__(self, sampler: Sampler, journal: Journal, row: Trajectory):
        """Args: row: the episode's first one."""
        self.sampler, self.journal = sampler, journal
        self.episode = {"group": row.group, "rollout": row.rollout, "task": row.task, "seed": row.seed}
        self._taken: Counter[str] = Counter()
        self._owed: dict[str, list[int]] = {}  # what was said again and the sampler does not hold yet

    async def generate(self, request: SampleRequest) -> Sample:
        name, number = request.trajectory, self._taken[request.trajectory]
        self._taken[name] += 1
        place = {**self.episode, "turn": number}
        kept = self.journal.turn(place, name)
        if kept is None:
            sample = await self._sample(request)
            self.journal.sampled(place, request, sample)
            return sample
        _compare(f"{name}, turn {number}: the world's answer", list(request.tokens), kept["fed"])
        if self.journal.redraw:
            sample = await self.sampler.generate(request)
            _compare(f"{name}, turn {number}: what was sampled", sample.tokens, kept["tokens"])
            return sample
        self._owed.setdefault(name, []).extend([*request.tokens, *kept["tokens"]])
        told = {key: kept[key] for key in ("tokens", "logprobs", "versions", "stopped")}
        return Sample(**told, fed_start=request.start, fed=list(request.tokens))

    async def _sample(self, request: SampleRequest) -> Sample:
        """Samples a turn; what was only said again is fed with it."""
        owed = self._owed.pop(request.trajectory, [])
        if not owed:
            return await self.sampler.generate(request)
        whole = replace(request, tokens=(*owed, *request.tokens), start=request.start - len(owed), group="")
        sample = await self.sampler.generate(whole)
        _compare(f"{request.trajectory}: what the sampler was fed", sample.fed, list(whole.tokens))
        return replace(sample, fed_start=request.start, fed=list(request.tokens))

    def release(self, trajectory: str) -> None:
        self._owed.pop(trajectory, None)
        self.sampler.release(trajectory)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that are whole."""
    for line in path.read_bytes().split(b"\n"):
        check, _, text = line.partition(b" ")
        if check and check == b"%08x" % zlib.crc32(text):
            yield json.loads(text)


def _number(group: str) -> int:
    return int(group.rpartition("/")[2])


def _compare(what: str, now: list[int], then: list[int]) -> None:
    """Raises Diverged where two lists of tokens differ."""
    if now != then:
        at = next((i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then)))
        raise Diverged(f"{what} is not what the journal holds: {len(now)} and {len(then)} tokens, the first difference at {at}")
