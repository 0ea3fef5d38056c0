"""Memory cgroups for children, v1 or v2: what turns level L2 into L3.

Root, or a user to whom a group was delegated, makes the base group, and only from outside the jail can it be removed.
So the zygote's parent, which stays what it was and does nothing else, calls `create` and `remove`, and the unprivileged
zygote inside makes one leaf per slot through a directory descriptor: the tree is not visible in the jail.
"""

import contextlib
import os
import time
from pathlib import Path

_PREFIX = "sandbox-"
_V1_FILES = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control")
_V2_FILES = ("memory.max", "memory.swap.max", "memory.events")


class CgroupError(Exception):
    """Why there is no usable memory cgroup."""


def _own_group(controller: str) -> str:
    """Returns this process's path in the hierarchy of `controller` ("" is v2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    raise CgroupError(f"this process is in no cgroup hierarchy with {controller or 'v2'}")


def _mount_of(version: int) -> tuple[Path, str]:
    """Returns where the memory hierarchy is mounted and which group is seen there as its root."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        kind, _, options = right.split(" ", 2)
        if (kind == "cgroup2") if version == 2 else (kind == "cgroup" and "memory" in options.split(",")):
            return Path(left.split(" ")[4]), left.split(" ")[3]
    raise CgroupError(f"no cgroup v{version} memory hierarchy is mounted")


def _parents(version: int) -> list[Path]:
    mount, seen_as = _mount_of(version)
    own = _own_group("memory" if version == 1 else "").removeprefix(seen_as.rstrip("/")).strip("/")
    # the group above too: in v2 a group that holds processes can have no groups below it that bound memory
    return list(dict.fromkeys([mount / own, (mount / own).parent, mount])) if own else [mount]


def _create_in(parent: Path, name: str, version: int, uid: int) -> Path:
    if version == 2:
        if "memory" not in (parent / "cgroup.controllers").read_text().split():
            raise CgroupError(f"v2 at {parent}: no memory controller")
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")  # EBUSY where the parent holds processes
    _sweep(parent)
    base = parent / name
    base.mkdir(mode=0o755)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _V1_FILES[0] if version == 1 else _V2_FILES[0]
    (base / limit).write_text(str(total // 2))  # whatever the sessions do, the trainer keeps the other half
    if version == 2:
        (base / "cgroup.subtree_control").write_text("+memory")
        (base / "zygote").mkdir()
    # moving a process needs, in v2, the right to write the nearest common group: so the zygote lives below the base
    for owned in (base, *base.glob("cgroup.procs")):
        os.chown(owned, uid, uid)
    return base


def create(uid: int) -> Path:
    """Returns a fresh base group that `uid` may make leaves in. Raises CgroupError with every way that failed."""
    failures = []
    for version in (2, 1):
        try:
            for parent in _parents(version):
                try:
                    return _create_in(parent, f"{_PREFIX}{os.getpid()}", version, uid)
                except OSError as error:
                    failures.append(f"v{version} at {parent}: {error.strerror}")
        except CgroupError as error:
            failures.append(str(error))
    raise CgroupError("; ".join(failures))


def remove(base: Path, patience_s: float = 2.0) -> None:
    """Removes the base group and its leaves, waiting a little for the last process in them to be gone."""
    deadline = time.monotonic() + patience_s
    while base.exists():
        for group in [*(entry for entry in base.iterdir() if entry.is_dir()), base]:
            with contextlib.suppress(OSError):
                group.rmdir()
        if time.monotonic() > deadline:
            return
        if base.exists():
            time.sleep(0.01)


def _sweep(parent: Path) -> None:
    """Removes the groups of servers that were killed before they could."""
    for base in parent.glob(f"{_PREFIX}*"):
        if not Path("/proc", base.name.removeprefix(_PREFIX)).exists():
            remove(base, patience_s=0.0)


class Leaves:
    """One memory group per slot, made when the slot is first used and kept for the children that follow."""

    def __init__(self, base: Path, memory_bytes: int) -> None:
        self._base = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._memory = str(memory_bytes)
        self._files = _V2_FILES if (base / "memory.max").exists() else _V1_FILES
        if self._files is _V2_FILES:
            (base / "zygote" / "cgroup.procs").write_text("0")
        self._doors: dict[int, int] = {}
        self._kills: dict[int, int] = {}

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self._base)

    def _kill_count(self, slot: int) -> int:
        file = self._open(f"{slot}/{self._files[2]}", os.O_RDONLY)
        words = os.read(file, 4096).split()
        os.close(file)
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    def prepare(self, slot: int) -> None:
        """Makes the slot's group on its first use."""
        if slot in self._doors:
            return
        os.mkdir(str(slot), 0o755, dir_fd=self._base)
        for name, value in ((self._files[0], self._memory), (self._files[1], self._swap())):
            with contextlib.suppress(FileNotFoundError):  # no swap accounting in this kernel
                file = self._open(f"{slot}/{name}", os.O_WRONLY)
                os.write(file, value.encode())
                os.close(file)
        self._doors[slot] = self._open(f"{slot}/cgroup.procs", os.O_WRONLY)
        self._kills[slot] = 0

    def _swap(self) -> str:
        return "0" if self._files is _V2_FILES else self._memory  # v1 counts memory and swap together

    def join(self, slot: int, pid: int = 0) -> None:
        """Moves a process, this one for 0, into the slot's group."""
        os.write(self._doors[slot], b"%d" % pid)

    def ran_out(self, slot: int) -> bool:
        """Returns whether the kernel killed for memory in the slot since it was last asked."""
        count = self._kill_count(slot)
        killed, self._kills[slot] = count > self._kills[slot], count
        return killed
