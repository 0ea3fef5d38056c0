"""The streams of tasks: seeded and resumable, shuffled (grain) or by value; and files read with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np


class TaskStream:
    """Indices of a split in a seeded order, epoch after epoch. `state` and `restore` resume it exactly."""

    def __init__(self, size: int, seed: int):
        indices = grain.MapDataset.range(size).seed(seed).shuffle().repeat()
        self._iterator = iter(indices.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    def take(self, count: int) -> list[int]:
        return [int(next(self._iterator)) for _ in range(count)]

    def tell(self, index: int, solved: int, played: int) -> None:
        """How a task went; it changes nothing here."""

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


class ValueStream:
    """Tasks drawn by how much they teach: value(p) = p (1 - p), where p is how often the task has been solved.

    A group of rollouts of a task with success rate p has rewards of variance p (1 - p): nothing is learnt where all fail or
    all succeed. p is the mean of Beta(1 + solved, 1 + failed), so that a task never played has the highest value, 1/4, and
    one that always fails keeps a chance to come back. Of all tasks that were drawn fewer than `max_repeats` times in this
    round of `size` draws, one is drawn with a probability in proportion to its value; the tasks of one `take` differ.

    Rewards in training are then those of tasks of middling difficulty: their curve says nothing about the whole split.
    """

    def __init__(self, size: int, seed: int, max_repeats: int):
        if max_repeats < 1:
            raise ValueError(f"feed.max_repeats must be at least 1 to draw tasks by value, got {max_repeats}")
        self.size, self.seed, self.max_repeats = size, seed, max_repeats
        self.solved, self.played = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.drawn, self.repeats = 0, np.zeros(size, np.int64)

    def values(self) -> np.ndarray:
        p = (1 + self.solved) / (2 + self.played)
        return p * (1 - p)

    def take(self, count: int) -> list[int]:
        chosen: list[int] = []
        for _ in range(count):
            if self.drawn % self.size == 0:
                self.repeats[:] = 0
            weight = np.where(self.repeats < self.max_repeats, self.values(), 0.0)
            fresh = weight.copy()
            fresh[chosen] = 0.0
            weight = fresh if fresh.any() else weight
            rng = np.random.default_rng((self.seed, self.drawn))  # the place is its only state
            index = int(rng.choice(self.size, p=weight / weight.sum()))
            self.repeats[index] += 1
            self.drawn += 1
            chosen.append(index)
        return chosen

    def tell(self, index: int, solved: int, played: int) -> None:
        """`solved` of `played` rollouts of a task that counted succeeded."""
        self.solved[index] += solved
        self.played[index] += played

    def state(self) -> dict[str, Any]:
        tables = {name: getattr(self, name).tolist() for name in ("solved", "played", "repeats")}
        return {"drawn": self.drawn, **tables}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        for name in ("solved", "played", "repeats"):
            getattr(self, name)[:] = state[name]


def examples_at(size: int, seed: int, first: int, count: int) -> list[int]:
    """Indices `first` to `first + count` of the order that `TaskStream(size, seed)` has: its place is its only state."""
    indices = grain.MapDataset.range(size).seed(seed).shuffle().repeat()
    return [int(indices[i]) for i in range(first, first + count)]


def read_jsonl(path: str | Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with the required keys. Raises ValueError naming file, line and fault."""
    return [record for _, record in numbered(path, required)]


def numbered(path: str | Path, required: Sequence[str] = ()) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with the numbers of their lines, each with the required keys.

    Raises ValueError naming file, line and fault.
    """
    path = Path(path)
    if not path.is_file():
        wanted = f" with {', '.join(required)}" if required else ""
        raise ValueError(f"{path}: no such file; one JSON object per line{wanted} is wanted")
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):  # JSON strings may hold other line ends
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: an object is wanted, got {type(record).__name__}")
        wanting = (key for key in required if record.get(key) is None)  # null is no value, as in Parquet
        missing = [f"{key} (it is null)" if key in record else key for key in wanting]
        if missing:
            raise ValueError(f"{path}, line {number}: missing {', '.join(missing)}; got {', '.join(record) or 'nothing'}")
        records.append((number, record))
    if not records:
        raise ValueError(f"{path}: nothing in it")
    return records
