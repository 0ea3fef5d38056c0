"""The server's end of a zygote: its process, the children that wait ready, the copies of live ones."""

import asyncio
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import frames
from .groups import Limits
from .line import Child, ChildDied

# the package's face is not imported there: it would bring the client with it
_BOOT = (
    "import sys, types; package = types.ModuleType('sandbox_client'); package.__path__ = [sys.argv[1]];"
    "sys.modules['sandbox_client'] = package; from sandbox_client import zygote; zygote.main(int(sys.argv[2]))"
)
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_WATCH_S = 0.1
_START_S = 10.0
_HELD_S = 0.005  # a fork takes a core from a program; after so long it is asked again whether one is free
_LEAST_WARM = 2
_CORES = os.cpu_count() or 1


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


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _sender(line: socket.socket) -> int:
    """Returns the process that sends the first byte on `line`, as the kernel knows it. Raises ChildDied."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(line.fileno(), _settle, ready)
    try:
        async with asyncio.timeout(_START_S):
            await ready
        data, ancillary, _, _ = line.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
    except TimeoutError:
        raise ChildDied("copy", None, False) from None
    finally:
        loop.remove_reader(line.fileno())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for level, kind, content in ancillary:
        if data and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid: int = _CREDENTIALS.unpack(content)[0]
            return pid
    raise ChildDied("copy", None, False)


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
        self._held = False
        self._waiting: deque[asyncio.Future[Child]] = deque()
        self._orders: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._reports = bytearray()
        self._closing = self._closed = self.dead = self._begun = False
        self.forks = self.takes = self.cold_takes = self.killed = 0
        self.on_death: Callable[[], None] = lambda: None
        self.on_end: Callable[[float], None] = lambda _: None
        self.busy: Callable[[], int] = lambda: 0  # how many cores are wanted by programs, of this pool's and others' children

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
                self.loop.call_soon(self._refill)  # when its program is on its way
                return child
        self.cold_takes += 1
        waiter = self.loop.create_future()
        self._waiting.append(waiter)
        self._refill()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._warm.append(waiter.result())  # it came in the same moment
            raise

    async def take_stem(self) -> Child:
        """Returns a new locked child that may be copied. Raises ChildDied when it cannot be had."""
        self.takes += 1
        self.cold_takes += 1
        child = self._fork(frames.FORK_STEM)
        kind, head, _ = await child.listen(_START_S)
        if kind != frames.READY:
            child.kill("start")
            raise ChildDied(f"start: {head.decode(errors='replace')}", None, False)
        return child

    async def copy(self, stem: Child) -> Child:
        """Returns a copy of a child from take_stem, in namespaces of its own. Raises ChildDied."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        (out, out_theirs), (err, err_theirs) = os.pipe(), os.pipe()
        child: Child | None = None
        try:
            try:
                async with stem.copying:
                    reply, _ = await stem.ask(
                        frames.BRANCH, b"{}", _START_S, descriptors=(theirs.fileno(), out_theirs, err_theirs)
                    )
            finally:
                theirs.close()
                os.close(out_theirs)
                os.close(err_theirs)
            if reply.get("outcome") != "ok":
                raise ChildDied(f"copy: {reply.get('error')}", None, False)
            pid = await _sender(ours)
            number = next(self._numbers)
            child = self._children[number] = Child(self.order_end, number, ours, out, err)
            child.stem = stem
            stem.count_copy(1)
            self._order(frames.REQUEST.pack(frames.ADOPT, number, stem.number, pid))
            known, _ = await asyncio.wait([child.adopted, child.ended], timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            if not known:
                raise ChildDied("copy", None, False)
            ready = child.listen(_START_S)
            ours.send(b"\1")
            if (await ready)[0] != frames.READY:
                raise ChildDied("copy", None, False)
            self.forks += 1
            return child
        except (ChildDied, OSError) as error:
            if child:
                child.kill("start")
            else:
                ours.close()
                os.close(out)
                os.close(err)
            raise error if isinstance(error, ChildDied) else ChildDied(f"copy: {error}", None, False) from None

    def order_end(self, number: int, kind: bytes) -> None:
        self._order(frames.REQUEST.pack(kind, number, 0, 0))

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
    def warm(self) -> int:
        """Returns how many wait ready."""
        return len(self._warm)

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
        self._closing = True  # from here on nothing is replaced
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

    def poke(self) -> None:
        """Says that a program has ended: its core may be free for a fork."""
        self._refill()

    def _asked_again(self) -> None:
        self._held = False
        self._refill()

    def _refill(self) -> None:
        """Forks what is missing, while programs leave a core to it.

        For callers who wait a fork is their program's beginning: as many at once as there are cores, more would only share
        these. The last two children of the store are replaced one after the other whatever else runs, else neighbours that
        never rest would empty it. All others are forked on cores that no program wants just now: a call is answered first.
        """
        while not (self._closed or self.dead) and len(self._warm) + self._starting < self._target + len(self._waiting):
            if self._waiting:
                free = _CORES
            elif len(self._warm) < _LEAST_WARM:
                free = 1
            else:
                free = _CORES - self.busy()
            if self._starting >= free:
                if not (self._starting or self._held):  # else the end of a start asks
                    self._held = True
                    self.loop.call_later(_HELD_S, self._asked_again)
                return
            self._starting += 1
            self._await_start(self._fork())

    def _await_start(self, child: Child) -> None:
        child.listen(_START_S).add_done_callback(lambda ready: self._started(child, ready))

    def _fork(self, kind: bytes = frames.FORK) -> Child:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        (out, out_theirs), (err, err_theirs) = os.pipe(), os.pipe()
        number = next(self._numbers)
        self._order(frames.REQUEST.pack(kind, number, 0, 0), (theirs.detach(), out_theirs, err_theirs))
        child = self._children[number] = Child(self.order_end, number, ours, out, err)
        self.forks += 1
        return child

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
        if self._waiting or not failure:  # of one that cannot be started, others would be no better: but who waits is told
            self._refill()

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
            kind, number, status, known = frames.EXIT.unpack_from(self._reports)
            del self._reports[: frames.EXIT.size]
            if kind == frames.ADOPTED:
                self._children[number].adopted.set_result(None)
                continue
            child = self._children.pop(number)
            self.killed += known == frames.FROM_OUTSIDE
            if child.ordered is not None:
                self.on_end(self.loop.time() - child.ordered)
            child.finish(None if status == -1 else status, known == frames.OUT_OF_MEMORY, known == frames.FROM_OUTSIDE)
            if child in self._warm:
                self._warm.remove(child)
                if not self._closing:
                    self._refill()


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
