"""`agentgym` against servers that name things as the real ones do: every row of the table is played to its reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from scripted import episode, script

from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.agentgym import SERVERS, AgentGym, AgentGymFault
from jaxagent.envs.check import Checker
from jaxagent.types import Message, StopReason

TEMPLATE = PlainTemplate()


class Fake:
    """Two steps to win. What it is called stands in `name`; `fault` is what /step does instead."""

    def __init__(self, name: str):
        self.words, self.name, self.fault = SERVERS[name], name, ""
        self.made, self.steps = 0, dict[int, int]()
        self.resets: list[dict[str, Any]] = []

    async def create(self, request: web.Request) -> web.Response:
        self.made += 1
        return web.json_response(self.made if self.words.observe else {"id": self.made})

    async def reset(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.resets.append(asked)
        self.steps[asked[self.words.key]] = 0
        if asked[self.words.index] >= 90:
            return web.json_response({"error": "no such task"})
        return web.json_response([None, None] if self.words.observe else self.told(0, asked[self.words.index]))

    async def observation(self, request: web.Request) -> web.Response:
        return web.json_response(f"page of {request.query[self.words.key]}")

    async def step(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.fault == "error":
            return web.json_response({"error": "has finished"})
        if self.fault == "status":
            return web.Response(status=500, text="trace")
        if self.fault == "long":
            return web.Response(body=b" " * (17 << 20))
        if self.fault == "hang":
            await asyncio.sleep(30)
        self.steps[asked[self.words.key]] += asked["action"] == "go"
        return web.json_response(self.told(self.steps[asked[self.words.key]], 0))

    def told(self, count: int, task: int) -> dict[str, Any]:
        said = {self.words.text: f"step {count} of task {task}", "reward": float(count == 2), "done": count == 2}
        if self.words.score:
            said |= {"reward": 0.0, self.words.score: self.words.full * count / 2}  # so far, not for this step
        if self.words.intro:
            said[self.words.intro] = "Boil water."
        if self.words.choices:
            said[self.words.choices] = ["go", "wait"]
        return said


@asynccontextmanager
async def serving(name: str) -> AsyncIterator[tuple[Fake, AgentGym]]:
    fake, app = Fake(name), web.Application()
    for path in ("create", "reset", "step"):
        app.router.add_post(f"/{path}", getattr(fake, path))
    app.router.add_get("/observation", fake.observation)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield fake, AgentGym(f"http://127.0.0.1:{runner.addresses[0][1]}/", name, tasks=100, timeout_s=5.0)
    finally:
        await runner.cleanup()


def said(text: str) -> Message:
    return Message("assistant", text)


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_of_every_kind_is_played_to_its_reward(name: str) -> None:
    async def play() -> None:
        async with serving(name) as (fake, world):
            for _ in range(2):
                (row,) = await episode(world, world.task("train", 3), script(TEMPLATE, said("wait"), said("go")))
                assert (row.stop, row.reward, len(row.turns)) == (StopReason.ENV_TERMINATED, 1.0, 3)
            assert fake.made == 1  # the environment is used again
            assert fake.resets[0][fake.words.index] == 3
            assert fake.words.fixed.items() <= fake.resets[0].items()
            text = TEMPLATE.text(row.tokens)
            assert text.startswith(
                "<user>Boil water.\n\nstep 0"
                if fake.words.intro
                else "<user>page of 1"
                if fake.words.observe
                else "<user>step 0"
            )
            assert ("You can: go, wait" in text) == bool(fake.words.choices)

    asyncio.run(play())


def test_the_checker_finds_nothing_and_splits_are_parts_of_the_servers_tasks() -> None:
    async def ask() -> None:
        async with serving("textcraft") as (_, world):
            findings = await Checker(world).ask_all(None)
            assert [finding for finding in findings if finding.ok is False] == []
            numbers = [world.task(split, i)["seed"] for split, size in world.sizes.items() for i in range(size)]
            assert numbers == list(range(100))

    asyncio.run(ask())


def test_what_a_server_does_wrong_is_no_reward_and_its_environment_is_not_used_again() -> None:
    async def play() -> None:
        async with serving("babyai") as (fake, world):
            fake.fault = "error"
            (row,) = await episode(world, world.task("train", 0), script(TEMPLATE, said("go")))
            assert (row.stop, row.stop.counts) == (StopReason.ENV_TRUNCATED, False)
            assert "has finished" in row.error
            for fault, told in (("status", "status 500: trace"), ("hang", "TimeoutError")):
                fake.fault, world.timeout_s = fault, 0.3
                env = world.episode("e", None)
                await env.reset(world.task("train", 0), 0)
                with pytest.raises(AgentGymFault, match=f"/step: .*{told}"):
                    await env.step(said("go"))
                await env.close()
                await env.close()
            fake.fault = "hang"
            env = world.episode("e", None)
            await env.reset(world.task("train", 0), 0)
            with pytest.raises(TimeoutError):  # the episode's own deadline, while the server is at work
                await asyncio.wait_for(env.step(said("go")), 0.05)
            await env.close()
            fake.fault, world.timeout_s = "long", 5.0
            env = world.episode("e", None)
            await env.reset(world.task("train", 0), 0)
            with pytest.raises(AgentGymFault, match="a reply of more than 16 MiB"):
                await env.step(said("go"))
            await env.close()
            assert (fake.made, world.free) == (5, [])
            env = world.episode("e", None)
            with pytest.raises(AgentGymFault, match="/reset: no such task"):
                await env.reset(world.task("test", 0), 0)
            await env.close()

    asyncio.run(play())


def test_an_address_where_nobody_is_and_options_that_cannot_be_are_told() -> None:
    async def ask() -> None:
        env = AgentGym("http://127.0.0.1:9", "maze", tasks=10).episode("e", None)
        with pytest.raises(AgentGymFault, match=r"http://127\.0\.0\.1:9/create: ClientConnectorError"):
            await env.reset({"seed": 0}, 0)
        await env.close()

    asyncio.run(ask())
    good = {"url": "http://x", "server": "maze", "tasks": 10}
    for wrong in ({"url": "x"}, {"server": "chess"}, {"tasks": 9}, {"timeout_s": 0.0}):
        with pytest.raises(ValueError, match=rf"env\.options\.{next(iter(wrong))} must be"):
            AgentGym(**{**good, **wrong})
