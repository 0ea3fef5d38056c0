"""Runs one program locked, for as long as it lasts: for a whole service that executes what a model wrote.

    python -P -c 'import sys; sys.path.insert(0, ROOT); from sandbox_client.confine import main; main()' \\
        '{"readable": [...], "path": "/usr/bin:/bin", "memory_mb": 4096}' PROGRAM ARGUMENTS...

The program has the locks of level L2: a private tree that shows what is `readable` and nothing else, no network, no process of
the host, one writable place. Standard streams are passed on, a socket among them, and nothing else. It ends with this process,
and this with the thread that started it. Where the machine does not give the lock, nothing is run, and standard error says why.
"""

import json
import os
import sys

from .decision import user_id
from .groups import Limits, LockError
from .pool import readable_paths

if sys.platform == "linux":
    from . import jail

_UID = 64130  # for a program that root starts: none of the server's own


def main() -> None:
    """Does what this module says, with the arguments of the process, and exits with the program's status."""
    config, command = json.loads(sys.argv[1]), sys.argv[2:]
    try:
        status = run(config, command)
    except LockError as error:
        sys.exit(f"no isolation: {error.reason}; {error.remedy or 'run it on another machine'}")
    except OSError as error:
        sys.exit(f"no isolation: {error}")
    os._exit(status)


def run(config: dict[str, object], command: list[str]) -> int:
    """Runs a command locked and returns its status. Raises LockError or OSError where there is no such lock."""
    if sys.platform != "linux":
        raise LockError("it needs Linux")
    memory_bytes = int(str(config["memory_mb"])) << 20
    limits = Limits(memory_bytes=memory_bytes, processes=256, disk_bytes=512 << 20, inodes=65536, open_files=1024, cpu_s=10**6)
    readable = [*readable_paths(), *map(str, config["readable"] if isinstance(config["readable"], list) else ())]
    lock = jail.Namespaced(list(dict.fromkeys(readable)), limits, _UID if user_id() == 0 else None, None)
    jail.die_with_parent()
    jail.set_shared_limits(limits, bounded=False)
    pid = lock.fork(0)
    if pid == 0:
        try:
            lock.enter(0)
            lock.close_from(3)
            place = {"HOME": f"{jail.BOX}/work", "TMPDIR": f"{jail.BOX}/tmp", "PATH": str(config["path"])}
            os.execve(command[0], command, {**os.environ, **place})
        except OSError as error:
            print(f"no isolation: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF
