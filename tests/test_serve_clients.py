"""The official clients of OpenAI and Anthropic against the door: what they send is read, what they are sent they can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from asking import LOOK, LOOK_OPENAI, NAME, TOKEN, result, served, user
from made import make
from scripted import script

from jaxagent.types import Message, ToolCall

CHATML = make("chatml")
CALL = Message("assistant", "Let me see.", calls=(ToolCall("look", {"key": "37"}),))
SAID = Message("assistant", "It is 52.")


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
