"""The server's end of the zygote: its process, the warm children, and one `Child` to speak to each.

A child is single-use. What it says is hostile: frames are bounded and strictly decoded, a word out of turn ends it.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import frames, wire
from .groups import Limits

# the package's face is not imported there: it would bring the client with it
_BOOT = (
    "import sys, types; package = types.ModuleType('sandbox_client'); package.__path__ = [sys.argv[1]];"
    "sys.modules['sandbox_client'] = package; from sandbox_client import zygote; zygote.main(int(sys.argv[2]))"
)
_HEAD_MAX_BYTES = wire.REQUEST_MAX_BYTES + (1 << 16)
_READ_BYTES = 1 << 16
_BURST_BYTES = 1 << 18  # after so much output in one go the loop turns to the others
_BURST_PAUSE_S = 0.005
_EXIT_PATIENCE_S = 2.0
_WATCH_S = 0.1


class ChildDied(Exception):
    """The child is gone. `cause`: exit, timeout, protocol, closed, expired; `status` as waitpid gives it."""

    def __init__(self, cause: str, status: int | None, oom: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.oom = oom


def readable_paths() -> list[str]:
    """Returns what a program may read of the host: the system's tools, this interpreter, its packages."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
    prefixes = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)]
    own = [f"{prefix}/{part}" for prefix in dict.fromkeys(prefixes) for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    return [*system, "/etc/localtime", *(path for path in own if not path.startswith("/usr/"))]


def _import_path(functions: Sequence[str]) -> list[str]:
    """Returns sys.path for the zygote, which runs without site: ours, and wherever the functions' packages are."""
    places = [str(Path(entry).absolute()) for entry in sys.path]
    for name in functions:
        spec = find_spec(name.partition(".")[0])
        if spec and spec.has_location and spec.origin:
            depth = 2 if spec.submodule_search_locations else 1
            places.append(str(Path(spec.origin).absolute().parents[depth - 1]))
    return list(dict.fromkeys(places))


class Output:
    """One stream of a child: drained while the program runs, first and last half of `limit` kept, the rest counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = loop
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._pause: asyncio.TimerHandle | None = None
        self.at_end = False  # no process holds the writing end any more
        self._used = False

    def begin(self, limit: int) -> None:
        """Starts a new record."""
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self._total = self._burst = 0
        self._used = True
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._readable)

    def _read(self) -> int:
        """Reads once. Returns the number of bytes, 0 at the end, -1 when there is nothing now."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return -1
        self._total += len(data)
        self.at_end = not data
        room = max(0, self._half - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half + _READ_BYTES:
            del self._tail[: len(self._tail) - self._half]
        return len(data)

    def _readable(self) -> None:
        count = self._read()
        self._burst += count
        if count == 0:  # every writer is gone
            self._loop.remove_reader(self._descriptor)
        elif self._burst >= _BURST_BYTES:
            self._burst = 0
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_BURST_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._readable)

    def _drain(self) -> None:
        """Stops listening and takes what is still in the pipe."""
        if self._pause:
            self._pause.cancel()
            self._pause = None
        if self._used and self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            for _ in range(32):  # bounded, for a background program may refill the pipe as fast
                if self._read() <= 0:
                    break

    def end(self) -> tuple[str, int]:
        """Returns the text of the record and the count of bytes dropped."""
        self._drain()
        del self._tail[: max(0, len(self._tail) - self._half)]
        dropped = self._total - len(self._head) - len(self._tail)
        if not dropped:
            return (self._head + self._tail).decode(errors="replace"), 0
        gap = f"\n[... {dropped} bytes dropped ...]\n"
        return self._head.decode(errors="replace") + gap + self._tail.decode(errors="replace"), dropped

    def close(self) -> None:
        """Closes the pipe; the record can still be asked for."""
        self._drain()
        os.close(self._descriptor)
        self._descriptor = -1


class Child:
    """One locked process. Ask it one thing at a time."""

    def __init__(self, pool: "Pool", number: int, line: socket.socket, out: int, err: int) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._line = line
        self._number = number
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._waiter: asyncio.Future[tuple[bytes, bytes, bytes]] | None = None
        self._cause = "exit"
        self._gone = False
        self.deadline: float | None = None  # of the operation under way, on the loop's clock
        self.out, self.err = Output(self._loop, out), Output(self._loop, err)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(line.fileno(), self._readable)

    @property
    def alive(self) -> bool:
        return not self._gone

    def listen(self, timeout_s: float) -> asyncio.Future[tuple[bytes, bytes, bytes]]:
        """Returns the future of the next frame: kind, head, blob. It fails with ChildDied."""
        if self._gone:
            raise ChildDied(self._cause, None, False)
        self._waiter = self._loop.create_future()
        self.deadline = self._loop.time() + timeout_s + wire.KILL_MARGIN_S
        return self._waiter

    async def ask(self, kind: bytes, head: bytes, timeout_s: float, blob: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Sends one request and returns the reply's head and bytes. Raises ChildDied."""
        reply = self.listen(timeout_s)
        self._send(frames.FRAME.pack(kind, len(head), len(blob)) + head + blob)
        word, text, data = await reply
        try:
            if word != frames.REPLY or (data and kind != frames.READ):
                raise ValueError("out of turn")
            return wire.decode(text), data
        except ValueError:
            self.kill("protocol")
            await self.ended
            raise ChildDied("protocol", None, False) from None

    def kill(self, cause: str) -> None:
        """Ends the child; whoever waits for it learns `cause`."""
        if not self._gone:
            self._gone = True
            self._cause = cause
            self._loop.remove_reader(self._line.fileno())
            if self._outgoing:
                self._loop.remove_writer(self._line.fileno())
            # the line is closed when it is dead: closed now, it would wake the child to read the end of it
            self._pool.order_end(self._number, frames.BURY if cause == "exit" else frames.KILL)
            # should the kernel never finish with it, callers still get their answer
            self._loop.call_later(_EXIT_PATIENCE_S, self.finish, None, False)

    def finish(self, status: int | None, oom: bool) -> None:
        """Called when the zygote has reaped the child."""
        if self.ended.done():
            return
        self.kill(self._cause)
        self.ended.set_result(None)
        self._line.close()
        self.out.close()
        self.err.close()
        if self._waiter and not self._waiter.done():
            self._waiter.set_exception(ChildDied(self._cause, status, oom))

    def _send(self, data: bytes) -> None:
        try:
            sent = self._line.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has hung up: the reader notices
        if sent < len(data):
            self._outgoing += data[sent:]
            self._loop.add_writer(self._line.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            del self._outgoing[: self._line.send(self._outgoing)]
        except OSError:
            self._outgoing.clear()
        if not self._outgoing:
            self._loop.remove_writer(self._line.fileno())

    def _readable(self) -> None:
        try:
            data = self._line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.kill("exit")
            return
        self._buffer += data
        if len(self._buffer) < frames.FRAME.size:
            return
        kind, head_length, blob_length = frames.FRAME.unpack_from(self._buffer)
        size = frames.FRAME.size + head_length + blob_length
        waiter = self._waiter
        if waiter is None or waiter.done() or len(self._buffer) > size:
            self.kill("protocol")
            return
        if head_length > _HEAD_MAX_BYTES or blob_length > wire.FILE_MAX_BYTES:
            self.kill("protocol")
            return
        if len(self._buffer) < size:
            return
        body = bytes(self._buffer[frames.FRAME.size :])
        self._buffer.clear()
        self._waiter = self.deadline = None
        waiter.set_result((kind, body[:head_length], body[head_length:]))


class Pool:
    """The zygote's process and the children it has forked."""

    def __init__(self, level: str, functions: Sequence[str], uid: int | None, limits: Limits, warm: int) -> None:
        self.level = level
        self._functions, self._uid, self.limits = tuple(functions), uid, limits
        self._target = warm
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}
        self._warm: deque[Child] = deque()
        self._starting = 0
        self._waiting: deque[asyncio.Future[Child]] = deque()
        self._orders: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._reports = bytearray()
        self._closed = self.dead = False
        self.forks = self.cold_takes = 0
        self.on_death: Callable[[], None] = lambda: None

    async def start(self) -> dict[str, Any]:
        """Starts the zygote. Returns {} or why it could not lock: `reason` and `remedy`, or `fatal`."""
        self.loop = asyncio.get_running_loop()
        self._control, theirs = socket.socketpair()
        config = {
            "level": self.level,
            "uid": self._uid,
            "limits": self.limits._asdict(),
            "readable": readable_paths(),
            "path": _import_path(self._functions),
            "functions": self._functions,
            "scratch": tempfile.gettempdir(),
        }
        self._process = subprocess.Popen(  # noqa: ASYNC220  (once, at the start)
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(Path(__file__).parent), str(theirs.fileno())],
            env=_child_environment() | {"LD_BIND_NOW": "1"},  # else every child resolves the same symbols again
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C is the server's to answer
        )
        theirs.close()
        self._control.setblocking(False)
        await self.loop.sock_sendall(self._control, json.dumps(config).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            data = await self.loop.sock_recv(self._control, 4096)
            if not data:
                return {"fatal": f"the zygote ended early with status {self._process.wait()}; see the lines above"}
            line += data
        problem = json.loads(line)
        if not problem:
            self.loop.add_reader(self._control.fileno(), self._reported)
            self._refill()
            self._watch()
        return problem

    async def take(self) -> Child:
        """Returns a locked child that nobody has used. Raises ChildDied when it cannot be had."""
        while self._warm:
            child = self._warm.popleft()
            if child.alive:
                self._refill()
                return child
        self.cold_takes += 1
        waiter = self.loop.create_future()
        self._waiting.append(waiter)
        self._refill()
        return await waiter

    def order_end(self, number: int, kind: bytes) -> None:
        self._order(frames.REQUEST.pack(kind, number))

    def _watch(self) -> None:
        """Kills the children whose program has ignored its own deadline: one timer for all, for calls are many."""
        now = self.loop.time()
        for child in list(self._children.values()):
            if child.deadline is not None and child.deadline < now:
                child.kill("timeout")
        if not self._closed:
            self.loop.call_later(_WATCH_S, self._watch)

    @property
    def live(self) -> int:
        return len(self._children)

    @property
    def memory_bytes(self) -> int:
        return self.limits.memory_bytes

    def process_ids(self) -> list[int]:
        """Returns the zygote's, or its supervisor's where there is one."""
        return [self._process.pid]

    async def close(self) -> None:
        """Ends the zygote, which first ends and reaps every child."""
        children = list(self._children.values())
        for child in children:
            child.kill("closed")
        await asyncio.gather(*(child.ended for child in children))
        self._closed = True
        self.loop.remove_reader(self._control.fileno())
        self.loop.remove_writer(self._control.fileno())
        self._control.close()
        await asyncio.to_thread(self._process.wait)

    def _order(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a record to the zygote, now or when it has caught up, and closes `descriptors`."""
        self._orders.append((message, descriptors))
        if len(self._orders) == 1:
            self._send_orders()

    def _send_orders(self) -> None:
        try:
            while self._orders:
                message, descriptors = self._orders[0]
                socket.send_fds(self._control, [message], descriptors)
                self._orders.popleft()
                for descriptor in descriptors:
                    os.close(descriptor)
        except BlockingIOError:
            self.loop.add_writer(self._control.fileno(), self._send_orders)
            return
        except OSError:
            return  # it is gone: the reader of the control line will say so
        self.loop.remove_writer(self._control.fileno())

    def _refill(self) -> None:
        while not (self._closed or self.dead) and len(self._warm) + self._starting < self._target + len(self._waiting):
            self._fork()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        (out, out_theirs), (err, err_theirs) = os.pipe(), os.pipe()
        number = next(self._numbers)
        self._order(frames.REQUEST.pack(frames.FORK, number), (theirs.detach(), out_theirs, err_theirs))
        child = self._children[number] = Child(self, number, ours, out, err)
        self.forks += 1
        self._starting += 1
        child.listen(10.0).add_done_callback(lambda ready: self._started(child, ready))

    def _started(self, child: Child, ready: "asyncio.Future[tuple[bytes, bytes, bytes]]") -> None:
        self._starting -= 1
        failure: ChildDied | None = None
        if ready.exception() is not None:
            failure = ChildDied("start", None, False)
        elif ready.result()[0] != frames.READY:
            failure = ChildDied(f"start: {ready.result()[1].decode(errors='replace')}", None, False)
            child.kill("start")
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._waiting:
            waiter = self._waiting.popleft()
            waiter.set_exception(failure) if failure else waiter.set_result(child)
        elif not failure:
            self._warm.append(child)

    def _reported(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.loop.remove_reader(self._control.fileno())
            self.loop.remove_writer(self._control.fileno())
            self.dead = True
            for child in list(self._children.values()):
                child.kill("closed")
                child.finish(None, False)
            self.on_death()
        self._reports += data
        while len(self._reports) >= frames.EXIT.size:
            _, number, status, oom = frames.EXIT.unpack_from(self._reports)
            del self._reports[: frames.EXIT.size]
            child = self._children.pop(number)
            child.finish(status, bool(oom))
            if child in self._warm:
                self._warm.remove(child)


def _child_environment() -> dict[str, str]:
    """Returns the whole environment of a program. Nothing of the server's is in it."""
    binaries = dict.fromkeys([f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"])
    return {
        "PATH": ":".join(binaries),
        "HOME": "/box/work",
        "TMPDIR": "/box/tmp",
        "LANG": "C.UTF-8",
        # address space is limited per process, and these reserve it by the core
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
