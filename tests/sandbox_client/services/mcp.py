"""An MCP server over streamable HTTP: replies as JSON or as an event stream, in turn, since a client must read both."""

import json
import sys
from typing import Any

from aiohttp import web

from .machine import Machine

TOOLS = [
    {"name": "python", "inputSchema": {"type": "object", "properties": {"code": {"type": "string"}}}},
    {"name": "add", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
]


def app(machine: Machine) -> web.Application:
    sessions: set[str] = set()
    answered = 0

    async def use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "fail":
            return {"content": [{"type": "text", "text": "it broke"}], "isError": True}
        if name == "add":
            total = arguments["a"] + arguments["b"]
            return {"content": [{"type": "text", "text": str(total)}], "structuredContent": {"total": total}}
        ran = await machine.run([sys.executable, "-c", arguments["code"]], 30)
        text = (ran.stdout if ran.code == 0 else ran.stderr).decode(errors="replace")
        return {"content": [{"type": "text", "text": text}], "isError": ran.code != 0}

    async def post(request: web.Request) -> web.StreamResponse:
        nonlocal answered
        head = json.loads(await request.read())
        assert "text/event-stream" in request.headers["Accept"] and head["jsonrpc"] == "2.0"
        extra = {}
        if head["method"] == "initialize":
            name = f"session-{len(sessions)}"
            sessions.add(name)
            extra["Mcp-Session-Id"] = name
            result: dict[str, Any] = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x"},
            }
        elif request.headers.get("Mcp-Session-Id") not in sessions:
            return web.json_response({"jsonrpc": "2.0", "error": {"code": -32001, "message": "Session not found"}}, status=404)
        elif head["method"].startswith("notifications/"):
            return web.Response(status=202)
        elif head["method"] == "tools/list":
            result = {"tools": TOOLS}
        else:
            result = await use(head["params"]["name"], head["params"]["arguments"])
        answer = {"jsonrpc": "2.0", "id": head["id"], "result": result}
        answered += 1
        if answered % 2:
            return web.json_response(answer, headers=extra)
        note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "working"}}
        lines = "".join(f"event: message\ndata: {json.dumps(message)}\n\n" for message in (note, answer))
        return web.Response(text=lines, content_type="text/event-stream", headers=extra)

    async def delete(request: web.Request) -> web.Response:
        sessions.discard(request.headers.get("Mcp-Session-Id", ""))
        return web.Response(status=204)

    made = web.Application(client_max_size=64 << 20)
    made.add_routes([web.post("/mcp", post), web.delete("/mcp", delete)])
    return made
