"""`openenv`: any environment that an OpenEnv server holds, over its websocket; one connection is one episode.

The server's HTTP routes make a new environment for every call, so that only the websocket can play an episode of several
turns. The protocol is that of openenv-core 0.3: {"type": "reset", "data": {...}} and {"type": "step", "data": ACTION} are
answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data": {"message",
"code"}}.

An action is a JSON object of the environment's own fields. Where `field` is given, the policy's text is the value of that
field; else the text must be the whole object. An action that the server refuses is told to the policy; what else goes wrong
is a fault of the server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.synchronous import seed_of
from jaxagent.types import Message

_REFUSED = {"VALIDATION_ERROR", "INVALID_JSON"}  # what is wrong with an action, and not with the server
_MOST_BYTES = 16 << 20


class OpenEnvFault(Exception):
    """The server failed; the episode is to be played again."""


class OpenEnv:
    """The world.

    Args:
        url: of the server, as in http://127.0.0.1:8000.
        field: of an action, that the policy's text fills; empty for an action in JSON.
        shows: field of the observation that is its text; empty shows it all, as JSON.
        rules: said before the first observation.
        timeout_s: of one message. Reset may make the environment anew.
    """

    functions = ""
    tools = ()

    def __init__(self, url: str, field: str = "", shows: str = "", rules: str = "", timeout_s: float = 60.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"env.options.url must be that of an OpenEnv server, as in http://127.0.0.1:8000; got {url!r}")
        if timeout_s <= 0:
            raise ValueError(f"env.options.timeout_s must be positive, got {timeout_s}")
        self.url, self.field, self.shows = f"{url.rstrip('/')}/ws", field, shows
        self.rules, self.timeout_s = rules, timeout_s

    def task(self, split: str, index: int) -> Task:
        return {"id": f"openenv/{split}/{index}", "seed": seed_of(split, index), "difficulty": "open"}

    def episode(self, name: str, sandbox: Any) -> Env:
        return OpenEnvEpisode(self, name)


class OpenEnvEpisode:
    """One connection."""

    def __init__(self, world: OpenEnv, name: str):
        self.world, self.name = world, name
        self.http: aiohttp.ClientSession | None = None
        self.line: aiohttp.ClientWebSocketResponse | None = None
        self.state = ""

    async def reset(self, task: Task, seed: int) -> Step:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.world.timeout_s)
        self.http = aiohttp.ClientSession(timeout=timeout)
        try:
            async with asyncio.timeout(self.world.timeout_s):
                self.line = await self.http.ws_connect(self.world.url, max_msg_size=_MOST_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or f"not within {self.world.timeout_s:g} s (env.options.timeout_s)"
            raise OpenEnvFault(f"env.options.url={self.world.url}: no OpenEnv server answers there: {why}") from None
        text = self._text(await self._ask("reset", {"seed": seed, "episode_id": self.name}))
        return self._step(f"{self.world.rules}\n\n{text}" if self.world.rules else text)

    async def step(self, action: Message) -> Step:
        fault = action.error or ("there are no tools here: write the action as text" if action.calls else "")
        data: Any = {self.world.field: action.content.strip()}
        if not self.world.field and not fault:
            try:
                data = json.loads(action.content)
            except (ValueError, RecursionError) as error:
                fault = f"the action must be a JSON object: {error}"
            if not fault and not isinstance(data, dict):
                fault = "the action must be a JSON object"
        if fault:
            return self._step(f"error: {fault}", reason=fault, state=self.state)
        answer = await self._ask("step", data)
        if "refused" in answer:
            return self._step(f"error: {answer['refused']}", reason="refused", state=self.state)
        done = bool(answer.get("done"))
        return self._step(self._text(answer), reward=float(answer.get("reward") or 0.0), terminated=done)

    async def close(self) -> None:
        line, http, self.line, self.http = self.line, self.http, None, None
        if line is not None and not line.closed:
            await line.send_json({"type": "close"})
            await line.close()
        if http is not None:
            await http.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The observation that a message is answered with, or what was refused. Raises OpenEnvFault for everything else."""
        where, limit_s = f"{self.world.url}, {kind}", self.world.timeout_s
        if self.line is None:
            raise OpenEnvFault(f"{where}: this episode has not begun")
        try:
            await self.line.send_json({"type": kind, "data": data})
            answer = await self.line.receive_json(timeout=limit_s)
        except TimeoutError:
            raise OpenEnvFault(f"{where}: no answer within {limit_s:g} s (env.options.timeout_s)") from None
        except (aiohttp.ClientError, TypeError, ValueError, RecursionError, OSError) as error:  # closed, or no text, or no JSON
            raise OpenEnvFault(f"{where}: {type(error).__name__}: {error}") from None
        said, told = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else ("", None)
        if said == "observation" and isinstance(told, dict):
            return told
        if said == "error" and isinstance(told, dict):
            if kind == "step" and told.get("code") in _REFUSED:
                return {"refused": str(told.get("message", ""))}
            raise OpenEnvFault(f"{where}: {told.get('code')}: {told.get('message')}")
        raise OpenEnvFault(f"{where}: the server answered {str(answer)[:80]!r}")

    def _text(self, answer: dict[str, Any]) -> str:
        seen = answer.get("observation", {})
        if self.world.shows:
            if not isinstance(seen, dict) or self.world.shows not in seen:
                known = ", ".join(seen) if isinstance(seen, dict) else type(seen).__name__
                raise OpenEnvFault(f"env.options.shows={self.world.shows}: the observation has no such field; it has {known}")
            seen = seen[self.world.shows]
        self.state = seen if isinstance(seen, str) else json.dumps(seen, sort_keys=True)
        return self.state

    def _step(self, text: str, *, state: str | None = None, **said: Any) -> Step:
        return Step([Message("user", text)], state=self.state if state is None else state, **said)


make_world = OpenEnv
