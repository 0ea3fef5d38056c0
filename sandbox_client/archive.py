"""A zip or tar archive unpacked into a session's directory, by the session's own child and within bounds.

Headers lie, so it is what comes out that is counted. Links, devices, sparse files and names that lead out are refused.
"""

import importlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

MOST_MEMBERS, MOST_GROWTH = 1_000, 20
_PIECE_BYTES = 1 << 16


class _Member(NamedTuple):
    name: str
    executable: bool
    open: Callable[[], IO[bytes] | None] | None  # None is a directory


def unpack(data: bytes, target: str) -> int:
    """Unpacks `data` into the directory `target`. Returns the number of files.

    Raises ValueError for what is refused; what came before it in the archive is then there.
    """
    # an import of the standard library that few sessions need and every child would pay for
    members = _zip(data) if data.startswith(b"PK") else _tar(data)
    room, count = MOST_GROWTH * len(data), 0
    for number, member in enumerate(members):
        if number >= MOST_MEMBERS:
            raise ValueError(f"wanted at most {MOST_MEMBERS} members")
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\0" in member.name:
            raise ValueError(f"wanted names inside the archive's directory, got {member.name!r}")
        place = Path(target, path)
        if member.open is None:
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        source = member.open()
        assert source is not None  # it is a file
        file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o755 if member.executable else 0o644)
        with source, os.fdopen(file, "wb") as sink:
            while piece := source.read(_PIECE_BYTES):
                room -= len(piece)
                if room < 0:
                    raise ValueError(f"wanted at most {MOST_GROWTH} times the archive's {len(data)} bytes to come out")
                sink.write(piece)
        count += 1
    return count


def _zip(data: bytes) -> Iterator[_Member]:
    zipfile: Any = importlib.import_module("zipfile")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                mode = entry.external_attr >> 16
                if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR) or entry.flag_bits & 1:
                    raise ValueError(f"wanted plain files and directories, {entry.filename!r} is neither")
                opener = None if entry.is_dir() else lambda entry=entry: archive.open(entry)
                yield _Member(entry.filename, bool(mode & 0o100), opener)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"wanted a zip archive: {error}") from None


def _tar(data: bytes) -> Iterator[_Member]:
    tarfile: Any = importlib.import_module("tarfile")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
            for entry in archive:
                if not (entry.isreg() or entry.isdir()) or entry.issparse():
                    raise ValueError(f"wanted plain files and directories, {entry.name!r} is neither")
                if entry.size > MOST_GROWTH * len(data):  # else what follows it would be found by reading it
                    raise ValueError(f"wanted at most {MOST_GROWTH} times the archive's {len(data)} bytes to come out")
                opener = None if entry.isdir() else lambda entry=entry: archive.extractfile(entry)
                yield _Member(entry.name, bool(entry.mode & 0o100), opener)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"wanted a zip or tar archive: {error}") from None
