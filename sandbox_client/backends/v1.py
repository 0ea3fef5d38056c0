"""Our own server: `/v1/sessions` with numbered operations, and SandboxFusion's `/run_code` with a key that it remembers."""

import base64
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

from .. import wire
from ..calls import Call
from ..transport import Request, Safety
from ..wire import CallResult, ExecResult, GradeResult
from .backend import Abilities, Backend, Grading, Opening, Program, Seat
from .sandbox_fusion import post_run

R = TypeVar("R", CallResult, ExecResult, GradeResult)

_FILE_S = 10.0


class V1(Backend):
    """Speaks to sandbox-server."""

    name = "v1"
    can = Abilities(
        run_code=True,
        sessions=True,
        exec=True,
        call=True,
        functions=True,
        read_file=True,
        write_file=True,
        branch=True,
        grade=True,
        imports=True,
        tokens=True,
        stdin=True,
        files=True,
        state="names",
    )

    def headers(self, token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def check(self, program: Program, in_session: bool) -> None:
        if in_session:
            super().check(program, in_session)  # a stateless program's language is the server's to know

    async def ready(self, call: Call) -> wire.Readiness:
        return await call.json(Request("GET", "/readyz"), wire.parse_ready)

    async def run_code(self, call: Call, program: Program) -> ExecResult:
        return await post_run(call, program, Safety.PURE if program.pure else Safety.KEYED)

    async def open(self, call: Call, opening: Opening) -> Seat:
        head: dict[str, Any] = {"key": opening.key, "functions": opening.functions, "options": dict(opening.options)}
        if opening.branching:
            head["branching"] = True
        if opening.imports:
            head["imports"] = opening.imports
        reply = await call.json(Request("POST", "/v1/sessions", wire.encode(head)), _parse_open)
        assert call.answered_by is not None
        return Seat(reply["session"], call.answered_by, reply["level"], token=reply["token"])

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        head: dict[str, Any] = {"code": program.code, "language": program.language, "timeout_s": program.timeout_s}
        if program.max_output_bytes is not None:
            head["max_output_bytes"] = program.max_output_bytes
        return await self._perform(call, seat, "exec", head, wire.parse_exec)

    async def call(self, call: Call, seat: Seat, name: str, arguments: dict[str, Any], timeout_s: float) -> CallResult:
        head = {"name": name, "arguments": arguments, "timeout_s": timeout_s}
        return await self._perform(call, seat, "call", head, wire.parse_call)

    async def grade(self, call: Call, seat: Seat, grading: Grading) -> GradeResult:
        head: dict[str, Any] = {"code": grading.code, "collect": list(grading.collect), "timeout_s": grading.timeout_s}
        head["files"] = {path: base64.b64encode(content).decode() for path, content in grading.tests.items()}
        return await self._perform(call, seat, "grade", head, wire.parse_grade)

    async def _perform(
        self, call: Call, seat: Seat, action: str, head: dict[str, Any], parse: Callable[[dict[str, Any], int], R]
    ) -> R:
        seq = seat.seq + 1
        body = wire.encode({"seq": seq, **head})
        seat.seq = seq  # a number is used up by being sent, and by nothing that could not be
        path = f"/v1/sessions/{seat.id}/{action}"

        def checked(words: dict[str, Any]) -> R:
            if words.get("seq") != seq:
                raise ValueError(f"wanted the reply to seq {seq}, got that to {words.get('seq')!r}")
            return parse(words, call.attempts)

        answer_s = head["timeout_s"] + wire.ASK_AGAIN_S
        return await call.json(Request("POST", path, body, answer_s=answer_s, fate=_fate(seat, seq)), checked)

    async def branch(self, call: Call, seat: Seat, keys: list[str]) -> list[Seat]:
        reply = await self._numbered(call, seat, "branch", {"keys": keys})
        made = call.parsed(lambda: [_parse_branch(one) for one in wire.take(reply, "sessions", list)])
        if [key for key, _, _ in made] != keys:
            raise wire.ProtocolError(f"{call.what}: wanted branches {keys}", call.attempts, may_have_executed=True)
        return [Seat(identity, seat.endpoint, seat.level, token=token) for _, identity, token in made]

    async def reset(self, call: Call, seat: Seat) -> bool:
        try:
            await self._numbered(call, seat, "reset", {})
        except wire.RequestRefused as refusal:
            if refusal.code != "no_such_route":
                raise
            return False
        return True

    async def _numbered(self, call: Call, seat: Seat, action: str, head: dict[str, Any]) -> dict[str, Any]:
        """Performs an operation that has no time limit of its own."""
        seat.seq += 1
        seq = seat.seq

        def checked(words: dict[str, Any]) -> dict[str, Any]:
            if words.get("seq") != seq:
                raise ValueError(f"wanted the reply to seq {seq}, got that to {words.get('seq')!r}")
            return words

        body = wire.encode({"seq": seq, **head})
        path = f"/v1/sessions/{seat.id}/{action}"
        return await call.json(Request("POST", path, body, answer_s=_FILE_S, fate=_fate(seat, seq)), checked)

    async def read_file(self, call: Call, seat: Seat, path: str) -> bytes:
        reply = await call.ask(Request("GET", _place(seat, path), max_bytes=wire.FILE_MAX_BYTES, answer_s=_FILE_S))
        return reply.body

    async def write_file(self, call: Call, seat: Seat, path: str, content: bytes) -> None:
        await call.ask(Request("PUT", _place(seat, path), content, answer_s=_FILE_S))

    async def close(self, call: Call, seat: Seat) -> None:
        await call.ask(Request("DELETE", f"/v1/sessions/{seat.id}"))


def _place(seat: Seat, path: str) -> str:
    return f"/v1/sessions/{seat.id}/files/{urllib.parse.quote(path, safe='')}"


def _fate(seat: Seat, seq: int) -> str:
    return f"/v1/sessions/{seat.id}/exec/{seq}"


def _parse_branch(one: Any) -> tuple[str, str, str]:
    if type(one) is not dict:
        raise ValueError(f"wanted a branch as an object, got {type(one).__name__}")
    return wire.take(one, "key", str), wire.take(one, "session", str), wire.take({"token": "", **one}, "token", str)


def _parse_open(reply: dict[str, Any]) -> dict[str, Any]:
    wire.take(reply, "session", str)
    wire.take(reply, "level", str)
    return {**reply, "token": wire.take({"token": "", **reply}, "token", str)}
