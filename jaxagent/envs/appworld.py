"""`appworld`: tasks of AppWorld, each played by writing Python, behind AppWorld's own environment servers.

AppWorld's requirements fight with others and its data lies elsewhere, so it is never imported: `appworld serve environment
--port N` in an environment of its own is one server, and holds one task at a time. An episode takes a free server and speaks

    POST /initialize {"task_id", "experiment_name", ...}    -> {"output": {"instruction", "supervisor", "datetime", ...}}
    POST /execute {"task_id", "code"}                       -> {"output": what the code printed}
    POST /task_completed {"task_id"}                        -> {"output": whether complete_task was called}
    POST /evaluate {"task_id"}                              -> {"output": {"success", "num_tests", "passes", "failures"}}
    POST /close {"task_id"}

The code of a turn is what stands in its fence, or all of it. When the task says that it is complete, the episode ends; the
outcome is 1 where every test of its state passes, and the check `tests` is the share that does. A server runs the
policy's programs: it belongs into a container, without anything that those should not reach.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from jaxagent.envs.env import Env, Step, Task
from jaxagent.tools import shortened
from jaxagent.types import Message, ToolSpec

_MOST_BYTES = 16 << 20  # of a reply
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
RULES = (
    "You act for a person by writing Python, a block in every turn; what it prints is shown to you, and its variables stay. "
    "Apps are called as apis.<app>.<api>(...). apis.api_docs.show_app_descriptions(), show_api_descriptions(app_name=...) and "
    "show_api_doc(app_name=..., api_name=...) say what there is; apis.supervisor has the person's accounts and passwords. "
    "Call apis.supervisor.complete_task(), with answer=... where a question was asked, when you are done."
)


class AppWorldFault(Exception):
    """A server failed; the episode is to be played again."""


class AppWorld:
    """The world.

    Args:
        urls: of environment servers, with commas; set rollout.concurrency to as many as there are.
        tasks: a folder with AppWorld's lists of ids, train.txt, dev.txt and test_normal.txt, a line each.
        experiment: the name that servers keep their output under, with a number for each server.
        max_interactions: blocks of an episode that a server takes.
        observation_chars: of what a block printed: head and tail.
        timeout_s: of one request.
    """

    functions = ""
    tools: Sequence[ToolSpec] = ()

    def __init__(
        self,
        urls: str,
        tasks: str,
        experiment: str = "jaxagent",
        max_interactions: int = 50,
        observation_chars: int = 4000,
        timeout_s: float = 300.0,
    ):
        self.urls = [url.strip().rstrip("/") for url in urls.split(",") if url.strip()]
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(
                f"env.options.urls must be of AppWorld environment servers, as in http://127.0.0.1:8000; got {urls!r}"
            )
        if max_interactions < 1 or observation_chars < 1 or timeout_s <= 0:
            raise ValueError("env.options.max_interactions, observation_chars and timeout_s must be positive")
        self.ids = {split: _ids(Path(tasks) / f"{name}.txt") for split, name in _FILES.items()}
        self.sizes = {split: len(ids) for split, ids in self.ids.items()}
        self.experiment, self.max_interactions = experiment, max_interactions
        self.observation_chars, self.timeout_s = observation_chars, timeout_s
        self.free = list(self.urls)
        self.given_back = asyncio.Condition()

    def task(self, split: str, index: int) -> Task:
        return {"id": f"appworld/{split}/{index}", "seed": index, "difficulty": "all", "task_id": self.ids[split][index]}

    def episode(self, name: str, sandbox: Any) -> Env:
        return AppWorldEpisode(self)

    async def take(self) -> str:
        """A server that no episode has."""
        async with self.given_back:
            await self.given_back.wait_for(lambda: self.free)
            return self.free.pop()

    async def give_back(self, url: str) -> None:
        async with self.given_back:
            self.free.append(url)
            self.given_back.notify()


_FILES = {"train": "train", "valid": "dev", "test": "test_normal"}


def _ids(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path}: a list of AppWorld's task ids is wanted there, a line each")
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


class AppWorldEpisode:
    """One episode at one server."""

    def __init__(self, world: AppWorld):
        self.world = world
        self.url = ""
        self.begun = False
        self.http: aiohttp.ClientSession | None = None

    async def reset(self, task: Task, seed: int) -> Step:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.world.timeout_s))
        self.url, self.task_id = await self.world.take(), task["task_id"]
        folder = f"{self.world.experiment}_{self.world.urls.index(self.url)}"  # two servers must not write into one
        told = await self._post("initialize", experiment_name=folder, max_interactions=self.world.max_interactions)
        self.begun = True
        try:
            person = told["supervisor"]
            about = ", ".join(f"{key} {person[key]}" for key in ("first_name", "last_name", "email", "phone_number"))
            text = f"{RULES}\n\nThe person: {about}. Now it is {told['datetime']}.\nThe task: {told['instruction']}"
        except (KeyError, TypeError):
            raise AppWorldFault(f"{self.url}/initialize: a task was wanted, got {told!r:.200}") from None
        return Step([Message("user", text)])

    async def step(self, action: Message) -> Step:
        fault = action.error or ("there are no tools here: write Python" if action.calls else "")
        if fault:
            return Step([Message("user", f"error: {fault}")], reason=fault)
        fenced = _FENCED.findall(action.content)
        code = "\n".join(fenced) if fenced else action.content
        printed = await self._post("execute", code=code.encode(errors="replace").decode())
        if not await self._post("task_completed"):
            return Step([Message("user", shortened(str(printed), self.world.observation_chars))])
        return self._score(await self._post("evaluate"))

    def _score(self, told: Any) -> Step:
        try:
            tests, failures = int(told["num_tests"]), list(told["failures"])
            outcome = float(bool(told["success"]))
            lacking = "; ".join(str(one["requirement"]) for one in failures)
        except (KeyError, TypeError, ValueError):
            raise AppWorldFault(f"{self.url}/evaluate: results of tests were wanted, got {told!r:.200}") from None
        share = 1 - len(failures) / tests if tests else outcome
        reason = f"not so: {lacking:.300}" if failures else f"{tests} tests passed"
        return Step(reward=outcome, reason=reason, terminated=True, answered=True, checks={"tests": share})

    async def close(self) -> None:
        """Ends the task, and gives the server back; one that cannot end it says so to who initializes it next."""
        http, self.http = self.http, None
        url, self.url = self.url, ""
        if http is None:
            return
        try:
            if self.begun and url:
                self.begun = False
                await self._asked(http, f"{url}/close", {"task_id": self.task_id})
        except AppWorldFault:
            pass  # what the episode earned stands
        finally:
            await http.close()
            if url:
                await self.world.give_back(url)

    async def _post(self, path: str, **data: Any) -> Any:
        if self.http is None:
            raise AppWorldFault(f"{path}: this episode has not begun, or is closed")
        return await self._asked(self.http, f"{self.url}/{path}", {"task_id": self.task_id, **data})

    async def _asked(self, http: aiohttp.ClientSession, url: str, data: dict[str, Any]) -> Any:
        """The `output` of an answer. Raises AppWorldFault for anything else."""
        try:
            async with http.post(url, json=data) as reply:
                content = bytearray()
                async for chunk in reply.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > _MOST_BYTES:
                        raise AppWorldFault(f"a reply of more than {_MOST_BYTES >> 20} MiB")
            if reply.status != 200:
                raise AppWorldFault(f"status {reply.status}: {content.decode(errors='replace')[:200]}")
            return json.loads(content)["output"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            raise AppWorldFault(f"{url}: {type(error).__name__}: {error}") from None


make_world = AppWorld
