"""One writer, one clock, one step axis: `metrics.jsonl`, a line per step, flat `group/what` names with units."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]


class Metrics:
    """Appends one JSON object per step. On a resume, the lines at and after the resumed step are dropped."""

    def __init__(self, path: Path, *, writes: bool = True):
        """Args: writes: false where another process writes the file, and this one reads it only."""
        self.path, self._writes = path, writes
        self._file: Any = None
        self._failed = False

    def start(self, step: int) -> None:
        """Keeps what was written before `step`; a torn last line is dropped."""
        kept = [record for record in read(self.path) if record["step"] < step]
        self.close()
        if not self._writes:
            return
        partial = self.path.with_suffix(".partial")  # a run that is killed here keeps what it had
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.rename(self.path)
        self._file = self.path.open("a")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one line. Numbers that are not finite become null, so that the file stays JSON."""
        if not self._writes:
            return
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **clean}) + "\n")
            self._file.flush()
        except OSError:
            self._failed = True
            raise

    def close(self) -> None:
        """What `write` could not write it has told of, and closing tries it once more."""
        file, self._file = self._file, None
        if file:
            with contextlib.suppress(OSError) if self._failed else contextlib.nullcontext():
                file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file, in order."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a torn line is the end of what was safely written
    return records


EVALUATIONS = "evaluations.jsonl"  # beside metrics.jsonl, of those who evaluate checkpoints while the run goes on


def with_evaluations(workdir: Path) -> list[dict[str, Any]]:
    """A run's metrics, with the evaluations that others made of its checkpoints at the steps that they are of.

    What the run says itself of a step stands.
    """
    records = read(workdir / "metrics.jsonl")
    made = {
        record["step"]: {n: v for n, v in record.items() if n.startswith("eval/")} for record in read(workdir / EVALUATIONS)
    }
    return [{**made.get(record["step"], {}), **record} for record in records]


def eval_metrics(table: dict[str, Any]) -> dict[str, float]:
    """What curves show of an evaluation."""
    levels = {f"eval/success_{name.replace(' ', '_')}": value for name, value in table["by_difficulty"].items()}
    return {"eval/success": table["success"], "eval/turns": table["turns"], **levels}


def want_alike(tables: Mapping[str, Mapping[str, Any]], but: Sequence[str] = ("policy",)) -> None:
    """Raises ValueError where tables that are to be compared say different settings, those in `but` aside.

    A table that says none is of a run from before they were kept: nothing is known against it.
    """
    told = {name: table["settings"] for name, table in tables.items() if "settings" in table}
    for (one, first), (other, second) in itertools.pairwise(told.items()):
        for name in sorted({*first, *second}.difference(but)):
            if first.get(name) != second.get(name):
                raise ValueError(
                    f"the evaluations {one} and {other} cannot be compared: {name} is {first.get(name)} in the one and "
                    f"{second.get(name)} in the other; evaluate both alike, with jaxagent eval"
                )


def peak_bytes() -> int:
    """The most memory that this process has held; 0 where the system does not tell."""
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Mean(float):
    """A mean that still knows of how much it is the mean, so that the means of several hosts combine exactly."""

    total: float
    count: float

    def __new__(cls, total: float, count: float) -> Mean:
        mean = super().__new__(cls, total / count if count else 0.0)
        mean.total, mean.count = float(total), float(count)
        return mean

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of numbers, 0 of none."""
        values = list(values)
        return cls(sum(values), len(values))


LANES = ("step", "learner", "engine", "rollout", "tool")


@dataclass(frozen=True)
class Span:
    """A stretch of a step on the time line; `began_s` counts from 1970.

    Args:
        lane: what was busy, one of LANES; of several of them it is `number`, from 1 on.
        within: the span that this one is part of; None for parts of the step itself.
        told: what else is known of it.
    """

    name: str
    began_s: float
    seconds: float
    lane: str = "step"
    number: int = 0
    within: Span | None = None
    told: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def row(self) -> str:
        """The lane by name; spans of one row overlap only where one is part of the other."""
        return f"{self.lane} {self.number}" if self.number else self.lane


class Clock:
    """Wall seconds by part since the last `take`; CPU seconds of the process beside them. `spans` says when the parts were."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.spans: list[Span] = []
        self.zero_s = time.time() - time.monotonic()  # what is added to the monotonic clock for seconds since 1970
        self._cpu = time.process_time()
        self._lap = time.monotonic()

    @contextmanager
    def part(self, name: str, lane: str = "") -> Iterator[None]:
        """Args: lane: what is busy with it, as a span says."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.parts[name] = self.parts.get(name, 0.0) + seconds
            self.spans.append(whole := Span(name, self.zero_s + began, seconds))
            if lane:
                self.spans.append(Span(name, whole.began_s, seconds, lane, within=whole))

    def lap(self) -> float:
        """Wall seconds since the last call."""
        before, self._lap = self._lap, time.monotonic()
        return self._lap - before

    def take(self) -> dict[str, float]:
        """`time/<part>_s` and `time/cpu_s` since the last call."""
        cpu = time.process_time()
        values = {f"time/{name}_s": seconds for name, seconds in self.parts.items()}
        values["time/cpu_s"] = cpu - self._cpu
        self.parts, self.spans, self._cpu = {}, [], cpu
        return values
