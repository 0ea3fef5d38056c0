"""E2B and the engines that clone its protocol: a control service that makes sandboxes, envd in each of them for processes
and files, and a code interpreter beside it that keeps Python's names.

The control service's key never goes to a sandbox: there each has a token of its own.
"""

import base64
import dataclasses
import secrets
import time
import urllib.parse
from collections.abc import Coroutine
from typing import Any

from .. import wire
from ..calls import Again, Call, judge
from ..endpoints import Endpoint
from ..transport import Reply, Request, Safety
from ..wire import ExecResult, Outcome
from .backend import Abilities, Backend, Opening, Program, Seat, command, no_such_file
from .connect import CONTENT_TYPE, STREAM_MAX_BYTES, envelope, json_lines, multipart, result_of

_ENVD_PORT, _INTERPRETER_PORT = 49983, 49999
_IN_FLIGHT = 8  # at one sandbox


class E2B(Backend):
    """Speaks to an E2B-compatible control service and to the sandboxes that it makes."""

    name = "e2b"

    def __init__(
        self,
        template: str = "base",
        domain: str = "e2b.app",
        life_s: int = 3600,
        sandbox_url: str = "",
        interpreter: bool = False,
        user: str = "user",
        home: str = "/home/user",
        internet: bool = False,
    ) -> None:
        """Args:
        template: what a sandbox is made from; with `interpreter` one that holds the code interpreter
        life_s: after which the service ends a sandbox that nobody closed
        sandbox_url: of a proxy before all sandboxes; empty is https://PORT-SANDBOX.DOMAIN
        interpreter: Python runs in a kernel and keeps its names, instead of in a new process
        home: where relative paths begin
        internet: whether programs may reach it
        """
        self._template, self._domain, self._life_s = template, domain, life_s
        self._sandbox_url, self._interpreter, self._user, self._home = sandbox_url, interpreter, user, home
        self._internet = internet
        self.can = Abilities(
            sessions=True,
            exec=True,
            read_file=True,
            write_file=True,
            snapshot=True,
            cwd=not interpreter,
            env=True,
            state="names" if interpreter else "files",
        )

    def headers(self, token: str) -> dict[str, str]:
        return {"X-API-Key": token, "Content-Type": "application/json"}

    def judge(self, call: Call, reply: Reply) -> Again | None:
        if reply.status == 502:  # the proxy before the sandboxes: one that is not there is no bad gateway
            try:
                text = str(wire.decode(reply.body).get("message", ""))
            except ValueError:
                text = ""
            if "not found" in text.lower():
                raise call.lost(text)
        return judge(call, reply)

    async def open(self, call: Call, opening: Opening) -> Seat:
        body = {
            "templateID": opening.snapshot or opening.options.get("template", self._template),
            "timeout": self._life_s,
            "metadata": {"key": opening.key},
            "secure": True,
            "allow_internet_access": self._internet,
        }
        request = Request("POST", "/sandboxes", wire.encode(body), safety=Safety.ONCE)
        made = await call.json(request, _read_sandbox)
        domain, control = made["domain"] or self._domain, call.answered_by
        assert control is not None
        name = made["sandboxID"]
        urls = {port: self._sandbox_url or f"https://{port}-{name}.{domain}" for port in (_ENVD_PORT, _INTERPRETER_PORT)}
        facts = {"control": control, "token": made["envdAccessToken"], "interpreter": urls[_INTERPRETER_PORT], "tag": ""}
        return Seat(name, Endpoint(urls[_ENVD_PORT], _IN_FLIGHT), "L5", facts=facts)

    def _headers(self, seat: Seat, port: int = _ENVD_PORT, **more: str) -> dict[str, str]:
        own = {"E2b-Sandbox-Id": seat.id, "E2b-Sandbox-Port": str(port)}
        if seat.facts["token"]:
            own["X-Access-Token"] = seat.facts["token"]
        return {**own, **{name.replace("_", "-"): value for name, value in more.items()}}

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        if program.language == "python" and self._interpreter:
            return await self._interpret(call, seat, program)
        start = time.monotonic()
        seat.facts["tag"] = tag = secrets.token_hex(8)
        runner, *arguments = command(program)
        process = {"cmd": runner, "args": arguments, "envs": dict(program.env), "cwd": program.cwd or self._home}
        request = Request(
            "POST",
            "/process.Process/Start",
            envelope({"process": process, "tag": tag, "stdin": False}),
            self._headers(
                seat,
                Content_Type=CONTENT_TYPE,
                Connect_Protocol_Version="1",
                Connect_Timeout_Ms=str(int(program.timeout_s * 1000)),
                Authorization="Basic " + base64.b64encode(f"{self._user}:".encode()).decode(),
            ),
            Safety.ONCE,
            STREAM_MAX_BYTES,
            life_s=program.timeout_s + wire.KILL_MARGIN_S,
            own_credentials=True,
        )
        result = result_of(call, await call.ask(request), time.monotonic() - start)
        if result.outcome is Outcome.PROGRAM_TIMEOUT:
            call.caller.loose(self._kill(Call(call.caller, "ending a process", 5.0, endpoint=seat.endpoint), seat, tag))
        seat.facts["tag"] = ""
        return result

    async def _interpret(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        """Runs Python in the kernel. The service has no time limit of its own: past ours the kernel is begun anew."""
        start = time.monotonic()
        head = self._headers(seat, _INTERPRETER_PORT, Content_Type="application/json")
        address = seat.facts["interpreter"]
        if "context" not in seat.facts:
            body = wire.encode({"language": "python", "cwd": self._home})
            made = Request("POST", f"{address}/contexts", body, head, Safety.ONCE, own_credentials=True)
            seat.facts["context"] = await call.json(made, lambda reply: wire.take(reply, "id", str))
        context = seat.facts["context"]
        body = wire.encode({"code": program.code, "context_id": context, "language": None, "env_vars": dict(program.env)})
        request = Request("POST", f"{address}/execute", body, head, Safety.ONCE, STREAM_MAX_BYTES, own_credentials=True)
        reply = await call.ask(dataclasses.replace(request, life_s=program.timeout_s))
        result = self._read(call, reply, time.monotonic() - start)
        if reply.cut:
            await call.ask(Request("POST", f"{address}/contexts/{context}/restart", b"", head, own_credentials=True))
        return result

    @staticmethod
    def _read(call: Call, reply: Reply, elapsed_s: float) -> ExecResult:
        said: dict[str, list[str]] = {"stdout": [], "stderr": []}
        value, failure, ended = None, None, False
        for line in json_lines(call, reply):
            kind = line.get("type")
            if kind in said:
                said[kind].append(call.parsed(lambda line=line: wire.take(line, "text", str)))
            elif kind == "result" and line.get("is_main_result"):
                value = call.parsed(lambda line=line: wire.take(line, "text", str, type(None)))
            elif kind == "error":
                failure = f"{line.get('name')}: {line.get('value')}"
                said["stderr"].append(str(line.get("traceback") or ""))
            elif kind == "unexpected_end_of_execution":
                raise call.lost("the interpreter ended under the program", by_program=True)
            ended = ended or kind in ("end_of_execution", "error", "number_of_executions")
        if not ended and not reply.cut:
            call.sent = True
            raise wire.Unknown(f"{call.what}: the stream broke off", call.attempts, may_have_executed=True)
        outcome = Outcome.PROGRAM_TIMEOUT if reply.cut else Outcome.PROGRAM_ERROR if failure else Outcome.OK
        code = None if reply.cut else int(failure is not None)
        out, err = "".join(said["stdout"]), "".join(said["stderr"])
        return ExecResult(outcome, out, err, code, 0, elapsed_s, value, failure, attempts=call.attempts)

    def _file(self, method: str, seat: Seat, path: str, body: bytes = b"", kind: str = "") -> Request:
        where = path if path.startswith("/") else f"{self._home}/{path}"
        query = urllib.parse.urlencode({"path": where, "username": self._user})
        head = self._headers(seat, Content_Type=kind) if kind else self._headers(seat)
        expect = (404,) if method == "GET" else ()
        size = wire.FILE_MAX_BYTES
        return Request(method, f"/files?{query}", body, head, max_bytes=size, expect=expect, own_credentials=True)

    async def read_file(self, call: Call, seat: Seat, path: str) -> bytes:
        reply = await call.ask(self._file("GET", seat, path))
        if reply.status == 404:
            raise no_such_file(path)
        return reply.body

    async def write_file(self, call: Call, seat: Seat, path: str, content: bytes) -> None:
        kind, body = multipart("file", path, content)
        await call.ask(self._file("POST", seat, path, body, kind))

    async def snapshot(self, call: Call, seat: Seat) -> str:
        call.endpoint = seat.facts["control"]
        request = Request("POST", f"/sandboxes/{seat.id}/snapshots", b"{}", safety=Safety.ONCE)
        name: str = await call.json(request, lambda reply: wire.take(reply, "snapshotID", str))
        return name

    def abandon(self, call: Call, seat: Seat) -> Coroutine[Any, Any, None]:
        """Kills the process whose stream was given up, as it is now: by the time this runs there may be another."""
        return self._kill(call, seat, seat.facts["tag"])

    async def _kill(self, call: Call, seat: Seat, tag: str) -> None:
        if tag:
            body = wire.encode({"process": {"tag": tag}, "signal": "SIGNAL_SIGKILL"})
            head = self._headers(seat, Content_Type="application/json", Connect_Protocol_Version="1")
            request = Request("POST", "/process.Process/SendSignal", body, head, expect=(404,), own_credentials=True)
            await call.ask(request)

    async def close(self, call: Call, seat: Seat) -> None:
        call.endpoint = seat.facts["control"]
        await call.ask(Request("DELETE", f"/sandboxes/{seat.id}"))


def _read_sandbox(reply: dict[str, Any]) -> dict[str, Any]:
    name = wire.take(reply, "sandboxID", str)
    if not name.replace("-", "").isalnum():
        raise ValueError(f"wanted a sandboxID of letters and digits, got {name!r}")  # it becomes part of a host's name
    none = type(None)
    token = wire.take(reply, "envdAccessToken", str, none) if "envdAccessToken" in reply else None
    domain = wire.take(reply, "domain", str, none) if "domain" in reply else None
    return {"sandboxID": name, "envdAccessToken": token, "domain": domain}
