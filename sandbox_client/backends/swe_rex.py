"""SWE-ReX: programs by `/execute` in a directory of the session's own, and a named bash shell by `call("bash", ...)`.

Programs do not go through the shell: there both streams are one terminal's, framed by strings that a program can print.
Errors arrive with the name of an exception class of the server's; it is compared as text and never imported.
"""

import base64
import binascii
import posixpath
import secrets
import time
from typing import Any

from .. import wire
from ..calls import Again, Call, judge
from ..transport import Reply, Request, Safety
from ..wire import CallResult, ExecResult, Outcome, RequestRefused
from .backend import Abilities, Backend, Opening, Program, Seat, Unsupported, command, no_such_file
from .connect import multipart

_FAILED = 511  # the status of an exception of the runtime
_FILE_S = 30.0
_OF_THE_COMMAND = ("CommandTimeoutError", "NonZeroExitCodeError", "NoExitCodeError", "BashIncorrectSyntaxError")


class SweRex(Backend):
    """Speaks to a swerex-remote server."""

    name = "swe_rex"
    can = Abilities(
        sessions=True,
        exec=True,
        call=True,
        read_file=True,
        write_file=True,
        cwd=True,
        env=True,
        partial_output=False,
        state="files",
    )

    def __init__(self, root: str = "/tmp") -> None:
        """Args: root: below which each session gets a directory."""
        self._root = root

    def headers(self, token: str) -> dict[str, str]:
        # after an exception the server closes the connection without a word: none is used twice
        return {"X-API-Key": token, "Content-Type": "application/json", "Connection": "close"}

    def judge(self, call: Call, reply: Reply) -> Again | None:
        if reply.status != _FAILED:
            return judge(call, reply)
        kind, text = call.parsed(lambda: _read_failure(reply))
        if kind == "SessionDoesNotExistError":
            raise call.lost(text)
        raise RequestRefused(kind, text)

    async def ready(self, call: Call) -> wire.Readiness:
        alive = await call.json(Request("GET", "/is_alive"), lambda reply: wire.take(reply, "is_alive", bool))
        return wire.Readiness("remote", (), alive, None, None, (), 0)

    async def open(self, call: Call, opening: Opening) -> Seat:
        name = secrets.token_hex(8)
        place = posixpath.join(self._root, f"session-{name}")
        await self._command(call, ["mkdir", "-p", place], _FILE_S, None, {}, Safety.SAME)
        assert call.answered_by is not None
        return Seat(name, call.answered_by, "remote", facts={"place": place, "shell": False})

    async def _command(
        self, call: Call, words: list[str], timeout_s: float, cwd: str | None, env: dict[str, str], safety: Safety
    ) -> tuple[str, str, int]:
        body: dict[str, Any] = {"command": words, "timeout": timeout_s, "shell": False, "cwd": cwd}
        if env:
            body["command"] = ["env", *(f"{name}={value}" for name, value in env.items()), *words]
        request = Request("POST", "/execute", wire.encode(body), safety=safety, max_bytes=2 * wire.FILE_MAX_BYTES)
        return await call.json(request, _read_command)

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        start = time.monotonic()
        words, env = command(program), dict(program.env)
        place = posixpath.join(seat.facts["place"], program.cwd or "")
        try:
            out, err, code = await self._command(call, words, program.timeout_s, place, env, Safety.ONCE)
        except RequestRefused as failure:
            if failure.code != "CommandTimeoutError":
                raise
            elapsed_s = time.monotonic() - start
            return ExecResult(
                Outcome.PROGRAM_TIMEOUT, "", "", None, 0, elapsed_s, error=failure.message, attempts=call.attempts
            )
        outcome = Outcome.OK if code == 0 else Outcome.PROGRAM_ERROR
        return ExecResult(outcome, out, err, code, 0, time.monotonic() - start, attempts=call.attempts)

    async def call(self, call: Call, seat: Seat, name: str, arguments: dict[str, Any], timeout_s: float) -> CallResult:
        """`bash` with {command}: the named shell, whose directory and variables stay."""
        if name != "bash":
            raise Unsupported(self.name, f"function {name!r}; there is bash")
        start = time.monotonic()
        if not seat.facts["shell"]:
            opening = {"session": seat.id, "session_type": "bash", "startup_timeout": 5.0}
            await call.ask(Request("POST", "/create_session", wire.encode(opening), safety=Safety.ONCE))
            seat.facts["shell"] = True
        action = {"action_type": "bash", "session": seat.id, "timeout": timeout_s, "check": "silent", **arguments}
        request = Request("POST", "/run_in_session", wire.encode(action), safety=Safety.ONCE)
        try:
            value = await call.json(request, _read_action)
        except RequestRefused as failure:
            if failure.code not in _OF_THE_COMMAND:
                raise
            late = failure.code == "CommandTimeoutError"
            outcome = Outcome.PROGRAM_TIMEOUT if late else Outcome.PROGRAM_ERROR
            return CallResult(outcome, None, f"{failure.code}: {failure.message}", time.monotonic() - start, call.attempts)
        outcome = Outcome.OK if value["exit_code"] == 0 else Outcome.PROGRAM_ERROR
        return CallResult(outcome, value, None, time.monotonic() - start, call.attempts)

    async def read_file(self, call: Call, seat: Seat, path: str) -> bytes:
        place = posixpath.join(seat.facts["place"], path)  # /read_file decodes text, and changes the ends of lines
        out, err, code = await self._command(call, ["base64", "-w0", "--", place], _FILE_S, None, {}, Safety.SAME)
        if code != 0:
            raise no_such_file(path) if "No such file" in err else RequestRefused("unreadable", err.strip())
        try:
            return base64.b64decode(out, validate=True)
        except binascii.Error as error:
            raise wire.ProtocolError(f"{call.what}: {error}", call.attempts, may_have_executed=True) from None

    async def write_file(self, call: Call, seat: Seat, path: str, content: bytes) -> None:
        place = posixpath.join(seat.facts["place"], path)
        kind, body = multipart("file", "file", content, {"target_path": place, "unzip": "false"})
        await call.ask(Request("POST", "/upload", body, {"Content-Type": kind}))

    async def close(self, call: Call, seat: Seat) -> None:
        if seat.facts["shell"]:
            body = wire.encode({"session": seat.id, "session_type": "bash"})
            await call.ask(Request("POST", "/close_session", body, expect=(_FAILED,)))
        await self._command(call, ["rm", "-rf", "--", seat.facts["place"]], _FILE_S, None, {}, Safety.SAME)


def _read_failure(reply: Reply) -> tuple[str, str]:
    told = wire.take(wire.decode(reply.body), "swerexception", dict)
    return wire.take(told, "class_path", str).rpartition(".")[2], wire.take(told, "message", str)[:4096]


def _read_command(reply: dict[str, Any]) -> tuple[str, str, int]:
    return wire.take(reply, "stdout", str), wire.take(reply, "stderr", str), wire.take(reply, "exit_code", int)


def _read_action(reply: dict[str, Any]) -> dict[str, Any]:
    return {"output": wire.take(reply, "output", str), "exit_code": wire.take(reply, "exit_code", int, type(None))}
