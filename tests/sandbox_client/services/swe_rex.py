"""SWE-ReX's server as it answers: exceptions with status 511 and the name of their class."""

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from .machine import Machine

KEY = "the key"


def failure(kind: str, message: str) -> web.Response:
    told = {"message": message, "class_path": f"swerex.exceptions.{kind}", "traceback": "", "extra_info": {}}
    return web.json_response({"swerexception": told}, status=511)


def app(machine: Machine) -> web.Application:
    shells: dict[str, dict[str, Any]] = {}
    turn = asyncio.Lock()  # the server runs one command at a time, and blocks its loop meanwhile

    @web.middleware
    async def authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("X-API-Key") != KEY:
            return web.json_response({"detail": "Invalid API Key"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def execute(request: web.Request) -> web.Response:
        head = await request.json()
        async with turn:
            ran = await machine.run(head["command"], head["timeout"], head["cwd"])
        if ran.code is None:
            return failure("CommandTimeoutError", f"Timeout ({head['timeout']}s) exceeded while running command")
        texts = [data.decode(errors="backslashreplace") for data in (ran.stdout, ran.stderr)]
        return web.json_response({"stdout": texts[0], "stderr": texts[1], "exit_code": ran.code})

    async def upload(request: web.Request) -> web.Response:
        form = await request.post()
        target = Path(str(form["target_path"]))
        target.parent.mkdir(parents=True, exist_ok=True)
        file = form["file"]
        assert isinstance(file, web.FileField)
        target.write_bytes(file.file.read())
        return web.json_response({})

    async def create(request: web.Request) -> web.Response:
        shells[(await request.json())["session"]] = {"lines": []}
        return web.json_response({"output": "", "session_type": "bash"})

    async def run(request: web.Request) -> web.Response:
        head = await request.json()
        if head["session"] not in shells:
            return failure("SessionDoesNotExistError", f"session {head['session']!r} does not exist")
        lines = shells[head["session"]]["lines"]
        ran = await machine.run(["bash", "-c", "\n".join([*(f"{{ {old}\n}} >/dev/null" for old in lines), head["command"]])], 5)
        lines.append(head["command"])
        output = (ran.stdout + ran.stderr).decode()
        return web.json_response({"output": output, "exit_code": ran.code, "failure_reason": "", "session_type": "bash"})

    async def close(request: web.Request) -> web.Response:
        head = await request.json()
        if shells.pop(head["session"], None) is None:
            return failure("SessionDoesNotExistError", f"session {head['session']!r} does not exist")
        return web.json_response({"session_type": "bash"})

    async def alive(_: web.Request) -> web.Response:
        return web.json_response({"is_alive": True, "message": ""})

    made = web.Application(middlewares=[authenticate], client_max_size=64 << 20)
    made.add_routes([web.post("/execute", execute), web.post("/upload", upload), web.post("/create_session", create)])
    made.add_routes([web.post("/run_in_session", run), web.post("/close_session", close), web.get("/is_alive", alive)])
    return made
