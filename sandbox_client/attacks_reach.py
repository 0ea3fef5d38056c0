"""Attacks on what a program must not reach: files, the network, other processes, privileges, the kernel's rarer doors."""

from .attacks import Attack

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

REACH = (
    Attack(
        "host files",
        "a program reads no file of the host but its tools",
        "L1",
        """
import os
reached = []
for path in (P["secret"], "/etc/shadow", "/root/.bashrc", "/proc/1/root/etc/shadow", "/dev/mem", "/proc/kcore", "/boot"):
    for name in (path, "../../../../../../.." + path):
        try:
            with open(name, "rb") as file:
                reached.append(f"{name}: {file.read(20)!r}")
        except OSError:
            pass
", ".join(reached)
""",
    ),
    Attack(
        "links out",
        "nor through a link of its own",
        "L1",
        """
import os
reached = []
for number, path in enumerate((P["secret"], P["place"], "/etc/shadow", "/root/.ssh", "/proc/1/root")):
    os.symlink(path, f"link{number}")
    try:
        if os.path.isdir(f"link{number}"):
            os.listdir(f"link{number}")
        else:
            with open(f"link{number}", "rb") as file:
                file.read(20)
        reached.append(path)
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
        "no process outside can be signalled",
        "L1",
        """
import ctypes, os, signal
call = ctypes.CDLL(None, use_errno=True).syscall
x86 = os.uname().machine == "x86_64"
reached = []
info = ctypes.create_string_buffer(128)
for pid in P["pids"]:
    for name, knock in (
        ("kill", lambda: os.kill(pid, 0)),
        ("group", lambda: os.killpg(pid, 0)),
        ("tgkill", lambda: call(234 if x86 else 131, pid, pid, 0)),
        ("queue", lambda: call(129 if x86 else 138, pid, 0, info)),
        ("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 0)),
    ):
        try:
            if knock() in (None, 0) and pid != os.getpid():
                reached.append(f"{name} {pid}")
        except OSError:
            pass
", ".join(reached)
""",
    ),
    Attack(
        "ptrace",
        "no process outside can be traced",
        "L1",
        """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
number = 101 if os.uname().machine == "x86_64" else 117
attach, seize = 16, 0x4206
", ".join(f"trace {pid}" for pid in P["pids"] for how in (attach, seize) if call(number, how, pid, 0, 0) == 0)
""",
    ),
    Attack(
        "memory of others",
        "no memory, descriptor or directory of another process can be had",
        "L1",
        """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
x86 = os.uname().machine == "x86_64"
reached = []
room = ctypes.create_string_buffer(64)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(room), 64)
for pid in set(P["pids"]) - {os.getpid()}:
    if call(310 if x86 else 270, pid, vector, 1, vector, 1, 0) > 0:
        reached.append(f"process_vm_readv {pid}")
    for name in ("mem", "environ", "maps", "fd/0", "root/etc/shadow", "cwd/secret", "task"):
        try:
            if os.path.isdir(f"/proc/{pid}/{name}"):
                os.listdir(f"/proc/{pid}/{name}")
            else:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
            reached.append(f"/proc/{pid}/{name}")
        except OSError:
            pass
    try:
        file = os.pidfd_open(pid)
        if call(438, file, 0, 0) >= 0:
            reached.append(f"pidfd_getfd {pid}")
    except OSError:
        pass
", ".join(reached)
""",
    ),
    Attack(
        "limits of others",
        "no other process can be slowed, moved or limited",
        "L1",
        """
import os, resource
reached = []
for pid in P["pids"]:
    for name, change in (
        ("priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)),
        ("cores", lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})),
        ("limits", lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 1))),
        ("class", lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))),
    ):
        try:
            change()
            if pid != os.getpid():
                reached.append(f"{name} {pid}")
        except OSError:
            pass
", ".join(reached)
""",
    ),
    Attack(
        "inherited descriptors",
        "a program holds no descriptor but its streams and its own line",
        "L1",
        """
import fcntl, os, stat
open_ = []
for number in range(4096):
    try:
        kind = stat.S_IFMT(os.fstat(number).st_mode)
    except OSError:
        continue
    if number > 3 or (number in (1, 2) and kind != stat.S_IFIFO) or (number == 3 and kind != stat.S_IFSOCK):
        open_.append(f"{number} {kind:o}")
    elif number == 0 and kind not in (stat.S_IFCHR, stat.S_IFREG):
        open_.append(f"0 {kind:o}")
", ".join(open_)
""",
    ),
    Attack(
        "memfd execution",
        "no program is run that is not a file of the session or of the system",
        "L1",
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
reached = []
file = libc.syscall(319 if x86 else 279, b"code", 0)
if file >= 0:
    reached.append("memfd_create")
if libc.syscall(447, 0) >= 0:
    reached.append("memfd_secret")
here = os.open("/bin/true", os.O_PATH)
pid = os.fork()
if pid == 0:
    libc.syscall(322 if x86 else 281, here, b"", 0, 0, 0x1000)
    os._exit(9)
if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
    reached.append("execveat of a descriptor")
os.close(here)
", ".join(reached)
""",
    ),
    Attack(
        "io_uring",
        "no ring, which does system calls past the filter",
        "L1",
        """
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
parameters = ctypes.create_string_buffer(120)
ring = call(425, 8, parameters)
"" if ring < 0 and call(426, 0, 1, 0, 0, 0, 0) < 0 and call(427, 0, 0, 0, 0) < 0 else "a ring"
""",
    ),
    Attack(
        "userfaultfd",
        "no page faults handled by the program, which kernel exploits stop the clock with",
        "L1",
        """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
reached = [f"flags {flags}" for flags in (0, 1) if call(323 if os.uname().machine == "x86_64" else 282, flags) >= 0]
try:
    os.close(os.open("/dev/userfaultfd", os.O_RDWR))
    reached.append("/dev/userfaultfd")
except OSError:
    pass
", ".join(reached)
""",
    ),
    Attack(
        "keyrings",
        "no key of the kernel's can be stored, found or asked for",
        "L1",
        """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
x86 = os.uname().machine == "x86_64"
reached = [f"keyring {ring}" for ring in range(-5, 0) if call(250 if x86 else 219, 0, ring, 1) >= 0]
if call(248 if x86 else 217, b"user", b"name", b"value", 5, -3) >= 0:
    reached.append("add_key")
if call(249 if x86 else 218, b"user", b"name", None, -3) >= 0:
    reached.append("request_key")
", ".join(reached)
""",
    ),
    Attack(
        "devices",
        "no device but the five harmless ones, none made either",
        "L1",
        """
import os, stat
reached = []
for name in ("kmsg", "kvm", "fuse", "mem", "port", "sda", "vda", "nvme0n1", "loop-control", "loop0", "net/tun", "ptmx", "tty",
             "vhost-net", "rtc0", "uinput", "dri/card0", "nvidia0", "mapper/control", "hpet"):
    try:
        os.close(os.open(f"/dev/{name}", os.O_RDWR | os.O_NONBLOCK))
        reached.append(name)
    except OSError:
        pass
for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 3)):
    try:
        os.mknod("made", kind | 0o666, os.makedev(major, minor))
        os.close(os.open("made", os.O_RDWR))
        reached.append(f"made {major}:{minor}")
    except OSError:
        pass
", ".join(reached)
""",
    ),
    Attack(
        "clocks",
        "the machine's time cannot be set, slowed or replaced",
        "L1",
        """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
reached = []
for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, 11):
    try:
        time.clock_settime(clock, time.clock_gettime(clock))
        reached.append(f"clock {clock}")
    except OSError:
        pass
buffer = ctypes.create_string_buffer(256)
for name, arguments in (("settimeofday", (buffer, None)), ("adjtimex", (buffer,)), ("clock_adjtime", (0, buffer))):
    if getattr(libc, name)(*arguments) >= 0:
        reached.append(name)
if libc.unshare(0x80) == 0:
    reached.append("a time namespace")
if libc.timerfd_create(8, 0) >= 0:  # CLOCK_REALTIME_ALARM wakes the machine
    reached.append("an alarm that wakes the machine")
", ".join(reached)
""",
    ),
    Attack(
        "link races",
        "a link swapped while a path is being followed leads nowhere else",
        "L1",
        """
import os, threading, time
outside, name = os.path.split(P["secret"])
reached, done = set(), threading.Event()
os.mkdir("real")
with open(f"real/{name}", "w") as file:
    file.write("mine")
os.symlink(outside, "evil")
os.symlink("real", "swap")
def swap():
    while not done.is_set():
        for target in ("evil", "real"):
            os.symlink(target, "next")
            os.rename("next", "swap")
swapper = threading.Thread(target=swap)
swapper.start()
end, rounds = time.monotonic() + 0.2, 0
while time.monotonic() < end or rounds < 300:
    rounds += 1
    try:
        with open(f"swap/{name}") as file:
            if file.read() != "mine":
                reached.add("the secret read")
        with open(f"swap/{name}-new", "x") as file:
            pass
        os.unlink(f"swap/{name}-new")
    except OSError:
        pass
    try:
        os.link(f"swap/{name}", "hard")
        try:
            with open("hard") as file:
                if file.read() != "mine":
                    reached.add("a hard link to the secret")
        finally:
            os.unlink("hard")
    except OSError:
        pass
done.set()
swapper.join()
for path in (P["secret"], "/etc/passwd", "/usr/bin/env", "/dev/null"):
    try:
        os.link(path, "hard")
        reached.add(f"a hard link to {path}")
        os.unlink("hard")
    except OSError:
        pass
", ".join(sorted(reached))
""",
    ),
    Attack(
        "forged replies",
        "a program that speaks for its server is cut off",
        "L1",
        """
import os, struct, time
text = b'{"outcome":"ok","error":null,"value":"forged","exit_code":0}'
os.write(3, (struct.pack("!cII", b"r", len(text), 0) + text) * 2)
while True:
    time.sleep(1)
""",
        ends="lost",
    ),
    Attack(
        "proc and sys",
        "no kernel setting can be written, no other process seen",
        "L1",
        """
import os
reached = []
for path in (
    *(f"/proc/sys/{name}" for name in ("vm/swappiness", "kernel/hostname", "kernel/core_pattern")),
    "/sys/kernel/mm/ksm/run",
    "/proc/sysrq-trigger",
):
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
)
