"""The client: sessions, calls and runs over one small Transport seam, with deadlines, retries and typed failures.

What may be sent again, and why it never runs twice: opening is idempotent per key, calls and execs carry a sequence
number and runs a key that the server remembers; the rest (files, closing) has the same effect done twice. A foreign
server that does not announce that memory is never sent a run again once it may have begun.
"""

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import importlib
import io
import random
import secrets
import time
import urllib.parse
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from . import wire
from .wire import (
    CallResult,
    Cancelled,
    CodeRefused,
    ExecResult,
    InfrastructureError,
    Outcome,
    Overloaded,
    ProtocolError,
    RequestRefused,
    SessionLost,
    Unknown,
    Unreachable,
)

T = TypeVar("T")
R = TypeVar("R", CallResult, ExecResult)

_BACKOFF_S, _BACKOFF_MAX_S = 0.05, 2.0
_STREAMED_BYTES = 1 << 20  # above, aiohttp wants a file so as not to hold the loop
_CLOSE_S = 5.0
_ANSWERED_AGAIN = (500, 502, 503, 504, 429, 524)


class Reply(NamedTuple):
    """An HTTP reply; `headers` is asked by lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class NotSent(Exception):
    """No connection was made: the request has certainly not arrived."""


class ReplyLost(Exception):
    """The request may have arrived, its reply did not."""


class Oversized(Exception):
    """The reply is larger than it may be."""


class Transport(Protocol):
    """The seam: one HTTP exchange. Raises NotSent, ReplyLost or Oversized."""

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float, max_bytes: int
    ) -> Reply: ...

    async def close(self) -> None: ...


class AiohttpTransport:
    """The default transport: pooled HTTP/1.1, whose closed connection is how a server learns of a cancelled call."""

    def __init__(self, url: str, max_connections: int) -> None:
        # an optional weight: the server imports this package too and never opens a transport
        self._aiohttp = importlib.import_module("aiohttp")
        self._url = url
        aiohttp = self._aiohttp
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=wire.CLIENT_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,  # nothing is compressed, so nothing can expand
        )

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float, max_bytes: int
    ) -> Reply:
        aiohttp = self._aiohttp
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._url + path, data=_payload(body), headers=headers, allow_redirects=False
                ) as r,
            ):
                data = await _read_bounded(r.content, max_bytes)
                return Reply(r.status, r.headers, data)
        except aiohttp.ClientConnectorError as error:
            raise NotSent(str(error)) from None
        except TimeoutError:
            raise ReplyLost(f"no reply within {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ReplyLost(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._session.close()


def _payload(body: bytes) -> Any:
    return None if not body else body if len(body) < _STREAMED_BYTES else io.BytesIO(body)


async def _read_bounded(content: Any, max_bytes: int) -> bytes:
    data: bytes = await content.readany()
    while not content.at_eof():
        data += await content.readany()
        if len(data) > max_bytes:
            break
    if len(data) > max_bytes:
        raise Oversized(f"wanted a reply of at most {max_bytes} bytes, got more")
    return data


def _retry_after(reply: Reply) -> float:
    try:
        return max(0.0, float(reply.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0  # a date or nonsense: our own backoff decides


class _Attempts:
    """The history of one call, for its error: how often it was tried, whether it may have run."""

    def __init__(self, what: str, deadline: float) -> None:
        self.what = what
        self.deadline = deadline
        self.count = 0
        self.sent = False
        self.last: tuple[type[InfrastructureError], str] = (Unreachable, "the deadline passed before the first attempt")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def failure(self) -> InfrastructureError:
        kind, text = self.last
        if self.sent and kind is not ProtocolError:
            kind = Unknown  # an earlier attempt may have arrived
        return kind(f"{self.what}: {text}", self.count, self.sent)


class SandboxClient:
    """Speaks to one sandbox server, from one event loop."""

    def __init__(
        self,
        url: str,
        token: str,
        timeout_s: float = 30.0,
        max_connections: int = 256,
        make_transport: Callable[[str, int], Transport] = AiohttpTransport,
    ) -> None:
        """The transport is opened by the first call, inside the running loop.

        Args:
          url: such as http://127.0.0.1:8080
          token: the bearer token, from the server's --token-file
          timeout_s: for all that has no timeout of its own: opening, files, readiness, closing
        """
        self._url = url.rstrip("/")
        self._authorization = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._make_transport = make_transport
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._remembers = False  # the server has announced that it answers a repeated key from memory
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._drained: asyncio.Future[None] | None = None

    async def __aenter__(self) -> "SandboxClient":
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def open_session(self, key: str, functions: str | None = None, options: dict[str, Any] | None = None) -> "Session":
        """Returns the session of `key`; a repeated key is the same session while it lives.

        Args:
          key: trajectory id and attempt
          functions: a module that the operator registered with --functions
          options: what its session_functions gets
        """
        body = wire.encode({"key": key, "functions": functions, "options": options or {}})
        reply, _ = await self._ask("opening a session", "POST", "/v1/sessions", body, self._timeout_s, _parse_open)
        return Session(self, reply["session"], key, reply["level"])

    async def run_code(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        timeout_s: float = 10.0,
        files: dict[str, bytes] | None = None,
        fetch_files: tuple[str, ...] = (),
    ) -> ExecResult:
        """Runs a program in a fresh sandbox, by SandboxFusion's protocol; a SandboxFusion server may be asked too.

        Raises InfrastructureError, RequestRefused, CodeRefused.
        """
        body = wire.encode(
            {
                "code": code,
                "language": language,
                "stdin": stdin,
                "run_timeout": timeout_s,
                "files": {path: base64.b64encode(content).decode() for path, content in (files or {}).items()},
                "fetch_files": fetch_files,
                "key": secrets.token_hex(16),
            }
        )
        deadline_s = timeout_s + wire.CLIENT_MARGIN_S
        result, attempts = await self._ask(
            "run_code", "POST", "/run_code", body, deadline_s, _parse_run, repeatable=lambda: self._remembers
        )
        return _with_attempts(result, attempts)

    async def ready(self) -> wire.Readiness:
        """Returns what the server is and what it lacks."""
        return (await self._ask("readiness", "GET", "/readyz", b"", self._timeout_s, wire.parse_ready))[0]

    async def close(self) -> None:
        """Ends what is in flight with Cancelled and closes the connections."""
        self._closed = True
        if self._in_flight:
            self._drained = asyncio.get_running_loop().create_future()
            for task in self._in_flight:
                task.cancel()
            await self._drained
        if self._transport:
            await self._transport.close()
            self._transport = None

    def _opened(self) -> Transport:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("this SandboxClient was first used in another event loop: make one client per loop")
        if self._closed:
            raise Cancelled("the client is closed")
        if self._transport is None:
            self._loop = loop
            self._transport = self._make_transport(self._url, self._max_connections)
        return self._transport

    async def _ask(
        self,
        what: str,
        method: str,
        path: str,
        body: bytes,
        timeout_s: float,
        parse: Callable[[dict[str, Any]], T],
        repeatable: Callable[[], bool] = lambda: True,
    ) -> tuple[T, int]:
        """Returns the parsed JSON reply and the number of attempts."""
        attempts = _Attempts(what, time.monotonic() + timeout_s)
        reply = await self._exchange(attempts, method, path, body, repeatable)
        return self._parsed(attempts, reply, parse), attempts.count

    def _parsed(self, attempts: _Attempts, reply: Reply, parse: Callable[[dict[str, Any]], T]) -> T:
        try:
            return parse(wire.decode(reply.body, unique=True))
        except (ValueError, KeyError) as error:
            raise ProtocolError(f"{attempts.what}: {error}", attempts.count, may_have_executed=True) from None

    async def _exchange(
        self,
        attempts: _Attempts,
        method: str,
        path: str,
        body: bytes,
        repeatable: Callable[[], bool] = lambda: True,
        max_bytes: int = wire.REPLY_MAX_BYTES,
    ) -> Reply:
        """Returns a 200 reply, retrying until the deadline. Raises InfrastructureError or RequestRefused."""
        transport = self._opened()
        task = asyncio.current_task()
        assert task is not None
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        wait_s = _BACKOFF_S
        self._in_flight.add(task)
        try:
            while (left_s := attempts.left_s) > 0:
                headers["X-Deadline-Ms"] = str(int(left_s * 1000))
                attempts.count += 1
                least_s = 0.0
                try:
                    reply = await transport.send(method, path, headers, body, left_s, max_bytes)
                    self._remembers = self._remembers or wire.WIRE_HEADER in reply.headers
                    if reply.status == 200:
                        return reply
                    least_s = self._judge(attempts, reply)
                except NotSent as error:
                    attempts.last = Unreachable, str(error)
                except ReplyLost as error:
                    attempts.sent = True
                    attempts.last = Unknown, str(error)
                except Oversized as error:
                    raise ProtocolError(f"{attempts.what}: {error}", attempts.count, may_have_executed=True) from None
                pause_s = max(least_s, random.uniform(0, wait_s))  # full jitter: a herd spreads out
                if pause_s >= attempts.left_s or (attempts.sent and not repeatable()):
                    break
                await asyncio.sleep(pause_s)
                wait_s = min(2 * wait_s, _BACKOFF_MAX_S)
        except asyncio.CancelledError:
            if self._closed and not task.cancelling() > 1:
                task.uncancel()
                raise Cancelled(f"{attempts.what}: the client was closed", attempts.count, attempts.count > 0) from None
            raise
        finally:
            self._in_flight.discard(task)
            if self._drained and not self._in_flight:
                self._drained.set_result(None)
        raise attempts.failure()

    def _judge(self, attempts: _Attempts, reply: Reply) -> float:
        """Returns how long to wait at least before the next attempt, or raises what the status means."""
        error = _error_of(reply)
        code, text = str(error.get("code")), str(error.get("message") or f"HTTP status {reply.status}")
        if reply.status in _ANSWERED_AGAIN:
            if reply.status in (429, 503):
                attempts.last = Overloaded, text
            else:
                attempts.sent = True
                attempts.last = Unknown, text
            return _retry_after(reply)
        if reply.status == 410 or (reply.status == 404 and code in ("None", "sandbox_not_found")):
            by_program = error.get("caused_by_program") is True
            raise SessionLost(f"{attempts.what}: {text}", attempts.count, attempts.sent, by_program)
        remedy = error.get("remedy")
        refusal = CodeRefused if code == "code_refused" else RequestRefused
        raise refusal(code, text, remedy if isinstance(remedy, str) else None)


def _error_of(reply: Reply) -> dict[str, Any]:
    try:
        error = wire.decode(reply.body).get("error")
    except ValueError:
        return {}
    return error if isinstance(error, dict) else {}


def _parse_open(reply: dict[str, Any]) -> dict[str, Any]:
    wire.take(reply, "session", str)
    wire.take(reply, "level", str)
    return reply


def _parse_run(reply: dict[str, Any]) -> ExecResult:
    """Reads SandboxFusion's reply, and our own words beside it where they are."""
    if reply.get("status") == "SandboxError":
        raise ValueError(f"the sandbox itself failed: {reply.get('message')}")
    result = wire.take(reply, "run_result", dict)
    late = wire.take(result, "status", str) == "TimeLimitExceeded"
    code = wire.take(result, "return_code", int, type(None))
    guess = Outcome.PROGRAM_TIMEOUT if late else Outcome.OK if code == 0 else Outcome.PROGRAM_ERROR
    try:
        files = {path: base64.b64decode(text, validate=True) for path, text in (reply.get("files") or {}).items()}
    except (binascii.Error, TypeError, AttributeError) as error:
        raise ValueError(f"wanted 'files' as path -> base64: {error}") from None
    return ExecResult(
        outcome=Outcome(reply.get("outcome", guess)),
        stdout=wire.take(result, "stdout", str, type(None)) or "",
        stderr=wire.take(result, "stderr", str, type(None)) or "",
        exit_code=code,
        dropped_bytes=reply.get("dropped_bytes", 0),
        elapsed_s=wire.take(result, "execution_time", float, int, type(None)) or 0.0,
        error=wire.take(reply, "message", str, type(None)) or None,
        files=files,
    )


def _with_attempts(result: ExecResult, attempts: int) -> ExecResult:
    return result if attempts == 1 else dataclasses.replace(result, attempts=attempts)


class Session:
    """One sandbox that keeps its state between operations, which run one after another in the order asked."""

    def __init__(self, client: SandboxClient, identity: str, key: str, level: str) -> None:
        self.id, self.key, self.level = identity, key, level
        self._client = client
        self._path = f"/v1/sessions/{identity}"
        self._call_path, self._exec_path = f"{self._path}/call", f"{self._path}/exec"
        self._turn = asyncio.Lock()
        self._seq = 0

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float = 10.0) -> CallResult:
        """Calls a fixed function of the session. Its failures are outcomes; raises InfrastructureError otherwise."""
        head = {"name": name, "arguments": arguments, "timeout_s": timeout_s}
        return await self._perform("call", self._call_path, head, timeout_s, wire.parse_call)

    async def exec(
        self, code: str, language: str = "python", timeout_s: float = 10.0, max_output_bytes: int | None = None
    ) -> ExecResult:
        """Runs a program in the session: Python in its live namespace, bash in its work directory."""
        head: dict[str, Any] = {"code": code, "language": language, "timeout_s": timeout_s}
        if max_output_bytes is not None:
            head["max_output_bytes"] = max_output_bytes
        return await self._perform("exec", self._exec_path, head, timeout_s, wire.parse_exec)

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, by a path in the work directory or an absolute one, and the directories above it."""
        await self._file("PUT", path, content, wire.REPLY_MAX_BYTES)

    async def read_file(self, path: str) -> bytes:
        """Returns a file's content. Raises RequestRefused with code no_such_file."""
        return (await self._file("GET", path, b"", wire.FILE_MAX_BYTES)).body

    async def close(self) -> None:
        """Ends the session. Never fails for the network's sake: a session that is not closed expires."""
        with contextlib.suppress(InfrastructureError):
            await self._client._ask("closing", "DELETE", self._path, b"", _CLOSE_S, lambda reply: reply)

    async def _perform(
        self,
        what: str,
        path: str,
        head: dict[str, Any],
        timeout_s: float,
        parse: Callable[[dict[str, Any], int], R],
    ) -> R:
        attempts = _Attempts(f"{what} in session {self.key}", time.monotonic() + timeout_s + wire.CLIENT_MARGIN_S)
        await self._take_turn(attempts)
        try:
            self._seq += 1
            seq = self._seq
            body = wire.encode({"seq": seq, **head})
            reply = await self._client._exchange(attempts, "POST", path, body)
        finally:
            self._turn.release()

        def checked(words: dict[str, Any]) -> R:
            if words.get("seq") != seq:
                raise ValueError(f"wanted the reply to seq {seq}, got that to {words.get('seq')!r}")
            return parse(words, attempts.count)

        return self._client._parsed(attempts, reply, checked)

    async def _file(self, method: str, path: str, content: bytes, max_bytes: int) -> Reply:
        attempts = _Attempts(f"{method} {path} in session {self.key}", time.monotonic() + self._client._timeout_s)
        place = f"{self._path}/files/{urllib.parse.quote(path, safe='')}"
        await self._take_turn(attempts)
        try:
            return await self._client._exchange(attempts, method, place, content, max_bytes=max_bytes)
        finally:
            self._turn.release()

    async def _take_turn(self, attempts: _Attempts) -> None:
        if not self._turn.locked():
            await self._turn.acquire()
            return
        try:
            async with asyncio.timeout(attempts.left_s):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(f"{attempts.what}: an earlier operation of the session kept it busy") from None
