"""Workers: processes that serve synchronous worlds, each for many episodes, called with a deadline.

    WorkerFault        a worker died, missed its deadline, spoke garbage, or its world raised: never the policy's fault

A place is a slot of a worker, and an episode has one from its reset to its close. Whoever comes when all are taken waits. The
calls of one worker run one after another, in a thread of its own here, so that neither an event loop nor the other workers
wait for it, and so that callers with and without a loop are served alike.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sandbox_client

PROGRAM = Path(__file__).with_name("program.py")
_MOST_BYTES = 64 << 20  # of one answer
_LOG_BYTES = 4 << 20  # that a worker may have written to its standard streams
# A worker reads what the policy writes: it gets these variables of the trainer's environment, no tokens.
VARIABLES = ("PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
PREFIXES = ("LC_", "XDG_")
_LEAVE_S = 5.0  # for a worker to end its worlds by itself


class WorkerFault(Exception):
    """A worker failed; the episode is to be played again."""


@dataclass(frozen=True)
class Kind:
    """What the workers of a pool are.

    Args:
        name: of the world, for messages.
        python: the interpreter that has the library.
        adapter: the file that imports it.
        options: of the adapter's `make`.
        workers: processes at most.
        slots: episodes that one process holds at once.
        timeout_s: of one call.
        start_s: for the library to be imported.
        address_mb: address space of a worker; 0 is no limit.
        variables: of the trainer's environment, that a worker gets beside `VARIABLES`.
        confined: a worker runs programs that the policy wrote, and so inside the locks of the sandbox.
    """

    name: str
    python: Path
    adapter: Path
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    slots: int = 1
    timeout_s: float = 60.0
    start_s: float = 120.0
    address_mb: int = 0
    variables: tuple[str, ...] = ()
    confined: bool = False


class Worker:
    """One process and the thread that speaks with it. After its first fault it is `lost`, and every later call says so."""

    def __init__(self, kind: Kind):
        self.kind, self.lost = kind, ""
        self.taken: set[int] = set()  # slots; the pool's business
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], Future[Any]] | None] = queue.SimpleQueue()
        self._rest, self._over = b"", False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, name=f"worker-{kind.name}", daemon=True)
        self._thread.start()

    def call(self, request: dict[str, Any]) -> Future[Any]:
        """What the world says to a request. The future raises WorkerFault; it cannot be cancelled once it is under way."""
        future: Future[Any] = Future()
        self._requests.put((request, future))
        if self._over:
            self._refuse_rest()
        return future

    def stop(self) -> None:
        """Has the worker end when the calls before this are done."""
        self._requests.put(None)

    def join(self, until: float) -> None:
        """Waits for the end, and forces it at `until`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._kill_group()
            self._thread.join()

    def _serve(self) -> None:
        ours, theirs = socket.socketpair()
        folder = tempfile.TemporaryDirectory(prefix="jaxagent-worker-", ignore_cleanup_errors=True)
        with ours, tempfile.TemporaryFile() as log, folder as place:
            with theirs:
                fault = self._start(theirs, log, place)
            if fault := fault or self._wait_until_ready(ours):
                self.lost = f"{fault}{_last_words(log)}"
            number = 0
            while (asked := self._requests.get()) is not None:
                request, future = asked
                if future.set_running_or_notify_cancel():
                    number += 1
                    self._answer(ours, log, {"id": number, **request}, future)
            self.lost = self.lost or f"world {self.kind.name}: its workers were ended"
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_WR)
            self._reap()
        self._over = True
        self._refuse_rest()

    def _answer(self, line: socket.socket, log: Any, request: dict[str, Any], future: Future[Any]) -> None:
        if not self.lost:
            said, fault = self._exchange(line, request)
            if fault:
                self.lost = f"{fault}{_last_words(log)}"
                self._kill_group()
        if self.lost:
            future.set_exception(WorkerFault(self.lost))
        elif "error" in said:
            future.set_exception(WorkerFault(f"world {self.kind.name}, {request['call']}: {said['error']}"))
        else:
            future.set_result(said["said"])
        if os.fstat(log.fileno()).st_size > _LOG_BYTES:  # the worker writes at the same place, and goes on at the beginning
            log.seek(0)
            log.truncate()

    def _refuse_rest(self) -> None:
        """Answers those who call a worker that has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._requests.get_nowait()
                if asked is not None and asked[1].set_running_or_notify_cancel():
                    asked[1].set_exception(WorkerFault(self.lost))

    def _start(self, theirs: socket.socket, log: Any, place: str) -> str:
        kind = self.kind
        # Absolute, since the worker stands in a folder of its own, and not resolved: a virtual environment's Python is a link.
        python, program, adapter = (str(path.absolute()) for path in (kind.python, PROGRAM, kind.adapter))
        command = [python, "-P", program, adapter, json.dumps(kind.options), str(kind.address_mb)]
        if kind.confined:
            command = [*confinement_of(kind), *command]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                cwd=place,
                env=environment_of(kind),
                start_new_session=True,
            )
        except OSError as error:
            return f"world {kind.name}: its worker {kind.python} cannot be started: {error.strerror}"
        return ""

    def _wait_until_ready(self, line: socket.socket) -> str:
        start_s = self.kind.start_s
        answer, fault = self._receive(line, time.monotonic() + start_s, f"it said nothing within {start_s:g} s")
        if not fault and answer != {"ready": True}:
            fault = f"its first words were {str(answer)[:80]!r}"
        if fault:
            self._kill_group()
        return f"world {self.kind.name}: its worker did not start: {fault}" if fault else ""

    def _exchange(self, line: socket.socket, request: dict[str, Any]) -> tuple[Any, str]:
        """An answer, and what is wrong with the worker."""
        where = f"world {self.kind.name}, {request['call']}"
        limit_s = self.kind.timeout_s
        until = time.monotonic() + limit_s
        try:
            line.settimeout(limit_s)
            line.sendall(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            return None, f"{where}: not taken within {limit_s:g} s (env.options.timeout_s)"
        except OSError:
            return None, f"{where}: {self._ended()}"
        answer, fault = self._receive(line, until, f"no answer within {limit_s:g} s (env.options.timeout_s)")
        if fault:
            return None, f"{where}: {fault}"
        known = isinstance(answer, dict) and answer.get("id") == request["id"] and ("said" in answer or "error" in answer)
        return answer, "" if known else f"{where}: the worker answered {str(answer)[:80]!r}, which answers nothing"

    def _receive(self, line: socket.socket, until: float, late: str) -> tuple[Any, str]:
        """The next line as JSON, and what is wrong with the worker: `late` where there is none at that time."""
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            left = until - time.monotonic()
            try:
                line.settimeout(max(left, 1e-3))
                part = line.recv(1 << 16)
            except TimeoutError:
                return None, late
            except OSError:
                part = b""
            if not part:
                return None, self._ended()
            parts.append(part)
            if sum(map(len, parts)) > _MOST_BYTES:
                return None, f"an answer of more than {_MOST_BYTES >> 20} MiB"
        text, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            return json.loads(text), ""
        except ValueError:
            return None, f"the worker answered {text[:80]!r}, which is no JSON"

    def _ended(self) -> str:
        if self._process is None:
            return "the worker is not there"
        with contextlib.suppress(subprocess.TimeoutExpired):  # the line may be closed a moment before the process is gone
            self._process.wait(1.0)
        return f"the worker ended, status {self._process.returncode}"

    def _kill_group(self) -> None:
        """Ends the worker and all that its worlds started, which share its process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self._kill_group()
        self._process.wait()


def environment_of(kind: Kind) -> dict[str, str]:
    """What a worker finds in its environment."""
    # Where it is the trainer's own Python that has the library, it may have it from there.
    path = ("PYTHONPATH",) if kind.python == Path(sys.executable) else ()
    names = {*VARIABLES, *kind.variables, *path}
    given = {name: value for name, value in os.environ.items() if name in names or name.startswith(PREFIXES)}
    # One thread each: there are as many workers as cores, and every thread reserves address space.
    return {**given, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def confinement_of(kind: Kind) -> list[str]:
    """The command behind which a worker runs locked: it reads its interpreter, the program and the adapter."""
    home, base = kind.python.absolute().parents[1], kind.python.resolve().parents[1]
    about = {
        "readable": [str(path) for path in (home, home.resolve(), base, PROGRAM, kind.adapter)],
        "path": f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "memory_mb": kind.address_mb or 8192,
    }
    root = str(Path(sandbox_client.__file__).absolute().parents[1])
    start = f"import sys; sys.path.insert(0, {root!r}); from sandbox_client.confine import main; main()"
    return [sys.executable, "-P", "-c", start, json.dumps(about)]


def _last_words(log: Any) -> str:
    """The last line that the worker wrote to its standard streams."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f"; its last words: {lines[-1][:300]}" if lines else ""


@dataclass
class Place:
    """A slot of a worker, for one episode."""

    worker: Worker
    slot: int

    def call(self, name: str, **arguments: Any) -> Future[Any]:
        return self.worker.call({"call": name, "slot": self.slot, **arguments})


class Pool:
    """The workers of one world. They are started when they are needed and ended by `close`, at the latest with the process."""

    def __init__(self, kind: Kind):
        self.kind = kind
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._waiting: deque[Future[Place]] = deque()
        self._closed = False
        atexit.register(self.close)

    def take(self) -> Future[Place]:
        """A place, when there is one; to be given back. Raises WorkerFault where the pool was closed."""
        future: Future[Place] = Future()
        with self._lock:
            if self._closed:
                raise WorkerFault(f"world {self.kind.name}: its workers were ended")
            self._waiting.append(future)
            self._seat()
        return future

    def give_back(self, place: Place) -> None:
        with self._lock:
            place.worker.taken.discard(place.slot)
            self._seat()

    def close(self) -> None:
        """Ends all workers and what they have started. Calls under way end with a WorkerFault, or as they would."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
            while self._waiting:
                self._waiting.popleft().cancel()
        for worker in workers:
            worker.stop()
        until = time.monotonic() + _LEAVE_S
        for worker in workers:
            worker.join(until)
        atexit.unregister(self.close)

    def _seat(self) -> None:
        """Gives places to those who wait, as far as there are any; the lock is held."""
        lost = [worker for worker in self._workers if worker.lost and not worker.taken]
        for worker in lost:
            worker.stop()
        self._workers = [worker for worker in self._workers if worker not in lost]
        while self._waiting and (place := self._free()):
            self._grant(place)

    def _grant(self, place: Place) -> None:
        future = self._waiting.popleft()
        if future.set_running_or_notify_cancel():  # or who waited has left
            place.worker.taken.add(place.slot)
            future.set_result(place)

    def _free(self) -> Place | None:
        """A free slot of the least busy worker; a new worker, rather than a second episode in one, while there may be more."""
        alive = [worker for worker in self._workers if not worker.lost]
        best = min(alive, key=lambda worker: len(worker.taken), default=None)
        if (best is None or best.taken) and len(self._workers) < self.kind.workers and not self._closed:
            best = Worker(self.kind)
            self._workers.append(best)
        if best is None or len(best.taken) >= self.kind.slots:
            return None
        return Place(best, next(slot for slot in range(self.kind.slots) if slot not in best.taken))
