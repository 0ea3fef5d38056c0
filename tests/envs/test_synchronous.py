"""Synchronous worlds through the agent: text is the action, or calls are; faults of workers are no rewards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import LIMITS, SAMPLING, ScriptedSampler, episode, script

from jaxagent.agent import Agent
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs import synchronous
from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.synchronous import Here, Said, Shown, SynchronousEpisode
from jaxagent.envs.workers.install import LIBRARIES, Library
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, SampleRequest, StopReason, ToolCall, ToolSpec

TEMPLATE = PlainTemplate()
PUSH = ToolSpec("push", "", {"type": "object", "properties": {"way": {"type": "string"}}, "required": ["way"]})


def describe(split: str, index: int) -> Task:
    return {"difficulty": "easy"}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """The misbehaving adapter, as a world whose library this Python has."""
    monkeypatch.setitem(LIBRARIES, "misbehaving", Library((), ()))
    monkeypatch.setattr(synchronous, "ADAPTERS", Path(__file__).with_name("workers"))
    world = Shown("misbehaving", {}, describe, rules="Count.", workers=1, slots=2, timeout_s=30.0)
    yield world
    world.close()


def said(text: str) -> Message:
    return Message("assistant", text)


def test_the_text_of_a_turn_is_the_action_and_what_the_world_says_is_the_users(world: Shown) -> None:
    task = world.task("train", 3)
    (row,) = asyncio.run(episode(world, task, script(TEMPLATE, said(" one "), said("end"))))
    assert (row.stop, row.reward, [turn.reason for turn in row.turns]) == (StopReason.ENV_TERMINATED, 1.0, ["counted"] * 2)
    text = TEMPLATE.text(row.tokens)
    assert text.startswith("<user>Count.\n\ngo misbehaving/train/3 3 ")
    assert text.endswith("<turn> one <eos><user>one 1<turn>end<eos>")
    assert row.turns[1].state == "one 1"


def test_a_turn_that_cannot_be_read_moves_nothing_and_is_answered(world: Shown) -> None:
    calls = Message("assistant", calls=(ToolCall("look", {}),))
    (row,) = asyncio.run(episode(world, world.task("train", 0), script(TEMPLATE, [65, 66], calls, said("end"))))
    text = TEMPLATE.text(row.tokens)
    assert "<user>error: the turn did not end within its token budget<turn>" in text
    assert "<user>error: no tool 'look'" in text
    assert [turn.reward for turn in row.turns] == [0.0, 0.0, 0.5]


def test_a_world_that_breaks_is_truncated_and_a_worker_that_dies_is_tried_again(world: Shown) -> None:
    actions = iter(("die", "raise", "end"))  # one for each attempt

    def write(text: str, request: SampleRequest) -> list[int]:
        return TEMPLATE.turn(said(next(actions)))

    sampler = ScriptedSampler(TEMPLATE, write)
    agent = Agent(TEMPLATE, (), sampler, LIMITS)
    rollouts = Rollouts(world, agent, lambda: None, 0, RolloutOptions(attempts=3, deadline_s=60.0))
    try:
        ((future,),) = rollouts.play([("g", world.task("train", 0))], 1, SAMPLING)
        (row,) = future.result(60.0)
    finally:
        rollouts.close()
    assert (row.stop, row.reward, row.attempts, row.error) == (StopReason.ENV_TERMINATED, 0.5, 3, "")
    (broken,) = asyncio.run(episode(world, world.task("train", 0), script(TEMPLATE, said("broken"))))
    assert (broken.stop, broken.error, broken.stop.counts) == (StopReason.ENV_TRUNCATED, "the sky fell", False)


def test_more_episodes_than_places_are_played_one_after_another(world: Shown) -> None:
    async def many() -> list[Step]:
        async def one(i: int) -> Step:
            env = world.episode(f"e{i}", None)
            await env.reset(world.task("train", i), i)
            step = await env.step(said("end"))
            await env.close()
            await env.close()
            return step

        return await asyncio.gather(*(one(i) for i in range(9)))

    steps = asyncio.run(many())
    assert [step.terminated for step in steps] == [True] * 9
    assert len(world.pool()._workers) == 1


def test_an_episode_that_is_cancelled_while_it_waits_for_a_place_leaves_none_taken(world: Shown) -> None:
    async def leave() -> None:
        envs = [world.episode(str(i), None) for i in range(3)]
        for env in envs[:2]:
            await env.reset(world.task("train", 0), 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await envs[2].reset(world.task("train", 0), 0)
        for env in envs:
            await env.close()
        async with asyncio.timeout(60.0):
            again = [world.episode(f"again {i}", None) for i in range(2)]
            for env in again:
                await env.reset(world.task("train", 0), 0)
            for env in again:
                await env.close()

    asyncio.run(leave())


def test_a_demonstration_is_what_the_oracle_does_and_what_the_world_says(world: Shown) -> None:
    shown = world.demonstrate(world.task("demo", 0), random.Random(0))
    assert [message.role for message in shown] == ["user", "assistant", "user", "assistant"]
    assert [message.content for message in shown[1:]] == ["one", "one 1", "end"]


def test_options_that_no_pool_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "misbehaving", Library((), ()))
    for options, fault in (
        ({"workers": -1}, "workers must be 0 or more, got -1"),
        ({"timeout_s": 0.0}, "timeout_s must be pos"),
    ):
        with pytest.raises(ValueError, match=rf"env\.options\.{fault}"):
            Shown("misbehaving", {}, describe, **options)


class Pushes:
    """A world of tools: it takes pushes to the east."""

    def reset(self, task: Task, seed: int) -> Said:
        self.pushed = 0
        return {"text": "push"}

    def step(self, action: Any) -> Said:
        if action != {"name": "push", "arguments": {"way": "east"}}:
            return {"text": "not that way", "invalid": True}
        self.pushed += 1
        return {"text": "moved", "reward": 0.25, "done": self.pushed == 2, "parts": {"outcome": 0.25}, "reason": "east"}

    def close(self) -> None:
        pass


def push(*ways: str, name: str = "push") -> Message:
    return Message("assistant", calls=tuple(ToolCall(name, {"way": way}) for way in ways))


def test_a_world_of_tools_gets_calls_and_several_of_one_turn_one_after_another() -> None:
    async def play() -> list[Step]:
        env: Env = SynchronousEpisode(Here(Pushes()), (PUSH,))
        turns = (said("east"), push("east", name="pull"), push("north", "east"), push("east", "east"))
        steps = [await env.reset({}, 0), *[await env.step(turn) for turn in turns]]
        await env.close()
        return steps

    _, text, unknown, both, last = asyncio.run(play())
    assert [m.content for m in text.messages] == ["error: call one of the tools: push"]
    assert (text.messages[0].role, unknown.messages[0].content) == ("tool", "error: no tool 'pull'; there are push")
    assert [m.content for m in both.messages] == ["not that way", "moved"]
    assert [(record.name, record.outcome) for record in both.tools] == [("push", "bad_arguments"), ("push", "ok")]
    assert (both.reward, both.parts, both.reason, both.terminated) == (0.25, {"outcome": 0.25}, "east", False)
    assert (last.reward, last.terminated, len(last.messages)) == (0.25, True, 1)  # the second call came too late
