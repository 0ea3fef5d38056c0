"""OpenEnv over its WebSocket, the only of its doors that keeps state between steps.

Messages have no ids, so a reply that comes late would answer the next question: after any timeout or cancellation the
socket is dropped and the session is lost.
"""

import asyncio
import time
from typing import Any

from .. import wire
from ..calls import Call
from ..transport import BadReply, ReplyLost, Request, Socket
from ..wire import CallResult, ExecResult, Outcome, ProtocolError, RequestRefused
from .backend import Abilities, Backend, Opening, Program, Seat, Unsupported

_MAX_BYTES = 16 << 20


class OpenEnv(Backend):
    """Speaks to an OpenEnv server. Functions: reset, step, state; programs where its action is code."""

    name = "openenv"

    def __init__(self, code_key: str = "", languages: tuple[str, ...] = ("python",)) -> None:
        """Args: code_key: the field of the environment's action that holds a program; empty: it runs none."""
        self._code_key = code_key
        self.can = Abilities(
            sessions=True,
            call=True,
            exec=bool(code_key),
            timeout=False,
            partial_output=False,
            state="names",
            languages=languages if code_key else (),
        )

    async def ready(self, call: Call) -> wire.Readiness:
        await call.ask(Request("GET", "/health"))
        return wire.Readiness("remote", (), bool(self._code_key), None, None, ("reset", "step", "state"), 0)

    async def open(self, call: Call, opening: Opening) -> Seat:
        socket = await call.connect("/ws", {}, _MAX_BYTES)
        assert call.answered_by is not None
        seat = Seat(opening.key, call.answered_by, "remote", facts={"socket": socket})
        if opening.options.get("reset", True):
            await self._exchange(call, seat, "reset", dict(opening.options.get("reset_with", {})))
        return seat

    async def call(self, call: Call, seat: Seat, name: str, arguments: dict[str, Any], timeout_s: float) -> CallResult:
        if name not in ("reset", "step", "state"):
            raise Unsupported(self.name, f"function {name!r}; there are reset, step, state")
        start = time.monotonic()
        try:
            value = await self._exchange(call, seat, name, arguments)
        except _ActionFailed as failure:
            return CallResult(Outcome.PROGRAM_ERROR, None, str(failure), time.monotonic() - start, call.attempts)
        return CallResult(Outcome.OK, value, None, time.monotonic() - start, call.attempts)

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        start = time.monotonic()
        try:
            step = await self._exchange(call, seat, "step", {self._code_key: program.code})
        except _ActionFailed as failure:
            elapsed_s = time.monotonic() - start
            return ExecResult(Outcome.PROGRAM_ERROR, "", "", None, 0, elapsed_s, error=str(failure), attempts=call.attempts)
        seen = call.parsed(lambda: wire.take(step, "observation", dict))
        code = call.parsed(lambda: wire.take(seen, "exit_code", int, type(None)))
        out, err = (call.parsed(lambda key=key: wire.take(seen, key, str)) for key in ("stdout", "stderr"))
        outcome = Outcome.OK if not code else Outcome.PROGRAM_ERROR
        return ExecResult(outcome, out, err, code, 0, time.monotonic() - start, attempts=call.attempts)

    async def _exchange(self, call: Call, seat: Seat, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends one message and returns the data of its reply. Raises _ActionFailed, RequestRefused, InfrastructureError."""
        socket: Socket | None = seat.facts["socket"]
        if socket is None:
            raise call.lost("its socket was given up after a reply that did not come")
        wanted = "state" if kind == "state" else "observation"
        done = False
        text = wire.encode({"type": kind, "data": data} if kind != "state" else {"type": kind}).decode()
        try:
            call.sent = True
            call.count = max(1, call.count)
            await socket.send(text)
            reply = wire.decode((await socket.receive(max(0.001, call.left_s))).encode(), unique=True)
            kind, told = wire.take(reply, "type", str), wire.take(reply, "data", dict)
            if kind not in (wanted, "error"):
                raise ValueError(f"wanted a message of type {wanted!r}, got {kind!r}")
            done = True
        except ReplyLost as error:
            if call.left_s > 0:
                raise call.lost(str(error)) from None
            raise wire.Unknown(f"{call.what}: {error}", call.attempts, may_have_executed=True) from None
        except (BadReply, ValueError, RecursionError) as error:
            raise ProtocolError(f"{call.what}: {error}", call.attempts, may_have_executed=True) from None
        finally:
            if not done:
                seat.facts["socket"] = None
                await _drop(socket)
        if kind == "error":
            raise _failure(call, told)
        return told

    async def close(self, call: Call, seat: Seat) -> None:
        socket, seat.facts["socket"] = seat.facts["socket"], None
        if socket is not None:
            try:
                await socket.send('{"type":"close"}')
            except ReplyLost:
                pass  # it is closed already
            finally:
                await _drop(socket)


class _ActionFailed(Exception):
    """The environment could not carry out the action: the policy may read why."""


def _failure(call: Call, told: dict[str, Any]) -> Exception:
    code, text = str(told.get("code")), str(told.get("message"))[:4096]
    if code == "VALIDATION_ERROR":
        return _ActionFailed(f"{code}: {text}")
    if code == "EXECUTION_ERROR":  # the environment raised: whose fault that is cannot be told, so nobody is scored for it
        return wire.Unknown(f"{call.what}: {text}", call.attempts, may_have_executed=True)
    if code == "CAPACITY_REACHED":
        return wire.Overloaded(f"{call.what}: {text}", call.attempts, may_have_executed=False)
    if code == "SESSION_ERROR":
        return call.lost(text)
    return RequestRefused(code, text)


async def _drop(socket: Socket) -> None:
    """Closes a socket even when the caller is being cancelled."""
    closing = asyncio.ensure_future(socket.close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing
        raise
