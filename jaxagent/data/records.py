"""Records of a file or folder, whatever its format: JSONL, Parquet, and data sets as `datasets` saves them to disk.

The latter two need pyarrow. A fault names the file and the line or row.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxagent.data.tasks import numbered


def read_records(path: str | Path, required: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """The records with where each stands ("line 3"), each with the required keys.

    Raises ValueError naming file, place and fault.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".parquet":
        found = [(f"row {number}", record) for number, record in enumerate(_rows(path), 1)]
        for where, record in found:
            if missing := [key for key in required if record.get(key) is None]:
                raise ValueError(f"{path}, {where}: missing {', '.join(missing)}; got {', '.join(record) or 'nothing'}")
        if not found:
            raise ValueError(f"{path}: nothing in it")
        return found
    return [(f"line {number}", record) for number, record in numbered(path, required)]


def split_of(identity: str, splits: Sequence[str]) -> str:
    """The split of a task, by its id alone: a file may grow without a task changing sides. A tenth for each but the first."""
    drawn = hashlib.blake2b(identity.encode(), digest_size=2).digest()[0] % 10
    return splits[drawn + 1] if drawn + 1 < len(splits) else splits[0]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(f"{path}: this format needs pyarrow: pip install 'jaxagent[data]'; JSONL needs nothing") from None
    if path.is_file():
        try:
            rows: list[dict[str, Any]] = parquet.read_table(path, partitioning=None).to_pylist()
        except arrow.ArrowInvalid as error:
            raise ValueError(f"{path}: not Parquet ({error})") from None
        return rows
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(
            f"{path}: several splits are in this folder; name one of {', '.join(str(path / name) for name in splits)}"
        )
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if (path / "state.json").is_file():
        names = [part["filename"] for part in json.loads((path / "state.json").read_text())["_data_files"]]
    else:
        names = sorted(file.name for file in path.glob("*.parquet"))
    if not names:
        raise ValueError(f"{path}: neither Parquet files nor a data set saved to disk is in this folder")
    found: list[dict[str, Any]] = []
    for name in names:
        if name.endswith(".parquet"):
            found += _rows(path / name)
            continue
        with arrow.memory_map(str(path / name)) as source, arrow.ipc.open_stream(source) as stream:
            found += stream.read_all().to_pylist()
    return found
