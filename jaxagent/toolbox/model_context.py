"""The tools of an MCP server, started as a program (stdio) or reached over streamable HTTP, through the package `mcp`.

A server is code that the user trusts: a stdio server runs as this user, and only the arguments of calls come from the policy. A
service that runs the policy's programs belongs behind the sandbox client, whose back end `mcp` is another thing.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shlex
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxagent.toolbox.kit import Kit, Task, Workplace
from jaxagent.toolbox.web import wanted_url
from jaxagent.tools import Tool, ToolFailed
from jaxagent.types import ToolSpec
from sandbox_client import Unknown, Unreachable

_CLOSE_S = 10.0
_OF_THE_CALL = (-32602, -32601)  # wrong arguments, no such tool: the policy may read it


class Connection:
    """One session with a server. A task of its own holds it, since the package wants it left where it was entered."""

    def __init__(self, target: Any, timeout_s: float):
        self._target, self._timeout_s = target, timeout_s
        self._done = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None

    async def client(self) -> Any:
        """Opens the session at the first call. A caller that gives up leaves it to open for the next."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._ready))
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        package = importlib.import_module("mcp.client.client")
        try:
            async with package.Client(self._target, read_timeout_seconds=self._timeout_s) as client:
                if not ready.done():
                    ready.set_result(client)
                await self._done.wait()
        except Exception as error:  # groups of errors, from its own tasks
            if not ready.done():
                self._ready = None  # the next call tries again
                ready.set_exception(Unreachable(f"the MCP server {described(self._target)} did not open: {_inner(error)}"))
        finally:
            ready.cancel()  # if nobody has heard yet

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a call's result. Raises ToolFailed for the tool's own error, InfrastructureError."""
        client = await self.client()
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if code in _OF_THE_CALL:
                raise ToolFailed(f"error: {error}") from None
            raise Unknown(f"calling {name} of {described(self._target)}: {_inner(error)}", 1, may_have_executed=True) from None
        text = "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")
        structured = getattr(result, "structured_content", None)
        text = text or (json.dumps(structured) if structured is not None else "")
        if result.is_error:
            raise ToolFailed(text or "error")
        return text

    async def close(self) -> None:
        self._done.set()
        if self._holder:
            done, _ = await asyncio.wait([self._holder], timeout=_CLOSE_S)
            if not done:
                self._holder.cancel()


def mcp(command: str = "", url: str = "", timeout_s: float = 30.0, pure: tuple[str, ...] = ()) -> Kit:
    """The kit `mcp`. Every episode has a session of its own; a server's tools are listed once, when the world is made.

    Args:
        command: what starts a server on this machine, as in a shell, for stdio.
        url: of a server over streamable HTTP; one of the two.
        timeout_s: of a call.
        pure: names of tools that change nothing.

    Raises ValueError where the server does not open, or the package is missing.
    """
    if bool(command) == bool(url):
        raise ValueError(f"toolbox.mcp: either a command or a url is wanted, got {command!r} and {url!r}")
    try:
        stdio = importlib.import_module("mcp.client.stdio")
        importlib.import_module("mcp.client.client")
    except ImportError:
        raise ValueError("toolbox.mcp needs the package mcp, version 2 or later: pip install 'jaxagent[mcp]'") from None
    words = shlex.split(command)
    target = stdio.StdioServerParameters(command=words[0], args=words[1:]) if words else wanted_url(url, "toolbox.mcp.url")

    async def listing() -> list[ToolSpec]:
        connection = Connection(target, timeout_s)
        try:
            client = await connection.client()
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += [ToolSpec(one.name, one.description or "", dict(one.input_schema)) for one in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    return found
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as apart:  # this thread may have a loop of its own
        try:
            specs = apart.submit(asyncio.run, asyncio.wait_for(listing(), timeout_s)).result()
        except (Unreachable, TimeoutError) as error:
            raise ValueError(f"toolbox.mcp: {error or f'no answer within {timeout_s:g} s'}") from None
    if strange := [name for name in pure if name not in [spec.name for spec in specs]]:
        known = ", ".join(spec.name for spec in specs)
        raise ValueError(f"toolbox.mcp.pure names {strange[0]!r}; {described(target)} has {known}")

    def tools(place: Workplace, task: Task) -> list[Tool]:
        connection: Connection | None = None

        def run_fn(name: str) -> Callable[..., Awaitable[str]]:
            async def run(**arguments: Any) -> str:
                nonlocal connection
                if connection is None:
                    connection = Connection(target, timeout_s)
                    place.at_the_end(connection.close)
                return await connection.call(name, arguments)

            return run

        return [Tool(spec, run_fn(spec.name), timeout_s, spec.name in pure) for spec in specs]

    return Kit(tools)


def described(target: Any) -> str:
    return target if isinstance(target, str) else shlex.join([target.command, *target.args])


def _inner(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
