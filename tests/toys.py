"""Toy worlds for the tests of what stands above worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, ToolCall, ToolSpec

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


class Stairs:
    """Task n is a flight of stairs: who stands on step `top` within the budget has arrived. U goes up, D goes down, F falls.

    Its episodes tell their state in full, need no sandbox, and can be forked where `forks` is set. `steps` counts all actions.
    """

    functions = ""
    tools = (ToolSpec("U"), ToolSpec("D"), ToolSpec("F"))

    def __init__(self, top: int = 3, *, forks: bool = False, restless: bool = False):
        self.top, self.forks, self.restless = top, forks, restless
        self.steps = self.episodes = self.closed = 0

    def task(self, split: str, index: int) -> Task:
        return {"id": f"stairs/{split}/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Climb:
        self.episodes += 1
        return Climb(self, self.episodes if self.restless else 0)


class Climb:
    def __init__(self, world: Stairs, mood: int, at: int = 0):
        self.world, self.mood, self.at = world, mood, at

    async def reset(self, task: Task, seed: int) -> Step:
        self.at = 0
        return Step([Message("user", "0")], state="0")

    async def step(self, action: Message) -> Step:
        self.world.steps += 1
        if not action.calls:
            return Step(terminated=True, answered=True)
        self.at = {"U": self.at + 1, "D": max(0, self.at - 1), "F": 0}[action.calls[0].name]
        if self.at == self.world.top:
            return Step(reward=1.0, reason="arrived", terminated=True)
        return Step([Message("tool", str(self.at + 10 * self.mood), name="U")], state=str(self.at))

    async def fork(self, name: str) -> Climb:
        return Climb(self.world, self.mood, self.at)

    async def close(self) -> None:
        self.world.closed += 1


class InTurns(Stairs):
    """The same with two who act in turns."""

    def episode(self, name: str, sandbox: Any) -> Climb:
        climb = super().episode(name, sandbox)
        step = climb.step

        async def answer(action: Message) -> Step:
            said = await step(action)
            said.agent = "white" if self.steps % 2 == 0 else "black"
            return said

        climb.step = answer  # type: ignore[method-assign]
        return climb


def climbing(*moves: str) -> list[Message]:
    return [Message("assistant", calls=(ToolCall(move),)) for move in moves]
