"""The client: programs, and sessions that keep their state, on one or many servers of one kind, with typed failures.

One model for every service; what is peculiar to a service stands in its adapter (`backends/`), what is common to all calls
(attempts, deadlines, limits, health) in `calls.py`. Deadlines are nested three deep: a program's own, the server's for
killing it (KILL_MARGIN_S later), the client's for giving up (CLIENT_MARGIN_S later); a trajectory's stands around them.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from . import wire
from .backends.backend import Backend, Grading, Opening, Program, Seat, Unsupported
from .backends.v1 import V1
from .cache import PureCache, key_of
from .calls import Call, Caller
from .endpoints import Endpoint
from .journal import Journal, digest
from .limits import affordable_connections
from .tokens import Provider, Token
from .transport import AiohttpTransport, Transport
from .wire import (
    CallResult,
    ExecResult,
    GradeResult,
    InfrastructureError,
    Overloaded,
    RequestRefused,
    SessionLost,
    Unknown,
    Unreachable,
)

T = TypeVar("T")
Work = Callable[[Call, Seat], Awaitable[T]]

_CLOSE_S = 5.0
_READING = ("read_file", "snapshot", "branch", "grade")  # nothing of them need be done again in a session built anew
_REBUILDS = 3  # of one session within one operation


@dataclass(frozen=True)
class Snapshot:
    """A point in a session from which others can be opened: a copy at the server, or the steps that led there."""

    opening: Opening
    name: str | None
    journal: Journal | None


@dataclass(frozen=True, slots=True)
class Ticket:
    """What opens one session and nothing else, to be handed to a process that shall have no more than that."""

    url: str
    key: str
    id: str
    token: str = field(repr=False)
    level: str
    seq: int  # of its last operation


class SandboxClient:
    """Speaks to the sandbox servers of one kind, from one event loop."""

    def __init__(
        self,
        url: str | Sequence[str],
        token: str | Provider = "",
        timeout_s: float = 30.0,
        max_connections: int = 256,
        make_transport: Callable[[int], Transport] = AiohttpTransport,
        backend: Backend | None = None,
        cache: PureCache | None = None,
    ) -> None:
        """The transport is opened by the first call, inside the running loop.

        Args:
          url: such as http://127.0.0.1:8080; of several a trajectory prefers one, by rendezvous hashing
          token: the bearer token, or a function that fetches one, asked again when the old one is refused
          timeout_s: for all that has no timeout of its own: opening, files, readiness, closing
          max_connections: at once, fewer where this process may not open as many files
          backend: the adapter to the service, by default to our own server
          cache: where results of pure programs are kept; None keeps none
        """
        self.backend = backend or V1()
        self._timeout_s = timeout_s
        self._cache = cache
        most = affordable_connections(max_connections)
        urls = [url] if isinstance(url, str) else list(url)
        if not urls:
            raise ValueError("wanted the URL of at least one sandbox server, got none")
        endpoints = [Endpoint(one, most) for one in urls]
        self._caller = Caller(endpoints, Token(token), self.backend.headers, self.backend.judge, make_transport, most)

    async def __aenter__(self) -> "SandboxClient":
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def open_session(
        self,
        key: str,
        functions: str | None = None,
        options: Mapping[str, Any] | None = None,
        replayable: bool = False,
        snapshot: Snapshot | None = None,
        branching: bool = False,
        imports: str | None = None,
    ) -> "Session":
        """Returns the session of `key`; at our own server a repeated key is the same session while it lives.

        Args:
          key: trajectory id and attempt
          functions: a module that the operator registered with --functions
          options: what its session_functions gets, or what the adapter makes of them
          replayable: all that will be done in it gives the same when it is done again: a session that the
            infrastructure loses, or whose server stays out of reach while another is there, is then built anew, step by step
          snapshot: where it begins, from another session's snapshot()
          branching: it will be branched from, for which our own server must know at its birth
          imports: a set of modules that it has from its beginning, such as "numpy,scipy"; the operator registered it with
            --imports, and ready() names them all
        """
        if imports and not self.backend.can.imports:
            raise Unsupported(self.backend.name, "imports")
        opening = Opening(key, functions, dict(options or {}), branching=branching, imports=imports)
        if snapshot:
            opening = dataclasses.replace(snapshot.opening, key=key, snapshot=snapshot.name)
        call = Call(self._caller, f"opening session {key}", self._timeout_s, route=key)
        async with self._caller.running(call):
            seat = await self.backend.open(call, opening)
            steps = snapshot.journal.copy() if snapshot and snapshot.journal else Journal()
            session = Session(self, opening, seat, steps if replayable or steps.steps else None)
            if snapshot and snapshot.name is None:
                await session._replay(call)
        return session

    def join(self, ticket: Ticket) -> "Session":
        """Returns the session that another process has opened and handed over, which must not go on with it itself.

        This client may be one that has the ticket's token for its own: then it can do nothing but this session's operations,
        and cannot grade it. A session that is joined is never built anew.
        """
        endpoint = next((one for one in self._caller.endpoints if one.url == ticket.url), None)
        if endpoint is None:
            there = ", ".join(one.url for one in self._caller.endpoints)
            raise ValueError(f"wanted a client of {ticket.url}, where session {ticket.key} is, got one of {there}")
        seat = Seat(ticket.id, endpoint, ticket.level, ticket.seq, ticket.token)
        return Session(self, Opening(ticket.key), seat, None, joined=True)

    async def run_code(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        timeout_s: float = 10.0,
        files: Mapping[str, bytes] | None = None,
        fetch_files: tuple[str, ...] = (),
        pure: str = "",
    ) -> ExecResult:
        """Runs a program in a fresh sandbox.

        Args:
          pure: the name of the tool that declares this call pure: running it twice is running it once. Then it may be
            hedged, tried again at another server, and answered from the cache.

        Raises InfrastructureError, RequestRefused, CodeRefused.
        """
        program = Program(code, language, timeout_s, stdin, files=files or {}, fetch_files=fetch_files, pure=bool(pure))
        return await self.run(program, pure)

    async def run(self, program: Program, tool: str = "") -> ExecResult:
        """Runs a stateless program, all of whose surroundings can be given."""
        self.backend.check(program, in_session=False)

        async def run() -> ExecResult:
            call = Call(self._caller, "run_code", program.timeout_s + wire.CLIENT_MARGIN_S, route=program.key)
            async with self._caller.running(call):
                return shortened(await self.backend.run_code(call, program), program.max_output_bytes)

        if self._cache is None or not program.pure:
            return await run()
        parts = {name.name: getattr(program, name.name) for name in dataclasses.fields(program) if name.name != "key"}
        parts |= {"files": [(path, digest(data)) for path, data in sorted(program.files.items())]}
        parts |= {"env": sorted(program.env.items()), "backend": self.backend.name, "tool": tool}
        parts["servers"] = sorted(endpoint.url for endpoint in self._caller.endpoints)
        return await self._cache.get(tool, key_of(parts), run)

    async def ready(self) -> wire.Readiness:
        """Returns what the server is and what it lacks."""
        call = Call(self._caller, "readiness", self._timeout_s)
        async with self._caller.running(call):
            return await self.backend.ready(call)

    def metrics(self) -> dict[str, float]:
        """Returns counts since the client was made, and the state of its endpoints, by name."""
        caller = self._caller
        found = {f"client/{name}": float(count) for name, count in caller.counts.items()}
        found["client/in_flight"] = float(caller.in_flight)
        for number, endpoint in enumerate(caller.endpoints):
            found[f"client/endpoint_{number}_latency_s"] = endpoint.breaker.latency_s
            found[f"client/endpoint_{number}_window"] = endpoint.window.limit
            found[f"client/endpoint_{number}_closed"] = float(endpoint.breaker.state == "closed")
        return found

    async def close(self) -> None:
        """Ends what is in flight with Cancelled and closes the connections."""
        await self._caller.close()


class Session:
    """One sandbox that keeps its state between operations, which run one after another in the order asked."""

    def __init__(
        self, client: SandboxClient, opening: Opening, seat: Seat, journal: Journal | None, joined: bool = False
    ) -> None:
        self._client, self._opening, self._seat, self._journal = client, opening, seat, journal
        self._backend, self._caller = client.backend, client._caller
        self._turn = asyncio.Lock()
        self._joined = joined
        self._births = 0
        self._whole = True  # no replay has stopped half-way
        self.rebuilt = 0  # how often it was lost and built anew

    @property
    def key(self) -> str:
        """Trajectory id and attempt."""
        return self._opening.key

    @property
    def id(self) -> str:
        """The server's own name for it."""
        return self._seat.id

    @property
    def level(self) -> str:
        """The isolation that the server reached."""
        return self._seat.level

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float = 10.0) -> CallResult:
        """Calls a fixed function of the session. Its failures are outcomes; raises InfrastructureError otherwise."""
        step = {"name": name, "arguments": arguments, "timeout_s": timeout_s}
        result: CallResult = await self._do("call", step, timeout_s + wire.CLIENT_MARGIN_S)
        return result

    async def exec(
        self,
        code: str,
        language: str = "python",
        timeout_s: float = 10.0,
        max_output_bytes: int | None = None,
        stdin: str = "",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Runs a program in the session: Python in its live namespace, bash in its work directory, where it has them."""
        program = Program(code, language, timeout_s, stdin, cwd, env or {}, max_output_bytes=max_output_bytes)
        self._backend.check(program, in_session=True)
        result: ExecResult = await self._do("exec", {"program": program}, timeout_s + wire.CLIENT_MARGIN_S)
        return shortened(result, max_output_bytes)

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, by a path in the work directory or an absolute one, and the directories above it."""
        await self._do("write_file", {"path": path, "content": content}, self._client._timeout_s)

    async def read_file(self, path: str) -> bytes:
        """Returns a file's content. Raises RequestRefused with code no_such_file."""
        result: bytes = await self._do("read_file", {"path": path}, self._client._timeout_s)
        return result

    async def grade(
        self, code: str, tests: Mapping[str, bytes] | None = None, collect: Sequence[str] = (), timeout_s: float = 10.0
    ) -> GradeResult:
        """Judges files of the session by a program that runs where no program of the session has been.

        Args:
          code: Python that sets `reward` to a finite number; it may try what was submitted by run_submission(...)
          tests: files that only the grader sees, under tests/
          collect: paths of the session's files, which it sees under submission/

        Raises Unsupported where the service has no graders, InfrastructureError, RequestRefused.
        """
        if not self._backend.can.grade:
            raise Unsupported(self._backend.name, "grade")
        grading = Grading(code, dict(tests or {}), tuple(collect), timeout_s)
        result: GradeResult = await self._do("grade", {"grading": grading}, timeout_s + wire.CLIENT_MARGIN_S)
        return result

    def ticket(self) -> Ticket:
        """Returns what opens this session alone: see SandboxClient.join. Raises Unsupported where there is no such thing."""
        if not self._backend.can.tokens or not self._seat.token:
            raise Unsupported(self._backend.name, "token of one session")
        seat = self._seat
        return Ticket(seat.endpoint.url, self.key, seat.id, seat.token, seat.level, seat.seq)

    async def snapshot(self) -> Snapshot:
        """Returns this point as the beginning of other sessions. Raises Unsupported where neither way is open."""
        if self._backend.can.snapshot:
            name: str = await self._do("snapshot", {}, self._client._timeout_s)
            return Snapshot(self._opening, name, None)
        if self._journal is None or self._journal.overflown:
            raise Unsupported(self._backend.name, "snapshot of a session that is not replayable")
        return Snapshot(self._opening, None, self._journal.copy())

    async def branch(self, keys: Sequence[str]) -> "list[Session]":
        """Returns sessions that go on from this point, one per key: copies at the server, or replays of the same steps."""
        if self._backend.can.branch and (self._opening.branching or self._journal is None):
            seats = await self._do("branch", {"keys": list(keys)}, self._client._timeout_s)
            pairs = zip(keys, seats, strict=True)
            journals = [self._journal.copy() if self._journal else None for _ in keys]
            made = zip(pairs, journals, strict=True)
            return [
                Session(self._client, dataclasses.replace(self._opening, key=key), seat, journal)
                for (key, seat), journal in made
            ]
        point, found = await self.snapshot(), list[Session]()
        try:
            for key in keys:
                found.append(await self._client.open_session(key, replayable=self._journal is not None, snapshot=point))
        except BaseException:
            for session in found:
                await asyncio.shield(session.close())
            raise
        return found

    async def reset(self) -> None:
        """Returns the session to how it was opened: ends it and opens another, which is cheaper and safer than cleaning.

        At our own server it keeps its key and place; the steps so far are forgotten.
        """
        call = self._call("reset", self._client._timeout_s)
        async with self._caller.running(call), self._in_turn(call):
            if self._journal is not None:
                self._journal = Journal()
            if not await self._backend.reset(call, self._seat):
                await self._end()
                await self._reopen(call)

    async def close(self) -> None:
        """Ends the session. Never fails for the network's sake: a session that is not closed expires."""
        await self._end()

    async def _end(self) -> None:
        call = Call(self._caller, f"closing session {self.key}", _CLOSE_S, endpoint=self._seat.endpoint)
        with contextlib.suppress(InfrastructureError):
            async with self._caller.running(call):
                await self._backend.close(call, self._seat)

    def _call(self, what: str, timeout_s: float) -> Call:
        return Call(self._caller, f"{what} in session {self.key}", timeout_s, endpoint=self._seat.endpoint)

    async def _do(self, operation: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        call = self._call(operation, timeout_s)
        async with self._caller.running(call), self._in_turn(call):
            call.endpoint = self._seat.endpoint  # the session may have moved while this waited
            for attempt in range(_REBUILDS + 1):
                if not self._whole:
                    await self._rebuild(call)
                steps = self._journal
                call.movable = steps is not None and not steps.overflown and attempt < _REBUILDS
                try:
                    result = await self._perform(call, operation, arguments)
                except SessionLost as loss:
                    if not call.movable or loss.caused_by_program:
                        raise
                    await self._rebuild(call)
                except (Unreachable, Unknown):
                    if self._seat.endpoint not in call.avoided:
                        raise
                    await self._move(call)
                else:
                    if self._journal is not None and operation not in _READING:
                        self._journal.record(operation, arguments, result)
                    return result
        raise AssertionError("the last attempt returns or raises")

    async def _perform(self, call: Call, operation: str, arguments: dict[str, Any]) -> Any:
        seat = self._seat
        try:
            return await getattr(self._backend, operation)(call, seat, **arguments)
        except RequestRefused as refusal:
            forgotten = self._joined and refusal.code == "unauthorized" and operation != "grade"
            if forgotten:  # a server that has forgotten a session has forgotten its token too
                raise call.lost("its token opens it no more") from None
            raise
        except (asyncio.CancelledError, wire.Unknown, wire.Cancelled):
            if call.count and type(self._backend).abandon is not Backend.abandon:
                left = Call(self._caller, f"abandoning session {self.key}", _CLOSE_S, endpoint=seat.endpoint)
                self._caller.loose(self._backend.abandon(left, seat))
            raise

    async def _rebuild(self, call: Call) -> None:
        """Builds the lost session anew, at any server. Raises SessionLost when it does not become what it was."""
        call.endpoint, call.movable, self._whole = None, False, False
        await self._reopen(call)
        await self._replay(call)
        self._whole = True
        self.rebuilt += 1
        self._caller.counts["rebuilt"] += 1

    async def _move(self, call: Call) -> None:
        """Builds the session anew at another server, its own being out of reach; what is left there is ended if it can be."""
        left = Call(self._caller, f"leaving session {self.key}", _CLOSE_S, endpoint=self._seat.endpoint)
        self._caller.loose(self._backend.close(left, self._seat))
        await self._rebuild(call)

    async def _reopen(self, call: Call) -> None:
        self._births += 1
        key = f"{self.key}~{self._births}"
        call.endpoint, call.route = None, key
        self._seat = await self._backend.open(call, dataclasses.replace(self._opening, key=key))
        call.endpoint = self._seat.endpoint

    async def _replay(self, call: Call) -> None:
        call.endpoint = self._seat.endpoint
        for number, step in enumerate(self._journal.steps if self._journal else (), 1):
            result = await self._perform(call, step.operation, step.arguments)
            if digest(result) != step.digest:
                raise call.lost(f"step {number} of the replay ({step.operation}) gave something else than the first time")

    @contextlib.asynccontextmanager
    async def _in_turn(self, call: Call) -> AsyncIterator[None]:
        if self._turn.locked():
            try:
                async with asyncio.timeout(call.left_s):
                    await self._turn.acquire()
            except TimeoutError:
                raise Overloaded(f"{call.what}: an earlier operation of the session kept it busy") from None
        else:
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()


def shortened(result: ExecResult, max_bytes: int | None) -> ExecResult:
    """Returns `result` with each stream cut in its middle to `max_bytes`, where the server has not done so itself.

    What a server has cut is left as it is: the gap's own note is not output, and may be longer than what was asked for.
    """
    if max_bytes is None or result.dropped_bytes:
        return result
    (stdout, dropped), (stderr, dropped_too) = wire.shorten(result.stdout, max_bytes), wire.shorten(result.stderr, max_bytes)
    return dataclasses.replace(result, stdout=stdout, stderr=stderr, dropped_bytes=dropped + dropped_too)
