"""Starts the real server in the situations the tests need: as root, as an ordinary user, on a locked-down host."""

import contextlib
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
# Of one worker of the tests: the limit of processes counts all of a user.
ORDINARY_UID = 64123 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PATIENCE_S = 60.0  # a hang fails by this; nothing is measured
IS_ROOT = os.geteuid() == 0

_UNSHARE = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
_LANDLOCK = 444
LOCKS = {"no namespaces": (_UNSHARE,), "nothing": (_UNSHARE, _LANDLOCK)}


@dataclass
class Running:
    """A server that has said it is ready."""

    process: "subprocess.Popen[str]"
    ready: dict[str, Any]
    token: str

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def token_file(self) -> str:
        return str(self.ready["token_file"])


def environment() -> dict[str, str]:
    """Returns the environment of a server under test, with something to steal in it."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{REPOSITORY}:{HERE}",
        "PYTHONSAFEPATH": "1",
        "SERVER_SECRET": "the-secret-of-the-server",
    }


def command(*flags: str, user: str = "", lock: str = "") -> list[str]:
    """Returns the command of a server.

    `user`: "ordinary" gives up root first, and the path of a cgroup.procs does so in that group; `lock`: a key of LOCKS.
    """
    words = [sys.executable, "-m", "sandbox_client.server", *flags]
    if lock:
        words = [sys.executable, __file__, ",".join(map(str, LOCKS[lock])), *words]
    if user not in ("", "root") and IS_ROOT:
        words = [*_as_ordinary_user(), *words]
    if user.startswith("/"):
        words = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', user, *words]
    return words


def _as_ordinary_user() -> list[str]:
    """Returns the words that drop root before a command.

    Interpreter, environment and repository are made reachable where only root can reach them: in mounts of its own, what
    closes them off is covered, and they are shown again at their places.
    """
    if not shutil.which("setpriv") or not shutil.which("unshare"):
        pytest.skip("needs util-linux's setpriv and unshare to become an ordinary user")
    drop = f'exec setpriv --reuid={ORDINARY_UID} --regid={ORDINARY_UID} --clear-groups "$@"'
    closed = {place: gate for place in map(Path, (sys.base_prefix, sys.prefix, REPOSITORY)) if (gate := _gate(place))}
    if own := closed.keys() & set(closed.values()):
        pytest.skip(f"an ordinary user may not enter {', '.join(map(str, own))}")
    wanted = [place for place in closed if not closed.keys() & set(place.parents)]
    if not wanted:
        return ["sh", "-c", drop, "sh"]
    keep = [f"mkdir /mnt/{i} && mount --bind {place} /mnt/{i}" for i, place in enumerate(wanted)]
    hide = [f"mount -t tmpfs -o mode=755 none {gate}" for gate in sorted(set(closed.values()))]
    show = [f"mkdir -p {place} && mount --bind /mnt/{i} {place}" for i, place in enumerate(wanted)]
    words = " && ".join(["mount -t tmpfs none /mnt", *keep, *hide, *show, "cd /", drop])
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", words, "sh"]


def _gate(place: Path) -> Path | None:
    """Returns the topmost directory on the way to `place` that only its owner may pass."""
    return next((on for on in (*reversed(place.parents), place) if not on.stat().st_mode & 0o001), None)


@contextlib.contextmanager
def serving(place: Path, *flags: str, user: str = "", lock: str = "", code: int = 0) -> Iterator[Running]:
    """Runs a server at a free port with its token and log in `place`; ends it and expects exit code `code`."""
    place.chmod(0o777)
    words = command("--port=0", f"--token-file={place}/token", *flags, user=user, lock=lock)
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            words, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"no ready line, exit code {process.wait()}: {(place / 'log').read_text()}")
        ready = json.loads(line)
        try:
            yield Running(process, ready, (place / "token").read_text().strip())
        finally:
            if process.poll() is None:
                process.terminate()
            ended = process.wait(20)
    assert ended in (code, -9), (ended, (place / "log").read_text())


def refused(place: Path, *flags: str, user: str = "", lock: str = "") -> tuple[int, str]:
    """Runs a server that should not come up. Returns its exit code and what it said."""
    place.chmod(0o777)
    words = command("--port=0", f"--token-file={place}/token", *flags, user=user, lock=lock)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr.strip()


def descendants(pid: int) -> list[int]:
    """Returns `pid` and every process below it, as this machine numbers them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def _lock_and_run(numbers: Sequence[int], words: Sequence[str]) -> None:
    """Becomes `words` under a filter that answers EPERM to the system calls `numbers`: a strict container's host."""
    lines = [(0x20, 0, 0, 0)]
    for number in numbers:
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    lines.append((0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    os.execv(words[0], list(words))


if __name__ == "__main__":
    _lock_and_run([int(number) for number in sys.argv[1].split(",")], sys.argv[2:])
