"""The workload as a world of jaxagent: whatever a turn says is a call of a tool that sleeps; the last turn ends the episode."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import RESULT, Tools, reward
from jaxagent.envs.env import Step, Task
from jaxagent.types import Message

SPARE_S = 60.0  # longest wait for the others in lock-step


class Asking:
    """A world of some prompts. The runner says before each step what the tool takes in it."""

    functions, tools = "", ()

    def __init__(self, model: str, prompts: int, turns: int, together: int):
        self.asked = json.loads((Path(model) / "prompts.json").read_text())["messages"][:prompts]
        self.turns, self.together = turns, together
        self.sizes = dict.fromkeys(("train", "valid", "test"), prompts)
        self.tool_s = 0.0
        self.clock = Tools()
        self.barrier: asyncio.Barrier | None = None

    def task(self, split: str, index: int) -> Task:
        return {"id": f"asking/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> AskingEpisode:
        return AskingEpisode(self)

    async def everybody(self) -> None:
        """Lock-step: waits until all episodes of the step are here."""
        if self.together:
            if self.barrier is None:
                self.barrier = asyncio.Barrier(self.together)
            async with asyncio.timeout(SPARE_S + self.tool_s):
                await self.barrier.wait()


class AskingEpisode:
    def __init__(self, world: Asking):
        self.world, self.turn = world, 0

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", self.world.asked[task["seed"]])])

    async def step(self, action: Message) -> Step:
        self.turn += 1
        if self.turn == self.world.turns:
            return Step(terminated=True, reward=reward(action.content))
        await self.world.everybody()
        with self.world.clock.call():
            await asyncio.sleep(self.world.tool_s)
        await self.world.everybody()
        return Step([Message("tool", RESULT)])

    async def close(self) -> None:
        pass


def make_world(model: str, prompts: int, turns: int, together: int = 0) -> Asking:
    """Args: together: so many episodes take every turn together, and wait for the slowest of their tools; 0: nobody waits."""
    return Asking(model, prompts, turns, together)
