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
from .output import Output

# the package's face is not imported there: it would bring the client with it
_BOOT = (
    "import sys, types; package = types.ModuleType('sandbox_client'); package.__path__ = [sys.argv[1]];"
    "sys.modules['sandbox_client'] = package; from sandbox_client import zygote; zygote.main(int(sys.argv[2]))"
)
_HEAD_MAX_BYTES = wire.REQUEST_MAX_BYTES + (1 << 16)
_READ_BYTES = 1 << 16
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
    java = map(str, Path("/etc").glob("java-*"))  # its installation is full of links to there
    return [*system, "/etc/localtime", *java, *(path for path in own if not path.startswith("/usr/"))]


def _import_path(functions: Sequence[str]) -> list[str]:
    """Returns sys.path for the zygote, which runs without site: ours, and wherever the functions' packages are."""
    places = [str(Path(entry).absolute()) for entry in sys.path]
    for name in functions:
        spec = find_spec(name.partition(".")[0])
        if spec and spec.has_location and spec.origin:
            depth = 2 if spec.submodule_search_locations else 1
            places.append(str(Path(spec.origin).absolute().parents[depth - 1]))
    return list(dict.fromkeys(places))


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

    def __init__(
        self,
        level: str,
        functions: Sequence[str],
        uid: int | None,
        limits: Limits,
        warm: int,
        imports: Sequence[str] = (),
        toolchains: Sequence[str] = (),
    ) -> None:
        """`imports`: modules that children find imported; `toolchains`: more directories of tools that they may read."""
        self.level, self.imports = level, tuple(imports)
        self._functions, self._uid, self.limits = tuple(functions), uid, limits
        self._toolchains = tuple(toolchains) if level > "L1" else ()
        self._target = warm
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}
        self._warm: deque[Child] = deque()
        self._starting = 0
        self._waiting: deque[asyncio.Future[Child]] = deque()
        self._orders: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._reports = bytearray()
        self._closed = self.dead = self._begun = False
        self.forks = self.takes = self.cold_takes = 0
        self.on_death: Callable[[], None] = lambda: None

    async def start(self) -> dict[str, Any]:
        """Starts the zygote. Returns {} or why it could not lock: `reason` and `remedy`, or `fatal`."""
        self.loop, self._begun = asyncio.get_running_loop(), True
        self._control, theirs = socket.socketpair()
        config = {
            "level": self.level,
            "uid": self._uid,
            "limits": self.limits._asdict(),
            "readable": [*readable_paths(), *self._toolchains],
            "path": _import_path(self._functions),
            "functions": self._functions,
            "imports": self.imports,
            "scratch": tempfile.gettempdir(),
        }
        self._process = subprocess.Popen(  # noqa: ASYNC220  (once, at the start)
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(Path(__file__).parent), str(theirs.fileno())],
            env=child_environment(self._toolchains) | {"LD_BIND_NOW": "1"},  # else every child resolves the same symbols again
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
        self.takes += 1
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
    def dying(self) -> int:
        """Returns how many were ordered to end and have not been reported dead: 0 but for moments."""
        return sum(not child.alive for child in self._children.values())

    @property
    def memory_bytes(self) -> int:
        return self.limits.memory_bytes

    def process_ids(self) -> list[int]:
        """Returns the zygote's, or its supervisor's where there is one."""
        return [self._process.pid]

    async def close(self) -> None:
        """Ends the zygote, which first ends and reaps every child."""
        if not self._begun:
            return
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


def child_environment(toolchains: Sequence[str] = ()) -> dict[str, str]:
    """Returns the whole environment of a program. Nothing of the server's is in it."""
    own = [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    binaries = dict.fromkeys([*own, *(f"{place}/bin" for place in toolchains)])
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
