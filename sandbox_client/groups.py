"""The lock that needs no kernel: a process group and a directory of its own. Level L0, and the floor of L1."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple


class Limits(NamedTuple):
    """What one child may use. `processes` counts threads too; `cpu_s` is per process, over the session's life.

    `branches`: copies of one child at a time, times `processes` is what it and all copies may have together.
    `address_bytes` is what a process may reserve where the memory that it uses is counted (level L3).
    """

    memory_bytes: int = 512 << 20
    address_bytes: int = 8 << 30
    processes: int = 64
    branches: int = 64
    file_bytes: int = 64 << 20
    disk_bytes: int = 128 << 20
    inodes: int = 4096
    open_files: int = 256
    cpu_s: int = 600


class LockError(Exception):
    """A lock this machine does not give: what was tried, and what would give it."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def time_may_be_up(stat: str, limits: str, limit_s: int, cores: int) -> bool:
    """Returns whether a process may have died of a limit on time, by /proc's words of it; True where these are odd.

    CPU time is counted by ticks, between which a program may rest, so what was used says nothing: it may be up as soon as
    `cores` together could have reached `limit_s`, or when the program has lowered that.
    """
    try:
        words = stat.rpartition(")")[2].split()
        hard = {line[:25].rstrip(): line[25:].split()[1] for line in limits.splitlines()[1:]}
        lowered = int(hard["Max cpu time"]) < limit_s or hard["Max realtime timeout"] != "unlimited"
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / os.sysconf("SC_CLK_TCK")
    except (LookupError, ValueError):
        return True
    return lowered or age_s * cores >= limit_s


class Unlocked:
    """Forks into a directory per slot and kills by process group."""

    def __init__(self, home: str) -> None:
        """`home`: made here, holds one directory per slot, removed by close."""
        self._home = home
        Path(home).mkdir(mode=0o700)

    def place(self, slot: int) -> str:
        """Returns the slot's directory, which holds `work` and `tmp`."""
        return f"{self._home}/{slot}"

    def fork(self, slot: int, stem: bool = False) -> int:
        for name in ("work", "tmp"):
            Path(self.place(slot), name).mkdir(parents=True, exist_ok=True)
        return os.fork()

    def enter(self, slot: int, stem: bool = False) -> None:
        """Moves this child into its own group and directory."""
        os.setsid()
        os.chdir(f"{self.place(slot)}/work")
        os.environ.update(HOME=f"{self.place(slot)}/work", TMPDIR=f"{self.place(slot)}/tmp")

    def close_from(self, first: int) -> None:
        os.closerange(first, 4096)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def release(self, slot: int, pid: int) -> None:
        """Waits for what was left of the group and removes its files."""
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-pid, 0)
        _remove(self.place(slot))

    def ran_out(self, slot: int) -> bool:
        """Returns whether the kernel killed for memory there: it is not watched."""
        return False

    def exiting(self, pid: int) -> bool:
        """Returns whether `pid` was ending by itself: not asked where nothing follows from it."""
        return True

    def could_be_its_own(self, pid: int) -> bool:
        """Returns whether a program could have sent the SIGKILL that ended `pid`: here any may kill itself."""
        return True

    def close(self) -> None:
        _remove(self._home)


def _remove(path: str) -> None:
    """Removes a tree that a program may have made unreadable or deeper than a path can say: rm can, shutil cannot."""
    script = 'chmod -R u+rwx -- "$0" 2>/dev/null; rm -rf -- "$0"'
    os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", script, path], os.environ), 0)
