"""What a collection of tools is, and what the tools of one episode share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxagent.tools import Tool, ToolFailed
from sandbox_client import ExecResult, Outcome

GRACE_S = 30.0  # for the sandbox to answer after a program's own deadline

Task = Mapping[str, Any]


@dataclass
class Workplace:
    """One episode's: its sandbox session, opened by the first call that needs it, and all that must be closed in the end.

    Args:
        name: keys the session; never used twice.
        functions, options: of the session, as in `SandboxClient.open_session`.
        files: path -> text, written into the session before anything else is done in it.
    """

    name: str
    sandbox: Any
    functions: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._session: Any = None
        self._opening = asyncio.Lock()
        self._closing: list[Callable[[], Awaitable[None]]] = []

    async def session(self) -> Any:
        async with self._opening:  # calls of one turn may come at once
            if self._session is None:
                session = await self.sandbox.open_session(self.name, self.functions, self.options)
                self.at_the_end(session.close)
                for path, text in self.files.items():
                    await session.write_file(path, text.encode())
                self._session = session
        return self._session

    def at_the_end(self, close: Callable[[], Awaitable[None]]) -> None:
        self._closing.append(close)

    async def close(self) -> None:
        """Closes the last opened first; every one is closed, whatever another does."""
        while self._closing:
            try:
                await self._closing.pop()()
            except BaseException:
                await self.close()
                raise


@dataclass(frozen=True)
class Kit:
    """A collection of tools.

    Args:
        tools: makes an episode's from its workplace and its task. With a workplace that has no sandbox it still tells them.
        runs_code: programs of the policy run in the session.
        functions: the module whose `session_functions` the session must hold, or nothing.
        options: what they get, from the task.
        remembers: whether what is kept in it outlives the dialogue: see `toolbox/memory.py`.
    """

    tools: Callable[[Workplace, Task], list[Tool]]
    runs_code: bool = False
    functions: str = ""
    options: Callable[[Task], dict[str, Any]] = lambda task: {}
    remembers: bool = False


def text_of(result: ExecResult) -> str:
    """What a program printed and the value of its last expression. Raises ToolFailed with the same and the error."""
    said = [result.stdout, result.stderr, result.value or ""]
    failed = result.outcome != Outcome.OK
    said += [f"error: {result.error or result.outcome}"] if failed else []
    text = "\n".join(part.strip("\n") for part in said if part) or "no output"
    if failed:
        raise ToolFailed(text)
    return text
