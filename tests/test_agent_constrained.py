"""An agent whose calls are held to their tools' schemas: a policy of random weights calls without a fault."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from scripted import LIMITS, ScriptedSampler
from toys import TASK, Lone

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
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


def test_requests_carry_the_constraint_only_where_it_was_asked_for() -> None:
    def asked(**how: Any) -> list[Any]:
        sampler = ScriptedSampler(TEMPLATE, lambda text, request: TEMPLATE.turn(Message("assistant", "x")))
        agent = Agent(TEMPLATE, TOOLS, sampler, LIMITS, **how)
        asyncio.run(agent.play(Calls(), TASK, [Trajectory("toy/0", 3, "g", 0)], (1, 2), Sampling(max_tokens=9)))
        return [request.sampling.constraint for request in sampler.requests]

    assert set(asked()) == {None}
    assert set(asked(constrain_calls=True)) == {TEMPLATE.constraint(TOOLS)}


def test_a_family_whose_calls_cannot_be_constrained_is_refused_before_anything_is_played() -> None:
    sampler = ScriptedSampler(PlainTemplate(), lambda text, request: [65])
    with pytest.raises(ValueError, match="have no schema"):
        Agent(PlainTemplate(), TOOLS, sampler, LIMITS, constrain_calls=True)
