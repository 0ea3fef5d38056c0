"""E2B's three services behind one address: control, envd and the code interpreter, told apart by their paths.

A process outlives its stream, and ends with the deadline of the request that started it.
"""

import asyncio
import base64
import contextlib
import io
import json
import traceback
from typing import Any

from aiohttp import web

from .machine import Machine

KEY, TOKEN, HOME = "e2b_key", "envd-token", "/home/user"


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def read_envelope(body: bytes) -> dict[str, Any]:
    assert body[0] == 0 and len(body) == 5 + int.from_bytes(body[1:5], "big")
    message: dict[str, Any] = json.loads(body[5:])
    return message


def pieces(data: bytes, size: int = 32_768) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


class Fake:
    """What the fake remembers, for the tests to look at."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.kills: list[str] = []
        self.made = 0
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.names: dict[str, dict[str, Any]] = {}

    def app(self) -> web.Application:
        @web.middleware
        async def authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
            self.seen.append((request.path, dict(request.headers)))
            control = request.path.startswith(("/sandboxes", "/v2/sandboxes"))
            if control and request.headers.get("X-API-Key") != KEY:
                return web.json_response({"code": 401, "message": "no such key"}, status=401)
            if not control and request.path != "/health":
                name = request.headers.get("E2b-Sandbox-Id", "")
                if name not in self.sandboxes:
                    return web.json_response(
                        {"sandboxId": name, "message": "The sandbox was not found", "code": 502}, status=502
                    )
                if request.headers.get("X-Access-Token") != TOKEN:
                    return web.json_response({"code": "unauthenticated", "message": "no token"}, status=401)
            response: web.StreamResponse = await handler(request)
            return response

        made = web.Application(middlewares=[authenticate], client_max_size=64 << 20)
        made.add_routes(
            [
                web.post("/sandboxes", self.create),
                web.post("/v2/sandboxes", self.create),
                web.delete("/sandboxes/{id}", self.delete),
                web.post("/sandboxes/{id}/snapshots", self.snapshot),
                web.post("/process.Process/Start", self.start),
                web.post("/process.Process/SendSignal", self.signal),
                web.get("/files", self.read),
                web.post("/files", self.write),
                web.get("/health", self.health),
                web.post("/contexts", self.context),
                web.post("/contexts/{id}/restart", self.restart),
                web.post("/execute", self.execute),
            ]
        )
        return made

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=204)

    async def create(self, request: web.Request) -> web.Response:
        head = await request.json()
        self.made += 1
        name = f"i{self.made}sandbox"
        self.sandboxes[name] = head
        made = {"sandboxID": name, "templateID": head["templateID"], "clientID": "c", "envdVersion": "0.5.7"}
        return web.json_response({**made, "envdAccessToken": TOKEN, "domain": None}, status=201)

    async def delete(self, request: web.Request) -> web.Response:
        found = self.sandboxes.pop(request.match_info["id"], None)
        return web.Response(status=204 if found else 404)

    async def snapshot(self, request: web.Request) -> web.Response:
        return web.json_response({"snapshotID": f"snap-{request.match_info['id']}", "names": []}, status=201)

    async def start(self, request: web.Request) -> web.StreamResponse:
        head = read_envelope(await request.read())
        config = head["process"]
        timeout_ms = request.headers.get("Connect-Timeout-Ms")
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        await response.write(envelope({"event": {"start": {"pid": 7}}}))
        where = self.machine.file(config.get("cwd") or HOME, HOME)
        limit_s = int(timeout_ms) / 1000 if timeout_ms else None
        ran = await self.machine.run([config["cmd"], *config["args"]], limit_s, where, config.get("envs"))
        for name, data in (("stdout", ran.stdout), ("stderr", ran.stderr)):
            for part in pieces(data):
                await response.write(envelope({"event": {"data": {name: base64.b64encode(part).decode()}}}))
        await response.write(envelope({"event": {"keepalive": {}}}))
        if ran.code is None:
            error = {"code": "deadline_exceeded", "message": "context deadline exceeded"}
            await response.write(envelope({"error": error}, 2))
        else:
            end = {"exited": ran.code >= 0, "status": f"exit status {ran.code}", **({"exitCode": ran.code} if ran.code else {})}
            await response.write(envelope({"event": {"end": end}}))
            await response.write(envelope({}, 2))
        return response

    async def signal(self, request: web.Request) -> web.Response:
        self.kills.append((await request.json())["process"]["tag"])
        return web.json_response({"code": "not_found", "message": "no such process"}, status=404)

    async def read(self, request: web.Request) -> web.Response:
        path = self.machine.file(request.query["path"], HOME)
        if not path.is_file():
            return web.json_response({"code": 404, "message": f"file '{path}' does not exist"}, status=404)
        return web.Response(body=path.read_bytes())

    async def write(self, request: web.Request) -> web.Response:
        path = self.machine.file(request.query["path"], HOME)
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.content_type == "application/octet-stream":
            path.write_bytes(await request.read())
        else:
            file = (await request.post())["file"]
            assert isinstance(file, web.FileField)
            path.write_bytes(file.file.read())
        return web.json_response([{"name": path.name, "type": "file", "path": request.query["path"]}])

    async def context(self, request: web.Request) -> web.Response:
        name = f"context-{len(self.names)}"
        self.names[name] = {}
        return web.json_response({"id": name, "language": "python", "cwd": HOME})

    async def restart(self, request: web.Request) -> web.Response:
        self.names[request.match_info["id"]].clear()
        return web.Response(status=204)

    async def execute(self, request: web.Request) -> web.StreamResponse:
        """Runs Python in this process, for programs of the tests' own; a sleep of theirs is awaited, not slept."""
        head = await request.json()
        names = self.names.setdefault(head["context_id"] or "default", {})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        out, err = io.StringIO(), io.StringIO()
        error: dict[str, Any] | None = None

        async def say(**line: Any) -> None:
            await response.write(json.dumps(line).encode() + b"\n")

        if "await_forever" in head["code"]:
            await say(type="stdout", text="early\n", timestamp="t")
            await asyncio.sleep(30)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                exec(head["code"], names)  # noqa: S102
        except Exception as problem:
            error = {"name": type(problem).__name__, "value": str(problem), "traceback": traceback.format_exc()}
        for kind, text in (("stdout", out.getvalue()), ("stderr", err.getvalue())):
            if text:
                await say(type=kind, text=text, timestamp="t")
        if error:
            await say(type="error", **error)
        await say(type="number_of_executions", execution_count=1)
        await say(type="end_of_execution")
        return response
