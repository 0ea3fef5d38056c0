"""The server over raw HTTP: what programs rely on in each dialect, and how they are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from asking import LOOK, LOOK_OPENAI, NAME, TOKEN, Client, asked, result, served, user
from made import make
from scripted import ScriptedSampler, script

from jaxagent import policy
from jaxagent.__main__ import parser, serve_options
from jaxagent.chat.plain import EOS, PlainTemplate
from jaxagent.door.ask import Ask
from jaxagent.door.session import Rules, Slots
from jaxagent.door.told import Visible
from jaxagent.serve import Address, ServeLimits, run, token_in
from jaxagent.types import Message, SampleRequest, ToolCall, ToolSpec

CHATML = make("chatml")
CALL = Message("assistant", "Let me see.", calls=(ToolCall("look", {"key": "37"}),))
BOTH = Message("assistant", calls=(ToolCall("look", {"key": "37"}), ToolCall("look", {"key": "38"})))
SAID = Message("assistant", "It is 52.")


def test_a_conversation_with_a_tool_goes_on_in_the_row_that_is_held() -> None:
    sampler = script(CHATML, CALL, SAID)

    async def work(client: Client) -> None:
        first = await client.chat(user("37?"), tools=[LOOK_OPENAI])
        choice = first["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        assert call["type"] == "function" and call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"]) == {"key": "37"}
        # As clients send it back: arguments written otherwise, no thoughts, other fields empty.
        mine = {**choice["message"], "tool_calls": [{**call, "function": {"name": "look", "arguments": '{ "key" : "37" }'}}]}
        second = await client.chat(user("37?"), mine, result(call["id"], "52"), tools=[LOOK_OPENAI])
        assert second["choices"][0]["message"]["content"] == "It is 52."
        assert second["choices"][0]["finish_reason"] == "stop"
        held = first["usage"]["total_tokens"]
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": held}
        assert "X-Retokenised" not in client.headers

    asked(CHATML, sampler, work)
    one, two = sampler.requests
    assert one.trajectory == two.trajectory
    observation = CHATML.extend([Message("tool", "52", name="look")], after=CALL)
    assert list(two.tokens) == observation  # only what is new was fed


def test_sampled_ids_are_never_encoded_again() -> None:
    """The policy writes "ab" as two tokens which the template would write as one: the row keeps the two."""
    odd = [*CHATML.turn(Message("assistant", "the"))]
    apart = [i for letter in "the" for i in CHATML.raw(letter)]
    assert apart != odd[:-1] and CHATML.text(apart) == "the"
    sampler = script(CHATML, [*apart, odd[-1]], SAID)

    async def work(client: Client) -> None:
        first = await client.chat(user("say"))
        assert first["choices"][0]["message"]["content"] == "the"
        again = await client.chat(user("say"), {"role": "assistant", "content": "the"}, user("more"))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]

    asked(CHATML, sampler, work)
    assert sampler.requests[1].start == len(sampler.requests[0].tokens) + 4


def test_a_turn_that_was_not_sampled_here_is_encoded_and_the_answer_says_so() -> None:
    sampler = script(CHATML, SAID)

    async def work(client: Client) -> str:
        await client.chat(user("a"), {"role": "assistant", "content": "not mine"}, user("b"))
        return client.headers["X-Retokenised"]

    assert asked(CHATML, sampler, work) == "true"
    told = [Message("user", "a"), Message("assistant", "not mine"), Message("user", "b")]
    assert list(sampler.requests[0].tokens) == CHATML.prompt(told, ())


def test_a_turn_that_cannot_be_read_is_a_text_and_a_header_says_why() -> None:
    async def work(client: Client) -> tuple[str, str | None]:
        found = await client.chat(user("q"), tools=[LOOK_OPENAI])
        header = unquote(client.headers["X-Unread"])
        return found["choices"][0]["message"]["content"], header

    text, header = asked(CHATML, script(CHATML, [*CHATML.raw("<tool_call>{oops</tool_call>"), CHATML.stop[0]]), work)
    assert "oops" in text and header


def test_a_conversation_that_turns_back_begins_a_row_from_the_recorded_ids() -> None:
    sampler = script(CHATML, SAID)

    async def work(client: Client) -> None:
        mine = {"role": "assistant", "content": SAID.content}
        await client.chat(user("a"))
        await client.chat(user("a"), mine, user("b"))
        await client.chat(user("a"), mine, user("c"))  # the row has gone on with b meanwhile

    asked(CHATML, sampler, work)
    rows = [request.trajectory for request in sampler.requests]
    assert rows[0] == rows[1] != rows[2]
    assert sampler.requests[2].start == 0


def test_parallel_calls_are_told_together_or_one_by_one() -> None:
    sampler = script(CHATML, BOTH)

    async def work(client: Client) -> None:
        both = await client.chat(user("q"), tools=[LOOK_OPENAI])
        ids = [call["id"] for call in both["choices"][0]["message"]["tool_calls"]]
        assert len(set(ids)) == 2 and both["choices"][0]["message"]["content"] is None
        one = await client.chat(user("q"), tools=[LOOK_OPENAI], parallel_tool_calls=False)
        assert len(one["choices"][0]["message"]["tool_calls"]) == 1

    asked(CHATML, sampler, work)


def test_without_tools_or_with_tool_choice_none_a_call_is_a_text() -> None:
    sampler = script(CHATML, CALL)

    async def work(client: Client) -> None:
        for more in ({}, {"tools": [LOOK_OPENAI], "tool_choice": "none"}):
            found = await client.chat(user("q"), **more)
            assert "<tool_call>" in found["choices"][0]["message"]["content"]
            assert found["choices"][0]["finish_reason"] == "stop"

    asked(CHATML, sampler, work)
    assert list(sampler.requests[1].tokens) == CHATML.prompt([Message("user", "q")], ())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_call_holds_the_turn_to_its_form(choice: Any, parallel: bool) -> None:
    sampler = script(CHATML, CALL)
    work = lambda client: client.chat(user("q"), tools=[LOOK_OPENAI], tool_choice=choice, parallel_tool_calls=parallel)  # noqa: E731
    asked(CHATML, sampler, work)
    form = CHATML.constraint([LOOK], parallel)
    constraint = sampler.requests[0].sampling.constraint
    assert constraint is not None and constraint.after == ()
    assert constraint.form == (form.after[0], form.form)
    assert form != CHATML.constraint([LOOK], not parallel)


def test_a_json_schema_and_all_settings_reach_the_sampler() -> None:
    sampler = script(CHATML, Message("assistant", '{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 7,
        "stop": ["x", "yy"],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"3": -5},
        "seed": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}},
        "user": "me",
    }

    async def work(client: Client) -> None:
        await client.chat(user("q"), **settings)
        await client.chat(user("q"), **settings)
        await client.chat(user("q"), **{**settings, "seed": 10})

    asked(CHATML, sampler, work)
    s = sampler.requests[0].sampling
    assert (s.temperature, s.top_p, s.max_tokens, s.stop_strings) == (0.5, 0.9, 7, ("x", "yy"))
    assert (s.presence_penalty, s.frequency_penalty, s.logit_bias) == (0.5, 0.25, ((3, -5.0),))
    assert s.constraint is not None and json.loads(s.constraint.form.schema) == schema  # type: ignore[union-attr]
    keys = [request.key for request in sampler.requests]
    assert keys[0] == keys[1] != keys[2]


def test_several_choices_are_sampled_apart_with_their_logprobs() -> None:
    sampler = script(CHATML, SAID)

    async def work(client: Client) -> None:
        found = await client.chat(user("q"), n=3, logprobs=True)
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
        content = found["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == "It is 52.<|im_end|>"
        assert [token["logprob"] for token in content[:2]] == [-0.25, -0.5]
        assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
        assert found["usage"]["completion_tokens"] == 3 * len(content)

    asked(CHATML, sampler, work)
    assert len({request.trajectory for request in sampler.requests}) == len({r.key for r in sampler.requests}) == 3


def test_a_stop_text_ends_the_turn_and_is_not_told() -> None:
    ids = CHATML.turn(Message("assistant", "one STOP two"))
    sampler = script(CHATML, ids[:-1])

    async def work(client: Client) -> None:
        found = await client.chat(user("q"), stop="STOP")
        assert found["choices"][0]["message"]["content"] == "one "
        assert found["choices"][0]["finish_reason"] == "stop"
        events = await client.stream("/v1/chat/completions", {"messages": [user("q")], "stop": ["STOP"]})
        assert text_of(events) == "one "
        cut = await client.chat(user("q"), max_tokens=3)
        assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 3

    asked(CHATML, sampler, work)


def text_of(events: list[tuple[str, Any]]) -> str:
    deltas = [data["choices"][0]["delta"] for _, data in events if data != "[DONE]" and data["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_stream_brings_the_text_as_it_is_sampled_then_calls_then_counts() -> None:
    sampler = script(CHATML, Message("assistant", "One moment, très vite.", calls=CALL.calls), SAID)

    async def work(client: Client) -> None:
        body = {"messages": [user("q")], "tools": [LOOK_OPENAI], "stream_options": {"include_usage": True}}
        events = await client.stream("/v1/chat/completions", body)
        assert events[-1] == ("", "[DONE]")
        chunks = [data for _, data in events[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert text_of(events) == "One moment, très vite."
        assert sum(bool(c["choices"] and c["choices"][0]["delta"].get("content")) for c in chunks) > 5
        (calls,) = [
            c["choices"][0]["delta"]["tool_calls"] for c in chunks if c["choices"] and "tool_calls" in c["choices"][0]["delta"]
        ]
        assert calls[0]["index"] == 0 and json.loads(calls[0]["function"]["arguments"]) == {"key": "37"}
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 5
        # what was streamed is found again
        mine = {"role": "assistant", "content": "One moment, très vite.", "tool_calls": calls}
        more = await client.chat(user("q"), mine, result(calls[0]["id"], "52"), tools=[LOOK_OPENAI])
        assert more["usage"]["prompt_tokens_details"]["cached_tokens"] == chunks[-1]["usage"]["total_tokens"]

    asked(CHATML, sampler, work)


def test_thoughts_are_told_apart_and_never_streamed_as_text() -> None:
    sampler = script(CHATML, Message("assistant", "Yes.", thinking="hm, well"))

    async def work(client: Client) -> None:
        found = await client.chat(user("q"))
        assert found["choices"][0]["message"]["reasoning_content"] == "hm, well"
        events = await client.stream("/v1/chat/completions", {"messages": [user("q")]})
        assert text_of(events) == "Yes."

    asked(CHATML, sampler, work)


def test_raw_completions_go_on_from_a_text_with_its_control_tokens_or_from_ids() -> None:
    template = PlainTemplate()
    sampler = ScriptedSampler(template, lambda text, request: [*b"52", EOS])

    async def work(client: Client) -> None:
        for prompt in ("<user>37<turn>", [258, 51, 55, 260], ["<user>37<turn>"]):
            status, found = await client.post("/v1/completions", {"model": NAME, "prompt": prompt, "logprobs": 0})
            assert status == 200, found
            choice = found["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("52", "stop")
            assert choice["logprobs"]["tokens"] == ["5", "2", "<eos>"]
        events = await client.stream("/v1/completions", {"prompt": "<user>37<turn>"})
        assert "".join(data["choices"][0]["text"] for _, data in events[:-1]) == "52"

    asked(template, sampler, work)
    assert {request.tokens for request in sampler.requests} == {(258, 51, 55, 260)}
    assert sampler.requests[0].sampling.max_tokens == 16


def test_responses_hold_text_and_calls_and_go_on_from_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = script(CHATML, CALL, SAID)
    tool = {"type": "function", "name": "look", "description": LOOK.description, "parameters": LOOK.parameters}

    async def work(client: Client) -> None:
        body = {"model": NAME, "input": "37?", "instructions": "Be brief.", "tools": [tool]}
        status, first = await client.post("/v1/responses", body)
        assert status == 200, first
        said, call = first["output"]
        assert said["content"][0]["text"] == "Let me see." and call["type"] == "function_call"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "52"}
        linked = {**body, "input": [output], "previous_response_id": first["id"]}
        status, second = await client.post("/v1/responses", linked)
        assert second["output"][0]["content"][0]["text"] == "It is 52."
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        # the same, with all items sent back
        items = [{"role": "user", "content": "37?"}, said, call, output]
        status, third = await client.post("/v1/responses", {**body, "input": items})
        assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        monkeypatch.setattr("jaxagent.serve.RESPONSES", 1)  # of a session
        status, _ = await client.post("/v1/responses", {**body, "input": items})
        status, missing = await client.post("/v1/responses", linked)
        assert (status, missing["error"]["code"]) == (404, "not_found")
        status, missing = await client.post("/v1/responses", {**linked, "previous_response_id": "resp_none"})
        assert (status, missing["error"]["code"]) == (404, "not_found")

    asked(CHATML, sampler, work)


def test_a_long_turn_is_not_read_anew_at_every_token() -> None:
    class Counted(PlainTemplate):
        reads = 0

        def parse(self, tokens: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
            self.reads += 1
            return super().parse(tokens, tools)

    template, tokens = Counted(), list(b"a" * 4096)
    visible = Visible(template, Ask(), (), [])
    heard = [visible.more(tokens[:n]) for n in range(1, 4097)]
    assert heard[:64] == ["a"] * 64 and len("".join(heard)) > 4000
    assert template.reads < 512 * len(template.stop)


def test_responses_stream_as_named_events_in_order() -> None:
    sampler = script(CHATML, CALL)
    tool = {"type": "function", "name": "look", "parameters": LOOK.parameters}
    events = asked(CHATML, sampler, lambda client: client.stream("/v1/responses", {"input": "37?", "tools": [tool]}))
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-1] == "response.completed"
    assert [data["type"] for _, data in events] == names
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == "Let me see."
    whole = events[-1][1]["response"]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == whole["output"] and len(done) == 2


def test_anthropic_messages_hold_blocks_and_results_come_back_with_the_user() -> None:
    sampler = script(CHATML, BOTH, SAID)
    tool = {"name": "look", "description": LOOK.description, "input_schema": LOOK.parameters}

    async def work(client: Client) -> None:
        body = {"model": NAME, "max_tokens": 99, "system": "Be brief.", "tools": [tool], "messages": [user("37?")]}
        status, first = await client.post("/v1/messages", body)
        assert status == 200, first
        assert first["stop_reason"] == "tool_use" and [block["type"] for block in first["content"]] == ["tool_use"] * 2
        assert first["content"][1]["input"] == {"key": "38"}
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "52"} for use in first["content"]]
        told = [user("37?"), {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        status, second = await client.post("/v1/messages", {**body, "messages": told})
        assert second["content"] == [{"type": "text", "text": "It is 52."}]
        counts = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert second["usage"]["cache_read_input_tokens"] == counts
        told += [{"role": "assistant", "content": second["content"]}, user("Sure?")]
        status, stopped = await client.post("/v1/messages", {**body, "messages": told, "stop_sequences": ["is"]})
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "is")

    asked(CHATML, sampler, work)


def test_anthropic_messages_stream_in_blocks() -> None:
    sampler = script(CHATML, CALL)
    tool = {"name": "look", "input_schema": LOOK.parameters}
    body = {"max_tokens": 99, "tools": [tool], "messages": [user("37?")]}
    events = asked(CHATML, sampler, lambda client: client.stream("/v1/messages", body))
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    starts = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert starts == ["text", "tool_use"]
    texts = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in texts) == "Let me see."
    assert json.loads("".join(delta.get("partial_json", "") for delta in texts)) == {"key": "37"}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


REFUSED = [
    ({"messages": []}, 400, None, "the last message"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, 400, None, "the last message"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, None, "must be one of system, developer"),
    ({"messages": "hello"}, 400, None, "messages must be a list"),
    ({"messages": [user("a")], "temperature": -1}, 400, None, "temperature must be between 0 and 5"),
    ({"messages": [user("a")], "temperature": True}, 400, None, "temperature must be a whole number or a number"),
    ({"messages": [user("a")], "best_guess": 3}, 400, None, "best_guess is not supported"),
    ({"messages": [user("a")], "response_format": {"type": "xml"}}, 400, None, "say json_schema"),
    ({"messages": [user("a")], "tool_choice": "required"}, 400, None, "there are no tools"),
    ({"messages": [user("a")], "model": "gpt"}, 404, "model_not_found", "the model here is 'tiny'"),
    ({"messages": [user("a" * 900)]}, 400, "context_length_exceeded", "does not fit a row of 400"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        *(400, None, "this policy reads text"),
    ),
    ({"messages": [user("a")], "n": 99}, 400, None, "n must be between 1 and 16"),
]


@pytest.mark.parametrize(("body", "status", "code", "words"), REFUSED)
def test_a_request_that_cannot_be_answered_is_refused_in_words(
    body: dict[str, Any], status: int, code: str | None, words: str
) -> None:
    whole = {"model": NAME, **body}
    found = asked(CHATML, script(CHATML, SAID), lambda client: client.post("/v1/chat/completions", whole))
    assert (found[0], found[1]["error"]["code"]) == (status, code)
    assert words in found[1]["error"]["message"]
    streamed = asked(
        CHATML, script(CHATML, SAID), lambda client: client.post("/v1/chat/completions", {**whole, "stream": True})
    )
    assert streamed == found  # before any event


def test_every_dialect_has_its_own_shape_of_a_fault() -> None:
    async def work(client: Client) -> None:
        assert (await client.post("/v1/messages", b"{"))[1] == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "the body is not JSON"},
        }
        status, missing = await client.post("/v1/messages", {"model": NAME, "messages": [user("q")]})
        assert (status, missing["error"]["message"]) == (400, "max_tokens is missing")
        status, found = await client.post("/v1/responses", {"model": NAME})
        assert (status, found["error"]["message"], found["error"]["param"]) == (400, "input is missing", "input")
        status, found = await client.get("/v1/nothing")
        assert (status, found["error"]["type"]) == (404, "not_found_error")
        status, found = await client.post("/v1/chat/completions", b"x" * 5000)
        assert (status, found["error"]["code"]) == (413, "too_large")

    asked(CHATML, script(CHATML, SAID), work, limits=ServeLimits(body_bytes=4096))


def test_who_has_no_token_and_pages_of_a_browser_are_refused() -> None:
    async def work(client: Client) -> None:
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/v1/models"))[0] == 401
        assert (await client.get("/v1/models", Authorization="Bearer wrong"))[0] == 401
        status, found = await client.get("/v1/models", Authorization=f"Bearer {TOKEN}")
        assert (status, found["data"][0]["id"]) == (200, NAME)
        status, found = await client.post("/v1/messages", {}, **{"x-api-key": "wrong"})
        assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert (await client.get("/v1/models/tiny", **{"x-api-key": TOKEN}))[0] == 200
        assert (await client.get("/v1/models/other", **{"x-api-key": TOKEN}))[0] == 404

    asked(CHATML, script(CHATML, SAID), work, token=TOKEN)

    async def strangers(client: Client) -> None:
        assert (await client.get("/v1/models"))[0] == 200
        assert (await client.get("/v1/models", Origin="http://evil.example"))[0] == 403
        assert (await client.get("/v1/models", Host="evil.example"))[0] == 403

    asked(CHATML, script(CHATML, SAID), strangers)


def test_a_server_takes_on_no_more_than_it_says_and_none_waits_for_ever() -> None:
    waiting = asyncio.Event()

    async def write(text: str, request: SampleRequest) -> list[int]:
        await waiting.wait()
        return []

    async def work(client: Client) -> None:
        body = {"model": NAME, "messages": [user("q")]}
        first = asyncio.ensure_future(client.post("/v1/chat/completions", body))
        await asyncio.sleep(0.05)
        status, found = await client.post("/v1/chat/completions", body)
        assert (status, found["error"]["type"]) == (429, "rate_limit_error")
        status, found = await first
        assert (status, found["error"]["code"]) == (504, "timeout")

    asked(CHATML, ScriptedSampler(CHATML, write), work, limits=ServeLimits(requests=1, deadline_s=0.3))


def test_rows_that_no_call_uses_give_their_room_up() -> None:
    sampler = script(CHATML, SAID)

    async def work(client: Client) -> None:
        for word in "abcde":
            await client.chat(user(word))
            assert len(sampler.rows) <= 2
        mine = {"role": "assistant", "content": SAID.content}
        found = await client.chat(user("a"), mine, user("more"))  # its row is gone, its ids are known
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "X-Retokenised" not in client.headers

    asked(CHATML, sampler, work, capacity=2)


def test_a_client_that_leaves_frees_its_row() -> None:
    async def work() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def write(text: str, request: SampleRequest) -> list[int]:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return []

        sampler = ScriptedSampler(CHATML, write)
        async with served(CHATML, sampler) as (client, _):
            call = asyncio.ensure_future(client.chat(user("q")))
            await began.wait()
            call.cancel()
            await ended.wait()
            await client.get("/health")
            assert sampler.rows == {} and len(sampler.released) == 1

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_token_file_is_made_once_and_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = token_in(str(path))
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert token_in(str(path)) == token
    path.chmod(0o644)
    with pytest.raises(ValueError, match="others may read it"):
        token_in(str(path))
    with pytest.raises(ValueError, match="give --token-file"):
        slots = Slots(CHATML, script(CHATML, SAID), 1)
        run(slots, Rules(100), "m", ServeLimits(), Address(host="0.0.0.0"))


def test_the_flags_of_the_command_reach_what_they_are_for() -> None:
    options = vars(parser().parse_args(["serve", "--checkpoint=c", "--port=0", "--context=1000", "--requests=3"]))
    options.pop("command")
    chosen = serve_options(options, policy)
    assert (chosen["checkpoint"], chosen["name"]) == ("c", "")
    assert chosen["at"] == Address(port=0)
    assert chosen["limits"] == ServeLimits(requests=3)
    engine = chosen["serving"].engine()
    assert engine.slot_tokens >= 1000 and engine.slots == 8 and not engine.exact
    assert set(chosen) == {"checkpoint", "name", "serving", "limits", "at"}


def test_half_a_stream_does_not_look_like_a_whole_one() -> None:
    async def write(text: str, request: SampleRequest) -> list[int]:
        assert request.hear is not None
        request.hear(CHATML.turn(SAID)[:-1])
        await asyncio.Event().wait()
        return []

    async def work(client: Client) -> None:
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.stream("/v1/chat/completions", {"messages": [user("q")]})

    asked(CHATML, ScriptedSampler(CHATML, write), work, limits=ServeLimits(deadline_s=0.3))
