"""Prime's control service and gateway behind one address. A start under a known uuid attaches to the first one's process."""

import asyncio
import base64
from typing import Any

from aiohttp import web

from .e2b import envelope, pieces, read_envelope
from .machine import Machine, Run

KEY, HOME = "prime-key", "/root"
GATEWAY = "/gateway/user/job"


class Fake:
    """What the fake remembers, for the tests to look at."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.status = ["PENDING", "RUNNING"]
        self.live = True
        self.tokens = 0
        self.processes: dict[str, asyncio.Task[Run]] = {}

    def app(self) -> web.Application:
        @web.middleware
        async def authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
            wanted = f"token-{self.tokens}" if request.path.startswith(GATEWAY) else KEY
            if request.headers.get("Authorization") != f"Bearer {wanted}":
                return web.json_response({"error": "unauthorized"}, status=401)
            if request.path.startswith(GATEWAY) and not self.live:
                return web.json_response({"error": "sandbox_not_found"}, status=502)
            response: web.StreamResponse = await handler(request)
            return response

        made = web.Application(middlewares=[authenticate], client_max_size=64 << 20)
        made.add_routes(
            [
                web.post("/api/v1/sandbox", self.create),
                web.get("/api/v1/sandbox/{id}", self.look),
                web.delete("/api/v1/sandbox/{id}", self.delete),
                web.post("/api/v1/sandbox/{id}/auth", self.auth),
                web.post(GATEWAY + "/command_session.CommandSession/Start", self.start),
                web.post(GATEWAY + "/upload", self.upload),
                web.get(GATEWAY + "/download", self.download),
            ]
        )
        return made

    async def create(self, request: web.Request) -> web.Response:
        head = await request.json()
        assert head["docker_image"] and head["idempotency_key"]
        return web.json_response({"id": "sb-1", "name": head["name"], "status": self.status[0]})

    async def look(self, _: web.Request) -> web.Response:
        if len(self.status) > 1:
            self.status.pop(0)
        return web.json_response({"id": "sb-1", "status": self.status[0]})

    async def delete(self, _: web.Request) -> web.Response:
        self.live = False
        return web.json_response({})

    async def auth(self, request: web.Request) -> web.Response:
        self.tokens += 1
        url = f"http://{request.host}/gateway"
        return web.json_response({"gateway_url": url, "user_ns": "user", "job_id": "job", "token": f"token-{self.tokens}"})

    async def start(self, request: web.Request) -> web.StreamResponse:
        head = read_envelope(await request.read())
        spec, key = head["command"], head["sessionUuid"]
        if key not in self.processes:
            limit_s = int(request.headers["Connect-Timeout-Ms"]) / 1000
            where = self.machine.file(spec["cwd"], HOME)
            work = self.machine.run([spec["cmd"], *spec["args"]], limit_s, where, spec["envs"])
            self.processes[key] = asyncio.ensure_future(work)
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        await response.write(envelope({"event": {"start": {"pid": 9}}}))
        ran = await asyncio.shield(self.processes[key])
        for name, data in (("stdout", ran.stdout), ("stderr", ran.stderr)):
            for part in pieces(data):
                await response.write(envelope({"event": {"data": {name: base64.b64encode(part).decode()}}}))
        if ran.code is None:
            await response.write(envelope({"error": {"code": "deadline_exceeded", "message": "too late"}}, 2))
        else:
            await response.write(envelope({"event": {"end": {"exitCode": ran.code} if ran.code else {}}}))
            await response.write(envelope({}, 2))
        return response

    async def upload(self, request: web.Request) -> web.Response:
        file = (await request.post())["file"]
        assert isinstance(file, web.FileField) and request.query["sandbox_id"] == "sb-1"
        path = self.machine.file(request.query["path"], HOME)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.file.read())
        return web.json_response({"success": True, "path": request.query["path"]})

    async def download(self, request: web.Request) -> web.Response:
        path = self.machine.file(request.query["path"], HOME)
        return web.Response(body=path.read_bytes()) if path.is_file() else web.json_response({"error": "no file"}, status=404)
