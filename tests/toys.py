"""Toy worlds for the tests of what stands above worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, ToolSpec

TASK: Task = {"id": "toy/0", "seed": 3, "difficulty": "easy"}


class Lone:
    """A world of one task that is its own episode: a toy says what happens in `reset` and `step`."""

    functions = ""
    tools: Sequence[ToolSpec] = ()

    def task(self, split: str, index: int) -> Task:
        return TASK

    def episode(self, name: str, sandbox: Any) -> Env:
        return self

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", "q")])

    async def step(self, action: Message) -> Step:
        return Step(terminated=True)

    async def close(self) -> None:
        pass


class Parity:
    """Task n asks for n; who answers with a number pays it back modulo two. Task 3 is broken; early tasks take longest."""

    functions = ""
    tools = ()

    def task(self, split: str, index: int) -> Task:
        return {"id": f"parity/{split}/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Answer()


class Answer:
    async def reset(self, task: Task, seed: int) -> Step:
        self.number = seed
        return Step([Message("user", str(seed))])

    async def step(self, action: Message) -> Step:
        for _ in range(20 - self.number % 20):
            await asyncio.sleep(0)
        if self.number == 3:
            raise ConnectionError("three is broken")
        return Step(terminated=True, answered=True, reward=float(int(action.content) % 2))

    async def close(self) -> None:
        pass
