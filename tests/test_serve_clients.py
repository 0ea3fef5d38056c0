"""The official clients of OpenAI and Anthropic against the door: what they send is read, what they are sent they can read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from asking import LOOK, LOOK_OPENAI, NAME, TOKEN, result, served, user
from made import make, make_tokenizer
from scripted import ScriptedSampler, script

from jaxagent.door.session import Row
from jaxagent.models import hf
from jaxagent.types import Message, Sample, SampleRequest, ToolCall

CHATML = make("chatml")
CALL = Message("assistant", "Let me see.", calls=(ToolCall("look", {"key": "37"}),))
SAID = Message("assistant", "It is 52.")
SEEDS = 150  # the most that are tried until a turn has two calls
READY_S = 300.0  # it loads and compiles before it says that it is ready


def through(work: Callable[[str], Awaitable[None]], *turns: Message) -> None:
    """Args: work: is given the server's address."""

    async def whole() -> None:
        async with served(CHATML, script(CHATML, *turns), token=TOKEN) as (client, _):
            await work(client.url)

    asyncio.run(whole())


def openai_client(url: str) -> Any:
    openai = pytest.importorskip("openai", reason="the openai client is not installed (extra: clients)")
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)


def anthropic_client(url: str) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed (extra: clients)")
    return anthropic.AsyncAnthropic(base_url=url, api_key=TOKEN, max_retries=0)


def test_openai_chat_with_tools_whole_and_streamed() -> None:
    async def work(url: str) -> None:
        async with openai_client(url) as client:
            ask: dict[str, Any] = {"model": NAME, "tools": [LOOK_OPENAI]}
            first = await client.chat.completions.create(messages=[user("37?")], logprobs=True, **ask)
            message = first.choices[0].message
            assert json.loads(message.tool_calls[0].function.arguments) == {"key": "37"}
            told = [user("37?"), message.model_dump(), result(message.tool_calls[0].id, "52")]
            second = await client.chat.completions.create(messages=told, **ask)
            assert second.choices[0].message.content == "It is 52."
            assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
            async with client.chat.completions.stream(messages=[user("37?")], **ask) as stream:
                events = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert "content.delta" in events and final.choices[0].message.content == "Let me see."
            assert final.choices[0].finish_reason == "tool_calls"
            assert [model.id async for model in client.models.list()] == [NAME]

    through(work, CALL, SAID)


def test_openai_reads_several_calls_of_a_turn_as_they_were_recorded() -> None:
    both = Message("assistant", "Two.", calls=tuple(ToolCall("look", {"key": key}) for key in ("37", "38")))
    recorded: list[list[tuple[str, str, Any]]] = []

    def heard(row: Row, before: int, sample: Sample, told: Sequence[Message]) -> None:
        recorded.append([(call.id, call.name, call.arguments) for call in told[-1].calls])

    def read(calls: Any) -> list[tuple[str, str, Any]]:
        return [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls]

    async def whole() -> None:
        async with served(CHATML, script(CHATML, both), token=TOKEN) as (at, session), openai_client(at.url) as client:
            session.heard = heard
            ask: dict[str, Any] = {"model": NAME, "tools": [LOOK_OPENAI], "messages": [user("37 and 38?")]}
            found = [read((await client.chat.completions.create(**ask)).choices[0].message.tool_calls)]
            async with client.chat.completions.stream(**ask) as stream:
                found.append(read((await stream.get_final_completion()).choices[0].message.tool_calls))
            tool = {"type": "function", "name": "look", "parameters": LOOK.parameters, "strict": False}
            said = (await client.responses.create(model=NAME, input="37 and 38?", tools=[tool])).output[1:]
            found.append([(call.call_id, call.name, json.loads(call.arguments)) for call in said])
        assert found == recorded and [[key["key"] for *_, key in calls] for calls in found] == [["37", "38"]] * 3

    asyncio.run(whole())


def test_openai_responses_whole_and_streamed_and_raw_completions() -> None:
    async def work(url: str) -> None:
        async with openai_client(url) as client:
            tool = {"type": "function", "name": "look", "parameters": LOOK.parameters, "strict": False}
            first = await client.responses.create(model=NAME, input="37?", tools=[tool])
            assert first.output_text == "Let me see." and first.output[1].type == "function_call"
            output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "52"}
            second = await client.responses.create(model=NAME, input=[output], previous_response_id=first.id, tools=[tool])
            assert second.output_text == "It is 52."
            async with client.responses.stream(model=NAME, input="37?", tools=[tool]) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert kinds[-1] == "response.completed" and final.output_text == "Let me see."
            raw = await client.completions.create(model=NAME, prompt="<|im_start|>user\nq<|im_end|>", max_tokens=50)
            assert raw.choices[0].text.startswith("Let me see.")

    through(work, CALL, SAID)


def test_openai_faults_are_its_own_exceptions() -> None:
    async def work(url: str) -> None:
        openai = pytest.importorskip("openai", reason="the openai client is not installed (extra: clients)")
        async with openai_client(url) as client:
            with pytest.raises(openai.NotFoundError, match="the model here is 'tiny'"):
                await client.chat.completions.create(model="gpt", messages=[user("q")])
            with pytest.raises(openai.BadRequestError, match="does not fit"):
                await client.chat.completions.create(model=NAME, messages=[user("q" * 900)])
        async with openai_client(url).with_options(api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    through(work, SAID)


def test_anthropic_messages_whole_and_streamed() -> None:
    async def work(url: str) -> None:
        async with anthropic_client(url) as client:
            tool = {"name": "look", "description": "", "input_schema": LOOK.parameters}
            ask: dict[str, Any] = {"model": NAME, "max_tokens": 60, "tools": [tool]}
            first = await client.messages.create(messages=[user("37?")], **ask)
            assert first.stop_reason == "tool_use" and first.content[1].input == {"key": "37"}
            answer = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "52"}
            told = [user("37?"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
            second = await client.messages.create(messages=told, **ask)
            assert second.content[0].text == "It is 52." and second.usage.cache_read_input_tokens > 0
            async with client.messages.stream(messages=[user("37?")], **ask) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "Let me see." and final.content[1].input == {"key": "37"}

    through(work, CALL, SAID)


def breaking(faults: int) -> ScriptedSampler:
    """A policy whose engine breaks at its first requests."""
    left = iter(range(faults))

    async def write(text: str, request: SampleRequest) -> list[int]:
        if next(left, None) is not None:
            raise RuntimeError("the device is gone")
        return CHATML.turn(SAID)

    return ScriptedSampler(CHATML, write)


async def chats(url: str, retries: int) -> Any:
    async with openai_client(url).with_options(max_retries=retries) as client:
        return await client.chat.completions.create(model=NAME, messages=[user("q")])


async def responds(url: str, retries: int) -> Any:
    async with openai_client(url).with_options(max_retries=retries) as client:
        return await client.responses.create(model=NAME, input="q")


async def messages(url: str, retries: int) -> Any:
    async with anthropic_client(url).with_options(max_retries=retries) as client:
        return await client.messages.create(model=NAME, messages=[user("q")], max_tokens=60)


@pytest.mark.parametrize("asks", [chats, responds, messages])
def test_what_a_client_asks_again_is_known_for_the_same_request(asks: Callable[[str, int], Awaitable[Any]]) -> None:
    async def faults_left(faults: int, retries: int) -> list[str]:
        async with served(CHATML, breaking(faults), token=TOKEN) as (client, session):
            try:
                await asks(client.url, retries)
            except Exception as fault:
                assert getattr(fault, "status_code", 0) == 503, fault
            return [one.fault for one in session.faults]

    assert asyncio.run(faults_left(faults=1, retries=1)) == []
    assert asyncio.run(faults_left(faults=1, retries=0)) == ["RuntimeError: the device is gone"]
    assert asyncio.run(faults_left(faults=2, retries=1)) == ["RuntimeError: the device is gone"]


# ====================================================================== the server as it is started, on a checkpoint

KEY = {"type": "object", "properties": {"key": {"enum": ["37", "38"]}}, "required": ["key"], "additionalProperties": False}
TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Ulm", "Bonn"]}, "tall": {"type": "boolean"}},
    "required": ["town", "tall"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": KEY, "strict": True}} for name in ("look", "hear")]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address and the token of `jaxagent serve` on a tiny checkpoint of random weights, in a process of its own."""
    pytest.importorskip("openai", reason="the openai client is not installed (extra: clients)")
    folder = tmp_path_factory.mktemp("served")
    tokenizer = make_tokenizer("chatml")
    hf.save(tiny.policy(tiny.config(vocab_size=len(tokenizer))), folder / NAME)
    tokenizer.save_pretrained(folder / NAME)
    command = [sys.executable, "-m", "jaxagent", "serve", f"--checkpoint={folder / NAME}", "--port=0", "--context=512"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "1"}
    with subprocess.Popen(
        [*command, f"--token-file={folder / 'token'}", "--slots=4"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        impatient = threading.Timer(READY_S, process.kill)
        impatient.start()
        try:
            ready = json.loads(next(line for line in process.stdout if line.startswith("{")))
            impatient.cancel()
            assert ready["ready"] and ready["model"] == NAME
            yield ready["url"].removesuffix("/v1"), (folder / "token").read_text().strip()
        finally:
            impatient.cancel()
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def chat(client: Any, **asked: Any) -> Any:
    found = client.chat.completions.create(model=NAME, messages=[user("37?")], **{"max_tokens": 60, "seed": 7, **asked})
    return found.choices[0]


def a_tool_is_chosen(client: Any) -> None:
    named = {"type": "function", "function": {"name": "hear"}}
    for wanted, names in (("required", {"look", "hear"}), (named, {"hear"})):
        choice = chat(client, tools=TOOLS, tool_choice=wanted, max_tokens=300)
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and {call.function.name for call in calls} <= names
        assert all(json.loads(call.function.arguments)["key"] in ("37", "38") for call in calls)
    assert chat(client, tools=TOOLS, tool_choice="none").message.tool_calls is None


def forced(client: Any, seed: int, parallel: bool) -> list[tuple[str, Any]]:
    """The calls of a turn as the client reads them, which are those of the text that was sampled, all of it."""
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "logprobs": True}
    choice = chat(client, seed=seed, parallel_tool_calls=parallel, **asked)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
    sampled = [json.loads(one) for one in re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    assert calls == [(one["name"], one["arguments"]) for one in sampled]
    assert len({call.id for call in choice.message.tool_calls}) == len(calls)
    return calls


def a_forced_turn_is_one_call_or_several(client: Any) -> None:
    several = next((seed for seed in range(SEEDS) if len(forced(client, seed, parallel=True)) > 1), None)
    assert several is not None, f"of {SEEDS} turns none had two calls"  # about one of fourteen has
    assert len(forced(client, several, parallel=False)) == 1


def a_seed_fixes_the_text(client: Any) -> None:
    first, again, other = (chat(client, seed=seed).message.content for seed in (7, 7, 8))
    assert first and first == again != other


def a_stop_text_ends_the_turn(client: Any) -> None:
    whole = chat(client).message.content
    stop = next(c for c in whole[1:] if c.isascii() and c.isalnum())
    choice = chat(client, stop=[stop])
    assert (choice.message.content, choice.finish_reason) == (whole.partition(stop)[0], "stop")


def an_answer_is_held_to_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN, "strict": True}}
    for seed in range(3):
        said = json.loads(chat(client, seed=seed, response_format=form).message.content)
        assert said["town"] in ("Ulm", "Bonn") and isinstance(said["tall"], bool) and len(said) == 2


def raw_text_goes_on(client: Any) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": "the user and the", "max_tokens": 9, "seed": 7, "logprobs": 2}
    first, again = (client.completions.create(**asked) for _ in range(2))
    assert first.choices[0].text == again.choices[0].text
    assert first.usage.completion_tokens == len(first.choices[0].logprobs.tokens) <= 9
    assert all(value <= 0 for value in first.choices[0].logprobs.token_logprobs)


def responses_go_on_from_each_other(client: Any) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    first = client.responses.create(model=NAME, input="37?", tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "52"}
    form = {"type": "json_schema", "name": "town", "schema": TOWN, "strict": True}
    second = client.responses.create(model=NAME, input=[output], previous_response_id=first.id, text={"format": form})
    assert json.loads(second.output_text)["town"] in ("Ulm", "Bonn")
    alone = client.responses.create(model=NAME, input="37?", max_output_tokens=1)
    assert second.usage.input_tokens > alone.usage.input_tokens  # the call and its result as well


OPENAI: list[Callable[[Any], None]] = [
    a_tool_is_chosen,
    a_forced_turn_is_one_call_or_several,
    a_seed_fixes_the_text,
    a_stop_text_ends_the_turn,
    an_answer_is_held_to_a_schema,
    raw_text_goes_on,
    responses_go_on_from_each_other,
]


@pytest.mark.parametrize("work", OPENAI, ids=lambda work: work.__name__)
def test_the_openai_client_and_a_served_checkpoint(serving: tuple[str, str], work: Callable[[Any], None]) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed (extra: clients)")
    with openai.OpenAI(base_url=f"{serving[0]}/v1", api_key=serving[1], max_retries=0) as client:
        work(client)


def test_the_anthropic_client_and_a_served_checkpoint(serving: tuple[str, str]) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed (extra: clients)")
    tool = {"name": "look", "description": "Looks it up.", "input_schema": KEY}
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 60, "tools": [tool]}
    with anthropic.Anthropic(base_url=serving[0], api_key=serving[1], max_retries=0) as client:
        wanted = {"type": "any", "disable_parallel_tool_use": True}
        first = client.messages.create(messages=[user("37?")], tool_choice=wanted, **asked)
        (use,) = [part for part in first.content if part.type == "tool_use"]
        assert first.stop_reason == "tool_use" and use.name == "look" and use.input["key"] in ("37", "38")
        answer = {"type": "tool_result", "tool_use_id": use.id, "content": "52"}
        told = [user("37?"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
        second = client.messages.create(messages=told, **asked)
        assert second.role == "assistant" and second.usage.output_tokens > 0
