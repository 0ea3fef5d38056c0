"""Attacks on what a session may use and on its end: processes, memory, disk, output, time, and what stays behind.

A payload runs in a locked child like any program and ends in an expression: "" when it was stopped, otherwise what it
reached. `P` holds the limits and what was set out for it to reach. What a program might reach is in attacks_reach.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attack:
    """What is promised, from which level on, and the payload that tries to break it."""

    name: str
    promise: str
    level: str
    code: str
    timeout_s: float = 8.0
    at_start: bool = True
    ends: str = "value"  # how it shows: by its value, or as a "flood", "killed", "lost", or when made "twice"


USE = (
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
        "endless output",
        "a flood of output is cut and counted",
        "L1",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        timeout_s=0.2,
        ends="flood",
    ),
    Attack(
        "deaf to its deadline",
        "a program that ignores signals is killed",
        "L1",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: time.sleep(1)",
        timeout_s=0.2,
        at_start=False,
        ends="killed",
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
        ends="twice",
    ),
    Attack(
        "alarm taken away",
        "a program that removes its own deadline has it all the same",
        "L1",
        """
import signal
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
while True:
    pass
""",
        timeout_s=0.2,
        at_start=False,
        ends="killed",
    ),
    Attack(
        "thread bomb",
        "threads count as processes",
        "L1",
        """
import threading
count, done = 0, threading.Event()
try:
    while count < P["processes"] + 80:
        threading.Thread(target=done.wait, daemon=True).start()
        count += 1
except RuntimeError:
    pass
done.set()
"" if count <= P["processes"] else f"{count} threads"
""",
    ),
    Attack(
        "memory behind a raised limit",
        "a program that raises its own limits has no more memory for it",
        "L3",
        """
import mmap, os, resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_MEMLOCK):
    try:
        resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)
    except (OSError, ValueError):
        pass
held = mmap.mmap(-1, P["memory_mb"] * 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.madvise(14)
for place in range(0, len(held), 4096):
    held[place] = 1
f"{len(held) >> 20} MiB"
""",
    ),
    Attack(
        "limits raised",
        "no limit can be raised, nor its own priority",
        "L1",
        """
import os, resource
reached = []
for name in ("NOFILE", "CPU", "NPROC", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE", "AS"):
    kind = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(kind)[1]
    try:
        resource.setrlimit(kind, (hard, hard + 1))
        reached.append(name)
    except (OSError, ValueError):
        pass
for name, change in (
    ("nice", lambda: os.nice(-1)),
    ("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
    ("killed last", lambda: open("/proc/self/oom_score_adj", "w").write("-1000")),
):
    try:
        change()
        reached.append(name)
    except OSError:
        pass
", ".join(reached)
""",
    ),
    Attack(
        "zip bomb",
        "an archive that grows a thousandfold fills no more than its session's disk",
        "L2",
        """
import os, zipfile
with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bomb:
    for number in range(4):
        with bomb.open(f"zeros{number}", "w") as file:
            for _ in range(56):
                file.write(bytes(1 << 20))
size = os.path.getsize("bomb.zip")
try:
    with zipfile.ZipFile("bomb.zip") as bomb:
        bomb.extractall()
except OSError:
    pass
written = sum(os.stat(name).st_blocks * 512 for name in os.listdir())
"" if size < 1 << 21 and written <= P["disk_bytes"] else f"{written >> 20} MiB"
""",
        at_start=False,
    ),
    Attack(
        "tar bomb",
        "nor does one that names its files out of the directory, or says that they are huge",
        "L2",
        """
import io, os, tarfile
with tarfile.open("bomb.tar", "w") as bomb:
    for name, kind, size in (("../../evil", tarfile.REGTYPE, 4), ("/evil", tarfile.REGTYPE, 4), ("huge", b"S", 0)):
        entry = tarfile.TarInfo(name)
        entry.type, entry.size = (tarfile.REGTYPE if kind == b"S" else kind), size
        bomb.addfile(entry, io.BytesIO(b"evil"))
    device = tarfile.TarInfo("device")
    device.type, device.devmajor, device.devminor, device.mode = tarfile.BLKTYPE, 8, 0, 0o666
    bomb.addfile(device)
reached = []
with tarfile.open("bomb.tar") as bomb:
    for entry in bomb:
        try:
            bomb.extract(entry, filter="fully_trusted")
        except (OSError, tarfile.TarError, TypeError):
            pass
for path in ("/evil", "/usr/evil"):
    if os.path.exists(path):
        reached.append(path)
try:
    os.close(os.open("device", os.O_RDONLY))
    reached.append("a device")
except OSError:
    pass
try:
    with open("huge", "r+b") as file:
        file.truncate(1 << 40)
    reached.append("a file of a terabyte")
except OSError:
    pass
", ".join(reached)
""",
        at_start=False,
    ),
    Attack(
        "a million files",
        "tiny files, directories and links are counted, whatever they weigh",
        "L2",
        """
import os
count, kinds = 0, 0
open("first", "w").close()
try:
    while count < 1_000_000:
        os.mkdir(f"d{count}")
        count += 1
        for name, make in (
            ("f", lambda path: os.close(os.open(path, os.O_CREAT))),
            ("s", lambda path: os.symlink("nowhere", path)),
            ("h", lambda path: os.link("first", path)),
            ("p", os.mkfifo),
        ):
            make(f"d{count - 1}/{name}")
            count += 1
except OSError:
    pass
"" if count <= P["inodes"] else f"{count} files"
""",
    ),
)
