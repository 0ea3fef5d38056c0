"""The parent of every child: a small interpreter that forks, locks, kills and reaps, and hears no program.

The server starts it as a fresh process, tells it everything in one line of JSON, then speaks by fixed records: fork a
child around three descriptors, kill one; back comes that a child and all that it started are dead. It holds no secret,
for its children are copies of it. As root with cgroups it first splits in two: one half stays root and only waits to
remove the cgroup, the other gives root up and is the zygote.
"""

import _signal  # without the enums of `signal`, which cost every child a third of a millisecond
import contextlib
import gc
import importlib
import io
import json
import os
import select
import socket
import sys
from pathlib import Path
from typing import Any, Protocol

from . import child
from .frames import (
    ADOPT,
    ADOPTED,
    BURY,
    EXIT,
    EXITED,
    FAILED,
    FORK,
    FORK_STEM,
    FROM_OUTSIDE,
    KILL,
    NOTHING,
    OUT_OF_MEMORY,
    REQUEST,
)
from .groups import Limits, LockError, Unlocked

if sys.platform == "linux":
    from . import cgroups, jail

_NEVER_WAS = 127 << 8
_IGNORED = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


class Lock(Protocol):
    """How children are locked: jail.Namespaced, jail.Landlocked, or not at all: groups.Unlocked."""

    def fork(self, slot: int, stem: bool = False) -> int: ...
    def enter(self, slot: int, stem: bool = False) -> None: ...
    def close_from(self, first: int) -> None: ...
    def kill(self, pid: int) -> None: ...
    def release(self, slot: int, pid: int) -> None: ...
    def ran_out(self, slot: int) -> bool: ...
    def exiting(self, pid: int) -> bool: ...
    def could_be_its_own(self, pid: int) -> bool: ...
    def close(self) -> None: ...


class Zygote:
    """The loop: requests from the server, deaths from the kernel."""

    def __init__(self, control: socket.socket, lock: Lock) -> None:
        self._control = control
        self._lock = lock
        self._free: list[int] = []
        self._slots = 0
        self._pids: dict[int, int] = {}  # child id -> pid
        self._children: dict[int, tuple[int, int]] = {}  # pid -> child id, slot
        self._ordered: set[int] = set()  # those whose death the server wanted
        self._hung_up: set[int] = set()  # those that have closed their line and lived on
        self._copies: dict[int, tuple[int, int, int]] = {}  # pidfd -> child id, pid, slot; a copy is no child of ours
        self._copy_of: dict[int, int] = {}  # child id -> pidfd
        self._adopting: dict[int, int] = {}  # the pid of who does it -> child id of the copy
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Runs until the server is gone; then kills and reaps every child."""
        poll = self._poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap(os.WNOHANG)
                elif ready in self._copies:
                    self._bury_copy(ready)
                elif not self._answer():
                    for pid in self._children:
                        self._lock.kill(pid)
                    self._reap(0)
                    self._lock.close()
                    return

    def _answer(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, 3)
        except ConnectionError:
            return False
        if len(message) < REQUEST.size:
            return False
        kind, child_id, stem_id, pid = REQUEST.unpack(message)
        if kind in (FORK, FORK_STEM):
            self._fork(child_id, descriptors, kind == FORK_STEM)
        elif kind == ADOPT:
            self._adopt(child_id, stem_id, pid)
        elif child_id in self._copy_of:
            if kind == KILL:
                self._ordered.add(child_id)
            with contextlib.suppress(ProcessLookupError):
                _signal.pidfd_send_signal(self._copy_of[child_id], _signal.SIGKILL)
        elif child_id in self._pids:
            if kind == KILL:
                self._ordered.add(child_id)
            elif kind == BURY and not self._lock.exiting(self._pids[child_id]):
                self._hung_up.add(child_id)
            self._lock.kill(self._pids[child_id])
        return True

    def _slot(self) -> int:
        slot = self._free.pop() if self._free else self._slots
        self._slots = max(self._slots, slot + 1)
        return slot

    def _tell(self, kind: bytes, child_id: int, status: int = 0, known: int = NOTHING) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(EXIT.pack(kind, child_id, status, known))

    def _fork(self, child_id: int, descriptors: list[int], stem: bool) -> None:
        slot = self._slot()
        try:
            pid = self._lock.fork(slot, stem)
        except OSError:  # no room for one more, now: the server is told that it is dead
            self._free.append(slot)
            self._tell(EXITED, child_id, _NEVER_WAS)
        else:
            if pid == 0:
                try:
                    become_child(self._lock, slot, stem, *descriptors)
                finally:
                    os._exit(1)
            self._pids[child_id] = pid
            self._children[pid] = child_id, slot
        for descriptor in descriptors:
            os.close(descriptor)

    def _adopt(self, child_id: int, stem_id: int, pid: int) -> None:
        """Takes over the copy that a stem has made of itself, if that is what `pid` is."""
        slot, pidfd = self._slot(), -1
        try:
            if not isinstance(self._lock, jail.Namespaced):
                raise PermissionError("copies need namespaces")
            pidfd = os.pidfd_open(pid)  # first: from here on the number cannot become another's
            stem = self._pids.get(stem_id) or self._copies[self._copy_of[stem_id]][1]
            worker = self._lock.adopt(slot, stem, pid)
        except (OSError, KeyError):
            self._free.append(slot)
            if pidfd >= 0:
                os.close(pidfd)
            self._tell(EXITED, child_id, _NEVER_WAS)
            return
        self._copies[pidfd] = child_id, pid, slot
        self._copy_of[child_id] = pidfd
        self._adopting[worker] = child_id
        self._poll.register(pidfd, select.POLLIN)

    def _adopted(self, worker: int, status: int) -> None:
        child_id = self._adopting.pop(worker)
        if status == 0:
            self._tell(ADOPTED, child_id)
        elif child_id in self._copy_of:
            with contextlib.suppress(ProcessLookupError):
                _signal.pidfd_send_signal(self._copy_of[child_id], _signal.SIGKILL)

    def _bury_copy(self, pidfd: int) -> None:
        """Reports a copy dead. It is its stem's to reap, so how it ended is not known here."""
        child_id, pid, slot = self._copies.pop(pidfd)
        del self._copy_of[child_id]
        self._poll.unregister(pidfd)
        os.close(pidfd)
        oom = child_id not in self._ordered and self._lock.ran_out(slot)
        self._ordered.discard(child_id)
        self._lock.release(slot, pid)
        self._free.append(slot)
        self._tell(EXITED, child_id, -1, OUT_OF_MEMORY if oom else NOTHING)

    def _reap(self, flags: int) -> None:
        while self._children or self._adopting:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | flags)
            if ended is None:
                return
            pid = ended.si_pid
            known = NOTHING
            if pid in self._children:
                killed = ended.si_code == os.CLD_KILLED and ended.si_status == _signal.SIGKILL
                known = self._known(pid, *self._children[pid]) if killed else NOTHING
                self._lock.kill(pid)  # while its number is still its own: the group it leads may live on
            status = os.waitpid(pid, 0)[1]
            if pid in self._adopting:
                self._adopted(pid, status)
            if pid not in self._children:
                continue  # an orphan that a landlocked child left to us
            child_id, slot = self._children.pop(pid)
            del self._pids[child_id]
            self._ordered.discard(child_id)
            self._hung_up.discard(child_id)
            self._lock.release(slot, pid)
            self._free.append(slot)
            self._tell(EXITED, child_id, status, known)

    def _known(self, pid: int, child_id: int, slot: int) -> int:
        """Returns what is known of a SIGKILL of which `pid` has just died. It is not reaped yet."""
        if child_id in self._ordered:
            return NOTHING
        if self._lock.ran_out(slot):
            return OUT_OF_MEMORY
        own = child_id in self._hung_up or self._lock.could_be_its_own(pid)
        return NOTHING if own else FROM_OUTSIDE


def become_child(lock: Lock, slot: int, stem: bool, line: int, out: int, err: int) -> None:
    """Locks this fresh fork and serves its session; returns only when it cannot be locked."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    for number in _IGNORED:
        _signal.signal(number, _signal.SIG_DFL)
    try:
        lock.enter(slot, stem)
    except OSError as error:
        child.send(socket.socket(fileno=line), FAILED, json.dumps({"error": str(error)}).encode())
        return
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.dup2(line, 3, inheritable=False)
    lock.close_from(4)
    gc.freeze()  # again: else the zygote's own garbage would be collected once by every child
    gc.enable()
    able = lock if isinstance(lock, jail.Namespaced) else None
    child.main(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, 3), able, stem)


def _split(uid: int) -> Path:
    """Makes the cgroup, forks, and returns its path in the half that goes on; the other removes it and ends."""
    base = cgroups.create(uid)
    pid = os.fork()
    if pid == 0:
        jail.die_with_parent()
        return base
    os.closerange(3, 256)
    status = os.waitpid(pid, 0)[1]
    cgroups.remove(base)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def make_lock(config: dict[str, Any]) -> Lock:
    """Returns the lock of the level asked for. Raises LockError where the machine does not give it."""
    level, uid = config["level"], config["uid"]
    home = f"{config['scratch']}/sandbox-{os.getpid()}"
    if level == "L0":
        return Unlocked(home)
    jail.die_first()
    limits = Limits(**config["limits"])
    if level == "L1":
        return jail.Landlocked(config["readable"], limits, uid, home)
    leaves = None
    if level == "L3":
        try:
            leaves = cgroups.Leaves(_split(os.getuid() if uid is None else uid), limits.memory_bytes)
        except cgroups.CgroupError as error:
            remedy = "start as root, which drops to an ordinary user; or " if uid is None else ""
            remedy += "delegate the memory controller to this service, which systemd does with Delegate=memory"
            raise LockError(f"no memory cgroup ({error})", remedy) from None
    return jail.Namespaced(config["readable"], limits, uid, leaves)


def main(descriptor: int) -> None:
    """Reads the configuration, locks, reports in one line of JSON, serves; `descriptor` is the line to the server."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    text = b""
    while not text.endswith(b"\n"):
        data = control.recv(1 << 16)
        if not data:
            return
        text += data
    config = json.loads(text)
    for number in _IGNORED:
        _signal.signal(number, _signal.SIG_IGN)  # the end of the control line is what ends it
    sys.path[:] = config["path"]
    os.environ.pop("LD_BIND_NOW", None)  # meant for this process, not for what programs start
    problem: dict[str, Any] = {}
    wanted = "modules to import beforehand"
    try:
        for name in config["imports"]:
            importlib.import_module(name)
        for name in config["functions"]:
            wanted = f"functions module {name}"
            if not callable(getattr(importlib.import_module(name), "session_functions", None)):
                raise ImportError(f"{name} has no function session_functions(options)")
    except ImportError as error:
        problem = {"fatal": f"wanted {wanted}: {error}"}
    try:
        lock = None if problem else make_lock(config)
    except LockError as error:
        problem = {"reason": error.reason, "remedy": error.remedy}
    except OSError as error:
        problem = {"reason": str(error), "remedy": None}
    if problem or lock is None:
        control.sendall(json.dumps(problem).encode() + b"\n")
        return
    if config["level"] != "L0":
        jail.die_with_parent()
        jail.set_shared_limits(Limits(**config["limits"]), bounded=config["level"] == "L3")
    sys.path.insert(0, "")  # what the program wrote beside itself
    sys.dont_write_bytecode = True
    for stream in (sys.stdout, sys.stderr):  # in a child they lead into its pipes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    control.sendall(b"{}\n")
    gc.collect()
    gc.freeze()
    gc.disable()
    Zygote(control, lock).serve()
