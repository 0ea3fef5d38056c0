"""Sessions: order by sequence number, repeated requests answered from memory, deaths turned into outcomes, expiry.

A session owns one child of the pool; where nothing can be locked it owns only its fixed functions (`LocalSession`).
"""

import asyncio
import json
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from . import frames, wire
from .line import Child, ChildDied
from .pools import Pools

_KEPT_REPLIES, _KEPT_BYTES = 8, 1 << 20
_KEPT_DROPPED = 64
_OUTCOMES = frozenset(wire.Outcome)
_BY_OTHERS = ("closed", "expired", "killed")  # causes of a child's end that its program has no part in
_YOUNG_S = 0.02  # most programs have ended by then, or will go on for long
_START_S = 10.0  # for what is no program: building functions, moving a file

Reply = dict[str, Any]


class Spec(NamedTuple):
    """What a session was opened with: another with the same key must be the same."""

    functions: str | None = None
    options: str = "{}"  # as JSON
    imports: str | None = None
    branching: bool = False


Operation = Callable[[], Awaitable[Reply]]


class Refused(Exception):
    """A request that is not carried out, as HTTP will say it."""

    def __init__(self, status: int, code: str, message: str, remedy: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.status = status
        self.by_program = extra.get("caused_by_program", False)
        self.body = {"error": {"code": code, "message": message, "remedy": remedy, **extra}}


def lost(message: str, by_program: bool) -> Refused:
    return Refused(410, "session_lost", message, "open another session", caused_by_program=by_program)


def busy(message: str) -> Refused:
    """Returns the refusal for load; the client tries again after a second."""
    return Refused(429, "overloaded", message, retry_after_s=1)


def unknown_call(what: str) -> Refused:
    """Returns the answer to who asks after a call that was never carried out here, or is forgotten."""
    return Refused(404, "unknown_call", f"no call {what} is known here")


def cancelled(what: str) -> Refused:
    """Returns the refusal of a call that was taken back."""
    return Refused(409, "cancelled", f"the call {what} was taken back")


def no_child(death: ChildDied) -> Refused:
    """Returns the refusal when no process could be had."""
    return Refused(503, "no_child", f"no child could be started ({death.cause})", retry_after_s=1)


class Gate:
    """At most `running` programs at once, at most `waiting` behind them, each for at most `longest_s`."""

    def __init__(
        self, running: int, waiting: int, longest_s: float = wire.MAX_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: tells how long a program has been inside."""
        self.longest_s, self._clock = longest_s, clock
        self._slots = asyncio.Semaphore(running)
        self._room = self._most = waiting
        self._begun: dict[object, float] = {}  # when each of those inside was let in
        self.on_leave: Callable[[], None] = lambda: None

    @property
    def inside(self) -> int:
        return len(self._begun)

    def busy(self) -> int:
        """Returns how many programs want a core: those that wait, and those that are young. An old one may well sleep."""
        since = self._clock() - _YOUNG_S
        return self._most - self._room + sum(begun > since for begun in self._begun.values())

    @asynccontextmanager
    async def enter(self, deadline: float) -> AsyncIterator[None]:
        """Waits for a turn until `deadline` on the loop's clock. Raises Refused."""
        if self._slots.locked():
            if self._room <= 0:
                raise busy("as many programs as allowed are running and waiting")
            self._room -= 1
            try:
                async with asyncio.timeout_at(deadline):
                    await self._slots.acquire()
            except TimeoutError:
                raise busy("no turn came before the request's deadline") from None
            finally:
                self._room += 1
        elif asyncio.get_running_loop().time() > deadline:
            raise busy("the request's deadline had passed")
        else:
            await self._slots.acquire()
        loop, mark = asyncio.get_running_loop(), object()
        self._begun[mark] = self._clock()
        try:
            yield
        finally:
            del self._begun[mark]
            self._slots.release()
            loop.call_soon(self.on_leave)  # after the answer is on its way


def killed() -> Refused:
    """Returns the refusal where a process was killed by somebody else: nothing that the model has done or is told."""
    text = "its process was killed from outside the sandbox"
    return Refused(410, "session_lost", text, "open another session", caused_by_program=False, began=True)


def _checked(reply: Reply, *, ran: bool) -> Reply:
    """Returns a child's reply with exactly the fields of its kind. Raises ValueError: the program has forged it."""
    if reply.get("outcome") not in _OUTCOMES:
        raise ValueError("no outcome")
    error = wire.take(reply, "error", str, type(None))
    result = {"outcome": reply["outcome"], "error": error and error[: frames.TEXT_MAX], "session_lost": False}
    if not ran:
        return {**result, "value": reply.get("value")}
    value = wire.take(reply, "value", str, type(None))
    return {**result, "value": value, "exit_code": wire.take(reply, "exit_code", int, type(None))}


def _epitaph(death: ChildDied, timeout_s: float, memory_bytes: int, once: bool = False) -> Reply:
    """Returns what the model is told when its program has ended its own process; a stateless run may well do so."""
    outcome, code = "program_error", None
    if death.cause == "timeout":
        outcome, error = "program_timeout", f"ignored its deadline of {timeout_s:g} s and was killed"
    elif death.oom:
        outcome, error = "program_oom", f"killed for using more than {memory_bytes >> 20} MiB"
    elif death.cause == "protocol":
        error = "the program spoiled its line to the server and was killed"
    else:
        code = None if death.status is None else os.waitstatus_to_exitcode(death.status)
        how = "a branch's exit code is not known" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        outcome = "ok" if once and code == 0 else outcome
        error = how if once else f"the program ended the process that ran it ({how})"
    ok = outcome == "ok"
    return {"outcome": outcome, "value": None, "exit_code": code, "error": None if ok else error, "session_lost": True}


async def execute(child: Child, head: dict[str, Any], limit: int, memory_bytes: int, stdin: bytes = b"") -> Reply:
    """Runs a program in `child` and returns the whole reply of an exec. Raises ChildDied when others have ended it."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    child.out.begin(limit)
    child.err.begin(limit)
    try:
        answer, _ = await child.ask(frames.EXEC, json.dumps(head).encode(), head["timeout_s"], stdin)
        reply = _checked(answer, ran=True)
        if head.get("grade"):
            reply["reward"] = answer.get("reward")
    except ChildDied as death:
        if death.cause in _BY_OTHERS:
            raise
        reply = _epitaph(death, head["timeout_s"], memory_bytes, once=head.get("once", False))
    except ValueError:
        child.kill("protocol")
        reply = _epitaph(ChildDied("protocol", None, False), head["timeout_s"], memory_bytes)
    (stdout, dropped), (stderr, dropped_too) = child.out.end(), child.err.end()
    streams = {"stdout": stdout, "stderr": stderr, "dropped_bytes": dropped + dropped_too}
    return {**reply, **streams, "elapsed_s": round(loop.time() - start, 6)}


class Session(ABC):
    """One trajectory's place: its operations one after another, each sequence number at most once."""

    def __init__(self, identity: str, key: str, spec: Spec) -> None:
        self.identity, self.key, self.spec = identity, key, spec
        self.token = secrets.token_urlsafe(24)  # opens this session only
        self.loop = asyncio.get_running_loop()
        self.born = self.used = self.loop.time()
        self.lost: Refused | None = None
        self._turn = asyncio.Lock()
        self._started = 0
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._replies: dict[int, bytes] = {}
        self._dropped: set[int] = set()  # taken back, above all that have begun

    @property
    def idle(self) -> bool:
        return not self._pending

    async def perform(self, seq: int, operation: Operation, deadline: float) -> bytes:
        """Returns the encoded reply of `operation`, run in order and once per `seq`. Raises Refused."""
        stored = self._replies.get(seq)
        if stored is not None:
            return stored
        pending = self._pending.get(seq)
        if pending is not None:
            return await asyncio.shield(pending)
        future = self._pending[seq] = self.loop.create_future()
        try:
            body = wire.encode({"seq": seq, **await self.in_turn(operation, deadline, seq)})
            self._remember(seq, body)
            future.set_result(body)
            return body
        except Refused as refusal:
            future.set_exception(refusal)
            future.exception()  # nobody need be waiting for it
            raise
        finally:
            del self._pending[seq]
            future.cancel()  # a no-op unless this task was itself cancelled
            self.used = self.loop.time()

    async def in_turn(self, operation: Operation, deadline: float, seq: int = 0) -> Reply:
        """Runs `operation` after those before it. Raises Refused, before it has begun, when that comes too late."""
        async with self._turn:
            if self.lost:
                raise self.lost
            if seq in self._dropped:
                raise cancelled(str(seq))
            if seq and seq <= self._started:
                raise Refused(409, "stale_seq", f"wanted a seq above {self._started}, got {seq}")
            if self.loop.time() > deadline:
                raise busy("the session was busy until the request's deadline")
            self._started = max(seq, self._started)
            return await operation()

    def fate(self, seq: int) -> bytes | None:
        """Returns the reply of operation `seq`, None while it waits or runs. Raises Refused for one that is not known."""
        if seq not in self._replies and seq not in self._pending:
            raise unknown_call(str(seq))
        return self._replies.get(seq)

    def drop(self, seq: int) -> str:
        """Takes operation `seq` back, if it has not begun: then it never will. Returns what is true of it now.

        One that runs goes on until its own deadline, for it cannot be ended without the session's child.
        """
        if seq in self._replies:
            return "done"
        if seq <= self._started:
            return "running" if seq in self._pending else "done"
        self._dropped = {number for number in self._dropped if number > self._started}
        if len(self._dropped) >= _KEPT_DROPPED:
            raise busy(f"{_KEPT_DROPPED} operations of this session are taken back already")
        self._dropped.add(seq)
        return "cancelled"

    def _remember(self, seq: int, body: bytes) -> None:
        replies = self._replies
        replies[seq] = body
        while len(replies) > _KEPT_REPLIES or (len(replies) > 1 and sum(map(len, replies.values())) > _KEPT_BYTES):
            del replies[next(iter(replies))]

    @abstractmethod
    async def open(self) -> None:
        """Builds the session's functions. Raises Refused."""

    async def reset(self, pools: Pools | None) -> Reply:
        """Gives the session a fresh start: functions built anew, nothing else kept. Raises Refused."""
        await self.open()
        return {"session_lost": False}

    @abstractmethod
    async def call(self, head: Reply, body: bytes) -> Reply:
        """Calls a fixed function; `body` is `head` as it came."""

    def end(self, loss: Refused) -> None:
        """Ends the session; whoever comes later is told `loss`."""
        self.lost = self.lost or loss


class JailedSession(Session):
    """Functions, code and files all in one locked child."""

    def __init__(self, identity: str, key: str, spec: Spec, child: Child, memory_bytes: int) -> None:
        super().__init__(identity, key, spec)
        self._child = child
        self._memory_bytes = memory_bytes

    async def _ask(self, kind: bytes, head: bytes, timeout_s: float, blob: bytes = b"") -> tuple[Reply, bytes]:
        """Returns the child's checked answer, or the epitaph of a program that has ended it. Raises Refused."""
        try:
            reply, data = await self._child.ask(kind, head, timeout_s, blob)
            return _checked(reply, ran=False), data
        except ValueError:
            self._child.kill("protocol")
            death = ChildDied("protocol", None, False)
        except ChildDied as error:
            death = error
        if death.cause in _BY_OTHERS:
            raise self._loss(death)
        epitaph = _epitaph(death, timeout_s, self._memory_bytes)
        self.end(lost(epitaph["error"], by_program=True))
        return epitaph, b""

    def _loss(self, death: ChildDied) -> Refused:
        """Returns what whoever asks is told of a child that others have ended."""
        if death.cause == "killed":
            self.end(killed())
        return self.lost or lost("the session was closed", by_program=False)

    async def open(self) -> None:
        module, options = self.spec.functions, self.spec.options
        if module is not None:
            head = f'{{"functions":{json.dumps(module)},"options":{options},"timeout_s":{_START_S}}}'
            reply, _ = await self._ask(frames.OPEN, head.encode(), _START_S)
            if reply["outcome"] != "ok":
                raise Refused(422, "functions_failed", f"{module}.session_functions: {reply['error']}")

    async def reset(self, pools: Pools | None) -> Reply:
        assert pools is not None  # a jailed session has come from one
        try:
            child = await pools.take(self.spec.imports, branching=self.spec.branching)
        except ChildDied as death:
            raise no_child(death) from None
        self._child, old = child, self._child
        old.retire()
        return await super().reset(pools)

    async def call(self, head: Reply, body: bytes) -> Reply:
        start = self.loop.time()
        reply, _ = await self._ask(frames.CALL, body, head["timeout_s"])
        reply["elapsed_s"] = round(self.loop.time() - start, 6)
        return reply

    async def exec(self, head: Reply, limit: int) -> Reply:
        """Runs a program in the session's namespace."""
        try:
            reply = await execute(self._child, head, limit, self._memory_bytes)
        except ChildDied as death:
            raise self._loss(death) from None
        if reply["session_lost"]:
            self.end(lost(reply["error"], by_program=True))
        return reply

    async def move_file(self, path: str, content: bytes | None, limit: int = wire.FILE_MAX_BYTES) -> bytes:
        """Writes `content` to `path` or, without any, returns the file's. The child does it: it can reach no other."""
        head = json.dumps({"path": path, "limit": limit, "timeout_s": _START_S}).encode()
        kind = frames.READ if content is None else frames.WRITE
        reply, data = await self._ask(kind, head, _START_S, content or b"")
        if reply["outcome"] != "ok":
            missing = reply["error"].startswith("FileNotFoundError")
            raise Refused(404 if missing else 422, "no_such_file" if missing else "file_refused", reply["error"])
        return data

    async def unpack(self, path: str, content: bytes) -> Reply:
        """Unpacks an archive into the directory `path`. Raises Refused."""
        head = json.dumps({"path": path, "timeout_s": _START_S}).encode()
        reply, _ = await self._ask(frames.UNPACK, head, _START_S, content)
        if reply["outcome"] != "ok":
            raise Refused(422, "archive_refused", reply["error"])
        return {"files": reply["value"]}

    async def branch(self, pools: Pools, key: str) -> "JailedSession":
        """Returns a session that goes on from where this one is. Raises Refused."""
        if not self.spec.branching:
            raise Refused(422, "not_branching", "this session was not opened to be branched", "open it with branching: true")
        try:
            child = await pools.pool_for(self.spec.imports).copy(self._child)
        except ChildDied as death:
            if death.cause in _BY_OTHERS:
                raise self._loss(death) from None
            raise Refused(422, "not_copied", f"the session's process could not be copied ({death.cause})") from None
        return JailedSession(secrets.token_urlsafe(12), key, self.spec, child, self._memory_bytes)

    @property
    def branches(self) -> int:
        return self._child.copies

    def end(self, loss: Refused) -> None:
        super().end(loss)
        self._child.kill("closed") if loss.by_program else self._child.retire()

    @property
    def death(self) -> Refused | None:
        """Returns what ended the session's child, when something has."""
        if not self._child.ended.done():
            return None
        by_itself = lost("the program ended it between two operations", by_program=True)
        return killed() if self._child.cause == "killed" else by_itself


class LocalSession(Session):
    """Fixed functions only, in this process: they are the operator's, the model brings the arguments."""

    threads = ThreadPoolExecutor(8, thread_name_prefix="functions")

    async def _run(self, timeout_s: float, work: Callable[[], Any]) -> Reply:
        future = self.loop.run_in_executor(self.threads, work)
        await asyncio.wait([future], timeout=timeout_s)
        if not future.done():  # a thread cannot be stopped: it keeps its place, the session does not
            error = f"did not return within {timeout_s:g} s"
            self.end(lost(error, by_program=True))
            return {"outcome": "program_timeout", "value": None, "error": error, "session_lost": True}
        problem = future.exception()
        if problem is None:
            return {"outcome": "ok", "value": future.result(), "error": None, "session_lost": False}
        outcome = "program_oom" if isinstance(problem, MemoryError) else "program_error"
        text = f"{type(problem).__name__}: {problem}"[: frames.TEXT_MAX]
        return {"outcome": outcome, "value": None, "error": text, "session_lost": False}

    async def open(self) -> None:
        module, options = self.spec.functions, self.spec.options
        self._functions: dict[str, Callable[..., Any]] = {}
        if module is not None:
            reply = await self._run(_START_S, lambda: sys.modules[module].session_functions(json.loads(options)))
            if reply["outcome"] != "ok":
                raise Refused(422, "functions_failed", f"{module}.session_functions: {reply['error']}")
            self._functions = dict(reply["value"])

    async def call(self, head: Reply, body: bytes) -> Reply:
        start = self.loop.time()
        function = self._functions.get(head["name"])
        if function is None:
            error = f"no function named {head['name']!r}; this session has: {', '.join(self._functions) or 'none'}"
            reply: Reply = {"outcome": "denied", "value": None, "error": error, "session_lost": False}
        else:
            reply = await self._run(head["timeout_s"], lambda: function(**head["arguments"]))
            try:
                wire.encode(reply)
            except (TypeError, ValueError, RecursionError) as problem:
                reply |= {"outcome": "program_error", "value": None, "error": f"{type(problem).__name__}: {problem}"}
        reply["elapsed_s"] = round(self.loop.time() - start, 6)
        return reply
