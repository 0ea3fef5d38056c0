"""Worlds of libraries for tests, which skip where the library is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxagent.envs.check import check
from jaxagent.envs.env import Step, Task, World, end
from jaxagent.types import Message

_WORLDS: list[World] = []
PATIENCE_S = 600.0  # for one call: a hang fails by this, a busy machine does not


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Ends the worlds that a test made."""
    yield
    while _WORLDS:
        end(_WORLDS.pop())


def made(make: Any, **options: Any) -> Any:
    """The world, if what it needs is here."""
    try:
        world = make(workers=1, timeout_s=PATIENCE_S, **options)
        _WORLDS.append(world)
        return world
    except ValueError as error:
        if "jaxagent env install" in str(error) or "needs the program" in str(error):
            pytest.skip(str(error))
        raise


def played(world: World, task: Task, actions: Sequence[str]) -> list[Step]:
    """What the world says at the beginning and to each of these actions."""

    async def play() -> list[Step]:
        env = world.episode("played", None)
        try:
            return [await env.reset(task, task["seed"]), *[await env.step(Message("assistant", text)) for text in actions]]
        finally:
            await env.close()

    return asyncio.run(play())


def faults(world: World) -> dict[str, str]:
    """What the checker has against it."""
    return {finding.question: finding.said for finding in check(world) if finding.ok is False}
