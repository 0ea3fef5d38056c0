"""`appworld` against servers that answer as AppWorld's own do: paths, bodies, and the errors that they give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from answering import answering
from scripted import episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.appworld import AppWorld, AppWorldFault
from jaxagent.envs.check import Checker
from jaxagent.types import Message, Sampling, StopReason

PERSON = {"first_name": "Ada", "last_name": "Ito", "email": "ada@example.com", "phone_number": "555"}
DONE = "```python\napis.supervisor.complete_task(answer=42)\n```"


class Server:
    """One environment server, which holds one task at a time. Nothing is executed: it looks for what the code calls."""

    def __init__(self) -> None:
        self.active, self.fault, self.completed = "", "", False
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answer = ""

    async def handle(self, request: web.Request) -> web.Response:
        name, data = request.path.strip("/"), await request.json()
        self.asked.append((name, data))
        if self.fault == name:
            return web.Response(status=500, text="Internal Server Error")
        if name == "initialize":
            self.active, self.completed, self.answer = data["task_id"], False, ""
            about = {"task_id": self.active, "instruction": f"Solve {self.active}.", "datetime": "2023-05-18T12:00:00"}
            return web.json_response({"output": {**about, "supervisor": PERSON}})
        if data["task_id"] != self.active:
            return web.Response(status=500, text=f"The active task world is {self.active}")
        return web.json_response({"output": getattr(self, name)(data)})

    def execute(self, data: dict[str, Any]) -> str:
        code = data["code"]
        if "complete_task(" in code:
            self.completed, self.answer = True, code.partition("answer=")[2].partition(")")[0]
        return "x" * 5000 if "long" in code else f"ran {code}"

    def task_completed(self, data: dict[str, Any]) -> bool:
        return self.completed

    def evaluate(self, data: dict[str, Any]) -> dict[str, Any]:
        right = {"requirement": "the answer is 42", "label": "no_op_fail"}
        kept = {"requirement": "nothing else changed", "label": "no_op_pass"}
        good = self.answer == "42"
        passes, failures = ([right, kept], []) if good else ([kept], [right])
        return {"success": good, "difficulty": 1, "num_tests": 2, "passes": passes, "failures": failures}

    def close(self, data: dict[str, Any]) -> None:
        self.active = ""


@asynccontextmanager
async def running(count: int = 1) -> AsyncIterator[tuple[list[Server], str]]:
    servers = [Server() for _ in range(count)]
    async with answering([server.handle for server in servers]) as urls:
        yield servers, urls


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    for name in ("train", "dev", "test_normal"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}_{n}\n" for n in range(4)))
    return str(tmp_path)


def say(text: str) -> Message:
    return Message("assistant", text)


def test_an_episode_from_its_task_to_its_tests(tasks: str) -> None:
    async def play() -> tuple[Any, Server]:
        async with running() as ((server,), urls):
            world = AppWorld(urls, tasks)
            turns = script(PlainTemplate(), say("```python\nprint(1)\n```\nand\n```\nprint(2)\n```"), say("x = 1"), say(DONE))
            limits = Limits(max_turns=5, max_tokens=9000)
            (row,) = await episode(world, world.task("train", 1), turns, limits=limits, sampling=Sampling(max_tokens=200))
            assert world.free == [urls]
            return row, server

    row, server = asyncio.run(play())
    assert (row.reward, row.stop) == (1.0, StopReason.ANSWERED)
    assert row.turns[-1].checks == {"tests": 1.0}
    text = PlainTemplate().text(row.tokens)
    assert "Solve train_1." in text
    assert "ran print(1)\n\nprint(2)" in text
    names = ["initialize", "execute", "task_completed", "execute", "task_completed", "execute", "task_completed"]
    assert [name for name, _ in server.asked] == [*names, "evaluate", "close"]
    assert all(data["task_id"] == "train_1" for _, data in server.asked)
    assert server.asked[0][1] == {"task_id": "train_1", "experiment_name": "jaxagent_0", "max_interactions": 50}


async def steps(world: AppWorld, *turns: Message) -> Any:
    env = world.episode("", None)
    try:
        await env.reset(world.task("train", 0), 0)
        for turn in turns:
            step = await env.step(turn)
        return step
    finally:
        await env.close()
        await env.close()


def test_what_is_wrong_is_paid_nothing_and_says_which_test(tasks: str) -> None:
    async def play() -> Any:
        async with running() as (_, urls):
            return await steps(AppWorld(urls, tasks), say(DONE.replace("42", "41")))

    step = asyncio.run(play())
    assert (step.reward, step.terminated, step.checks) == (0.0, True, {"tests": 0.5})
    assert step.reason == "not so: the answer is 42"


def test_long_output_is_cut_and_what_is_no_text_reaches_no_server(tasks: str) -> None:
    async def play() -> tuple[Any, Server]:
        async with running() as ((server,), urls):
            return await steps(AppWorld(urls, tasks, observation_chars=100), say("long \ud800")), server

    step, server = asyncio.run(play())
    assert "[4900 more characters]" in step.messages[0].content
    assert server.asked[1][1]["code"] == "long ?"


@pytest.mark.parametrize("fault", ["initialize", "execute", "task_completed", "evaluate"])
def test_a_server_that_fails_breaks_the_episode_and_is_tried_again(fault: str, tasks: str) -> None:
    async def play() -> None:
        async with running() as ((server,), urls):
            world = AppWorld(urls, tasks)
            server.fault = fault
            with pytest.raises(AppWorldFault, match=f"{fault}: .*status 500|status 500"):
                await steps(world, say(DONE))
            server.fault = ""
            assert (await steps(world, say(DONE))).reward == 1.0

    asyncio.run(play())


def test_a_task_that_cannot_be_closed_keeps_what_it_earned(tasks: str) -> None:
    async def play() -> float:
        async with running() as ((server,), urls):
            server.fault = "close"
            return float((await steps(AppWorld(urls, tasks), say(DONE))).reward)

    assert asyncio.run(play()) == 1.0


def test_no_two_episodes_share_a_server(tasks: str) -> None:
    async def play() -> None:
        async with running(2) as (servers, urls):
            world = AppWorld(urls, tasks)
            played = await asyncio.gather(*(steps(world, say("x"), say(DONE)) for _ in range(6)))
            assert [step.reward for step in played] == [1.0] * 6
            for number, server in enumerate(servers):
                held = [name for name, _ in server.asked if name in ("initialize", "close")]
                assert held == ["initialize", "close"] * (len(held) // 2)
                folders = {data["experiment_name"] for name, data in server.asked if name == "initialize"}
                assert folders <= {f"jaxagent_{number}"}

    asyncio.run(play())


def test_the_contract_is_kept(tasks: str) -> None:
    async def ask() -> list[Any]:
        async with running() as (_, urls):
            return await Checker(AppWorld(urls, tasks)).ask_all(None)

    assert [(finding.question, finding.said) for finding in asyncio.run(ask()) if finding.ok is False] == []


def test_options_that_make_no_world_are_told(tasks: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"env\.options\.urls must be of AppWorld environment servers"):
        AppWorld("localhost:8000", tasks)
    with pytest.raises(ValueError, match=r"train\.txt: a list of AppWorld's task ids is wanted"):
        AppWorld("http://localhost:8000", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="must be positive"):
        AppWorld("http://localhost:8000", tasks, timeout_s=0)
