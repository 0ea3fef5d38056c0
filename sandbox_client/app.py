"""The server's HTTP surface as one raw ASGI application: who may ask, what is well-formed, which session answers.

No framework stands between the socket and a call: at hundreds of calls a second its work would be most of the cost.

    GET  /healthz  /readyz  /metrics
    POST /run_code                                  a program in a child of its own, in SandboxFusion's words
    POST /v1/sessions                               key, functions, options, imports, branching -> session, token, level
    POST /v1/sessions/{id}/exec, call               python or bash; a fixed function. Numbered by seq
    POST /v1/sessions/{id}/reset, branch, grade     a fresh child; copies under new keys; a reward. Numbered by seq
    GET, PUT /v1/sessions/{id}/files/{path}         one file
    PUT  /v1/sessions/{id}/archive[/{path}]         a zip or tar, unpacked
    DELETE /v1/sessions/{id}
    GET, DELETE /v1/exec/{key}                      what became of a keyed /run_code: its reply, 202, 404; its end
    GET, DELETE /v1/sessions/{id}/exec/{seq}        the same of a numbered operation, ended only where it has not begun

Every reply repeats the request's X-Call-Id.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import wire
from .fusion import Fusion, wanted_timeout
from .grading import Grader
from .languages import Language
from .metrics import Metrics
from .pools import Pools
from .sessions import Gate, JailedSession, Refused, Reply, Session, Spec
from .table import Runs, Sessions

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_IN_SESSIONS = ("python", "bash")
_JSON = (b"content-type", b"application/json")
_WIRE = (wire.WIRE_HEADER.encode(), b"%d" % wire.WIRE_VERSION)
_CALL_ID = wire.CALL_ID.lower().encode()
_CALL_ID_MAX = 128
_OK = (200, b"application/json")
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
    languages: Mapping[str, Language] = field(default_factory=dict)  # besides Python


def _wrong(message: str) -> Refused:
    return Refused(400, "bad_request", message)


def told(reply: bytes | None) -> tuple[int, bytes, bytes]:
    """Returns what became of a call as HTTP says it: the reply that it had, or 202 while it is carried out."""
    return (*_OK, reply) if reply is not None else (202, b"application/json", b'{"state":"running"}')


def ended(state: str) -> tuple[int, bytes, bytes]:
    """Returns what taking a call back has led to: cancelled, running (it goes on) or done."""
    return (*_OK, wire.encode({"state": state}))


class _Request:
    """One request's headers, checked, and its body on demand."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.authorization = self.host = b""
        self.origin: bytes | None = None
        self.deadline: float | None = None
        self.call_id = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorization = value
            elif name == b"host":
                self.host = value
            elif name == b"origin":
                self.origin = value
            elif name == _CALL_ID:
                self.call_id = value[:_CALL_ID_MAX]
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
        self, token: str, hosts: frozenset[bytes] | None, policy: Policy, pools: Pools | None, table: Sessions, gate: Gate
    ) -> None:
        """`hosts`: the Host headers served; None, behind a proxy, is any."""
        self._token = f"Bearer {token}".encode()
        self._hosts = hosts
        self._policy, self._pools, self._sessions, self._gate = policy, pools, table, gate
        self._runs = Runs()
        self._metrics = Metrics()
        if pools:
            pools.on_end(lambda elapsed_s: self._metrics.time("kill", elapsed_s))
        self._grader = Grader(pools.graders, gate, self._metrics) if pools and pools.graders else None
        self._fusion = Fusion(pools, gate, policy.languages, self._metrics) if pools else None
        self._born = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        extra: list[tuple[bytes, bytes]] = []
        request = _Request(scope, receive)
        try:
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
        if request.call_id:
            extra.append((_CALL_ID, request.call_id))
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
            self._want_session_token(request, parts)
        if parts[1:3] == ["v1", "sessions"]:
            return await self._on_session(request, parts)
        return await self._on_server(request)

    def _want_session_token(self, request: _Request, parts: list[str]) -> None:
        """Lets a session's own token open what concerns this session only. Raises Refused."""
        if parts[1:3] == ["v1", "sessions"] and len(parts) > 3:
            token = self._sessions.token_of(parts[3])
            if token and hmac.compare_digest(request.authorization, f"Bearer {token}".encode()):
                return
        raise Refused(401, "unauthorized", "wanted Authorization: Bearer with this server's token, or this session's")

    async def _on_server(self, request: _Request) -> tuple[int, bytes, bytes]:
        route = request.method, request.path
        if request.path.startswith("/v1/exec/") and request.method in ("GET", "DELETE"):
            key = request.path.removeprefix("/v1/exec/")
            return told(self._runs.fate(key)) if request.method == "GET" else ended(self._runs.end(key))
        if route == ("POST", "/run_code"):
            head = wire.decode(await request.body())
            key = wire.take(head, "key", str, type(None))
            fusion = self._want_code()
            return (*_OK, await self._runs.once(key, lambda: fusion.run_code(head, request.deadline)))
        if route == ("GET", "/readyz"):
            return (*_OK, wire.encode(self._readiness()))
        if route == ("GET", "/metrics"):
            gauges: dict[str, float] = {"sessions": len(self._sessions), "up_seconds": time.monotonic() - self._born}
            gauges |= {"tasks": len(asyncio.all_tasks()), "programs_running": self._gate.inside}
            if self._pools:
                gauges |= self._pools.gauges()
            return 200, b"text/plain; version=0.0.4", self._metrics.text(self._policy.level, gauges).encode()
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
            "languages": ("python", *policy.languages) if policy.code else (),
            "graders": self._grader is not None,
            "imports": self._pools.imports if self._pools else (),
        }

    async def _on_session(self, request: _Request, parts: list[str]) -> tuple[int, bytes, bytes]:
        action = request.method, parts[4] if len(parts) > 4 else "", len(parts)
        if action == ("POST", "call", 5):
            body = await request.body()
            head = wire.decode(body)
            timeout_s = wanted_timeout(head, self._gate.longest_s)
            wire.take(head, "name", str)
            wire.take(head, "arguments", dict)
            session = self._sessions.find(parts[3])
            return (*_OK, await self._perform(session, head, request.until(timeout_s), body))
        if action == ("POST", "exec", 5):
            self._want_code()
            head = wire.decode(await request.body())
            return (*_OK, await self._exec(self._sessions.find(parts[3]), head, request))
        if action == ("POST", "grade", 5):
            if not hmac.compare_digest(request.authorization, self._token):
                raise Refused(401, "unauthorized", "a session does not grade itself: wanted this server's token")
            head = wire.decode(await request.body(wire.FILE_MAX_BYTES))
            return (*_OK, await self._grade(self._sessions.find(parts[3]), head, request))
        if action in (("POST", "reset", 5), ("POST", "branch", 5)):
            head = wire.decode(await request.body())
            session = self._sessions.find(parts[3])
            return (*_OK, await self._renew(session, head, parts[4], request.until(wire.CLIENT_MARGIN_S)))
        if action == ("POST", "", 3):
            return (*_OK, await self._open(wire.decode(await request.body())))
        if action == ("DELETE", "", 4):
            self._sessions.close(parts[3])
            return (*_OK, b"{}")
        if action[1:] == ("exec", 6) and request.method in ("GET", "DELETE"):
            if not parts[5].isdigit():
                raise _wrong(f"wanted the number of an operation, got {parts[5]!r}")
            session, seq = self._sessions.find(parts[3]), int(parts[5])
            return told(session.fate(seq)) if request.method == "GET" else ended(session.drop(seq))
        if action in (("PUT", "archive", 5), ("PUT", "archive", 6)):
            return await self._archive(request, [*parts, ""][5])
        if action[1:] == ("files", 6) and request.method in ("GET", "PUT"):
            return await self._file(request, parts)
        raise Refused(404, "no_such_route", f"no {request.method} {request.path} here")

    async def _perform(self, session: Session, head: Reply, deadline: float, body: bytes) -> bytes:
        async def operation() -> Reply:
            reply = await session.call(head, body)
            self._metrics.observe("call", reply)
            reply["level"] = self._policy.level
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
        imports = wire.take(head, "imports", str, type(None))
        branching = wire.take({"branching": False, **head}, "branching", bool)
        session = await self._sessions.open(key, Spec(functions, json.dumps(options, sort_keys=True), imports, branching))
        return wire.encode({"session": session.identity, "level": self._policy.level, "token": session.token})

    async def _grade(self, session: Session, head: Reply, request: _Request) -> bytes:
        self._want_code()
        if self._grader is None or not isinstance(session, JailedSession):
            raise Refused(422, "no_graders", "wanted isolation L2 or better, to grade where no program has been")
        grader, jailed, deadline = self._grader, session, request.until(wanted_timeout(head, self._gate.longest_s))

        async def operation() -> Reply:
            return {**await grader.grade(jailed, head, deadline), "level": self._policy.level}

        return await session.perform(self._seq(head), operation, deadline)

    async def _renew(self, session: Session, head: Reply, action: str, deadline: float) -> bytes:
        """Resets a session, or branches others off it."""
        keys = wire.take(head, "keys", list) if action == "branch" else []
        if action == "branch" and (not keys or {type(key) for key in keys} != {str}):
            raise ValueError("wanted 'keys' as the keys of the new sessions")

        async def operation() -> Reply:
            start = session.loop.time()
            work = self._sessions.branch(session, keys) if keys else self._sessions.reset(session)
            reply = {**await work, "level": self._policy.level}
            self._metrics.time(action, (session.loop.time() - start) / max(1, len(keys)))
            return reply

        return await session.perform(self._seq(head), operation, deadline)

    def _want_code(self) -> Fusion:
        if not self._policy.code or self._fusion is None:
            raise Refused(403, "code_refused", self._policy.reason or "code is off", self._policy.remedy)
        return self._fusion

    @staticmethod
    def _session_language(head: Reply) -> str:
        language: str = wire.take(head, "language", str)
        if language not in _IN_SESSIONS:
            there = ", ".join(_IN_SESSIONS)
            raise Refused(422, "language_unknown", f"no language {language!r} in a session; there are {there}")
        return language

    async def _exec(self, session: Session, head: Reply, request: _Request) -> bytes:
        timeout_s = wanted_timeout(head, self._gate.longest_s)
        work: Reply = {"code": wire.take(head, "code", str), "language": self._session_language(head), "timeout_s": timeout_s}
        limit = head.get("max_output_bytes", wire.EXEC_OUTPUT_BYTES)
        if type(limit) is not int or not 0 <= limit <= wire.RUN_OUTPUT_BYTES:
            raise ValueError(f"wanted 'max_output_bytes' from 0 to {wire.RUN_OUTPUT_BYTES}, got {limit!r}")
        if not isinstance(session, JailedSession):
            raise Refused(403, "code_refused", "this session runs fixed functions only")
        deadline = request.until(timeout_s)

        async def operation() -> Reply:
            asked = session.loop.time()
            async with self._gate.enter(deadline):
                self._metrics.time("queue", session.loop.time() - asked)
                reply = await session.exec(work, limit)
            self._metrics.observe("exec", reply)
            reply["level"] = self._policy.level
            return reply

        return await session.perform(self._seq(head), operation, deadline)

    async def _archive(self, request: _Request, path: str) -> tuple[int, bytes, bytes]:
        self._want_code()
        session = self._sessions.find(request.path.split("/", 5)[3])
        if not isinstance(session, JailedSession) or "\0" in path:
            raise _wrong(f"wanted the path of a directory, got {path!r}")
        content = await request.body(wire.FILE_MAX_BYTES)
        reply = await session.in_turn(lambda: session.unpack(path, content), request.until(wire.CLIENT_MARGIN_S))
        return (*_OK, wire.encode(reply))

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
