"""`android_world` against a server that answers as AndroidWorld's own does: paths, queries, bodies, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from answering import answering
from scripted import episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.android_world import AndroidWorld
from jaxagent.envs.check import Checker
from jaxagent.envs.phones.remote import PhoneFault
from jaxagent.types import Message, Sampling, StopReason

TASKS = ("SystemBluetoothTurnOn", "ContactsAddContact")


class Server:
    """One emulator, of three screens, with a switch on the second: whether it is on is the score."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.screen, self.on, self.task = "home", False, ""
        self.instances = 2
        self.fault, self.status, self.text, self.slow_s = "", 500, "Internal Server Error", 0.0

    async def handle(self, request: web.Request) -> web.Response:
        name = f"{request.method} {request.path}"
        body = await request.json() if request.can_read_body else None
        self.asked.append((name, dict(request.query), body))
        if name.endswith(self.fault) and self.fault:
            await asyncio.sleep(self.slow_s)
            return web.Response(status=self.status, text=self.text)
        named = f"{request.query.get('task_type')} {request.query.get('task_idx')}"
        if name == "GET /suite/reinitialize":
            self.instances = int(request.query["n_task_combinations"])
        elif name == "GET /suite/task_length":
            return web.json_response({"length": self.instances})
        elif name == "POST /reset":
            self.screen = "home"
        elif name == "POST /task/initialize":
            self.task, self.on = named, False
        elif name == "GET /task/goal":
            return web.json_response({"goal": f"Turn it on, as {named} says."})
        elif name == "GET /task/score":
            return web.json_response({"score": 1.0 if self.on and named == self.task else 0.0})
        elif name == "GET /ui_elements":
            return web.json_response({"ui_elements": self.elements()})
        elif name == "POST /execute_action":
            assert set(body) <= {"action_type", "x", "y", "text", "direction", "app_name", "clear_text"}
            if body["action_type"] == "open_app":
                self.screen = body["app_name"]
            elif self.screen == "Settings" and (body.get("x"), body.get("y")) == (300, 150):
                self.on = not self.on
        return web.json_response({"status": "success", "message": "done"})

    def elements(self) -> list[dict[str, Any]]:
        box = {"x_min": 200, "x_max": 400, "y_min": 100, "y_max": 200}
        switch = {
            "text": None,
            "content_description": "Bluetooth",
            "class_name": "android.widget.Switch",
            "is_checked": self.on,
        }
        shown = {"home": {"text": "12:00"}, "Settings": switch}.get(self.screen, {"text": "Nothing here"})
        hidden = [
            {"text": "x", "bbox_pixels": box, "is_visible": False},
            {"text": "y", "bbox_pixels": None},
            {"bbox_pixels": box},
        ]
        return [{"bbox_pixels": box, "is_visible": True, "is_enabled": True, **shown}, *hidden]


@asynccontextmanager
async def running(count: int = 1) -> AsyncIterator[tuple[list[Server], str]]:
    servers = [Server() for _ in range(count)]
    async with answering([server.handle for server in servers]) as urls:
        yield servers, urls


def say(text: str) -> Message:
    return Message("assistant", text)


SOLVED = (say("open Settings"), say("tap 0"), say("done"))


async def steps(world: AndroidWorld, *turns: Message) -> Any:
    env = world.episode("", None)
    try:
        step = await env.reset(world.task("train", 0), 0)
        for turn in turns:
            step = await env.step(turn)
        return step
    finally:
        await env.close()
        await env.close()


def test_an_episode_from_its_task_to_its_score() -> None:
    async def play() -> tuple[Any, Server]:
        async with running() as ((server,), urls):
            world = AndroidWorld(urls, TASKS, suite_seed=7)
            limits = Limits(max_turns=6, max_tokens=9000)
            turns = script(PlainTemplate(), *SOLVED)
            (row,) = await episode(world, world.task("train", 3), turns, limits=limits, sampling=Sampling(max_tokens=100))
            await steps(world)
            return row, server

    row, server = asyncio.run(play())
    assert (row.reward, row.stop) == (1.0, StopReason.ANSWERED)
    text = PlainTemplate().text(row.tokens)
    assert "The task: Turn it on, as ContactsAddContact 1 says." in text
    assert "[0] Switch (Bluetooth) at 300 150" in text
    assert "[0] Switch (Bluetooth) checked at 300 150" in text
    task, look = {"task_type": "ContactsAddContact", "task_idx": "1"}, ("GET /ui_elements", {"wait_to_stabilize": "true"}, None)
    suite = {"n_task_combinations": "100", "seed": "7", "task_family": "android_world"}
    assert server.asked[:11] == [
        ("GET /suite/reinitialize", suite, None),
        ("POST /reset", {"go_home": "true"}, None),
        ("POST /task/initialize", task, None),
        ("GET /task/goal", task, None),
        look,
        ("POST /execute_action", {}, {"action_type": "open_app", "app_name": "Settings"}),
        look,
        ("POST /execute_action", {}, {"action_type": "click", "x": 300, "y": 150}),
        look,
        ("GET /task/score", task, None),
        ("POST /task/tear_down", task, None),
    ]
    assert [name for name, _, _ in server.asked].count("GET /suite/reinitialize") == 1  # once for all episodes of a run


@pytest.mark.parametrize(
    ("turns", "reward", "answered"),
    [
        ((say("done"),), 0.0, True),
        ((say("open Settings"), say("tap 0"), say("wait"), say("wait")), 0.0, False),  # nobody said that it is done
        (SOLVED, 1.0, True),
    ],
)
def test_who_says_that_it_is_done_is_scored_and_who_runs_out_of_turns_is_not(
    turns: tuple[Message, ...], reward: float, answered: bool
) -> None:
    async def play() -> Any:
        async with running() as (_, urls):
            return await steps(AndroidWorld(urls, TASKS, max_steps=4), *turns)

    step = asyncio.run(play())
    assert (step.reward, step.terminated, step.answered) == (reward, True, answered)


def test_a_server_that_was_started_anew_is_given_its_suite_again() -> None:
    async def play() -> list[str]:
        async with running() as ((server,), urls):
            world = AndroidWorld(urls, TASKS)
            for _ in range(2):
                await steps(world, *SOLVED)
            server.instances = 2  # between two episodes, which nobody is told of
            await steps(world, *SOLVED)
            return [name for name, _, _ in server.asked if name in ("GET /suite/reinitialize", "POST /task/initialize")]

    suite, task = "GET /suite/reinitialize", "POST /task/initialize"
    assert asyncio.run(play()) == [suite, task, task, suite, task]


@pytest.mark.parametrize("fault", ["/task/initialize", "/execute_action", "/task/tear_down"])
def test_a_server_that_failed_is_given_its_suite_again(fault: str) -> None:
    async def play() -> int:
        async with running() as ((server,), urls):
            world = AndroidWorld(urls, TASKS)
            server.fault = fault
            with contextlib.suppress(PhoneFault):
                await steps(world, *SOLVED)
            server.fault = ""
            await steps(world, *SOLVED)
            return [name for name, _, _ in server.asked].count("GET /suite/reinitialize")

    assert asyncio.run(play()) == 2


ASKED = ("/suite/reinitialize", "/reset", "/task/initialize", "/task/goal", "/ui_elements", "/execute_action", "/task/score")


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        *((name, 500, "Internal Server Error") for name in ASKED),
        *((name, 200, "<html>") for name in ASKED),
        *((name, 200, "[]") for name in ASKED),
        *((name, 200, "{}") for name in ("/task/goal", "/ui_elements", "/task/score")),
        ("/task/score", 200, '{"score": 7}'),
        ("/task/score", 200, '{"score": NaN}'),
        ("/ui_elements", 200, '{"ui_elements": ["x"]}'),
        ("/task/score", 0, ""),  # late
    ],
)
def test_a_server_that_fails_breaks_the_episode_and_is_tried_again(fault: str, status: int, text: str) -> None:
    async def play() -> None:
        async with running() as ((server,), urls):
            world = AndroidWorld(urls, TASKS, timeout_s=60.0 if status else 0.2)
            server.fault, server.status, server.text, server.slow_s = fault, status or 200, text, 0.0 if status else 0.5
            with pytest.raises(PhoneFault, match=fault):
                await steps(world, *SOLVED)
            server.fault = ""
            assert (await steps(world, *SOLVED)).reward == 1.0

    asyncio.run(play())


def test_a_task_that_cannot_be_cleared_away_keeps_what_it_earned() -> None:
    async def play() -> float:
        async with running() as ((server,), urls):
            server.fault = "/task/tear_down"
            return float((await steps(AndroidWorld(urls, TASKS), *SOLVED)).reward)

    assert asyncio.run(play()) == 1.0


def test_no_two_episodes_share_a_server() -> None:
    async def play() -> None:
        async with running(2) as (servers, urls):
            world = AndroidWorld(urls, TASKS)
            await asyncio.gather(*(steps(world, say("wait"), say("done")) for _ in range(6)))
            for server in servers:
                held = [name for name, _, _ in server.asked if name in ("POST /task/initialize", "POST /task/tear_down")]
                assert held == ["POST /task/initialize", "POST /task/tear_down"] * (len(held) // 2)

    asyncio.run(play())


def test_the_contract_of_a_world_is_kept() -> None:
    async def ask() -> list[Any]:
        async with running() as (_, urls):
            return await Checker(AndroidWorld(urls, TASKS)).ask_all(None)

    assert [(finding.question, finding.said) for finding in asyncio.run(ask()) if finding.ok is False] == []


def test_instances_belong_to_one_split_and_options_that_make_no_world_are_told() -> None:
    url = "http://127.0.0.1:5000"
    world = AndroidWorld(url, TASKS, instances=10)
    assert world.sizes == {"train": 14, "demo": 2, "valid": 2, "test": 2}
    drawn = [
        (task["task_type"], task["task_idx"])
        for split in world.sizes
        for task in map(world.task, [split] * 99, range(world.sizes[split]))
    ]
    assert sorted(drawn) == sorted((kind, number) for kind in TASKS for number in range(10))
    for options, why in (
        ({"urls": "localhost"}, r"env\.options\.urls must be those of AndroidWorld servers"),
        ({"tasks": ()}, r"env\.options\.tasks: nothing is named"),
        ({"tasks": ("A", "A")}, "'A' is named twice"),
        ({"instances": 3}, "instances must be more than 3"),
        ({"max_steps": 0}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=why):
            AndroidWorld(**{"urls": url, "tasks": TASKS, **options})  # type: ignore[arg-type]
