"""A world without tools whose reward a policy that knows nothing yet gets in part: there is something to learn at once."""

from __future__ import annotations

from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message


class Letters:
    """Task n asks for n; an answer is worth its share of bytes that are even, so that groups differ from the first step."""

    functions = ""
    tools = ()

    def task(self, split: str, index: int) -> Task:
        return {"id": f"letters/{split}/{index}", "seed": index, "difficulty": "even" if index % 2 == 0 else "odd"}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Answer()


class Answer:
    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", str(seed))])

    async def step(self, action: Message) -> Step:
        said = action.content.encode()
        return Step(terminated=True, answered=True, reward=sum(byte % 2 == 0 for byte in said) / max(1, len(said)))

    async def close(self) -> None:
        pass


def make_world() -> Letters:
    return Letters()
