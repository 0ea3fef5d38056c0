"""What every world keeps: a key names one world, splits do not meet, demonstrations can be learnt from."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from jaxagent import config as configs
from jaxagent.chat.plain import PlainTemplate
from jaxagent.chat.template import render
from jaxagent.envs.env import Ablated, Step, Task, World, find
from jaxagent.types import Message, ToolCall

CONFIGS = Path(__file__).parents[2] / "configs"
WORLDS = ("chain", "maze", "frozen_lake", "sokoban")
SPLITS = ("train", "demo", "valid", "test")
TEMPLATE = PlainTemplate()


def make(name: str, **options: Any) -> World:
    return find(name)(**options)


@pytest.mark.parametrize("name", WORLDS)
def test_a_task_is_the_same_whenever_it_is_asked_for(name: str) -> None:
    first, second = make(name), make(name)
    later = [second.task("valid", i) for i in reversed(range(50))]
    assert [first.task("valid", i) for i in range(50)] == later[::-1]


@pytest.mark.parametrize("name", WORLDS)
def test_tasks_have_a_name_a_seed_and_a_difficulty_and_no_two_splits_share_one(name: str) -> None:
    world = make(name)
    tasks = [world.task(split, index) for split in SPLITS for index in (*range(300), 10**9 - 1)]
    assert len({task["id"] for task in tasks}) == len(tasks)
    assert len({task["seed"] for task in tasks}) == len(tasks)
    assert all(isinstance(task["difficulty"], str) and task["difficulty"] for task in tasks)


@pytest.mark.parametrize("name", WORLDS)
def test_a_demonstration_depends_on_its_task_and_its_draws_only(name: str) -> None:
    world = make(name)
    shown = [world.demonstrate(world.task("demo", 3), random.Random(5)) for _ in range(2)]
    assert shown[0] == shown[1]
    others = [world.demonstrate(world.task("demo", 3), random.Random(i)) for i in range(20)]
    assert len({str(dialogue) for dialogue in others}) > 1


@pytest.mark.parametrize("config", ["quickstart", "maze", "frozen_lake"])
def test_what_a_demonstrator_writes_can_be_sampled_parsed_and_held(config: str) -> None:
    c, _ = configs.load(str(CONFIGS / f"{config}.py"))
    world = make(c.env.name, **c.env.options)
    rng = random.Random(0)
    for i in range(200):
        dialogue = world.demonstrate(world.task("demo", i), rng)
        assert dialogue[0].role == "user"
        turns = [message for message in dialogue if message.role == "assistant"]
        assert len(turns) <= c.agent.max_turns
        for turn in turns:
            ids = TEMPLATE.turn(turn)
            read = TEMPLATE.parse(ids, world.tools)
            assert (read.content, [c.name for c in read.calls]) == (turn.content, [c.name for c in turn.calls])
            assert read.error == ""
            assert len(ids) <= c.sampling.max_tokens
        ids, mask = render(TEMPLATE, dialogue, world.tools)
        assert len(ids) <= c.agent.max_tokens
        assert sum(mask) == sum(len(TEMPLATE.turn(turn)) for turn in turns)


def test_a_world_is_found_by_the_name_of_its_file_or_by_its_module() -> None:
    assert find("chain") is find("jaxagent.envs.chain")


@pytest.mark.parametrize("name", ["chian", "no_such_package.world", "jaxagent.envs.nothing", "jaxagent.nothing.world"])
def test_a_world_that_is_nowhere_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=f"must be a file of jaxagent/envs or a dotted module; got '{name}'"):
        find(name)


def test_a_module_without_a_world_is_told() -> None:
    with pytest.raises(ValueError, match=r"module jaxagent\.envs\.env has no `make_world`"):
        find("env")


def test_a_world_whose_own_import_fails_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_world.py").write_text("import no_such_library\n")
    (tmp_path / "broken_worlds").mkdir()
    (tmp_path / "broken_worlds" / "one.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("broken_worlds.one", "broken_world.one"):
        with pytest.raises(ModuleNotFoundError, match="no_such_library"):
            find(name)


class Loud:
    """Says a word to the agent and gives a number with it."""

    def __init__(self) -> None:
        self.closed = False

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", "go")], state="s")

    async def step(self, action: Message) -> Step:
        said = [Message("tool", "secret", name="look"), Message("user", "well?")]
        return Step(said, reward=0.5, reason="because", state="t")

    async def close(self) -> None:
        self.closed = True


def test_an_ablated_episode_hides_what_tools_say_and_nothing_else() -> None:
    inner = Loud()

    async def play() -> tuple[Step, Step]:
        env = Ablated(inner)
        began = await env.reset({}, 0)
        step = await env.step(Message("assistant", calls=(ToolCall("look"),)))
        await env.close()
        return began, step

    began, step = asyncio.run(play())
    assert began == Step([Message("user", "go")], state="s")
    assert step.messages == [Message("tool", "......", name="look"), Message("user", "well?")]
    assert (step.reward, step.reason, step.state) == (0.5, "because", "t")
    assert inner.closed


def test_without_tools_an_ablated_episode_tells_nothing_from_its_beginning_on() -> None:
    async def play() -> tuple[Step, Step]:
        env = Ablated(Loud(), mute=True)
        return await env.reset({}, 0), await env.step(Message("assistant", "look"))

    began, step = asyncio.run(play())
    assert began == Step([Message("user", "..")], state="s")
    assert step.messages == [Message("tool", "......", name="look"), Message("user", ".....")]
