"""Attacks that the server makes on itself before it serves: a level is what has stopped them, not what is installed.

Each payload runs in a locked child like any program and ends in an expression: "" when it was stopped, otherwise what
it reached. The suite is also `sandbox-server --self-test`.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .groups import Limits
from .line import Child, ChildDied
from .pool import Pool
from .sessions import Reply, execute

MakePool = Callable[[str, Limits, int], Pool]  # level, limits, warm children

_SMALL_BYTES = 96 << 20
LADDER = ("L3", "L2", "L1")
_EVERY = ("a kernel of its own", "a share of the CPU per session: only each process's CPU time is bounded")
_NO_CGROUP = ("a bound on a session's total memory: only each process is bounded",)
MISSING = {
    "L3": _EVERY,
    "L2": (*_EVERY, *_NO_CGROUP),
    "L1": (
        *_EVERY,
        *_NO_CGROUP,
        "a disk quota: only each file is bounded",
        "a process limit per session: all sessions share one",
        "private Unix sockets: they are denied",
        "hiding what exists: names of host files and processes can be guessed at, not read",
    ),
    "L0": ("every guarantee: programs run as this user, with this user's files and network",),
}


@dataclass(frozen=True, slots=True)
class Attack:
    """What is promised, from which level on, and the payload that tries to break it."""

    name: str
    promise: str
    level: str
    code: str
    timeout_s: float = 8.0
    at_start: bool = True


_SYSCALLS = """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
x86 = os.uname().machine == "x86_64"
calls = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "keyctl": (250, 219), "add_key": (248, 217),
    "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265), "memfd_create": (319, 279), "fsopen": (430, 430), "init_module": (175, 105),
    "shmget": (29, 194), "mq_open": (240, 180), "pidfd_getfd": (438, 438), "personality": (135, 92),
    "listmount": (458, 458), "clone3": (435, 435),
}
reached = []
for name, pair in calls.items():
    ctypes.set_errno(0)
    call(pair[not x86], 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() not in (1, 38):
        reached.append(name)
if call(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0) == 0:
    os._exit(0)
if ctypes.get_errno() != 1:
    reached.append("clone into a user namespace")
", ".join(reached)
"""

ATTACKS = (
    Attack(
        "fork bomb",
        "a program cannot have more than its processes",
        "L1",
        """
import os, time
count = 0
try:
    while count < P["processes"] + 80:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        count += 1
except OSError:
    pass
"" if count <= P["processes"] else f"{count} processes"
""",
    ),
    Attack(
        "memory of one process",
        "a process cannot have more than its memory",
        "L1",
        """
import mmap
held = []
try:
    while len(held) < 24:
        held.append(mmap.mmap(-1, 64 << 20))
except OSError:
    pass
size = len(held) * 64
held.clear()
"" if size <= P["memory_mb"] else f"{size} MiB"
""",
    ),
    Attack(
        "memory of many processes",
        "all processes of a session together cannot have more than its memory",
        "L3",
        """
import mmap, os, time
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        held = mmap.mmap(-1, P["memory_mb"] * 3 // 10 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.madvise(14)  # huge pages, where there are any, make this attack cheap
        for place in range(0, len(held), 4096):
            held[place] = 1
        os.kill(os.getpid(), 19)  # wait, holding it
    children.append(child)
holding = [child for child in children if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])]
time.sleep(0.05)  # one that held its share may since have been killed for another's
holding = [child for child in holding if os.waitpid(child, os.WNOHANG)[0] == 0]
"" if len(holding) <= 3 else f"{len(holding)} times three tenths of it"
""",
    ),
    Attack(
        "disk",
        "a session cannot fill the disk, nor use up its inodes",
        "L2",
        """
import os
written = files = 0
# two places may be one directory, so what is counted is never opened a second time
for place in (".", "/tmp", "/dev/shm", "/var/tmp", "/"):
    try:
        for number in range(5):
            with open(f"{place}/big{number}", "xb") as file:
                while written < 1 << 28:
                    written += file.write(bytes(1 << 20))
    except OSError:
        pass
for number in range(5):
    try:
        os.unlink(f"big{number}")
    except OSError:
        pass
try:
    while files < 20000:
        os.close(os.open(f"f{files}", os.O_CREAT))
        files += 1
except OSError:
    pass
"" if written <= P["disk_bytes"] and files < P["inodes"] else f"{written >> 20} MiB, {files} files"
""",
    ),
    Attack(
        "host files",
        "a program reads no file of the host but its tools, directly or through a link",
        "L1",
        """
import os
reached = []
for number, path in enumerate((P["secret"], "/etc/shadow", "/root/.bashrc", "/proc/1/root/etc/shadow", "/dev/mem")):
    os.symlink(path, f"link{number}")
    for name in (path, f"link{number}", "../../../../../../.." + path):
        try:
            with open(name, "rb") as file:
                reached.append(f"{name}: {file.read(20)!r}")
        except OSError:
            pass
", ".join(reached)
""",
    ),
    Attack(
        "writing outside",
        "a program writes nothing but its own directories",
        "L1",
        """
import os
reached = []
home = os.path.dirname(os.getcwd())
for path in ("/evil", "/usr/evil", "/etc/passwd", "../../evil", "../../../../evil", P["place"] + "/evil", "/run/evil"):
    try:
        with open(path, "ab"):
            if not os.path.realpath(path).startswith(home):
                reached.append(path)
    except OSError:
        pass
", ".join(reached)
""",
    ),
    Attack(
        "server environment",
        "nothing of the server's environment is to be seen",
        "L1",
        """
import glob, os
found = [name for name, value in os.environ.items() if P["canary"] in value]
for path in glob.glob("/proc/*/environ"):
    try:
        with open(path, "rb") as file:
            found.append(path) if P["canary"].encode() in file.read() else None
    except OSError:
        pass
", ".join(found)
""",
    ),
    Attack(
        "network",
        "no connection leaves, not to this machine, not to an abstract socket",
        "L1",
        """
import socket
reached = []
for name, family, kind, address in (
    ("loopback TCP", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", P["tcp"])),
    ("loopback UDP", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", P["tcp"])),
    ("a route out", socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
    ("IPv6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", P["tcp"])),
    ("an abstract socket", socket.AF_UNIX, socket.SOCK_STREAM, P["abstract"]),
    ("netlink", getattr(socket, "AF_NETLINK", 16), socket.SOCK_RAW, (0, 0)),
):
    try:
        with socket.socket(family, kind) as line:
            line.settimeout(1)
            line.connect(address)
            reached.append(name)
    except OSError:
        pass
", ".join(reached)
""",
    ),
    Attack(
        "neighbours",
        "no process outside can be signalled, traced or read",
        "L1",
        """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
reached = []
for pid in P["pids"]:
    try:
        os.kill(pid, 0)
        if pid != os.getpid():
            reached.append(f"signal {pid}")
    except OSError:
        pass
    if call(101 if os.uname().machine == "x86_64" else 117, 16, pid, 0, 0) == 0:
        reached.append(f"trace {pid}")
", ".join(reached)
""",
    ),
    Attack(
        "proc and sys",
        "no kernel setting can be written, no other process seen",
        "L1",
        """
import os
reached = []
for path in ("/proc/sys/vm/swappiness", "/proc/sys/kernel/hostname", "/sys/kernel/mm/ksm/run", "/proc/sysrq-trigger"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        reached.append(path)
    except OSError:
        pass
try:
    reached += [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
except OSError:
    pass
", ".join(reached)
""",
    ),
    Attack(
        "privileges",
        "no capability, no other user, no way to either",
        "L1",
        """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
reached = []
data = ctypes.create_string_buffer(24)
libc.capget(struct.pack("=Ii", 0x20080522, 0), data)
if any(data.raw):
    reached.append("capabilities")
if libc.prctl(39, 0, 0, 0, 0) != 1:
    reached.append("new privileges")
for change in (os.setuid, os.setgid):
    try:
        change(0)
        reached.append(change.__name__)
    except OSError:
        pass
if libc.prctl(1, 0, 0, 0, 0) == 0:
    reached.append("outliving the server")
", ".join(reached)
""",
    ),
    Attack("system calls", "what attacks kernels is out of reach", "L1", _SYSCALLS),
    Attack(
        "endless output",
        "a flood of output is cut and counted",
        "L1",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        timeout_s=0.2,
    ),
    Attack(
        "deaf to its deadline",
        "a program that ignores signals is killed",
        "L1",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: time.sleep(1)",
        timeout_s=0.2,
        at_start=False,
    ),
    Attack(
        "survivor",
        "nothing that a program started outlives its session",
        "L1",
        """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
        while True:
            time.sleep(1)
    os._exit(0)
""
""",
    ),
    Attack(
        "leftovers",
        "the next program finds nothing of the last",
        "L1",
        """
import os, tempfile
found, places = [], (".", "..", "/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir(), os.environ["HOME"])
for place in places:
    try:
        found += [name for name in os.listdir(place) if "marker" in name]
    except OSError:
        pass
for place in places:
    try:
        open(f"{place}/marker", "w").close()
    except OSError:
        pass
", ".join(found)
""",
    ),
)


@contextlib.contextmanager
def _bait(pool: Pool) -> Iterator[dict[str, Any]]:
    """Sets out what the payloads try to reach, and yields where it is."""
    canary = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as place, socket.socket() as tcp, contextlib.ExitStack() as stack:
        Path(place).chmod(0o755)
        secret = Path(place, "secret")
        secret.write_text(canary)
        secret.chmod(0o644)  # only the jail hides it
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        abstract = f"\0sandbox-{canary}"
        line = stack.enter_context(socket.socket(socket.AF_UNIX))
        line.bind(abstract)
        line.listen()
        os.environ["SANDBOX_CANARY"] = canary
        stack.callback(os.environ.pop, "SANDBOX_CANARY")
        limits = pool.limits
        yield {
            "secret": str(secret),
            "place": place,
            "canary": canary,
            "tcp": tcp.getsockname()[1],
            "abstract": abstract,
            "pids": [os.getpid(), os.getppid(), *pool.process_ids()],
            "processes": limits.processes,
            "memory_mb": limits.memory_bytes >> 20,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
        }


async def _attack(pool: Pool, attack: Attack, bait: dict[str, Any]) -> str:
    """Returns "" when the attack was stopped, otherwise what it reached."""
    try:
        child = await pool.take()
        try:
            reply = await _strike(child, attack, bait, pool.limits.memory_bytes)
            if attack.name == "leftovers":
                child.kill("closed")
                await child.ended
                child = await pool.take()
                reply = await _strike(child, attack, bait, pool.limits.memory_bytes)
        finally:
            child.kill("closed")
    except ChildDied as death:
        return f"no child could be started ({death.cause})"
    await child.ended
    if not child.out.at_end:
        return "a process that outlived its session"
    if attack.name == "endless output":
        return "" if reply["dropped_bytes"] and len(reply["stdout"]) < 2 * wire.EXEC_OUTPUT_BYTES else "all of it"
    if attack.name == "deaf to its deadline":
        return "" if reply["outcome"] == "program_timeout" and reply["session_lost"] else reply["outcome"]
    if reply["session_lost"]:
        return ""  # it was killed for trying
    return reply["error"] or reply["value"].strip("'\"")


async def _strike(child: Child, attack: Attack, bait: dict[str, Any], memory_bytes: int) -> Reply:
    code = f"import json\nP = json.loads({json.dumps(bait)!r})\n{attack.code}"
    head = {"code": code, "language": "python", "timeout_s": attack.timeout_s}
    return await execute(child, head, wire.EXEC_OUTPUT_BYTES, memory_bytes)


async def _attack_all(pool: Pool, attacks: Sequence[Attack]) -> list[tuple[Attack, str]]:
    with _bait(pool) as bait:
        return list(zip(attacks, await asyncio.gather(*(_attack(pool, a, bait) for a in attacks)), strict=True))


async def run_attacks(pool: Pool, make_pool: MakePool, *, starting: bool) -> list[tuple[Attack, str]]:
    """Makes every attack that the pool's level promises to stop. Returns each with what it reached, "" if stopped."""
    chosen = [a for a in ATTACKS if a.level <= pool.level and (a.at_start or not starting)]
    results = await _attack_all(pool, [a for a in chosen if a.level != "L3"])
    costly = [a for a in chosen if a.level == "L3"]
    if costly:  # it must really use the memory: so with a small limit
        small = make_pool(pool.level, Limits(memory_bytes=_SMALL_BYTES), 1)
        problem = await small.start()
        results += [(a, problem["reason"]) for a in costly] if problem else await _attack_all(small, costly)
        await small.close()
    return results


@dataclass(frozen=True, slots=True)
class Rung:
    """Why a level was not reached."""

    level: str
    reason: str
    remedy: str | None


class FatalError(Exception):
    """What no other level would cure, such as a functions module that cannot be imported."""


async def climb(
    make_pool: MakePool, levels: Sequence[str], limits: Limits, warm: int, *, starting: bool = True
) -> tuple[Pool | None, list[tuple[Attack, str]], list[Rung]]:
    """Returns the pool of the best of `levels` that stops its attacks, their results, and why better ones failed."""
    rungs = []
    for level in levels:
        pool = make_pool(level, limits, warm)
        problem = await pool.start()
        if "fatal" in problem:
            raise FatalError(problem["fatal"])
        if problem:
            rungs.append(Rung(level, problem["reason"], problem["remedy"]))
            await pool.close()
            continue
        results = await run_attacks(pool, make_pool, starting=starting)
        through = [f"{attack.name} ({reached})" for attack, reached in results if reached]
        if not through:
            return pool, results, rungs
        rungs.append(Rung(level, f"attacks got through: {'; '.join(through)}", None))
        await pool.close()
    return None, [], rungs
