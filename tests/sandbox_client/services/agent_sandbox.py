"""agent-sandbox behind one address: the router to its runtime, and the API server that binds claims."""

import shlex
from typing import Any

from aiohttp import web
from custom_resources import faults

from .machine import Machine

KUBERNETES_TOKEN, NAMESPACE = "cluster-token", "rollouts"
CLAIMS = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxclaims"


class Fake:
    """What the fake remembers, for the tests to look at."""

    def __init__(self, machine: Machine, looks_until_ready: int = 2) -> None:
        self.machine = machine
        self.claims: dict[str, dict[str, Any]] = {}
        self.looks = 0
        self._looks_until_ready = looks_until_ready

    def app(self) -> web.Application:
        @web.middleware
        async def routed(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path.startswith("/apis/"):
                if request.headers.get("Authorization") != f"Bearer {KUBERNETES_TOKEN}":
                    return web.json_response({"kind": "Status", "message": "Unauthorized", "code": 401}, status=401)
            else:
                assert KUBERNETES_TOKEN not in str(request.headers)
                names = [f"warm-{claim}" for claim in self.claims]
                if request.headers.get("X-Sandbox-Namespace") != NAMESPACE or request.headers["X-Sandbox-ID"] not in names:
                    return web.json_response({"detail": "Sandbox not found"}, status=404)
                assert request.headers["X-Sandbox-Port"] == "8888" and float(request.headers["X-Sandbox-Timeout"]) > 0
            response: web.StreamResponse = await handler(request)
            return response

        made = web.Application(middlewares=[routed], client_max_size=64 << 20)
        made.add_routes(
            [
                web.post(CLAIMS, self.claim),
                web.get(CLAIMS + "/{name}", self.look),
                web.delete(CLAIMS + "/{name}", self.drop),
                web.get("/", self.root),
                web.post("/execute", self.execute),
                web.get("/download/{path:.*}", self.download),
                web.post("/upload", self.upload),
            ]
        )
        return made

    async def claim(self, request: web.Request) -> web.Response:
        head = await request.json()
        assert head["kind"] == "SandboxClaim" and faults(head) == [] and head["spec"]["warmPoolRef"]["name"] == "python-pool"
        name = head["metadata"]["name"]
        if name in self.claims:
            return web.json_response({"kind": "Status", "reason": "AlreadyExists"}, status=409)
        self.claims[name] = head
        return web.json_response(head, status=201)

    async def look(self, request: web.Request) -> web.Response:
        self.looks += 1
        name = request.match_info["name"]
        ready = "True" if self.looks >= self._looks_until_ready else "False"
        condition = {"type": "Ready", "status": ready, "reason": "SandboxNotReady"}
        return web.json_response(
            {**self.claims[name], "status": {"sandbox": {"name": f"warm-{name}"}, "conditions": [condition]}}
        )

    async def drop(self, request: web.Request) -> web.Response:
        found = self.claims.pop(request.match_info["name"], None)
        return web.json_response({}, status=200 if found else 404)

    async def root(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "message": "Sandbox Runtime is active."})

    async def execute(self, request: web.Request) -> web.Response:
        head = await request.json()
        words = [word.replace("/app", str(self.machine.place)) for word in shlex.split(head["command"])]
        ran = await self.machine.run(words, head.get("timeout_seconds"))
        late = ran.code is None
        texts = [data.decode(errors="replace") for data in (ran.stdout, ran.stderr)]
        return web.json_response(
            {
                "stdout": texts[0],
                "stderr": texts[1],
                "exit_code": 124 if late else ran.code,
                **({"timed_out": True} if late else {}),
            }
        )

    async def download(self, request: web.Request) -> web.Response:
        path = self.machine.file(request.match_info["path"], "/app")
        if not path.is_file():
            return web.json_response({"detail": "File not found"}, status=404)
        return web.Response(body=path.read_bytes(), content_type="application/octet-stream")

    async def upload(self, request: web.Request) -> web.Response:
        file = (await request.post())["file"]
        assert isinstance(file, web.FileField)
        path = self.machine.file(file.filename, "/app")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.file.read())
        return web.json_response({"message": "uploaded"})
