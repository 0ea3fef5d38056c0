"""MCP over streamable HTTP: the tools of a server as the functions of a session.

The protocol has neither deadlines nor a way to send a call again safely, so a tool call is never repeated once it may have
begun; what a tool reports as its error goes to the policy.
"""

import json
import time
from typing import Any

from .. import wire
from ..calls import Again, Call, judge
from ..transport import Reply, Request, Safety
from ..wire import CallResult, ExecResult, Outcome, ProtocolError, RequestRefused
from .backend import Abilities, Backend, Opening, Program, Seat

_VERSION = "2025-06-18"
_SESSION = "Mcp-Session-Id"
_OF_THE_CALL = ("-32602", "-32601")  # wrong arguments, no such tool: the policy may read it


class Mcp(Backend):
    """Speaks to an MCP server; the endpoint's URL is the whole of it, path included."""

    name = "mcp"

    def __init__(self, code_tool: str = "", code_argument: str = "code", languages: tuple[str, ...] = ("python",)) -> None:
        """Args: code_tool: the tool that runs a program, if one does; its text is the program's output."""
        self._tool, self._argument = code_tool, code_argument
        self.can = Abilities(
            sessions=True,
            call=True,
            exec=bool(code_tool),
            stderr=False,
            exit_code=False,
            timeout=False,
            partial_output=False,
            languages=languages if code_tool else (),
        )

    def headers(self, token: str) -> dict[str, str]:
        own = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        return {**super().headers(token), **own}

    def judge(self, call: Call, reply: Reply) -> Again | None:
        if reply.status == 404 or (reply.status == 400 and b"session" in reply.body.lower()):
            raise call.lost(reply.body[:200].decode(errors="replace"))
        return judge(call, reply)

    async def open(self, call: Call, opening: Opening) -> Seat:
        hello = {
            "protocolVersion": _VERSION,
            "capabilities": {},
            "clientInfo": {"name": "sandbox-client", "version": "1"},
        }
        reply = await call.ask(_request("initialize", hello, call.id, {}))
        result = _result(call, reply, call.id)
        assert call.answered_by is not None
        seat = Seat(reply.headers.get(_SESSION) or reply.headers.get(_SESSION.lower()) or "", call.answered_by, "remote")
        call.endpoint = seat.endpoint
        seat.facts["version"] = call.parsed(lambda: wire.take(result, "protocolVersion", str))
        told = wire.encode({"jsonrpc": "2.0", "method": "notifications/initialized"})
        await call.ask(Request("POST", "", told, self._headers(seat)))
        listed = _result(call, await call.ask(_request("tools/list", {}, call.id, self._headers(seat))), call.id)
        seat.facts["tools"] = call.parsed(
            lambda: {wire.take(tool, "name", str): tool for tool in wire.take(listed, "tools", list)}
        )
        return seat

    def _headers(self, seat: Seat) -> dict[str, str]:
        own = {"MCP-Protocol-Version": str(seat.facts["version"])}
        return {**own, _SESSION: seat.id} if seat.id else own

    async def call(self, call: Call, seat: Seat, name: str, arguments: dict[str, Any], timeout_s: float) -> CallResult:
        start = time.monotonic()
        if name not in seat.facts["tools"]:
            error = f"no tool named {name!r}; there are {', '.join(seat.facts['tools']) or 'none'}"
            return CallResult(Outcome.DENIED, None, error, 0.0)
        words = {"name": name, "arguments": arguments}
        request = _request("tools/call", words, call.id, self._headers(seat), Safety.ONCE)
        try:
            result = _result(call, await call.ask(request), call.id)
        except RequestRefused as failure:
            if failure.code not in _OF_THE_CALL:
                raise
            return CallResult(Outcome.PROGRAM_ERROR, None, failure.message, time.monotonic() - start, call.attempts)
        parts = call.parsed(lambda: [part for part in wire.take(result, "content", list) if isinstance(part, dict)])
        text = "\n".join(str(part["text"]) for part in parts if part.get("type") == "text" and "text" in part)
        seconds = time.monotonic() - start
        if result.get("isError") is True:
            return CallResult(Outcome.PROGRAM_ERROR, None, text, seconds, call.attempts)
        structured = result.get("structuredContent")
        return CallResult(Outcome.OK, text if structured is None else structured, None, seconds, call.attempts)

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        done = await self.call(call, seat, self._tool, {self._argument: program.code}, program.timeout_s)
        value = done.value.get("result") if isinstance(done.value, dict) and set(done.value) == {"result"} else done.value
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return ExecResult(done.outcome, text, "", None, 0, done.elapsed_s, error=done.error, attempts=call.attempts)

    async def close(self, call: Call, seat: Seat) -> None:
        if seat.id:
            await call.ask(Request("DELETE", "", headers=self._headers(seat), expect=(400, 404, 405)))


def _request(method: str, words: dict[str, Any], number: str, headers: dict[str, str], safety: Safety = Safety.SAME) -> Request:
    body = wire.encode({"jsonrpc": "2.0", "id": number, "method": method, "params": words})
    return Request("POST", "", body, headers, safety)


def _result(call: Call, reply: Reply, number: str) -> dict[str, Any]:
    """Returns the result of the request `number`. Raises RequestRefused for the server's error, ProtocolError."""
    kind = (reply.headers.get("Content-Type") or reply.headers.get("content-type") or "").partition(";")[0].strip()
    messages = call.parsed(lambda: _events(reply.body) if kind == "text/event-stream" else [wire.decode(reply.body)])
    answer = next((message for message in messages if message.get("id") == number and "method" not in message), None)
    if answer is None:
        if kind == "text/event-stream":
            raise wire.Unknown(f"{call.what}: the stream ended without the reply", call.attempts, may_have_executed=True)
        raise ProtocolError(f"{call.what}: wanted the reply to {number}", call.attempts, may_have_executed=True)
    if isinstance(answer.get("error"), dict):
        code, text = answer["error"].get("code"), str(answer["error"].get("message"))[:4096]
        if type(code) is not int or code == -32603 or -32099 <= code <= -32000:  # the server's own trouble
            raise wire.Unknown(f"{call.what}: {code}: {text}", call.attempts, may_have_executed=True)
        raise RequestRefused(str(code), text)
    result: dict[str, Any] = call.parsed(lambda: wire.take(answer, "result", dict))
    return result


def _events(body: bytes) -> list[dict[str, Any]]:
    """Returns the messages of a stream of server-sent events."""
    text = body.decode().replace("\r\n", "\n").replace("\r", "\n")
    found = []
    for block in text.split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        if data.strip():
            found.append(wire.decode(data.encode()))
    return found
