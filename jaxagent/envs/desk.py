"""`desk`: chores in a register of people, at desktops that run here: real windows, pointer and keys. Needs Xvfb and xdotool.

What `osworld` is, without a virtual machine: the same protocol, rows and actions, to desktops of our own (desktop/machine.py)
and a program of ours on them (desktop/register.py), behind the locks of the sandbox. A task asks for one change; the reward is
1 where the file that the program saved holds that and nothing else.
"""

from __future__ import annotations

import os
import random
from typing import Any

from jaxagent.envs.desktop.chores import KINDS, advise, chore
from jaxagent.envs.desktop.evaluation import Files
from jaxagent.envs.desktop.local import missing
from jaxagent.envs.desktop.session import DesktopEpisode, Guests, Own, Ways
from jaxagent.envs.env import Env, Task
from jaxagent.envs.synchronous import seed_of
from jaxagent.envs.workers.places import counted, run_apart
from jaxagent.types import Message

_LONGEST_WAY = 16  # turns of a demonstration


class Desktop:
    """The world.

    Args:
        kinds: of chores, in turn: phone, city, member, add, delete.
        workers: desktops; 0: as many as there are cores. Set rollout.concurrency to no more: who waits has its deadline
            running.
        max_steps: turns after which a desktop is scored as it is.
        rules: are told at the beginning.
        screenshots: a folder that a picture of every turn is kept in; empty keeps none.
        timeout_s: of one request to a desktop.
    """

    functions = ""
    tools = ()

    def __init__(
        self,
        kinds: tuple[str, ...] = tuple(KINDS),
        workers: int = 0,
        max_steps: int = 12,
        rules: bool = True,
        screenshots: str = "",
        timeout_s: float = 60.0,
    ):
        counted(tuple(kinds), "kinds")
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"env.options.kinds must be of {', '.join(KINDS)}; got {unknown[0]!r}")
        if workers < 0:
            raise ValueError(f"env.options.workers must be 0 or more, got {workers}")
        if absent := missing():
            raise ValueError(f"env.name=desk: {absent}")
        self.kinds = tuple(kinds)
        self.ways = Ways(max_steps, 0.0, timeout_s, rules, screenshots)
        self.files = Files("", timeout_s)
        self.guests = Guests([Own(("register",)) for _ in range(workers or os.cpu_count() or 1)])

    def task(self, split: str, index: int) -> Task:
        kind, seed = self.kinds[index % len(self.kinds)], seed_of(split, index)
        return {"id": f"desk/{split}/{index}", "seed": seed, "difficulty": kind, **chore(kind, seed)}

    def episode(self, name: str, sandbox: Any) -> Env:
        return DesktopEpisode(name, self.guests, self.files, self.ways)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Who can read the rows does what they advise, at a desktop."""
        return run_apart(self._show(task))

    async def _show(self, task: Task) -> list[Message]:
        env = self.episode(f"{task['id']}/shown", None)
        try:
            step = await env.reset(task, task["seed"])
            messages = list(step.messages)
            while not step.terminated and len(messages) < 2 * _LONGEST_WAY:
                messages.append(Message("assistant", advise(task, messages[-1].content)))
                step = await env.step(messages[-1])
                messages += step.messages
        finally:
            await env.close()
        if step.reward != 1.0:
            raise RuntimeError(f"{task['id']}: what was advised led to {step.reward:g}: {step.reason}")
        return messages

    def close(self) -> None:
        self.guests.close()


make_world = Desktop
