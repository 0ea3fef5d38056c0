"""Calls that are held to their tools' schemas, an agent's and a client's: a policy of random weights calls without a fault."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from asking import Client, asked, user
from scripted import LIMITS, ScriptedSampler
from toys import TASK, Lone

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.door.session import Rules
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.envs.env import Step, Task
from jaxagent.types import Message, Sampling, ToolSpec, Trajectory

sys.path.insert(0, str(Path(__file__).parent / "chat"))
from made import make

TEMPLATE = make("chatml")
CALL = TEMPLATE.tokenizer.convert_tokens_to_ids("<tool_call>")
NUMBERED = {"type": "object", "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}}, "required": ["n"]}
TOOLS = (ToolSpec("look", "", NUMBERED), ToolSpec("end", ""))


class Calls(Lone):
    """Takes six turns and keeps them."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", "q")])

    async def step(self, action: Message) -> Step:
        self.seen.append(action)
        return Step([Message("user", "more")], terminated=len(self.seen) == 6)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = tiny.config(vocab_size=TEMPLATE.vocab_size, layers=1)
    options = EngineOptions(
        slots=4, slot_tokens=1024, chunk=128, decode_tokens=8, append_rows=1, append_tokens=(64,), constraint_states=256
    )
    engine = Engine(config, options, tiny.mesh(), TEMPLATE.vocabulary())
    engine.publish(tiny.params(config), version=0)
    yield engine
    engine.close()


def test_a_policy_of_random_weights_writes_calls_of_known_tools_with_arguments_of_their_schemas(engine: Engine) -> None:
    agent = Agent(TEMPLATE, TOOLS, engine, Limits(8, 1024), constrain_calls=True)
    # It begins a call at once, ends its numbers soon, and does not stop before.
    wish = ((CALL, 9.0), (TEMPLATE.tokenizer.convert_tokens_to_ids("}"), 4.0))
    world = Calls()

    async def story() -> None:
        rows = [Trajectory("toy/0", 3, "g", 0)]
        await agent.play(world, TASK, rows, (1, 2), Sampling(max_tokens=120, logit_bias=wish, stop_strings=("</tool_call>",)))
        assert all(turn.end > turn.start for turn in rows[0].turns)

    asyncio.run(asyncio.wait_for(story(), 120))
    texts = [message.content for message in world.seen]
    assert len(texts) == 6
    called = [TEMPLATE.dialect.read(text, TOOLS) for text in texts if text.endswith("</tool_call>")]
    assert len(called) >= 3
    for message in called:
        assert message.error == ""
        (call,) = message.calls
        assert call.name in ("look", "end")
        known: dict[str, type] = {"n": int, "on": bool} if call.name == "look" else {}
        assert all(type(value) is known[name] for name, value in call.arguments.items())
        assert call.name == "end" or "n" in call.arguments


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "end"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_turn_at_the_door_is_read_whether_it_holds_one_call_or_several(
    engine: Engine, choice: Any, parallel: bool
) -> None:
    tools = [{"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS]
    ends_soon = {str(TEMPLATE.tokenizer.convert_tokens_to_ids("}")): 4}
    options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "logit_bias": ends_soon}
    counts = []

    async def work(client: Client) -> None:
        for seed in range(8):
            (choice,) = (await client.chat(user("q"), seed=seed, max_tokens=900, **options))["choices"]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            called = [call["function"] for call in choice["message"]["tool_calls"]]
            assert all(call["name"] in names for call in called)
            assert all(type(json.loads(call["arguments"])["n"]) is int for call in called if call["name"] == "look")
            assert all(call["arguments"] == "{}" for call in called if call["name"] == "end")
            counts.append(len(called))

    names = {"look", "end"} if choice == "required" else {"end"}
    asked(TEMPLATE, engine, work, capacity=4, rules=Rules(1024))
    assert min(counts) == 1 and (max(counts) > 1) == parallel


def test_requests_carry_the_constraint_only_where_it_was_asked_for() -> None:
    def constraints(**how: Any) -> list[Any]:
        sampler = ScriptedSampler(TEMPLATE, lambda text, request: TEMPLATE.turn(Message("assistant", "x")))
        agent = Agent(TEMPLATE, TOOLS, sampler, LIMITS, **how)
        asyncio.run(agent.play(Calls(), TASK, [Trajectory("toy/0", 3, "g", 0)], (1, 2), Sampling(max_tokens=9)))
        return [request.sampling.constraint for request in sampler.requests]

    assert set(constraints()) == {None}
    assert set(constraints(constrain_calls=True)) == {TEMPLATE.constraint(TOOLS)}


def test_a_family_whose_calls_cannot_be_constrained_is_refused_before_anything_is_played() -> None:
    sampler = ScriptedSampler(PlainTemplate(), lambda text, request: [65])
    with pytest.raises(ValueError, match="have no schema"):
        Agent(PlainTemplate(), TOOLS, sampler, LIMITS, constrain_calls=True)
