"""AndroidWorld's server, spoken to: one phone, and the tasks of a suite.

    GET  /suite/reinitialize?n_task_combinations&seed&task_family      the same tasks on every server
    GET  /suite/task_length?task_type -> {"length"}                    the instances of a type
    POST /reset?go_home                    POST /task/initialize?task_type&task_idx       GET /task/goal -> {"goal"}
    POST /execute_action {"action_type", ...}          GET /task/score -> {"score"}       POST /task/tear_down
    GET  /ui_elements?wait_to_stabilize -> {"ui_elements": [...]}

The last is none of the server's own, which shows pixels alone: docs/ADDING.md has the lines to add to it.

    PhoneFault        a server did not answer, answered late, too much or nonsense: never the policy's fault
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

_MOST_BYTES = 64 << 20  # of an answer


class PhoneFault(Exception):
    """A server failed; the episode is to be played again."""


class Remote:
    """A server, for one episode.

    Args:
        url: as in http://127.0.0.1:5000.
        timeout_s: of one request.
    """

    def __init__(self, url: str, timeout_s: float):
        self.url = url
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def close(self) -> None:
        await self.http.close()

    async def begin(self, task_type: str, number: int) -> str:
        """Makes the phone ready for a task; returns its goal."""
        await self._ask("POST", "reset", {"go_home": "true"})
        await self._ask("POST", "task/initialize", _named(task_type, number))
        goal = (await self._ask("GET", "task/goal", _named(task_type, number))).get("goal")
        if not isinstance(goal, str):
            raise PhoneFault(f"{self.url}/task/goal: a goal was wanted, got {goal!r:.100}")
        return goal

    async def make_suite(self, instances: int, seed: int, family: str) -> None:
        about = {"n_task_combinations": str(instances), "seed": str(seed), "task_family": family}
        await self._ask("GET", "suite/reinitialize", about)

    async def instances(self, task_type: str) -> Any:
        return (await self._ask("GET", "suite/task_length", {"task_type": task_type})).get("length")

    async def act(self, action: dict[str, Any]) -> None:
        await self._ask("POST", "execute_action", {}, action)

    async def elements(self) -> list[dict[str, Any]]:
        told = (await self._ask("GET", "ui_elements", {"wait_to_stabilize": "true"})).get("ui_elements")
        if not isinstance(told, list) or not all(isinstance(one, dict) for one in told):
            raise PhoneFault(f"{self.url}/ui_elements: a list of elements was wanted, got {told!r:.100}")
        return told

    async def score(self, task_type: str, number: int) -> float:
        told = (await self._ask("GET", "task/score", _named(task_type, number))).get("score")
        if not isinstance(told, int | float) or not 0 <= told <= 1:
            raise PhoneFault(f"{self.url}/task/score: a number from 0 to 1 was wanted, got {told!r:.100}")
        return float(told)

    async def end(self, task_type: str, number: int) -> None:
        await self._ask("POST", "task/tear_down", _named(task_type, number))

    async def _ask(self, method: str, path: str, about: dict[str, str], body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = bytearray()
        try:
            where = f"{self.url}/{path}"
            async with self.http.request(method, where, params=about, json=body, allow_redirects=False) as reply:
                async for chunk in reply.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > _MOST_BYTES:
                        raise PhoneFault(f"{self.url}/{path}: more than {_MOST_BYTES >> 20} MiB")
            if reply.status != 200:
                raise PhoneFault(f"{self.url}/{path}: status {reply.status}: {content.decode(errors='replace')[:200]}")
            told = json.loads(content)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError, OSError) as error:
            raise PhoneFault(f"{self.url}/{path}: {type(error).__name__}: {error}") from None
        if not isinstance(told, dict):
            raise PhoneFault(f"{self.url}/{path}: an object was wanted, got {content[:80]!r}")
        return told


def _named(task_type: str, number: int) -> dict[str, str]:
    return {"task_type": task_type, "task_idx": str(number)}
