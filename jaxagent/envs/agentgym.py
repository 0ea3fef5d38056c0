"""`agentgym`: the worlds of AgentGym, each behind an HTTP server of its own, which name the same things differently.

An environment is made by POST /create, which answers with its id, and serves many episodes: most servers never forget one, so
ids are used again. POST /reset takes the number of a task, POST /step the text of an action. Servers answer 200 with
{"error": ...} for what is wrong with an action and for what is wrong with themselves alike; after /reset it is theirs, after
/step the episode ends as broken, because nothing tells whose fault it was.

What a server calls things stands in `SERVERS`, as its own client has it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message

_MOST_BYTES = 16 << 20  # of a reply


@dataclass(frozen=True)
class Server:
    """The words of one world's server.

    Args:
        index: of /reset, that names the task.
        key: of every request, that names the environment.
        text: of an answer to /step, that is the observation.
        score: of an answer, that is what was scored so far; empty where `reward` is the increment.
        full: the highest score or sum of rewards; rewards are divided by it.
        observe: the observation after /reset is asked for by GET /observation.
        intro: of the answer to /reset, that stands before the first observation.
        choices: of an answer, that lists what can be done.
        fixed: sent with every /reset.
    """

    index: str = "data_idx"
    key: str = "id"
    text: str = "observation"
    score: str = ""
    full: float = 1.0
    observe: bool = False
    intro: str = ""
    choices: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)


SERVERS = {
    "alfworld": Server("game", choices="available_actions", fixed={"world_type": "Text"}),
    "babyai": Server(score="score"),
    "sciworld": Server(score="score", full=100.0, intro="task_description"),
    "textcraft": Server(),
    "webshop": Server("session_id", "env_idx", "state", observe=True),
    "sqlgym": Server("item_id", "env_idx", "state", observe=True),
    "maze": Server("game"),
}


class AgentGymFault(Exception):
    """A server failed; the episode is to be played again."""


class AgentGym:
    """The world.

    Args:
        url: of the server, as in http://127.0.0.1:36001.
        server: which world it holds.
        tasks: how many it has; a tenth each is held out for demonstrations, validation and test.
        rules: said before the first observation.
        timeout_s: of one request.
    """

    functions = ""
    tools = ()

    def __init__(self, url: str, server: str, tasks: int, rules: str = "", timeout_s: float = 300.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"env.options.url must be that of an AgentGym server, as in http://127.0.0.1:36001; got {url!r}")
        if server not in SERVERS:
            raise ValueError(f"env.options.server must be one of {', '.join(SERVERS)}; got {server!r}")
        if tasks < 10:
            raise ValueError(f"env.options.tasks must be at least 10, to be split, got {tasks}")
        if timeout_s <= 0:
            raise ValueError(f"env.options.timeout_s must be positive, got {timeout_s}")
        self.url, self.name, self.words = url.rstrip("/"), server, SERVERS[server]
        self.rules, self.timeout_s = rules, timeout_s
        tenth = tasks // 10
        self.sizes = {"train": tasks - 3 * tenth, "demo": tenth, "valid": tenth, "test": tenth}
        self.free: list[Any] = []  # ids of environments that no episode has

    def task(self, split: str, index: int) -> Task:
        splits = list(self.sizes)
        number = sum(self.sizes[name] for name in splits[: splits.index(split)]) + index
        return {"id": f"{self.name}/{split}/{index}", "seed": number, "difficulty": self.name}

    def episode(self, name: str, sandbox: Any) -> Env:
        return AgentGymEpisode(self)


class AgentGymEpisode:
    """One episode in an environment of the server."""

    def __init__(self, world: AgentGym):
        self.world, self.words = world, world.words
        self.http: aiohttp.ClientSession | None = None
        self.id: Any = None
        self.score, self.text = 0.0, ""

    async def reset(self, task: Task, seed: int) -> Step:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.world.timeout_s))
        words = self.words
        self.id = self.world.free.pop() if self.world.free else await self._create()
        told = self._sound(await self._post("reset", {words.index: task["seed"], **words.fixed}), "reset")
        seen = await self._get("observation") if words.observe else told
        self.score = float(told.get(words.score) or 0.0) if words.score and isinstance(told, dict) else 0.0
        parts = [self.world.rules, told.get(words.intro, "") if isinstance(told, dict) else "", self._observation(seen)]
        self.text = parts[-1]
        return Step([Message("user", "\n\n".join(filter(None, parts)))], state=self.text)

    async def step(self, action: Message) -> Step:
        fault = action.error or ("there are no tools here: write the action as text" if action.calls else "")
        if fault:
            return Step([Message("user", f"error: {fault}")], reason=fault, state=self.text)
        told = await self._post("step", {"action": action.content.strip()})
        if not isinstance(told, dict) or "error" in told or self.words.text not in told:
            self.id = None  # nobody knows what state it is in
            return Step(truncated=True, error=f"{self.world.url}/step: {str(told)[:200]}")
        self.text = self._observation(told)
        reward = float(told.get("reward") or 0.0)
        if self.words.score:
            score = float(told.get(self.words.score) or 0.0)
            reward, self.score = score - self.score, score
        done = bool(told.get("done"))
        return Step([Message("user", self.text)], reward=reward / self.words.full, terminated=done, state=self.text)

    async def close(self) -> None:
        if self.id is not None:
            self.world.free.append(self.id)
        http, self.http, self.id = self.http, None, None
        if http is not None:
            await http.close()

    async def _create(self) -> Any:
        told = await self._post("create", {})
        if isinstance(told, dict):
            told = next((told[key] for key in (self.words.key, "id", "env_idx") if key in told), told)
        if not isinstance(told, int | str):
            raise AgentGymFault(f"{self.world.url}/create: an id was wanted, got {str(told)[:200]}")
        return told

    def _sound(self, told: Any, path: str) -> Any:
        if isinstance(told, dict) and "error" in told:
            self.id = None
            raise AgentGymFault(f"{self.world.url}/{path}: {told['error']}")
        return told

    def _observation(self, told: Any) -> str:
        if isinstance(told, str):
            return told
        if not isinstance(told, dict) or self.words.text not in told:
            self.id = None
            raise AgentGymFault(
                f"{self.world.url}: no {self.words.text!r} in {str(told)[:200]}; is it a {self.world.name} server?"
            )
        choices = told.get(self.words.choices) if self.words.choices else None
        return str(told[self.words.text]) + (f"\nYou can: {', '.join(choices)}" if choices else "")

    async def _post(self, path: str, data: dict[str, Any]) -> Any:
        return await self._send("POST", path, json=data if self.id is None else {self.words.key: self.id, **data})

    async def _get(self, path: str) -> Any:
        return await self._send("GET", path, params={self.words.key: self.id})

    async def _send(self, method: str, path: str, **what: Any) -> Any:
        """The answer as JSON. Raises AgentGymFault; the environment is then left to the server, as where it is cancelled."""
        if self.http is None:
            raise AgentGymFault(f"{self.world.url}/{path}: this episode has not begun")
        held, self.id = self.id, None
        try:
            async with self.http.request(method, f"{self.world.url}/{path}", **what) as reply:
                content = bytearray()
                async for chunk in reply.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > _MOST_BYTES:
                        raise AgentGymFault(f"a reply of more than {_MOST_BYTES >> 20} MiB")
            if reply.status != 200:
                raise AgentGymFault(f"status {reply.status}: {content.decode(errors='replace')[:200]}")
            told = json.loads(content)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError, OSError, AgentGymFault) as error:
            raise AgentGymFault(f"{self.world.url}/{path}: {type(error).__name__}: {error}") from None
        self.id = held
        return told


make_world = AgentGym
