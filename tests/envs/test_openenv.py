"""`openenv` against a server that speaks the protocol, and one that breaks it in every way."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from scripted import episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.config import load
from jaxagent.envs.env import Step, find
from jaxagent.envs.openenv import OpenEnv, OpenEnvFault
from jaxagent.types import Message, StopReason

TEMPLATE = PlainTemplate()
RECIPE = Path(__file__).parents[2] / "configs" / "openenv.py"


class Server:
    """Counts to three and pays 1; the session is the connection. `fault` is how it misbehaves at the first step."""

    def __init__(self) -> None:
        self.fault, self.resets, self.open, self.closes = "", [], 0, 0

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        self.open += 1
        count = 0
        async for message in line:
            if message.type != WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            if asked["type"] == "close":
                self.closes += 1
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                await line.send_json(self.observation(count := 0))
                continue
            if self.fault and await self.misbehave(line):
                continue
            if set(asked["data"]) != {"message"} or not isinstance(asked["data"]["message"], str):
                error = {"message": "field 'message' is wanted", "code": "VALIDATION_ERROR"}
                await line.send_json({"type": "error", "data": error})
                continue
            count += 1
            await line.send_json(self.observation(count))
        self.open -= 1
        return line

    async def misbehave(self, line: web.WebSocketResponse) -> bool:
        if self.fault == "hang":
            await asyncio.sleep(30)
        if self.fault == "text":
            await line.send_str("no json")
        if self.fault == "list":
            await line.send_json([1])
        if self.fault == "error":
            await line.send_json({"type": "error", "data": {"message": "oops", "code": "EXECUTION_ERROR"}})
        if self.fault == "drop":
            await line.close()
        return True

    @staticmethod
    def observation(count: int) -> dict[str, Any]:
        data = {"observation": {"text": f"count {count}", "n": count}, "reward": float(count == 3), "done": count == 3}
        return {"type": "observation", "data": data}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, str]]:
    server, app = Server(), web.Application()
    app.router.add_get("/ws", server.talk)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def said(text: str) -> Message:
    return Message("assistant", text)


def test_an_episode_is_one_connection_and_is_played_to_its_reward() -> None:
    async def play() -> None:
        async with serving() as (server, url):
            world = OpenEnv(url, field="message", shows="text", rules="Count.")
            task = world.task("train", 4)
            (row,) = await episode(world, task, script(TEMPLATE, said("up")))
            assert (row.stop, row.reward, len(row.turns)) == (StopReason.ENV_TERMINATED, 1.0, 3)
            assert TEMPLATE.text(row.tokens).startswith("<user>Count.\n\ncount 0<turn>up<eos><user>count 1<turn>")
            assert [turn.state for turn in row.turns] == ["count 0", "count 1", "count 2"]
            assert server.resets[0]["seed"] == task["seed"] and server.closes == 1
            await asyncio.sleep(0.05)
            assert server.open == 0

    asyncio.run(play())


def test_an_action_may_be_json_and_what_is_refused_is_told_to_the_policy() -> None:
    async def play() -> list[Step]:
        async with serving() as (_, url):
            env = OpenEnv(url, timeout_s=5.0).episode("e", None)
            steps = [await env.reset({"seed": 1}, 1)]
            for text in ('{"message": "up"}', "up", "[1]", '{"massage": 1}', "[" * 100_000):
                steps.append(await env.step(said(text)))  # noqa: PERF401
            steps.append(await env.step(Message("assistant", "x", error="cut off")))
            await env.close()
            await env.close()
            return steps

    texts = [step.messages[0].content for step in asyncio.run(play())]
    assert texts.pop(5).startswith("error: the action must be a JSON object: ")
    assert texts[:2] == ['{"n": 0, "text": "count 0"}', '{"n": 1, "text": "count 1"}']
    assert texts[2].startswith("error: the action must be a JSON object: ")
    assert texts[3:] == ["error: the action must be a JSON object", "error: field 'message' is wanted", "error: cut off"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hang", r"step: no answer within 0\.3 s \(env\.options\.timeout_s\)"),
        ("text", "step: JSONDecodeError"),
        ("list", r"step: the server answered '\[1\]'"),
        ("error", "step: EXECUTION_ERROR: oops"),
        ("drop", "step: "),
    ],
)
def test_a_server_that_fails_is_a_fault_and_no_reward(fault: str, told: str) -> None:
    async def play() -> None:
        async with serving() as (server, url):
            server.fault = fault
            env = OpenEnv(url, field="message", timeout_s=0.3).episode("e", None)
            await env.reset({"seed": 1}, 1)
            with pytest.raises(OpenEnvFault, match=told):
                await env.step(said("up"))
            await env.close()

    asyncio.run(play())


def test_a_server_that_takes_a_connection_and_says_nothing_is_told() -> None:
    async def play() -> None:
        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        silent = await asyncio.start_server(wait, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        env = OpenEnv(url, timeout_s=0.1).episode("e", None)
        with pytest.raises(OpenEnvFault, match=r"no OpenEnv server answers there: not within 0\.1 s"):
            await env.reset({"seed": 1}, 1)
        await env.close()
        silent.close()
        await asyncio.sleep(0.05)

    asyncio.run(play())


def test_an_address_where_nobody_is_and_a_field_that_is_not_there_are_told() -> None:
    async def play() -> None:
        nobody = OpenEnv("http://127.0.0.1:9").episode("e", None)
        with pytest.raises(OpenEnvFault, match=r"env\.options\.url=http://127\.0\.0\.1:9/ws: no OpenEnv server answers there"):
            await nobody.reset({"seed": 1}, 1)
        await nobody.close()
        async with serving() as (_, url):
            env = OpenEnv(url, shows="txt").episode("e", None)
            with pytest.raises(
                OpenEnvFault, match=r"env\.options\.shows=txt: the observation has no such field; it has text, n"
            ):
                await env.reset({"seed": 1}, 1)
            await env.close()

    asyncio.run(play())
    for options, named in (({"url": "ws://x"}, "url"), ({"url": "http://x", "timeout_s": 0.0}, "timeout_s")):
        with pytest.raises(ValueError, match=rf"env\.options\.{named} must be"):
            OpenEnv(**options)


def test_the_library_itself_serves_episodes_that_are_played_to_their_rewards(tmp_path: Path) -> None:
    """OPENENV_PYTHON names the interpreter of an environment with openenv-core, where this one has none."""
    python = os.environ.get("OPENENV_PYTHON", sys.executable)
    looks = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('openenv'))"
    if subprocess.run([python, "-c", looks], check=False).returncode:
        pytest.skip(f"openenv-core is not installed in {python}; OPENENV_PYTHON may name another that has it")
    variables = {**os.environ, "HOME": str(tmp_path)}
    program = [python, str(Path(__file__).with_name("openenv_counting.py"))]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=variables, cwd=tmp_path) as server:
        try:
            assert server.stdout
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"

            async def play() -> None:
                world = OpenEnv(url, field="message", shows="text")
                tasks = [world.task("train", index) for index in range(2)]
                games = (episode(world, task, script(TEMPLATE, said("up"))) for task in tasks)
                for task, (row,) in zip(tasks, await asyncio.gather(*games), strict=True):
                    assert (row.stop, row.reward, len(row.turns)) == (StopReason.ENV_TERMINATED, 1.0, 3), row.error
                    first = f"count 0, seed {task['seed']}"
                    assert [turn.state for turn in row.turns] == [first, "count 1, up", "count 2, up"]
                env = OpenEnv(url).episode("e", None)
                await env.reset({"seed": 1}, 1)
                refused, heard = await env.step(said('{"massage": 1}')), await env.step(said('{"message": "on"}'))
                assert refused.reason == "refused" and "error: " in str(refused.messages[0].content)
                assert "count 1, on" in str(heard.messages[0].content)
                await env.close()

            asyncio.run(play())
            fields = ["--config.env.options.field=message", "--config.env.options.shows=text", "--config.rollout.concurrency=4"]
            train = [
                sys.executable,
                "-m",
                "jaxagent",
                "train",
                f"--config={RECIPE}:runlocal:{url}",
                f"--workdir={tmp_path / 'r'}",
            ]
            ran = subprocess.run([*train, *fields], capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr
            assert {"before", "after"} <= json.loads((tmp_path / "r" / "eval.json").read_text()).keys()
        finally:
            server.kill()


def test_the_recipe_is_of_the_server_that_is_named_and_its_rows_hold_an_episode() -> None:
    async def play() -> None:
        async with serving() as (server, url):
            config, faults = load(f"{RECIPE}:runlocal:{url}", ["env.options.field=message", "env.options.shows=text"])
            assert (faults, config.env.name) == ([], "openenv")
            world = find(config.env.name)(**config.env.options)
            (row,) = await episode(world, world.task("train", 0), script(TEMPLATE, said("up")), limits=Limits(**config.agent))
            assert (row.stop, row.reward, len(server.resets)) == (StopReason.ENV_TERMINATED, 1.0, 1)

    asyncio.run(play())
    assert load(f"{RECIPE}:http://127.0.0.1:9")[0].env.options.url == "http://127.0.0.1:9"
