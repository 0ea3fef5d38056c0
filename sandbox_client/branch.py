"""A live child copied: its fork becomes the first process of namespaces of its own, with its own copy of the files.

Three take part. The child, which holds the program's state, can only be copied by itself: its filter allows it one kind
of clone, into new user, pid and mount namespaces. A helper that the zygote forks then enters those from outside, as only
an ancestor can, and mounts and fills the copy's directories. At last the copy gives up what rights the namespaces gave it.

What the program had open stays shared with the original, as after any fork. The copy's isolation from its siblings rests
on the program not having tampered with its own process before: then it harms only copies of itself.
"""

import _signal
import ctypes
import os
import resource
import stat
import struct
from collections.abc import Callable
from typing import NamedTuple

from .groups import Limits

_libc = ctypes.CDLL(None, use_errno=True)
_c_setns, _c_mount, _c_prctl, _c_capset, _syscall = _libc.setns, _libc.mount, _libc.prctl, _libc.capset, _libc.syscall

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000  # user, pid, mount
_NEW_NS, _NEW_USER = 0x20000, 0x10000000
_NOSUID_NODEV = 2 | 4
_PR_CAPBSET_DROP = 24
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_RESTRICT = 444, 446
_SCOPES_ONLY = struct.pack("=QQQ", 0, 0, 0b11)  # abstract sockets and signals
_NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)
_PATIENCE_S = 5
_COPY_BYTES = 1 << 20


class Box(NamedTuple):
    """Where a child's files are, and as whom it sees itself."""

    path: str
    inner_id: int
    limits: Limits


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def duplicate(fork: Callable[[int], int], limits: Limits) -> int:
    """Forks this child into new namespaces. Returns the copy's pid, 0 in the copy, which must `settle` when it may."""
    own, most = resource.getrlimit(resource.RLIMIT_NPROC)
    # the new user namespace is held to what is allowed at this moment, with all that descends from it
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    try:
        return fork(NEW_NAMESPACES)
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (own, most))


def settle(box: Box) -> None:
    """Locks this copy for good, once its files are there."""
    os.chdir(f"{box.path}/work")
    os.setsid()
    resource.setrlimit(resource.RLIMIT_NPROC, (box.limits.processes,) * 2)
    capability = 0
    while _c_prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    _check(_c_capset(*_NO_CAPABILITIES), "capset")
    ruleset = _syscall(_SYS_LANDLOCK_CREATE, _SCOPES_ONLY, len(_SCOPES_ONLY), 0)
    if ruleset >= 0:  # a domain of its own: siblings share the network namespace and could meet at abstract names
        _check(_syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)


def parent_of(proc: int, pid: int) -> int:
    """Returns the parent of `pid`; `proc` is a descriptor of /proc."""
    file = os.open(f"{pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        lines = os.read(file, 4096).splitlines()
    finally:
        os.close(file)
    return int(next(line.split()[1] for line in lines if line.startswith(b"PPid:")))


def adopt(proc: int, original: int, copy: int, box: Box, join: Callable[[int], None]) -> int:
    """Forks the helper that gives `copy` its identity, its cgroup and its files. Returns the helper's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
        _signal.alarm(_PATIENCE_S)
        join(copy)
        _enter(proc, original, "user", _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{box.inner_id} {box.inner_id} 1"), ("gid_map", "")):
            file = os.open(f"{copy}/{name}", os.O_WRONLY, dir_fd=proc)
            os.write(file, (text or f"{box.inner_id} {box.inner_id} 1").encode())
            os.close(file)
        _enter(proc, copy, "mnt", _NEW_NS)
        old = os.open(box.path, os.O_RDONLY | os.O_DIRECTORY)
        options = f"size={box.limits.disk_bytes},nr_inodes={box.limits.inodes},mode=755"
        _check(_c_mount(b"tmpfs", box.path.encode(), b"tmpfs", _NOSUID_NODEV, options.encode()), "mount")
        _copy_tree(old, os.open(box.path, os.O_RDONLY | os.O_DIRECTORY))
        status = 0
    finally:
        os._exit(status)


def _enter(proc: int, pid: int, name: str, kind: int) -> None:
    file = os.open(f"{pid}/ns/{name}", os.O_RDONLY, dir_fd=proc)
    _check(_c_setns(file, kind), f"setns {name}")
    os.close(file)


def _copy_tree(old: int, new: int) -> None:
    """Copies files, directories and links, following none; what is neither (pipes, sockets) stays behind."""
    stack = [(old, new)]
    while stack:
        source, target = stack.pop()
        with os.scandir(source) as entries:
            for entry in entries:
                name, found = entry.name, entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    os.mkdir(name, 0o700, dir_fd=target)
                    below = (_directory(name, source), _directory(name, target))
                    stack.append(below)
                elif stat.S_ISLNK(found.st_mode):
                    os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                    continue
                elif stat.S_ISREG(found.st_mode):
                    _copy_file(name, source, target)
                else:
                    continue
                os.chmod(name, stat.S_IMODE(found.st_mode), dir_fd=target)
                os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=target)
        os.close(source)
        os.close(target)


def _directory(name: str, above: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


def _copy_file(name: str, source: int, target: int) -> None:
    read = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    write = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    size = os.fstat(read).st_size
    place = 0
    while place < size:  # only what is there: a file of holes is no larger than what was written to it
        try:
            start = os.lseek(read, place, os.SEEK_DATA)
            place = os.lseek(read, start, os.SEEK_HOLE)
        except OSError:
            break
        os.lseek(write, os.lseek(read, start, os.SEEK_SET), os.SEEK_SET)
        while start < place:
            sent = os.sendfile(write, read, start, min(place - start, _COPY_BYTES))
            if not sent:
                break
            start += sent
    os.ftruncate(write, size)
    os.close(read)
    os.close(write)
