"""`phone`: errands on small phones of our own: contacts, notes and settings.

What `android_world` is, without an emulator: the same protocol, rows and actions, to a phone that is a database and its screens
(phones/apps.py), served on this machine. The reward is 1 where the database holds in the end what was asked for and nothing
else, and what was asked was answered. It tries all but an Android, and its scores are no AndroidWorld's.
"""

from __future__ import annotations

import os
import random
from typing import Any

from jaxagent.envs.env import Env, Task
from jaxagent.envs.phones.errands import TYPES, advise, errand
from jaxagent.envs.phones.session import PhoneEpisode, Place, Suite
from jaxagent.envs.workers.places import Places, counted, run_apart
from jaxagent.types import Message

_LONGEST_WAY = 20  # turns of a demonstration


class PhoneWorld:
    """The world.

    Args:
        kinds: of errands, in turn: AddContact, DeleteContact, AddNote, DeleteNote, ToggleSetting, AnswerPhone.
        workers: phones; 0: as many as there are cores.
        instances: of every kind; a tenth of them, at least one, is kept for each of demonstrations, validation and test.
        suite_seed: of the instances.
        max_steps: turns of an episode, after which nothing is earned.
        rules: are told at the beginning.
        timeout_s: of one request to a phone.
    """

    functions = ""
    tools = ()

    def __init__(
        self,
        kinds: tuple[str, ...] = TYPES,
        workers: int = 0,
        instances: int = 10_000,
        suite_seed: int = 42,
        max_steps: int = 12,
        rules: bool = True,
        timeout_s: float = 60.0,
    ):
        counted(tuple(kinds), "kinds")
        if unknown := [kind for kind in kinds if kind not in TYPES]:
            raise ValueError(f"env.options.kinds must be of {', '.join(TYPES)}; got {unknown[0]!r}")
        if workers < 0:
            raise ValueError(f"env.options.workers must be 0 or more, got {workers}")
        self.suite = Suite(tuple(kinds), instances, suite_seed, max_steps, timeout_s, rules)
        self.sizes = self.suite.sizes
        self.places = Places([Place("") for _ in range(workers or os.cpu_count() or 1)])

    def task(self, split: str, index: int) -> Task:
        return self.suite.task("phone", split, index)

    def episode(self, name: str, sandbox: Any) -> Env:
        return PhoneEpisode(self.places, self.suite)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Who can read the rows does what they advise, on a phone."""
        return run_apart(self._show(task))

    async def _show(self, task: Task) -> list[Message]:
        env, done = self.episode(f"{task['id']}/shown", None), errand(task["task_type"], task["task_idx"], self.suite.seed)
        last = False
        try:
            step = await env.reset(task, task["seed"])
            messages = list(step.messages)
            while not step.terminated and len(messages) < 2 * _LONGEST_WAY:
                action, last = ("done", True) if last else advise(done, messages[-1].content)
                messages.append(Message("assistant", action))
                step = await env.step(messages[-1])
                messages += step.messages
        finally:
            await env.close()
        if step.reward != 1.0:
            raise RuntimeError(f"{task['id']}: what was advised led to {step.reward:g}: {step.reason}")
        return messages

    def close(self) -> None:
        self.places.close()


make_world = PhoneWorld
