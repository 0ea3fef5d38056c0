"""The locks of Linux, by direct system calls: namespaces, a private root, Landlock, seccomp, capabilities, rlimits.

Two ways to lock a child, the same methods each: `Namespaced` (levels L2 and L3) and `Landlocked` (L1, where
namespaces are denied). The zygote calls fork, the child enter; kill ends a child, and release follows when it
and everything it started are dead. Linux only: it loads ctypes, so others never import it.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path

from . import branch, seccomp
from .cgroups import Leaves
from .groups import Limits, LockError, Unlocked, time_may_be_up

_libc = ctypes.CDLL(None, use_errno=True)
# looked up once, here: a name first used in a child is looked up again by every child
_syscall, _c_prctl, _c_mount, _c_capset = _libc.syscall, _libc.prctl, _libc.mount, _libc.capset
_c_unshare, _c_setns = _libc.unshare, _libc.setns
_clone = ctypes.PyDLL(None, use_errno=True).syscall  # keeps the interpreter's lock over the call, as os.fork does
_before_fork = ctypes.pythonapi.PyOS_BeforeFork
_after_fork_parent, _after_fork_child = ctypes.pythonapi.PyOS_AfterFork_Parent, ctypes.pythonapi.PyOS_AfterFork_Child

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_NEW_PID, _NEW_NET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PF_EXITING = 4
_MACHINE = os.uname().machine
_CORES = os.sysconf("SC_NPROCESSORS_CONF")  # asked before the root is changed; a program may widen its affinity
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(_MACHINE, -1)
# the same numbers on x86_64 and aarch64
_SYS_CLOSE_RANGE, _SYS_MOUNT_SETATTR = 436, 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ = 0b1101  # execute, read a file, list a directory
_LANDLOCK_ALL = 0xFFFF
_LANDLOCK_FILE = 0b1100000000000111  # what may be said of a path that is no directory
_LANDLOCK_NET = 0b11  # TCP bind and connect
_LANDLOCK_SCOPE = 0b11  # abstract sockets and signals, ABI 6

_CAPABILITY_HEADER, _NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)

DEVICES = ("null", "zero", "full", "random", "urandom")
BOX = "/box"  # the one writable mount of a namespaced child
INNER_ID = 1000
_PASSWD = f"root:x:0:0::/:/bin/sh\nsandbox:x:{INNER_ID}:{INNER_ID}::{BOX}/work:/bin/bash\nnobody:x:65534:65534::/:/bin/sh\n"
_GROUP = f"root:x:0:\nsandbox:x:{INNER_ID}:\nnogroup:x:65534:\n"


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _unshare(flags: int) -> None:
    _check(_c_unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    raw = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(_c_mount(raw[0], raw[1], raw[2], flags, raw[3]), f"mount {target}")


def _fork(flags: int) -> int:
    """Is os.fork with namespaces: os.fork takes no flags, and unshare(CLONE_NEWPID) works only once per process."""
    _before_fork()
    pid = _clone(_SYS_CLONE, flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        _after_fork_child()
    else:
        _after_fork_parent()
    return _check(pid, "clone")


def _prctl(option: int, value: int = 0) -> int:
    return _check(_c_prctl(option, value, 0, 0, 0), f"prctl {option}")


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Asks for `sig` when the parent thread ends. A change of uid forgets it, so call it after."""
    _prctl(_PR_SET_PDEATHSIG, sig)


def no_new_privileges() -> None:
    """Makes set-uid files and file capabilities powerless for this process and its children, for good."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become(uid: int) -> None:
    """Gives up root for `uid`, its only group too, and every capability."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise LockError(f"root cannot become uid {uid} ({error.strerror})", "give --uid a number that exists here") from None
    _prctl(_PR_SET_DUMPABLE, 1)  # otherwise /proc/self stays root's and the id maps cannot be written


def close_from(first: int) -> None:
    """Closes every descriptor from `first` up: a child holds none but its own."""
    _check(_syscall(_SYS_CLOSE_RANGE, first, ctypes.c_uint(0xFFFFFFFF), 0), "close_range")


def landlock_abi() -> int:
    """Returns Landlock's ABI, 0 where there is none."""
    return max(0, _syscall(_SYS_LANDLOCK_CREATE, None, 0, 1))


def _landlock_known() -> int:
    """Returns the rights on files that this kernel's Landlock knows."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(landlock_abi(), 16)) - 1


def _landlock_ruleset(handled_files: int) -> int:
    """Returns a ruleset with all that this kernel's Landlock knows of: files, then TCP (ABI 4), then scopes (ABI 6)."""
    abi = landlock_abi()
    handled_files &= _landlock_known()
    attributes = struct.pack("=QQQ", handled_files, _LANDLOCK_NET, _LANDLOCK_SCOPE)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    return _check(_syscall(_SYS_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")


def _landlock_allow(ruleset: int, path: str, access: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    access &= _landlock_known()
    if not Path(path).is_dir():
        access &= _LANDLOCK_FILE
    rule = struct.pack("=Qi", access, place)
    _check(_syscall(_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    os.close(place)


def _landlock_restrict(ruleset: int) -> None:
    _check(_syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")


def _allowed(kind: int, value: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def die_first() -> None:
    """Offers this process and its children to the kernel before any other, should the whole host run out of memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def raise_file_limit() -> None:
    """Allows this process as many descriptors as it may have: a child costs the server three."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_shared_limits(limits: Limits, *, bounded: bool) -> None:
    """Sets, in the zygote, the rlimits that it can bear itself: its children then have them for nothing.

    `bounded`: a cgroup counts the memory that is really used, so a program may raise its limit on mere address space,
    of which the runtimes of some languages reserve gigabytes.
    """
    most = _allowed(resource.RLIMIT_AS, limits.address_bytes if bounded else limits.memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (min(most, limits.memory_bytes), most))
    for kind, value in (
        (resource.RLIMIT_CORE, 1),  # 0 would still start the host's crash handler, where it reads cores from a pipe
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (_allowed(kind, value),) * 2)


def _own_limits(limits: Limits, processes: int, stem: bool = False) -> list[tuple[int, tuple[int, int]]]:
    """Returns the others, for the child to set. The copies of a stem count as its processes too."""
    wanted = {
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s),
        resource.RLIMIT_NPROC: (processes, processes * (1 + limits.branches if stem else 1)),
    }
    return [(kind, (_allowed(kind, soft), _allowed(kind, hard))) for kind, (soft, hard) in wanted.items()]


class _Filter:
    """The seccomp program, kept in C's layout so that loading it costs a child one call."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))
        self.program = struct.pack("HP", len(code) // 8, ctypes.addressof(self._code))

    def load(self) -> None:
        _check(_c_prctl(_PR_SET_SECCOMP, 2, self.program, 0, 0), "seccomp")


def _drop_capabilities() -> int:
    capability = 0
    while _c_prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    return _c_capset(_CAPABILITY_HEADER, _NO_CAPABILITIES)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _remedy() -> str:
    """Names what closes user namespaces here: one of three kernel settings, or else a container's filter."""
    for path, closed, opened in (
        ("user/max_user_namespaces", "0", "15000"),
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        if _read(f"/proc/sys/{path}") == closed:
            return f"as root: sysctl {path.replace('/', '.')}={opened}"
    return (
        "in Docker add --security-opt seccomp=unconfined --security-opt apparmor=unconfined, in Kubernetes the two "
        "profiles Unconfined; or give the address of a sandbox server that runs elsewhere"
    )


def _graft(path: Path, root: Path) -> None:
    """Makes `path` visible under `root`: a link as a link, a directory as a bind mount, a small file as a copy."""
    target = root / path.relative_to("/")
    if target.exists() or not path.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() and not path.readlink().is_absolute():
        target.symlink_to(path.readlink())
    elif path.is_dir():
        target.mkdir()
        _mount(str(path), str(target), None, _MS_BIND | _MS_REC)
    else:
        target.write_bytes(path.read_bytes())


def _build_root(readable: list[str]) -> None:
    """Replaces this mount namespace's root by an empty tree that shows `readable` and nothing else, read-only."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # any directory that hides no source will do: nobody else sees this mount
    spots = [spot for spot in ("/mnt", "/srv", "/media", "/boot", "/sys") if Path(spot).is_dir()]
    spot = next((spot for spot in spots if not any(path.startswith(spot + "/") for path in readable)), "/sys")
    _mount("tmpfs", spot, "tmpfs", _MS_NOSUID, "size=8m,mode=755")
    root = Path(spot)
    os.umask(0o022)
    for path in readable:
        _graft(Path(path), root)
    for directory in ("etc", "dev", "var", "proc", BOX[1:]):
        (root / directory).mkdir(exist_ok=True)
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("nsswitch.conf", "passwd: files\ngroup: files\n")):
        (root / "etc" / name).write_text(text)
    for device in DEVICES:
        (root / "dev" / device).touch()
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, _MS_BIND)
    for link in (root / "tmp", root / "var" / "tmp", root / "dev" / "shm"):
        if not link.exists():  # an interpreter installed under /tmp keeps it; TMPDIR names ours
            link.symlink_to(f"{BOX}/{link.name}")
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")
    read_only = struct.pack("=QQQQ", 1 | _MS_NOSUID, 0, 0, 0)
    _check(_syscall(_SYS_MOUNT_SETATTR, -100, b"/", 0x8000, read_only, len(read_only)), "mount_setattr")


class Namespaced:
    """Levels L2 and L3: every child is init of its own pid namespace, on its own tmpfs, in a network without links."""

    def __init__(self, readable: list[str], limits: Limits, uid: int | None, leaves: Leaves | None) -> None:
        """Moves this process into the outer namespaces. `uid`: what root becomes first; None for an ordinary user."""
        self._limits, self._leaves = limits, leaves
        seen = (*readable, "/etc", *(f"/dev/{name}" for name in DEVICES))
        self._readable = [path for path in seen if Path(path).exists()]
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # only root may read its own home, where the interpreter may be: so it grafts before it becomes `uid`.
            # A container's root may not mount, but once it is `uid` it may what an ordinary user may
            built = uid is not None and self._may_mount()
            if built:
                _build_root(readable)
            if uid is not None:
                become(uid)
            user, group = os.geteuid(), os.getegid()
            _unshare(_NEW_USER | _NEW_NS | _NEW_IPC | _NEW_UTS | _NEW_NET)
            self._write("self/setgroups", b"deny")  # the kernel's condition for an unprivileged group map
            self._write("self/uid_map", f"0 {user} 1".encode())
            self._write("self/gid_map", f"0 {group} 1".encode())
            if not built:
                _build_root(readable)
        except OSError as error:
            raise LockError(f"namespaces are denied ({error})", _remedy()) from None
        _libc.sethostname(b"sandbox", 7)
        self._networks: dict[int, int] = {}
        self._box = branch.Box(BOX, INNER_ID, limits)
        copying = branch.NEW_NAMESPACES | signal.SIGCHLD
        self._filters = [
            _Filter(seccomp.build_filter(_MACHINE, sockets=True, own_groups=True, clone=flags)) for flags in (0, copying)
        ]
        self._locks = [self._steps(stem) for stem in (False, True)]

    @staticmethod
    def _may_mount() -> bool:
        try:
            _unshare(_NEW_NS)
        except PermissionError:
            return False
        return True

    def _open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self._proc)

    def _write(self, path: str, text: bytes) -> None:
        file = self._open(path, os.O_WRONLY)
        os.write(file, text)
        os.close(file)

    def fork(self, slot: int, stem: bool = False) -> int:
        """Forks into the slot's network and a new pid namespace.

        A network namespace is slow to make and slower to tear down, so a slot keeps its own: a child has no right over
        it, and when the child's last process is dead nothing of it is left there.
        """
        if slot not in self._networks:
            _unshare(_NEW_NET)
            self._networks[slot] = self._open("self/ns/net")
        else:
            _check(_c_setns(self._networks[slot], _NEW_NET), "setns")
        if self._leaves:
            self._leaves.prepare(slot)
        return _fork(_NEW_PID)

    def _steps(self, stem: bool) -> list[tuple[str, Callable[..., int | None], tuple[object, ...]]]:
        """Returns a child's lock as calls in order: prepared, for a child pays in page faults for what it works out."""
        limits, self_is = self._limits, f"{INNER_ID} 0 1".encode()
        options = f"size={limits.disk_bytes},nr_inodes={limits.inodes},mode=755".encode()
        box = BOX.encode()
        steps: list[tuple[str, Callable[..., int | None], tuple[object, ...]]] = [
            ("die with the zygote", _c_prctl, (_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)),
            ("own user and mount namespaces", _c_unshare, (_NEW_USER | _NEW_NS,)),
            ("no group changes", self._write, ("self/setgroups", b"deny")),
            ("user map", self._write, ("self/uid_map", self_is)),
            ("group map", self._write, ("self/gid_map", self_is)),
            ("own files", _c_mount, (b"tmpfs", box, b"tmpfs", _MS_NOSUID | _MS_NODEV, options)),
            *((f"directory {name}", os.mkdir, (f"{BOX}/{name}", 0o700)) for name in ("work", "tmp", "shm")),
            ("work directory", os.chdir, (f"{BOX}/work",)),
            ("own session", os.setsid, ()),
            *(("limit", resource.setrlimit, limit) for limit in _own_limits(limits, limits.processes, stem)),
            ("no new privileges", _c_prctl, (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
            ("no capabilities", _drop_capabilities, ()),
        ]
        if landlock_abi() >= 6:
            steps.append(("Landlock", _syscall, (_SYS_LANDLOCK_RESTRICT, _landlock_ruleset(0), 0)))
        return [*steps, ("seccomp", _c_prctl, (_PR_SET_SECCOMP, 2, self._filters[stem].program, 0, 0))]

    def enter(self, slot: int, stem: bool = False) -> None:
        """Locks this child, for good. The pid, network and outer namespaces it was born in."""
        if self._leaves:
            self._leaves.join(slot)
        for what, call, arguments in self._locks[stem]:
            if call(*arguments) == -1:
                _check(-1, what)

    def copy(self) -> int:
        """Forks this stem. Returns the copy's pid, 0 in the copy, which must settle."""
        return branch.duplicate(_fork, self._limits)

    def settle(self) -> None:
        """Locks this copy, for good, once it is adopted."""
        branch.settle(self._box)

    def confine(self, place: str) -> None:
        """Narrows this process, for good, to the directory `place` and the system's tools; signals stay inside too."""
        ruleset = _landlock_ruleset(_LANDLOCK_ALL)
        for path in self._readable:
            _landlock_allow(ruleset, path, _LANDLOCK_READ | (2 if path.startswith("/dev/") else 0))
        _landlock_allow(ruleset, place, _LANDLOCK_ALL)
        _landlock_restrict(ruleset)
        os.close(ruleset)

    def adopt(self, slot: int, original: int, pid: int) -> int:
        """Starts giving the stem's copy its own files and cgroup; returns who does it. Raises OSError for a stranger."""
        if branch.parent_of(self._proc, pid) != original:
            raise ProcessLookupError(f"{pid} is no copy of {original}")
        leaves = self._leaves
        if leaves:
            leaves.prepare(slot)
        return branch.adopt(self._proc, original, pid, self._box, lambda copy: leaves.join(slot, copy) if leaves else None)

    def kill(self, pid: int) -> None:
        """Kills the namespace's init and, with it, all of the namespace."""
        os.kill(pid, signal.SIGKILL)

    def close_from(self, first: int) -> None:
        close_from(first)

    def release(self, slot: int, pid: int) -> None:
        """Nothing is left to wait for or to remove: it died with the namespaces."""

    def ran_out(self, slot: int) -> bool:
        """Returns whether the kernel killed for memory there since it was last asked."""
        return self._leaves.ran_out(slot) if self._leaves else False

    def exiting(self, pid: int) -> bool:
        """Returns whether `pid` and all its threads have begun to end."""
        with contextlib.suppress(OSError, LookupError, ValueError):
            words = self._text(f"{pid}/stat").rpartition(")")[2].split()
            return bool(int(words[6]) & _PF_EXITING) and int(words[17]) <= 1
        return True

    def could_be_its_own(self, pid: int) -> bool:
        """Returns whether a program could have brought about the SIGKILL of which `pid` is dead, and not reaped yet.

        The init of a pid namespace is deaf to the signals of those inside, SIGKILL too, and ptrace, whose tracer can take its
        tracee along, is filtered. What is left to a program is to run out of memory, of which only a cgroup tells, or of time.
        In doubt it was the program: to hide its own failure is worse than to be told of one that was not.
        """
        if self._leaves is None:
            return True
        try:
            stat, limits = (self._text(f"{pid}/{name}") for name in ("stat", "limits"))
        except (OSError, ValueError):
            return True
        return time_may_be_up(stat, limits, _allowed(resource.RLIMIT_CPU, self._limits.cpu_s), _CORES)

    def _text(self, path: str) -> str:
        file = self._open(path)
        try:
            return os.read(file, 1 << 14).decode()
        finally:
            os.close(file)

    def close(self) -> None:
        """Nothing stays: the mounts and namespaces end with this process."""


class Landlocked(Unlocked):
    """Level L1: no namespaces. Landlock closes the file tree, seccomp sockets, and no process may leave its group."""

    def __init__(self, readable: list[str], limits: Limits, uid: int | None, home: str) -> None:
        abi = landlock_abi()
        if abi < 6:
            raise LockError(
                f"Landlock ABI 6 is wanted (signals and abstract sockets), this kernel has {abi or 'none'}",
                "Linux 6.12 or newer with landlock among the lsm= of its command line",
            )
        self._readable = [path for path in (*readable, *(f"/dev/{name}" for name in DEVICES)) if Path(path).exists()]
        self._limits = limits
        if uid is not None:
            become(uid)
        hidden = [path for path in self._readable if not os.access(path, os.R_OK)]
        if hidden:
            raise LockError(f"uid {os.getuid()} cannot read {hidden[0]}", "install Python where every user can read it")
        self._uid = os.getuid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that release can wait for what a child left behind
        super().__init__(home)
        self._filter = _Filter(seccomp.build_filter(_MACHINE, sockets=False, own_groups=False))

    def _process_count(self) -> int:
        """Returns this user's processes: RLIMIT_NPROC counts them all."""
        count = 0
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                count += entry.name.isdigit() and entry.stat().st_uid == self._uid
        return count

    def enter(self, slot: int, stem: bool = False) -> None:
        """Locks this child, for good."""
        super().enter(slot)
        die_with_parent()
        processes = self._process_count() + self._limits.processes
        ruleset = _landlock_ruleset(_LANDLOCK_ALL)
        for path in self._readable:
            _landlock_allow(ruleset, path, _LANDLOCK_READ | (2 if path.startswith("/dev/") else 0))
        _landlock_allow(ruleset, self.place(slot), _LANDLOCK_ALL)
        for kind, values in _own_limits(self._limits, processes):
            resource.setrlimit(kind, values)
        no_new_privileges()
        _landlock_restrict(ruleset)
        self._filter.load()

    def close_from(self, first: int) -> None:
        close_from(first)
