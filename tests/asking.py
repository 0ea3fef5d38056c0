"""A served policy for tests: a scripted sampler behind the door, and who asks it over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from scripted import ScriptedSampler

from jaxagent.chat.template import Template
from jaxagent.door.session import Rules, Session, Slots
from jaxagent.serve import ServeLimits, Server
from jaxagent.types import Sampler, ToolSpec

LOOK = ToolSpec("look", "Looks it up.", {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]})
LOOK_OPENAI = {"type": "function", "function": {"name": "look", "description": LOOK.description, "parameters": LOOK.parameters}}
TOKEN = "a token of some length"
NAME = "tiny"


class Client:
    """Asks a server, and reads what it says."""

    def __init__(self, url: str, http: aiohttp.ClientSession):
        self.url, self.http = url, http
        self.headers: Mapping[str, str] = {}  # of the last answer to a post

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}{path}", headers=headers) as reply:
            return reply.status, await reply.json()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers) as reply:
            self.headers = reply.headers
            return reply.status, await reply.json()

    async def chat(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        status, found = await self.post("/v1/chat/completions", {"model": NAME, "messages": list(messages), **more})
        assert status == 200, found
        return found

    async def stream(self, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """The (name, data) of all events."""
        found, name = [], ""
        async with self.http.post(f"{self.url}{path}", json={"model": NAME, "stream": True, **body}) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.content_type == "text/event-stream"
            async for line in reply.content:
                text = line.decode().strip()
                if text.startswith("event: "):
                    name = text.removeprefix("event: ")
                if text.startswith("data: "):
                    data = text.removeprefix("data: ")
                    found.append((name, data if data == "[DONE]" else json.loads(data)))
        return found


@asynccontextmanager
async def served(
    template: Template,
    sampler: Sampler,
    *,
    token: str = "",
    capacity: int = 4,
    rules: Rules | None = None,
    limits: ServeLimits | None = None,
) -> AsyncIterator[tuple[Client, Session]]:
    slots = Slots(template, sampler, capacity)
    server = Server(slots, NAME, limits or ServeLimits())
    session = Session("s", slots, rules or Rules(400))
    if token:
        server.sessions[token] = session
    else:
        server.open = session
    url = await server.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(url, http), session
    finally:
        await server.stop()


def asked(template: Template, sampler: Sampler, work: Callable[[Client], Awaitable[Any]], **options: Any) -> Any:
    """Runs `work` against a server of its own; in the end the sampler holds nothing."""

    async def whole() -> Any:
        async with served(template, sampler, **options) as (client, _):
            return await work(client)

    found = asyncio.run(whole())
    if isinstance(sampler, ScriptedSampler):
        assert sampler.rows == {}
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
