"""Mistral from its tokenizer's version 3 on: calls as a JSON list or, in later versions, one by one; calls have ids.

    [INST] ...[/INST][TOOL_CALLS] [{"name": "look", "arguments": {"key": "37"}, "id": "call00000"}]</s>
    [TOOL_RESULTS] {"content": 52, "call_id": "call00000"}[/TOOL_RESULTS]
    [TOOL_CALLS]look[CALL_ID]call00000[ARGS]{"key": "37"}[TOOL_CALLS]look[ARGS]{"key": "38"}</s>

Many of these templates move the system message or the tools to the last message of the user: see chat/history.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from jaxagent.chat.dialect import Dialect, call_id, call_of, message_of, read_json
from jaxagent.types import Message, ToolCall, ToolSpec

_TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*")
_THINK = re.compile(r"\A\s*\[THINK\](.*?)\[/THINK\]\s*", re.DOTALL)


def read(text: str, tools: Sequence[ToolSpec]) -> Message:
    thought = _THINK.match(text)
    thinking, rest = (thought[1], text[thought.end() :]) if thought else ("", text)
    content, tag, called = rest.partition(_TAG)
    found = (_listed(called) if called.lstrip().startswith("[") else _named(tag + called)) if tag else []
    return message_of(content, found, thinking)


def write(calls: Sequence[ToolCall]) -> str:
    said = [{"name": call.name, "arguments": call.arguments, "id": call_id(call, i)} for i, call in enumerate(calls)]
    return f"{_TAG} {json.dumps(said, ensure_ascii=False)}"


def _listed(text: str) -> list[ToolCall | str]:
    try:
        values, end = read_json(text)
    except ValueError as error:
        return [str(error)]
    return [call_of(value) for value in values] if values and not text[end:].strip() else ["there must be one list of calls"]


def _named(text: str) -> list[ToolCall | str]:
    found: list[ToolCall | str] = []
    while text.strip():
        name = _NAMED.match(text)
        if not name:
            return [*found, f"a tool call is {_TAG}name[ARGS]{{...}}"]
        try:
            arguments, end = read_json(text, name.end())
        except ValueError as error:
            return [*found, str(error)]
        found.append(call_of({"name": name[1], "arguments": arguments, "id": name[2]}))
        text = text[end:]
    return found


DIALECT = Dialect(
    family="Mistral",
    control=("[INST]", "[/INST]", "[TOOL_CALLS]"),
    end="</s>",
    read=read,
    write=write,
    form=f'To call functions, write {_TAG} [{{"name": <function name>, "arguments": <its arguments as a JSON object>}}, ...]',
    result="[TOOL_RESULTS] {}[/TOOL_RESULTS]",
)
