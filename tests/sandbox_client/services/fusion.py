"""SandboxFusion as it answers: always status 200, one `Failed` for a time limit and for an exit code alike."""

import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import web

from .machine import Machine

RUNNERS = {"python": ["python3", "-c"], "bash": ["bash", "-c"]}


def app(machine: Machine) -> web.Application:
    async def run_code(request: web.Request) -> web.Response:
        head: dict[str, Any] = await request.json()
        place = Path(tempfile.mkdtemp(dir=machine.place))
        for path, text in head["files"].items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(base64.b64decode(text))
        words = [*RUNNERS[head["language"]], head["code"]]
        ran = await machine.run(words, head["run_timeout"], place, stdin=(head.get("stdin") or "").encode())
        late = ran.code is None
        result = {
            "status": "TimeLimitExceeded" if late else "Finished",
            "execution_time": 0.1,
            "return_code": ran.code,
            "stdout": ran.stdout.decode(errors="replace"),
            "stderr": ran.stderr.decode(errors="replace"),
        }
        files = {p: base64.b64encode((place / p).read_bytes()).decode() for p in head["fetch_files"] if (place / p).is_file()}
        shutil.rmtree(place)
        return web.json_response(
            {
                "status": "Failed" if late or ran.code else "Success",
                "message": "",
                "compile_result": None,
                "run_result": result,
                "executor_pod_name": None,
                "files": files,
            }
        )

    async def ping(_: web.Request) -> web.Response:
        return web.json_response("pong")

    made = web.Application(client_max_size=64 << 20)
    made.add_routes([web.post("/run_code", run_code), web.get("/v1/ping", ping)])
    return made
