"""The dialect of Anthropic's /v1/messages: content in blocks, calls and results among them, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxagent.door.ask import Answer, Ask, Event, Fields, Refused, choice_of, sampling_of, spec_of
from jaxagent.types import Message, ToolCall, ToolSpec

_SILENT = ("metadata", "service_tier", "thinking")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FINISH = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}


def error(refused: Refused) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def read_messages(raw: Any) -> Ask:
    """A body of /v1/messages. Raises Refused."""
    body = Fields(raw)
    body.ignore(("model", *_SILENT))
    tools, choice = _tools(body.take("tools", list, [])), body.take("tool_choice", dict)
    parallel, chosen = True, "auto"
    if choice is not None:
        parallel = not choice.get("disable_parallel_tool_use", False)
        said = choice if choice.get("type") == "tool" else choice.get("type")
        chosen = choice_of(said, tools, lambda c: c.get("name"), _CHOICES)
    system = _text(body.take("system", (str, list), ""), "system")
    body.want("max_tokens", int)
    ask = Ask(
        messages=(*([Message("system", system)] if system else ()), *_messages(body.want("messages", list))),
        tools=tools,
        choice=chosen,
        parallel=parallel,
        sampling=sampling_of(body, "max_tokens", "stop_sequences"),
        stream=body.take("stream", bool, False),
    )
    body.done()
    return ask


def _tools(raw: Sequence[Any]) -> tuple[ToolSpec, ...]:
    found = []
    for i, one in enumerate(raw):
        entry = Fields(one, f"tools[{i}]")
        if entry.take("type", str, "custom") != "custom":
            raise Refused(
                f"tools[{i}].type {one['type']!r} is a tool of the service's own, which is not here", param=f"tools[{i}]"
            )
        found.append(spec_of(entry, "input_schema")[0])
    return tuple(found)


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    said = []
    for i, block in enumerate(content):
        entry = Fields(block, f"{where}[{i}]")
        if entry.want("type", str) != "text":
            raise Refused(f"{where}[{i}].type {block['type']!r} is not supported: this policy reads text", param=where)
        said.append(entry.want("text", str))
    return "".join(said)


def _messages(raw: Sequence[Any]) -> Iterator[Message]:
    names: dict[str, str] = {}
    for i, one in enumerate(raw):
        entry, where = Fields(one, f"messages[{i}]"), f"messages[{i}]"
        role, content = entry.want("role", str), entry.want("content", (str, list))
        if role not in ("user", "assistant"):
            raise Refused(f"{where}.role must be user or assistant, got {role!r}", param=f"{where}.role")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said, calls, results = list[Any](), list[ToolCall](), list[Message]()
        for j, block in enumerate(blocks):
            part = Fields(block, f"{where}.content[{j}]")
            kind = part.want("type", str)
            if kind == "tool_use" and role == "assistant":
                calls.append(ToolCall(part.want("name", str), part.take("input", dict, {}), part.want("id", str)))
                names[calls[-1].id] = calls[-1].name
            elif kind == "tool_result" and role == "user":
                text = _text(part.take("content", (str, list), ""), f"{where}.content[{j}].content")
                results.append(Message("tool", text, name=names.get(part.want("tool_use_id", str), "")))
            elif kind not in ("thinking", "redacted_thinking"):
                said.append(block)
        text = _text(said, f"{where}.content")
        yield from results
        if role == "assistant" or text or not results:
            yield Message(role, text, calls=tuple(calls))


class AnthropicMessages:
    """The answer to one request, whole or in events."""

    ends = ""

    def __init__(self, ask: Ask, name: str, model: str, pieces: Sequence[bytes]):
        self.ask = ask
        self.head = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}
        self.said, self.opened = "", False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        said = [{"type": "text", "text": answer.message.content}] if answer.message.content else []
        content = [*said, *(self._use(call, call.arguments) for call in answer.message.calls)]
        counts = {
            "input_tokens": answer.prompt_tokens - answer.cached,
            "cache_read_input_tokens": answer.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(answer.tokens),
        }
        return {**self.head, "content": content, **self._ended(answer), "usage": counts}

    @staticmethod
    def _use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _ended(self, answer: Answer) -> dict[str, Any]:
        stopped = next((s for s in self.ask.sampling.stop_strings if answer.finish == "stop" and answer.stopped_by == s), None)
        return {"stop_reason": "stop_sequence" if stopped else FINISH[answer.finish], "stop_sequence": stopped}

    # ------------------------------------------------------------------ in events

    def begin(self) -> Iterator[Event]:
        nothing = {"input_tokens": 0, "output_tokens": 0}
        message: dict[str, Any] = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": nothing}
        yield _event("message_start", message=message)

    def more(self, i: int, text: str) -> Iterator[Event]:
        if not self.opened:
            self.opened = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self.said += text
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        answer = answers[0]
        if rest := answer.message.content[len(self.said) :]:
            yield from self.more(0, rest)
        if self.opened:
            yield _event("content_block_stop", index=0)
        for i, call in enumerate(answer.message.calls, start=int(self.opened)):
            text = json.dumps(call.arguments, ensure_ascii=False)
            yield _event("content_block_start", index=i, content_block=self._use(call, {}))
            yield _event("content_block_delta", index=i, delta={"type": "input_json_delta", "partial_json": text})
            yield _event("content_block_stop", index=i)
        yield _event("message_delta", delta=self._ended(answer), usage=self.whole(answers)["usage"])
        yield _event("message_stop")


def _event(kind: str, **said: Any) -> Event:
    return Event({"type": kind, **said}, kind)
