"""Named tensors in a directory of safetensors files: read a slice at a time, written one after the other.

`model.safetensors`, or shards with `model.safetensors.index.json`; where both are there the one file is read, as by
transformers. Nothing is known here of models.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
CODES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # the format's names of what we read and write


@dataclass(frozen=True)
class Stored:
    """What a file says of a tensor in its header."""

    file: str
    shape: tuple[int, ...]
    code: str  # the format's name of the dtype; may be one that we do not read


class TensorFiles:
    """The tensors of a directory by name. The headers of all files are read at once, tensors only when they are asked for."""

    def __init__(self, path: Path):
        """Raises ValueError for files that are missing, torn, or contradict each other or their index."""
        self.path = path
        self._handles: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        self.largest_file_bytes = 0
        with contextlib.ExitStack() as undo:
            places = _places(path)
            for file in sorted(set(places.values())) or [WHOLE]:
                self._open(file, undo)
            for name, file in places.items():
                if name not in self.tensors or self.tensors[name].file != file:
                    raise ValueError(f"{path}/{INDEX} names tensor {name!r} of {file}, but that file does not hold it")
            self._close = undo.pop_all()

    def _open(self, file: str, undo: contextlib.ExitStack) -> None:
        if not (self.path / file).is_file():
            raise ValueError(_missing(self.path, file))
        try:
            handle = undo.enter_context(safe_open(self.path / file, framework="numpy"))
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{self.path}: {file} cannot be read as safetensors: {error}") from None
        for name, view in slices.items():
            if name in self.tensors:
                raise ValueError(f"{self.path}: tensor {name!r} is in two files, {self.tensors[name].file} and {file}")
            self.tensors[name] = Stored(file, tuple(view.get_shape()), view.get_dtype())
        self._handles[file] = handle
        self.largest_file_bytes = max(self.largest_file_bytes, (self.path / file).stat().st_size)

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor in its stored dtype; nothing outside the slice is held."""
        return self._handles[self.tensors[name].file].get_slice(name)[box]

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()


def _places(path: Path) -> dict[str, str]:
    """The file of every tensor by the index; empty where there is no index, or a whole file beside it."""
    if (path / WHOLE).is_file() or not (path / INDEX).is_file():
        return {}
    try:
        places = json.loads((path / INDEX).read_text())["weight_map"]
        strange = [file for file in places.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}/{INDEX}: a JSON object with 'weight_map' is wanted: {error!r}") from None
    if strange or not places:
        raise ValueError(f"{path}/{INDEX}: 'weight_map' must name files of this directory, got {(strange or ['none'])[0]!r}")
    return places


def _missing(path: Path, file: str) -> str:
    others = sorted(path.glob("pytorch_model*.bin"))
    if file != WHOLE or not others:
        return f"{path}: {file} is missing"
    return (
        f"{path}: {file} is missing; {others[0].name} is there, but pickled weights are not read. Convert them where torch is: "
        "transformers.AutoModelForCausalLM.from_pretrained(PATH).save_pretrained(NEW_PATH)"
    )


def write_files(
    path: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterable[np.ndarray], dtype: str, max_shard_bytes: int
) -> None:
    """Writes tensors as `model.safetensors`, or as shards with an index where they are more than `max_shard_bytes`.

    No file has its final name before all are whole. What an earlier export left in the directory is removed.

    Args:
      shapes: of all tensors, in the order of `arrays`.
      arrays: taken one at a time; of `dtype` and C-contiguous.
      max_shard_bytes: of the tensors in a file; a larger tensor has a file of its own.
    """
    shards = _split(shapes, np.dtype(DTYPES[dtype]).itemsize, max_shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))] if shards[1:] else [WHOLE]
    partial = [path / f".{name}.partial" for name in names]
    source = iter(arrays)
    try:
        for file, shard in zip(partial, shards, strict=True):
            _write(file, shard, source, dtype)
        (path / INDEX).unlink(missing_ok=True)  # an index stands for whole shards: it goes first and comes last
        for file, name in zip(partial, names, strict=True):
            file.replace(path / name)
    finally:
        for file in path.glob(".model*.safetensors.partial"):
            file.unlink(missing_ok=True)
    for file in (path / WHOLE, *path.glob("model-*-of-*.safetensors")):
        if file.name not in names:
            file.unlink(missing_ok=True)
    if shards[1:]:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(map(math.prod, shapes.values())) * np.dtype(DTYPES[dtype]).itemsize
        write_text(path / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def _split(shapes: Mapping[str, tuple[int, ...]], width: int, limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors to files, in order."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _write(file: Path, shard: Mapping[str, tuple[int, ...]], arrays: Iterator[np.ndarray], dtype: str) -> None:
    """One file: the length of the header, the header, the tensors (safetensors' README, "Format")."""
    code = next(code for code, ours in CODES.items() if ours == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files that do not say so
    end = 0
    for name, shape in shard.items():
        start, end = end, end + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _ in shard:  # the source is asked for this file's tensors and not for one more
            out.write(next(arrays).reshape(-1).view(np.uint8).data)
        out.flush()
        os.fsync(out.fileno())  # renamed only when it is on disk
