"""The dialect of OpenAI's /v1/chat/completions and /v1/completions: requests in, answers, chunks and errors out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxagent.door.ask import (
    MOST_CHOICES,
    Answer,
    Ask,
    Event,
    Fields,
    Refused,
    arguments_of,
    choice_of,
    sampling_of,
    spec_of,
)
from jaxagent.types import Message, Sampling, ToolCall, ToolSpec

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
IMPOSSIBLE = -9999.0  # of a token that could not be drawn: JSON has no infinity
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}
# They say nothing about what is sampled, or something that is so here anyway.
_SILENT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort")


def error(refused: Refused) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts of a request: its prompt once, and what was sampled of all choices."""
    prompt, sampled = answers[0].prompt_tokens, sum(len(answer.tokens) for answer in answers)
    details = {"prompt_tokens_details": {"cached_tokens": max(answer.cached for answer in answers)}}
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled, **details}


# ====================================================================== what is asked


def read_chat(raw: Any) -> Ask:
    """A body of /v1/chat/completions. Raises Refused."""
    body = Fields(raw)
    body.ignore(("model", *_SILENT))
    tools, strict = tools_of(body.take("tools", list, []))
    budget = "max_completion_tokens" if raw.get("max_completion_tokens") is not None else "max_tokens"
    body.ignore(("max_tokens", "max_completion_tokens"))
    told = body.take("logprobs", bool, False)
    top = body.count("top_logprobs", 0, 20, 0)
    if top and not told:
        raise Refused("top_logprobs wants logprobs to be true", param="top_logprobs")
    stream = body.take("stream", bool, False)
    options = Fields(body.take("stream_options", dict, {}), "stream_options")
    options.ignore(("include_obfuscation",))
    ask = Ask(
        messages=tuple(messages_of(body.want("messages", list))),
        tools=tools,
        choice=choice_of(body.take("tool_choice", object), tools, _chosen, {w: w for w in ("auto", "none", "required")}),
        parallel=body.take("parallel_tool_calls", bool, True),
        strict=strict,
        schema=_schema(body.take("response_format", dict, {})),
        sampling=replace(_penalties(body, sampling_of(body, budget, "stop")), top_logprobs=top),
        n=body.count("n", 1, MOST_CHOICES, 1),
        seed=body.take("seed", int),
        stream=stream,
        logprobs=told,
        usage=options.take("include_usage", bool, False) if stream else True,
    )
    options.done()
    body.done()
    return ask


def read_completion(raw: Any, encode: Callable[[str], list[int]]) -> Ask:
    """A body of /v1/completions: one prompt, as text or ids. Raises Refused."""
    body = Fields(raw)
    body.ignore(("model", *_SILENT))
    prompt = body.want("prompt", (str, list))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise Refused("prompt must be one text or one list of token ids, not empty", param="prompt")
    if body.take("echo", bool, False) or body.take("best_of", int, 1) != 1:
        raise Refused("echo and best_of are not supported: leave them out", param="echo")
    top = body.take("logprobs", int)
    sampling = _penalties(body, sampling_of(body, "max_tokens", "stop"))
    stream = body.take("stream", bool, False)
    options = Fields(body.take("stream_options", dict, {}), "stream_options")
    ask = Ask(
        prompt=tuple(ids),
        # sixteen, where none is said, is this endpoint's own default
        sampling=replace(sampling, top_logprobs=top or 0, max_tokens=sampling.max_tokens or 16),
        n=body.count("n", 1, MOST_CHOICES, 1),
        seed=body.take("seed", int),
        stream=stream,
        logprobs=top is not None,
        usage=options.take("include_usage", bool, False) if stream else True,
    )
    body.done()
    return ask


def _penalties(body: Fields, sampling: Sampling) -> Sampling:
    bias = body.take("logit_bias", dict, {})
    if not all(name.isdecimal() and isinstance(value, int | float) and -100 <= value <= 100 for name, value in bias.items()):
        raise Refused("logit_bias maps token ids to numbers from -100 to 100", param="logit_bias")
    return replace(
        sampling,
        presence_penalty=body.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=body.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=tuple((int(name), float(value)) for name, value in bias.items()),
    )


def _chosen(choice: dict[str, Any]) -> Any:
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else None


def tools_of(raw: Sequence[Any]) -> tuple[tuple[ToolSpec, ...], bool]:
    """The tools, and whether any call is to be held to its schema."""
    found = []
    for i, one in enumerate(raw):
        entry = Fields(one, f"tools[{i}]")
        if entry.want("type", str) != "function":
            raise Refused(f"tools[{i}].type must be function, got {one['type']!r}", param=f"tools[{i}].type")
        found.append(spec_of(Fields(entry.want("function", dict), f"tools[{i}].function")))
    return tuple(spec for spec, _ in found), any(strict for _, strict in found)


def messages_of(raw: Sequence[Any]) -> Iterator[Message]:
    """Messages as the house has them; a tool's result is named by the call that it answers."""
    names: dict[str, str] = {}
    for i, one in enumerate(raw):
        entry = Fields(one, f"messages[{i}]")
        role = entry.want("role", str)
        if role not in ROLES:
            raise Refused(f"messages[{i}].role must be one of {', '.join(ROLES)}, got {role!r}", param=f"messages[{i}].role")
        content = text_of(entry.take("content", (str, list), ""), f"messages[{i}].content")
        calls = []
        for j, call in enumerate(entry.take("tool_calls", list, []) if role == "assistant" else ()):
            where = f"messages[{i}].tool_calls[{j}]"
            function = Fields(Fields(call, where).want("function", dict), f"{where}.function")
            arguments = arguments_of(function.take("arguments", str, ""), f"{where}.function.arguments")
            calls.append(ToolCall(function.want("name", str), arguments, str(call.get("id") or "")))
            names[calls[-1].id] = calls[-1].name
        name = names.get(entry.want("tool_call_id", str), entry.take("name", str, "")) if role == "tool" else ""
        thinking = entry.take("reasoning_content", str, "") if role == "assistant" else ""
        yield Message(ROLES[role], content, thinking, tuple(calls), name)


def text_of(content: str | list[Any], where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content, which may come in parts."""
    if isinstance(content, str):
        return content
    said = []
    for i, part in enumerate(content):
        entry = Fields(part, f"{where}[{i}]")
        if entry.want("type", str) not in kinds:
            raise Refused(f"{where}[{i}].type {part['type']!r} is not supported: this policy reads text", param=f"{where}[{i}]")
        said.append(entry.want("text", str))
    return "".join(said)


def _schema(raw: dict[str, Any]) -> str:
    """The JSON text of a response format's schema."""
    form = Fields(raw, "response_format")
    kind = form.take("type", str, "text")
    if kind == "text":
        return ""
    if kind != "json_schema":
        text = f"response_format.type {kind!r} is not supported: say json_schema, with a schema"
        raise Refused(text, param="response_format.type")
    return json.dumps(Fields(form.want("json_schema", dict), "response_format.json_schema").want("schema", dict))


# ====================================================================== what is answered


def calls_of(message: Message) -> list[dict[str, Any]]:
    functions = [{"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in message.calls]
    return [{"id": c.id, "type": "function", "function": f} for c, f in zip(message.calls, functions, strict=True)]


class Completions:
    """Answers of one request to either endpoint, whole or in chunks."""

    ends = "[DONE]"

    def __init__(self, ask: Ask, name: str, model: str, pieces: Sequence[bytes]):
        self.ask, self.pieces, self.chat = ask, pieces, not ask.prompt
        self.made = int(time.time())
        self.head = {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{name}", "created": self.made, "model": model}
        self.said: dict[int, str] = {}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": usage(answers)}

    def _choice(self, i: int, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {"index": i, "finish_reason": FINISH[answer.finish], "logprobs": None}
        if self.ask.logprobs:
            found["logprobs"] = self._logprobs(answer)
        if not self.chat:
            return {**found, "text": answer.message.content}
        message = answer.message
        said: dict[str, Any] = {
            "role": "assistant",
            "content": message.content or (None if message.calls else ""),
            "refusal": None,
        }
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.calls:
            said["tool_calls"] = calls_of(message)
        return {**found, "message": said}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        told = zip(answer.tokens, answer.logprobs, strict=True)
        tops = answer.top or [[] for _ in answer.tokens]
        if self.chat:
            content = [
                {**self._one(token, logprob), "top_logprobs": [self._one(*pair) for pair in top]}
                for (token, logprob), top in zip(told, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        texts, offsets, at = [self._text(token) for token in answer.tokens], [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        best = [{self._text(token): max(logprob, IMPOSSIBLE) for token, logprob in top} for top in tops]
        return {"tokens": texts, "token_logprobs": answer.logprobs, "top_logprobs": best, "text_offset": offsets}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.pieces[token] if token < len(self.pieces) else b""
        return {"token": self._text(token), "logprob": max(logprob, IMPOSSIBLE), "bytes": list(piece)}

    def _text(self, token: int) -> str:
        return (self.pieces[token] if token < len(self.pieces) else b"").decode(errors="replace")

    # ------------------------------------------------------------------ in chunks

    def begin(self) -> Iterator[Event]:
        for i in range(self.ask.n) if self.chat else ():
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def more(self, i: int, text: str) -> Iterator[Event]:
        self.said[i] = self.said.get(i, "") + text
        yield self._chunk(i, {"content": text})

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        for i, answer in enumerate(answers):
            if self.chat and answer.message.thinking:
                yield self._chunk(i, {"reasoning_content": answer.message.thinking})
            if rest := answer.message.content[len(self.said.get(i, "")) :]:
                yield from self.more(i, rest)
            if answer.message.calls:
                calls = [{"index": j, **call} for j, call in enumerate(calls_of(answer.message))]
                yield self._chunk(i, {"tool_calls": calls})
            logprobs = self._logprobs(answer) if self.ask.logprobs else None
            yield self._chunk(i, {}, finish=FINISH[answer.finish], logprobs=logprobs)
        if self.ask.usage:
            yield Event({**self.head, "object": self._object, "choices": [], "usage": usage(answers)})

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, i: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> Event:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": i, **said, "finish_reason": finish, "logprobs": logprobs}
        return Event({**self.head, "object": self._object, "choices": [choice]})
