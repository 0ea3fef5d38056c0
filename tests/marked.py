"""Processes of this machine that are found by a mark in their command line, and what they live in."""

import contextlib
from pathlib import Path


def processes_with(mark: str) -> list[int]:
    """Returns the processes of this machine that have `mark` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def init_with(mark: str) -> int:
    """Returns the init of the pid namespace that a process with `mark` in its command line is in. Raises LookupError."""
    for pid in processes_with(mark):
        with contextlib.suppress(OSError, LookupError):
            while pid > 1:
                words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                inside = words["NSpid"].split()
                if len(inside) > 1 and inside[-1] == "1":
                    return pid  # never 0, whose kill would reach all of the caller's group
                pid = int(words["PPid"])
    raise LookupError(f"no process with {mark} lives in a pid namespace of its own")
