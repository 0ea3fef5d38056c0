"""Letters whose training episodes never end from group LAG_FROM on; who waits in one leaves a file LAG_MARK-<host>."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from jaxagent.envs.env import Env, Step
from jaxagent.types import Message
from tests import letters


class Late(letters.Letters):
    def episode(self, name: str, sandbox: Any) -> Env:
        found = super().episode(name, sandbox)
        since = int(os.environ.get("LAG_FROM", "1000000"))
        split, number = name.rpartition("#")[0].split("/")[-2:]
        return Endless(found) if split == "train" and int(number) >= since else found


class Endless:
    """An episode that is never over."""

    def __init__(self, episode: Env):
        self.reset, self.close = episode.reset, episode.close

    async def step(self, action: Message) -> Step:
        Path(f"{os.environ['LAG_MARK']}-{os.environ.get('JAX_PROCESS_ID', '0')}").touch()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")


def make_world() -> Late:
    return Late()
