"""Prime Intellect's sandboxes: a control service, and a gateway that asks for a short-lived token of each sandbox's own.

A process is started under a uuid: a start that is sent again attaches to the process of the first one and runs nothing
twice, which makes it the one foreign exec that may be repeated.
"""

import asyncio
import dataclasses
import posixpath
import time
import urllib.parse
import uuid
from typing import Any

from .. import wire
from ..calls import Again, Call, judge
from ..endpoints import Endpoint
from ..transport import Reply, Request, Safety
from ..wire import ExecResult, RequestRefused
from .backend import Abilities, Backend, Opening, Program, Seat, command, no_such_file
from .connect import CONTENT_TYPE, STREAM_MAX_BYTES, envelope, multipart, result_of

_START = "/command_session.CommandSession/Start"
_POLL_S, _POLL_MAX_S = 0.2, 2.0
_ENDED = ("ERROR", "TERMINATED", "TIMEOUT", "STOPPED")


class Prime(Backend):
    """Speaks to Prime Intellect's sandbox service."""

    name = "prime"
    can = Abilities(sessions=True, exec=True, read_file=True, write_file=True, cwd=True, env=True, state="files")

    def __init__(self, image: str = "python:3.11-slim", home: str = "/root", life_minutes: int = 60, **request: Any) -> None:
        """Args: request: further fields of the creation, such as cpu_cores, memory_gb, region."""
        self._image, self._home, self._life, self._request = image, home, life_minutes, request

    def headers(self, token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def judge(self, call: Call, reply: Reply) -> Again | None:
        error = _error(reply) if reply.status in (410, 502) else ""
        if error in ("sandbox_not_found", "sandbox_terminated"):
            raise call.lost(error)
        return judge(call, reply)

    async def open(self, call: Call, opening: Opening) -> Seat:
        body = {
            "name": opening.key[-60:],
            "docker_image": self._image,
            "timeout_minutes": self._life,
            "idempotency_key": call.id,
            "vm": True,
            **self._request,
        }
        made = await call.json(Request("POST", "/api/v1/sandbox", wire.encode(body)), _read_sandbox)
        control = call.answered_by
        assert control is not None
        call.endpoint, wait_s = control, _POLL_S
        name, status = made
        while status != "RUNNING":
            if status in _ENDED:
                raise call.lost(f"the sandbox ended before it ran: {status}")
            if wait_s >= call.left_s:
                raise wire.Overloaded(f"{call.what}: the sandbox was still {status}", call.attempts)
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _POLL_MAX_S)
            _, status = await call.json(Request("GET", f"/api/v1/sandbox/{name}"), _read_sandbox)
        seat = Seat(name, control, "L5", facts={"control": control})
        await self._authorize(call, seat)
        return seat

    async def _authorize(self, call: Call, seat: Seat) -> None:
        call.endpoint = seat.facts["control"]
        found = await call.json(Request("POST", f"/api/v1/sandbox/{seat.id}/auth", b"{}"), _read_auth)
        seat.facts["token"] = found["token"]
        url = f"{found['gateway_url'].rstrip('/')}/{found['user_ns']}/{found['job_id']}"
        if seat.endpoint.url != url:
            seat.endpoint = Endpoint(url, 8)
        call.endpoint = seat.endpoint

    async def _gateway(self, call: Call, seat: Seat, request: Request) -> Reply:
        """Asks the gateway, once more with a fresh token when it refuses the old one: a refused request did nothing."""
        for again in (True, False):
            headers = {**request.headers, "Authorization": f"Bearer {seat.facts['token']}"}
            expect = (*request.expect, 401) if again else request.expect
            sent = dataclasses.replace(request, headers=headers, expect=expect, own_credentials=True)
            reply = await call.ask(sent)
            if reply.status != 401:
                return reply
            await self._authorize(call, seat)
        raise AssertionError("the second answer is returned or raised")

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        start = time.monotonic()
        runner, *arguments = command(program)
        place = posixpath.join(self._home, program.cwd or "")
        spec = {"cmd": runner, "args": arguments, "envs": dict(program.env), "cwd": place}
        body = envelope({"command": spec, "stdin": False, "sessionUuid": str(uuid.uuid4())})
        head = {
            "Content-Type": CONTENT_TYPE,
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(int(program.timeout_s * 1000)),
        }
        life_s = program.timeout_s + wire.KILL_MARGIN_S
        request = Request("POST", _START, body, head, Safety.SAME, STREAM_MAX_BYTES, life_s=life_s)
        return result_of(call, await self._gateway(call, seat, request), time.monotonic() - start)

    def _query(self, seat: Seat, path: str) -> str:
        return urllib.parse.urlencode({"path": posixpath.join(self._home, path), "sandbox_id": seat.id})

    async def read_file(self, call: Call, seat: Seat, path: str) -> bytes:
        request = Request("GET", f"/download?{self._query(seat, path)}", max_bytes=wire.FILE_MAX_BYTES, expect=(404,))
        reply = await self._gateway(call, seat, request)
        if reply.status == 404:
            raise no_such_file(path)
        return reply.body

    async def write_file(self, call: Call, seat: Seat, path: str, content: bytes) -> None:
        kind, body = multipart("file", posixpath.basename(path), content)
        await self._gateway(call, seat, Request("POST", f"/upload?{self._query(seat, path)}", body, {"Content-Type": kind}))

    async def close(self, call: Call, seat: Seat) -> None:
        call.endpoint = seat.facts["control"]
        await call.ask(Request("DELETE", f"/api/v1/sandbox/{seat.id}", expect=(404,)))


def _error(reply: Reply) -> str:
    try:
        return str(wire.decode(reply.body).get("error"))
    except ValueError:
        return ""


def _read_sandbox(reply: dict[str, Any]) -> tuple[str, str]:
    name: str = wire.take(reply, "id", str)
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"wanted an id of letters and digits, got {name!r}")  # it becomes part of a path
    return name, wire.take(reply, "status", str)


def _read_auth(reply: dict[str, Any]) -> dict[str, str]:
    found = {name: wire.take(reply, name, str) for name in ("gateway_url", "user_ns", "job_id", "token")}
    if not found["gateway_url"].startswith(("https://", "http://127.0.0.1:")):
        raise RequestRefused("gateway", f"wanted a gateway over https, got {found['gateway_url']!r}")
    return found
