"""OpenEnv's server as it answers on its WebSocket: an environment of its own for every socket, errors by code."""

import json
import sys
from typing import Any

from aiohttp import web

from .machine import Machine


def app(machine: Machine, capacity: int = 8) -> web.Application:
    live: list[Any] = []

    async def socket(request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse(max_msg_size=16 << 20)
        await response.prepare(request)
        if len(live) >= capacity:
            await response.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await response.close()
            return response
        live.append(response)
        steps = 0
        try:
            async for message in response:
                try:
                    head = json.loads(message.data)
                except ValueError:
                    await response.send_json({"type": "error", "data": {"message": "no JSON", "code": "INVALID_JSON"}})
                    continue
                if head["type"] == "close":
                    break
                if head["type"] == "reset":
                    steps = 0
                    seen: dict[str, Any] = {"stdout": "", "stderr": "", "exit_code": 0}
                    await response.send_json(
                        {"type": "observation", "data": {"observation": seen, "reward": None, "done": False}}
                    )
                elif head["type"] == "state":
                    await response.send_json({"type": "state", "data": {"step_count": steps}})
                elif "code" not in head["data"]:
                    await response.send_json(
                        {"type": "error", "data": {"message": "code: missing", "code": "VALIDATION_ERROR"}}
                    )
                elif head["data"]["code"] == "boom":
                    await response.send_json({"type": "error", "data": {"message": "disk full", "code": "EXECUTION_ERROR"}})
                elif head["data"]["code"] == "hang":
                    continue
                else:
                    steps += 1
                    ran = await machine.run([sys.executable, "-c", head["data"]["code"]], 30)
                    texts = [data.decode(errors="replace") for data in (ran.stdout, ran.stderr)]
                    seen = {"stdout": texts[0], "stderr": texts[1], "exit_code": ran.code}
                    await response.send_json(
                        {"type": "observation", "data": {"observation": seen, "reward": 1.0 * steps, "done": False}}
                    )
        finally:
            live.remove(response)
        return response

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    made = web.Application()
    made.add_routes([web.get("/ws", socket), web.get("/health", health)])
    return made
