"""The system-call filter of a jailed child, assembled by hand as classic BPF for x86_64 and aarch64.

Only bytes are built here; jail.py loads them. It stands apart because it is a table and an assembler, and pure.

The filter forbids what opens kernel attack surface or reaches other processes; everything younger than the table
answers ENOSYS, so a new kernel does not add calls. clone3 answers ENOSYS because its flags cannot be read by a
filter; the C libraries then use clone, whose flags can.
"""

import errno
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEWEST = 456  # futex_requeue, Linux 6.7; numbers above 423 are the same on every architecture

# name:x86_64:aarch64, "-" where the architecture has none
_FORBIDDEN = """
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 kcmp:312:272
pidfd_getfd:438:438 bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425
io_uring_enter:426:426 io_uring_register:427:427 keyctl:250:219 add_key:248:217 request_key:249:218 mount:165:40
umount2:166:39 pivot_root:155:41 chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431
fsmount:432:432 fspick:433:433 mount_setattr:442:442 unshare:272:97 setns:308:268 kexec_load:246:104
kexec_file_load:320:294 init_module:175:105 finit_module:313:273 delete_module:176:106 reboot:169:142 swapon:167:224
swapoff:168:225 acct:163:89 quotactl:179:60 quotactl_fd:443:443 nfsservctl:180:42 syslog:103:116 settimeofday:164:170
clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266 sethostname:170:161 setdomainname:171:162
open_by_handle_at:304:265 name_to_handle_at:303:264 fanotify_init:300:262 fanotify_mark:301:263 personality:135:92
vhangup:153:58 iopl:172:- ioperm:173:- modify_ldt:154:- create_module:174:- query_module:178:- get_kernel_syms:177:-
uselib:134:- _sysctl:156:- ustat:136:- sysfs:139:- memfd_create:319:279 memfd_secret:447:447 execveat:322:281
shmget:29:194 shmat:30:196 shmctl:31:195 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192 msgget:68:186
msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180 mq_unlink:241:181 mq_timedsend:242:182
mq_timedreceive:243:183 mq_notify:244:184 mq_getsetattr:245:185 lookup_dcookie:212:18 vmsplice:278:75
move_pages:279:239 migrate_pages:256:238
"""
_GUARDED = "clone:56:220 socket:41:198 ioctl:16:29 prctl:157:167 clone3:435:435 setsid:112:157 setpgid:109:154"

# what changes another process of the same user, and which argument says whose: only 0, oneself, is allowed
_OF_ANOTHER = {
    0: "prlimit64:302:261 sched_setaffinity:203:122 sched_setparam:142:118 sched_setscheduler:144:119 sched_setattr:314:274",
    1: "setpriority:141:140 ioprio_set:251:30",
}

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* but time, which clone cannot ask for
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # typing into a terminal
_PR_SET_PDEATHSIG, _PR_SET_MM = 1, 35  # outliving the server; rewriting one's own memory map
_AF_UNIX = 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_Line = tuple[int, int, str, str]  # code, constant, label if true, label if false; "" is the next line


def numbers(table: str, machine: str) -> dict[str, int]:
    """Returns name -> number of the system calls in `table` that `machine` has."""
    column = list(AUDIT_ARCH).index(machine) + 1
    rows = (row.split(":") for row in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _assemble(lines: list[_Line | str]) -> bytes:
    places: dict[str, int] = {}
    code: list[_Line] = []
    for line in lines:
        if isinstance(line, str):
            places[line] = len(code)
        else:
            code.append(line)
    packed = b""
    for here, (opcode, constant, yes, no) in enumerate(code):
        jumps = [places[label] - here - 1 if label else 0 for label in (yes, no)]
        packed += struct.pack("=HBBI", opcode, *jumps, constant)
    return packed


def _search(table: list[tuple[int, str]]) -> list[_Line | str]:
    """Returns lines that jump to the label of the loaded number, or to "allow", by halving.

    The kernel runs the filter over every number when it is loaded, so a chain of comparisons costs each child 0.1 ms.
    """
    if len(table) == 1:
        number, label = table[0]
        return [(_EQUAL, number, label, "allow")]
    middle = len(table) // 2
    right = f"from {table[middle][0]}"
    return [(_AT_LEAST, table[middle][0], right, ""), *_search(table[:middle]), right, *_search(table[middle:])]


def build_filter(machine: str, *, sockets: bool, own_groups: bool, clone: int = 0) -> bytes:
    """Returns the filter as an array of struct sock_filter.

    Args:
      machine: `platform.machine()`, one of AUDIT_ARCH.
      sockets: whether Unix sockets may be made (safe only where a network namespace hides abstract names and the
        file tree hides the others). No other family ever is; socketpair always works.
      own_groups: whether a program may leave its process group. Without a pid namespace the group is what is killed,
        so setsid and setpgid then answer 0 and do nothing; and limits and priorities of other processes are not its.
      clone: the one set of flags with new namespaces, signal included, that clone may have; 0 is none.
    """
    guarded = numbers(_GUARDED, machine)
    labels = dict.fromkeys(numbers(_FORBIDDEN, machine).values(), "forbid")
    labels |= {guarded[name]: name for name in ("clone", "socket", "ioctl", "prctl")} | {guarded["clone3"]: "absent"}
    if not own_groups:
        labels |= {guarded["setsid"]: "pretend", guarded["setpgid"]: "pretend"}
        for argument, table in _OF_ANOTHER.items():
            labels |= dict.fromkeys(numbers(table, machine).values(), f"self in {argument}")
    lines: list[_Line | str] = [
        (_LOAD, _ARCH, "", ""),
        (_EQUAL, AUDIT_ARCH[machine], "", "kill"),
        (_LOAD, _NUMBER, "", ""),
        (_AT_LEAST, NEWEST + 1, "absent", ""),
        *_search(sorted(labels.items())),
    ]
    for name, argument, tests in (
        ("clone", 0, [*([(_EQUAL, clone, "allow", "")] if clone else []), (_ANY_BIT, _NEW_NAMESPACES, "forbid", "allow")]),
        ("socket", 0, [(_EQUAL, _AF_UNIX, "allow" if sockets else "deny", "deny")]),
        ("ioctl", 1, [(_EQUAL, _TIOCSTI, "forbid", ""), (_EQUAL, _TIOCLINUX, "forbid", "allow")]),
        ("prctl", 0, [(_EQUAL, _PR_SET_PDEATHSIG, "forbid", ""), (_EQUAL, _PR_SET_MM, "forbid", "allow")]),
        *((f"self in {argument}", argument, [(_EQUAL, 0, "allow", "forbid")]) for argument in _OF_ANOTHER),
    ):
        lines += [name, (_LOAD, _ARGUMENT + 8 * argument, "", ""), *tests]
    for label, verdict in (
        ("allow", _ALLOW),
        ("forbid", _ERRNO | errno.EPERM),
        ("deny", _ERRNO | errno.EACCES),
        ("absent", _ERRNO | errno.ENOSYS),
        ("pretend", _ERRNO),
        ("kill", _KILL),
    ):
        lines += [label, (_RETURN, verdict, "", "")]
    return _assemble(lines)
