"""One process at a time where files are appended to, renamed and deleted: two would each undo what the other has written."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

LEASE_S = 120.0  # in which a file server lets go of the locks of a machine that is lost
_POLL_S = 1.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems that have none; nobody is refused there


@contextmanager
def alone(path: Path, refusal: str, lease_s: float = LEASE_S) -> Iterator[None]:
    """Holds the lock `path`, a file of its own: where locks are emulated, who closes a file ends them.

    It ends with the process, however that ends. A holder on another machine, who may be lost, is waited for.

    Raises:
        ValueError: another process holds it; says who, and then `refusal`.
    """
    with path.open("a+") as lock:
        try:
            _take(lock, path, refusal, lease_s)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            with suppress(OSError):  # a full disk: then nobody is told who it is
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _take(lock: TextIO, path: Path, refusal: str, lease_s: float) -> None:
    until = time.monotonic() + lease_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = path.read_text()
            lost = holder and not holder.endswith(f" on {socket.gethostname()}")
            if not lost or time.monotonic() >= until:
                raise ValueError(f"{path.parent}: {holder or 'another process'} {refusal}") from None
        time.sleep(_POLL_S)
