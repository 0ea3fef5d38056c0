"""The server's HTTP surface as one raw ASGI application: who may ask, what is well-formed, which session answers.

No framework stands between the socket and a call: at hundreds of calls a second its work would be most of the cost.
"""

import asyncio
import base64
import binascii
import contextlib
import hmac
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from . import wire
from .pool import ChildDied, Pool
from .sessions import Gate, JailedSession, Refused, Reply, Runs, Session, Sessions, busy, execute

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

LANGUAGES = ("python", "bash")
_JSON = (b"content-type", b"application/json")
_WIRE = (wire.WIRE_HEADER.encode(), b"1")
_OK = (200, b"application/json")
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_RUN_TIMEOUT_S = 10.0
_HEARD_OUT = 16  # times its limit, a body that is too large is still read and dropped


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator decided and what the machine allowed."""

    level: str
    missing: tuple[str, ...]
    code: bool
    reason: str | None
    remedy: str | None
    functions: tuple[str, ...]


class Metrics:
    """Counters and histograms in Prometheus' text form."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.dropped_bytes = 0
        self._seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (len(_BUCKETS_S) + 2))

    def observe(self, operation: str, reply: Reply) -> None:
        elapsed_s = reply["elapsed_s"]
        self.outcomes[operation, reply["outcome"]] += 1
        self.dropped_bytes += reply.get("dropped_bytes", 0)
        row = self._seconds[operation]
        row[-2] += 1
        row[-1] += elapsed_s
        for place, bound in enumerate(_BUCKETS_S):
            if elapsed_s <= bound:
                row[place] += 1
                break

    def text(self, gauges: dict[str, float]) -> str:
        lines = [f"sandbox_{name} {value:g}" for name, value in gauges.items()]
        for (operation, outcome), count in self.outcomes.items():
            lines.append(f'sandbox_outcomes_total{{operation="{operation}",outcome="{outcome}"}} {count}')
        lines += [f'sandbox_refusals_total{{code="{code}"}} {count}' for code, count in self.refusals.items()]
        lines.append(f"sandbox_dropped_bytes_total {self.dropped_bytes}")
        for operation, row in self._seconds.items():
            total = 0.0
            for bound, within in zip(_BUCKETS_S, row, strict=False):
                total += within
                lines.append(f'sandbox_seconds_bucket{{operation="{operation}",le="{bound}"}} {total:g}')
            lines.append(f'sandbox_seconds_bucket{{operation="{operation}",le="+Inf"}} {row[-2]:g}')
            lines.append(f'sandbox_seconds_count{{operation="{operation}"}} {row[-2]:g}')
            lines.append(f'sandbox_seconds_sum{{operation="{operation}"}} {row[-1]:.6f}')
        return "\n".join(lines) + "\n"


def _wrong(message: str) -> Refused:
    return Refused(400, "bad_request", message)


def _timeout(head: Reply, key: str = "timeout_s") -> float:
    value = wire.take(head, key, float, int)
    if not 0 < value <= wire.MAX_TIMEOUT_S:
        raise ValueError(f"wanted {key!r} above 0 and at most {wire.MAX_TIMEOUT_S:g}, got {value}")
    return value


def _language(head: Reply) -> str:
    language = wire.take(head, "language", str)
    if language not in LANGUAGES:
        raise Refused(422, "language_unknown", f"no language {language!r} here; there are {', '.join(LANGUAGES)}")
    return language


def _text(head: Reply, key: str) -> str:
    value = head.get(key)
    return "" if value is None else wire.take(head, key, str)


class _Request:
    """One request's headers, checked, and its body on demand."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.authorization = self.host = b""
        self.origin: bytes | None = None
        self.deadline: float | None = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorization = value
            elif name == b"host":
                self.host = value
            elif name == b"origin":
                self.origin = value
            elif name == b"x-deadline-ms" and value.isdigit():
                self.deadline = asyncio.get_running_loop().time() + min(int(value), 3_600_000) / 1000

    def until(self, timeout_s: float) -> float:
        """Returns when it is too late to start, on the loop's clock: the client will have gone."""
        if self.deadline is not None:
            return self.deadline
        return asyncio.get_running_loop().time() + timeout_s + wire.CLIENT_MARGIN_S

    async def body(self, limit: int = wire.REQUEST_MAX_BYTES) -> bytes:
        """Returns the whole body. Raises Refused above `limit`, having heard it out: a reset would hide the reply."""
        body, size, more = bytearray(), 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _wrong("the body broke off")
            size += len(message["body"])
            if size <= limit:
                body += message["body"]
            elif size > _HEARD_OUT * limit:
                break
            more = message["more_body"]
        if size > limit:
            raise Refused(413, "too_large", f"wanted at most {limit} bytes, got {size}{' or more' if more else ''}")
        return bytes(body)


class App:
    """Raw ASGI: `uvicorn` calls it, tests call it the same way."""

    def __init__(
        self, token: str, hosts: frozenset[bytes] | None, policy: Policy, pool: Pool | None, table: Sessions, gate: Gate
    ) -> None:
        """`hosts`: the Host headers served; None, behind a proxy, is any."""
        self._token = f"Bearer {token}".encode()
        self._hosts = hosts
        self._policy, self._pool, self._sessions, self._gate = policy, pool, table, gate
        self._runs = Runs()
        self._metrics = Metrics()
        self._born = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        extra: list[tuple[bytes, bytes]] = []
        try:
            request = _Request(scope, receive)
            status, kind, body = await self._answer(request)
        except Refused as refusal:
            status, kind, body = refusal.status, b"application/json", wire.encode(refusal.body)
            self._metrics.refusals[refusal.body["error"]["code"]] += 1
            if status in (429, 503):
                extra = [(b"retry-after", b"1")]
            if status in (401, 403, 413):
                extra = [(b"connection", b"close")]
        except ValueError as problem:
            refusal = _wrong(str(problem))
            status, kind, body = refusal.status, b"application/json", wire.encode(refusal.body)
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), _WIRE, *extra]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, request: _Request) -> tuple[int, bytes, bytes]:
        parts = request.path.split("/", 5)
        if self._hosts is not None and request.host not in self._hosts:
            raise Refused(403, "wrong_host", f"wanted a Host of this server, got {request.host.decode('latin-1')!r}")
        if request.origin is not None:
            raise Refused(403, "wrong_origin", "browsers are not served")
        if request.path == "/healthz":
            return (*_OK, b'{"ok":true}')
        if not hmac.compare_digest(request.authorization, self._token):
            raise Refused(401, "unauthorized", "wanted Authorization: Bearer with this server's token")
        if parts[1:3] == ["v1", "sessions"]:
            return await self._on_session(request, parts)
        return await self._on_server(request)

    async def _on_server(self, request: _Request) -> tuple[int, bytes, bytes]:
        route = request.method, request.path
        if route == ("POST", "/run_code"):
            head = wire.decode(await request.body())
            key = wire.take(head, "key", str, type(None))
            return (*_OK, await self._runs.once(key, lambda: self._run_code(request, head)))
        if route == ("GET", "/readyz"):
            return (*_OK, wire.encode(self._readiness()))
        if route == ("GET", "/metrics"):
            gauges: dict[str, float] = {"sessions": len(self._sessions), "up_seconds": time.monotonic() - self._born}
            if self._pool:
                gauges |= {"children": self._pool.live, "forks_total": self._pool.forks}
                gauges |= {"cold_takes_total": self._pool.cold_takes}
            return 200, b"text/plain; version=0.0.4", self._metrics.text(gauges).encode()
        raise Refused(404, "no_such_route", f"no {request.method} {request.path} here")

    def _readiness(self) -> Reply:
        policy = self._policy
        return {
            "level": policy.level,
            "missing": policy.missing,
            "code": policy.code,
            "reason": policy.reason,
            "remedy": policy.remedy,
            "functions": policy.functions,
            "sessions": len(self._sessions),
            "languages": LANGUAGES if policy.code else (),
        }

    async def _on_session(self, request: _Request, parts: list[str]) -> tuple[int, bytes, bytes]:
        action = request.method, parts[4] if len(parts) > 4 else "", len(parts)
        if action == ("POST", "call", 5):
            body = await request.body()
            head = wire.decode(body)
            timeout_s = _timeout(head)
            wire.take(head, "name", str)
            wire.take(head, "arguments", dict)
            session = self._sessions.find(parts[3])
            return (*_OK, await self._perform(session, head, request.until(timeout_s), body))
        if action == ("POST", "exec", 5):
            self._want_code()
            head = wire.decode(await request.body())
            return (*_OK, await self._exec(self._sessions.find(parts[3]), head, request))
        if action == ("POST", "", 3):
            return (*_OK, await self._open(wire.decode(await request.body())))
        if action == ("DELETE", "", 4):
            self._sessions.close(parts[3])
            return (*_OK, b"{}")
        if action[1:] == ("files", 6) and request.method in ("GET", "PUT"):
            return await self._file(request, parts)
        raise Refused(404, "no_such_route", f"no {request.method} {request.path} here")

    async def _perform(self, session: Session, head: Reply, deadline: float, body: bytes) -> bytes:
        async def operation() -> Reply:
            reply = await session.call(head, body)
            self._metrics.observe("call", reply)
            return reply

        return await session.perform(self._seq(head), operation, deadline)

    @staticmethod
    def _seq(head: Reply) -> int:
        seq: int = wire.take(head, "seq", int)
        if seq < 1:
            raise ValueError(f"wanted 'seq' from 1 up, got {seq}")
        return seq

    async def _open(self, head: Reply) -> bytes:
        key = wire.take(head, "key", str)
        functions = wire.take(head, "functions", str, type(None))
        options = wire.take(head, "options", dict, type(None)) or {}
        session = await self._sessions.open(key, functions, options)
        return wire.encode({"session": session.identity, "level": self._policy.level})

    def _want_code(self) -> None:
        if not self._policy.code:
            raise Refused(403, "code_refused", self._policy.reason or "code is off", self._policy.remedy)

    async def _exec(self, session: Session, head: Reply, request: _Request) -> bytes:
        timeout_s = _timeout(head)
        work = {"code": wire.take(head, "code", str), "language": _language(head), "timeout_s": timeout_s}
        limit = head.get("max_output_bytes", wire.EXEC_OUTPUT_BYTES)
        if type(limit) is not int or not 0 <= limit <= wire.RUN_OUTPUT_BYTES:
            raise ValueError(f"wanted 'max_output_bytes' from 0 to {wire.RUN_OUTPUT_BYTES}, got {limit!r}")
        if not isinstance(session, JailedSession):
            raise Refused(403, "code_refused", "this session runs fixed functions only")
        deadline = request.until(timeout_s)

        async def operation() -> Reply:
            async with self._gate.enter(deadline):
                reply = await session.exec(work, limit)
            self._metrics.observe("exec", reply)
            return reply

        return await session.perform(self._seq(head), operation, deadline)

    async def _file(self, request: _Request, parts: list[str]) -> tuple[int, bytes, bytes]:
        self._want_code()
        session = self._sessions.find(parts[3])
        path = parts[5]
        if not isinstance(session, JailedSession) or not path or "\0" in path:
            raise _wrong(f"wanted the path of a file, got {path!r}")
        content = await request.body(wire.FILE_MAX_BYTES) if request.method == "PUT" else None
        found: list[bytes] = []

        async def operation() -> Reply:
            found.append(await session.move_file(path, content))
            return {}

        await session.in_turn(operation, request.until(wire.CLIENT_MARGIN_S))
        return (*_OK, b"{}") if content is not None else (200, b"application/octet-stream", found[0])

    async def _run_code(self, request: _Request, head: Reply) -> bytes:
        """Answers in SandboxFusion's words, with ours beside them."""
        self._want_code()
        assert self._pool is not None  # code is never allowed without one
        timeout_s = _timeout({"run_timeout": _RUN_TIMEOUT_S, **head}, "run_timeout")
        memory_mb = head.get("memory_limit_MB", -1)
        work = {
            "code": wire.take(head, "code", str),
            "language": _language(head),
            "timeout_s": timeout_s,
            "once": True,
            "memory_bytes": memory_mb << 20 if type(memory_mb) is int and memory_mb > 0 else 0,
        }
        stdin = _text(head, "stdin").encode("utf-8", "surrogatepass")
        try:
            files = {path: base64.b64decode(text or "", validate=True) for path, text in (head.get("files") or {}).items()}
        except (binascii.Error, AttributeError, TypeError) as problem:
            raise _wrong(f"wanted 'files' as path -> base64, got {problem}") from None
        async with self._gate.enter(request.until(timeout_s)):
            try:
                child = await self._pool.take()
            except ChildDied as death:
                raise Refused(503, "no_child", f"no child could be started ({death.cause})") from None
            session = JailedSession("", "", (None, "{}"), child, self._pool.memory_bytes)
            try:
                for path, content in files.items():
                    await session.move_file(path, content)
                reply = await execute(child, work, wire.RUN_OUTPUT_BYTES, self._pool.memory_bytes, stdin)
                fetched, room = {}, wire.RUN_OUTPUT_BYTES
                for path in () if reply["session_lost"] else head.get("fetch_files") or ():
                    with contextlib.suppress(Refused):  # what the program did not write is not there
                        content = await session.move_file(str(path), None, room)
                        room -= len(content)
                        fetched[path] = base64.b64encode(content).decode()
            except ChildDied:
                raise busy("the server is stopping") from None
            finally:
                child.kill("closed")
        self._metrics.observe("run_code", reply)
        return wire.encode({**_fusion(reply), "files": fetched})


def _fusion(reply: Reply) -> Reply:
    """Returns an exec's reply in SandboxFusion's form. It knows no outcome but a return code or a time limit."""
    code = reply["exit_code"]
    if code is None:
        code = 0 if reply["outcome"] == "ok" else -9 if reply["session_lost"] else 1
    late = reply["outcome"] == "program_timeout"
    result = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": reply["elapsed_s"],
        "return_code": None if late else code,
        "stdout": reply["stdout"],
        "stderr": reply["stderr"],
    }
    return {
        "status": "Success" if not late and code == 0 else "Failed",
        "message": reply["error"] or "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "outcome": reply["outcome"],
        "dropped_bytes": reply["dropped_bytes"],
    }
