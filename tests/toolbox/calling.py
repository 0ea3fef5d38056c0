"""Calls of a kit's tools, as an episode would make them."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxagent.toolbox.box import Toolbox
from jaxagent.tools import dispatch_all
from jaxagent.types import ToolCall, ToolRecord


def called(box: Toolbox, *calls: tuple[str, dict[str, Any]], sandbox: Any = None, task: Any = None) -> list[ToolRecord]:
    """The records of these calls, one turn each, in one episode."""

    async def play() -> list[ToolRecord]:
        place = box.workplace("episode", sandbox, task or {})
        tools = box.tools(place, task or {})
        try:
            return [record for name, arguments in calls for record in await dispatch_all(tools, [ToolCall(name, arguments)])]
        finally:
            await place.close()

    return asyncio.run(play())
