"""The dialect of OpenAI's /v1/responses: text and function calls, whole or as a stream of named events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxagent.door.ask import Answer, Ask, Event, Fields, Refused, arguments_of, choice_of, sampling_of, spec_of
from jaxagent.door.chat_completions import ROLES, error, text_of
from jaxagent.types import Message, ToolCall, ToolSpec

__all__ = ["Responses", "error", "read_response"]
_SILENT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "reasoning",
    "include",
    "truncation",
)
_TEXTS = ("input_text", "output_text", "text")


def read_response(raw: Any, before: Sequence[Message] = ()) -> Ask:
    """A body of /v1/responses. Raises Refused.

    Args:
        before: the dialogue that `previous_response_id` names; the instructions of that time are not among it.
    """
    body = Fields(raw)
    body.ignore(("model", "previous_response_id", *_SILENT))
    tools, strict = _tools(body.take("tools", list, []))
    given = body.want("input", (str, list))
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = body.take("instructions", str, "")
    messages = [*([Message("system", instructions)] if instructions else ()), *before, *_messages(items, before)]
    form = Fields(Fields(body.take("text", dict, {}), "text").take("format", dict, {}), "text.format")
    kind = form.take("type", str, "text")
    if kind not in ("text", "json_schema"):
        raise Refused(f"text.format.type {kind!r} is not supported: say json_schema, with a schema", param="text.format.type")
    ask = Ask(
        messages=tuple(messages),
        own=int(bool(instructions)),
        tools=tools,
        choice=choice_of(
            body.take("tool_choice", object), tools, lambda c: c.get("name"), {w: w for w in ("auto", "none", "required")}
        ),
        parallel=body.take("parallel_tool_calls", bool, True),
        strict=strict,
        schema=json.dumps(form.want("schema", dict)) if kind == "json_schema" else "",
        sampling=sampling_of(body, "max_output_tokens", "stop"),
        seed=body.take("seed", int),
        stream=body.take("stream", bool, False),
    )
    body.done()
    return ask


def _tools(raw: Sequence[Any]) -> tuple[tuple[ToolSpec, ...], bool]:
    found = []
    for i, one in enumerate(raw):
        entry = Fields(one, f"tools[{i}]")
        if entry.want("type", str) != "function":
            raise Refused(f"tools[{i}].type must be function, got {one['type']!r}", param=f"tools[{i}].type")
        found.append(spec_of(entry))
    return tuple(spec for spec, _ in found), any(strict for _, strict in found)


def _messages(items: Sequence[Any], before: Sequence[Message]) -> Iterator[Message]:
    """Items as messages: what the assistant said and called in a row is one turn of it."""
    names = {call.id: call.name for message in before for call in message.calls}
    said, calls, open_turn = "", list[ToolCall](), False
    for i, item in enumerate(items):
        entry, where = Fields(item, f"input[{i}]"), f"input[{i}]"
        kind = entry.take("type", str, "message")
        if kind == "reasoning":
            continue
        role = entry.want("role", str) if kind == "message" else ""
        if kind == "function_call":
            name, arguments = entry.want("name", str), arguments_of(entry.take("arguments", str, ""), f"{where}.arguments")
            calls.append(ToolCall(name, arguments, entry.want("call_id", str)))
            names[calls[-1].id], open_turn = name, True
            continue
        if role == "assistant" and not calls:
            said, open_turn = said + text_of(entry.take("content", (str, list), ""), f"{where}.content", _TEXTS), True
            continue
        if open_turn:
            yield Message("assistant", said, calls=tuple(calls))
            said, calls, open_turn = "", [], False
        if kind == "function_call_output":
            output = text_of(entry.want("output", (str, list)), f"{where}.output", _TEXTS)
            yield Message("tool", output, name=names.get(entry.want("call_id", str), ""))
        elif role == "assistant":
            said, open_turn = text_of(entry.take("content", (str, list), ""), f"{where}.content", _TEXTS), True
        elif role in ROLES and role != "tool":
            yield Message(ROLES[role], text_of(entry.take("content", (str, list), ""), f"{where}.content", _TEXTS))
        else:
            raise Refused(f"{where} is no message, function_call or function_call_output", param=where)
    if open_turn:
        yield Message("assistant", said, calls=tuple(calls))


class Responses:
    """The answer to one request, whole or in events."""

    ends = ""

    def __init__(self, ask: Ask, name: str, model: str, pieces: Sequence[bytes]):
        self.ask, self.name = ask, name
        self.head = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": ask.parallel,
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "tool_choice": ask.choice if not ask.choice.startswith("=") else {"type": "function", "name": ask.choice[1:]},
            "tools": [
                {
                    "type": "function",
                    "name": t.name,
                    "description": t.description,
                    "parameters": t.parameters,
                    "strict": ask.strict,
                }
                for t in ask.tools
            ],
        }
        self.said, self.number, self.opened = "", 0, False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        items, sampled = [], len(answer.tokens)
        if answer.message.content or not answer.message.calls:
            items.append(self._message(answer.message.content, "completed"))
        items += [self._call(call, "completed") for call in answer.message.calls]
        cut = answer.finish == "length"
        counts = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + sampled,
        }
        ended = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }
        return {**self.head, **ended, "output": items, "usage": counts}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [self._part(text)] if status == "completed" else []
        return {"id": f"msg_{self.name}", "type": "message", "role": "assistant", "status": status, "content": content}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @staticmethod
    def _call(call: ToolCall, status: str) -> dict[str, Any]:
        arguments = json.dumps(call.arguments, ensure_ascii=False) if status == "completed" else ""
        own = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        return {"type": "function_call", **own, "arguments": arguments, "status": status}

    # ------------------------------------------------------------------ in events

    def begin(self) -> Iterator[Event]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response={**self.head, "status": "in_progress", "output": [], "usage": None})

    def more(self, i: int, text: str) -> Iterator[Event]:
        at = {"item_id": f"msg_{self.name}", "output_index": 0, "content_index": 0}
        if not self.opened:
            self.opened = True
            yield self._event("response.output_item.added", output_index=0, item=self._message("", "in_progress"))
            yield self._event("response.content_part.added", **at, part=self._part(""))
        self.said += text
        yield self._event("response.output_text.delta", **at, delta=text, logprobs=[])

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        message = answers[0].message
        if (rest := message.content[len(self.said) :]) or not (self.opened or message.calls):
            yield from self.more(0, rest)
        if self.opened:
            at = {"item_id": f"msg_{self.name}", "output_index": 0, "content_index": 0}
            yield self._event("response.output_text.done", **at, text=self.said, logprobs=[])
            yield self._event("response.content_part.done", **at, part=self._part(self.said))
            yield self._event("response.output_item.done", output_index=0, item=self._message(self.said, "completed"))
        for i, call in enumerate(message.calls, start=int(self.opened)):
            item = self._call(call, "completed")
            at = {"item_id": item["id"], "output_index": i}
            yield self._event("response.output_item.added", output_index=i, item=self._call(call, "in_progress"))
            yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield self._event("response.function_call_arguments.done", **at, name=call.name, arguments=item["arguments"])
            yield self._event("response.output_item.done", output_index=i, item=item)
        whole = self.whole(answers)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **said: Any) -> Event:
        event = Event({"type": kind, "sequence_number": self.number, **said}, kind)
        self.number += 1
        return event
