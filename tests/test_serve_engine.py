"""The door in front of the engine: streams are what is sampled, held rows are not fed again, forms and seeds are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from asking import Client, asked, user

from jaxagent.chat.plain import PlainTemplate
from jaxagent.door.ask import Ask
from jaxagent.door.session import Rules, Session, Slots
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.types import Message, Sampling

TEMPLATE = PlainTemplate()
OPTIONS = EngineOptions(
    slots=2,
    slot_tokens=64,
    chunk=64,
    decode_tokens=3,
    append_rows=1,
    append_tokens=(8,),
    top_logprobs=2,
    constraint_states=64,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = tiny.config(vocab_size=TEMPLATE.vocab_size, layers=1)
    engine = Engine(config, OPTIONS, tiny.mesh(), TEMPLATE.vocabulary())
    engine.publish(tiny.params(config), version=0)
    yield engine
    engine.close()


def serve(engine: Engine, work: Any) -> Any:
    return asked(TEMPLATE, engine, work, capacity=2, rules=Rules(OPTIONS.slot_tokens))


def test_a_seeded_answer_is_the_same_whole_and_as_a_stream(engine: Engine) -> None:
    async def work(client: Client) -> None:
        asked = {"seed": 5, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat(user("hello"), **asked)
        events = await client.stream("/v1/chat/completions", {"messages": [user("hello")], **asked})
        chunks = [data["choices"][0] for _, data in events[:-1]]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        assert chunks[-1]["logprobs"] == whole["choices"][0]["logprobs"]
        assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["logprobs"]["content"]) > 3
        first = whole["choices"][0]["logprobs"]["content"][0]
        assert len(first["top_logprobs"]) == 2 and first["top_logprobs"][0]["logprob"] >= first["logprob"]
        other = await client.chat(user("hello"), **{**asked, "seed": 6})
        assert other["choices"][0]["message"] != whole["choices"][0]["message"]

    serve(engine, work)


def test_what_is_held_is_not_prefilled_again(engine: Engine) -> None:
    async def work(client: Client) -> None:
        first = await client.chat(user("hello"), max_tokens=9, seed=1)
        engine.take_stats()
        mine = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = await client.chat(user("hello"), mine, user("ab"), max_tokens=9, seed=1)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        new = second["usage"]["prompt_tokens"] - first["usage"]["total_tokens"]
        assert engine.take_stats().prefilled == new  # the pending token of the first turn, and all new ones but the last

    serve(engine, work)


def test_an_answer_keeps_to_its_schema(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}

    async def work(client: Client) -> None:
        found = await client.chat(user("q"), response_format=form, seed=3)
        assert json.loads(found["choices"][0]["message"]["content"])["a"] in ("x", "yy")
        assert found["choices"][0]["finish_reason"] == "stop"

    serve(engine, work)


def test_equal_prompts_of_a_group_are_prefilled_once_and_sampled_alike(engine: Engine) -> None:
    """Sessions of one group, as the programs of a training group have them."""
    ask = Ask((Message("user", "a question of some length, so that it is copied"),), sampling=Sampling(max_tokens=5))

    async def sampled(group: str) -> tuple[list[list[int]], int]:
        slots, found = Slots(TEMPLATE, engine, 2), list[list[int]]()
        engine.take_stats()
        sessions = [Session(f"{group}#{i}", slots, Rules(OPTIONS.slot_tokens), (1, i), group) for i in range(2)]
        for session in sessions:
            found.append((await session.complete(ask))[0].tokens)
        for session in sessions:
            session.close()
        return found, engine.take_stats().prefilled

    (alone, cost), (together, less) = asyncio.run(sampled("")), asyncio.run(sampled("g"))
    assert together == alone and alone[0] != alone[1]
    assert less == cost - (len(TEMPLATE.prompt(ask.messages, ())) - 1)
