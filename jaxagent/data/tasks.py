"""The stream of tasks: seeded, shuffled, resumable (grain), and task files read with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain


class TaskStream:
    """Indices of a split in a seeded order, epoch after epoch. `state` and `restore` resume it exactly."""

    def __init__(self, size: int, seed: int):
        indices = grain.MapDataset.range(size).seed(seed).shuffle().repeat()
        self._iterator = iter(indices.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    def take(self, count: int) -> list[int]:
        return [int(next(self._iterator)) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


def read_jsonl(path: str | Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with the required keys. Raises ValueError naming file, line and fault."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such task file; one JSON object per line with {', '.join(required)} is wanted")
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
        missing = [key for key in required if key not in record]
        if missing:
            raise ValueError(f"{path}, line {number}: missing {', '.join(missing)}; got {', '.join(record) or 'nothing'}")
        records.append(record)
    if not records:
        raise ValueError(f"{path}: no tasks in it")
    return records
