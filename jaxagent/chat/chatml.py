"""ChatML, as Qwen2.5 and later speak it, with calls in Hermes' JSON or, from Qwen3.5 on, in tags.

<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n<think>\\n...\\n</think>\\n\\n
<tool_call>\\n{"name": "look", "arguments": {"key": "37"}}\\n</tool_call><|im_end|>
<tool_call>\\n<function=look>\\n<parameter=key>\\n37\\n</parameter>\\n</function>\\n</tool_call><|im_end|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxagent.chat.dialect import Dialect, call_json, message_of, read_call
from jaxagent.types import Message, ToolCall, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK = re.compile(r"\A\s*+(?:<think>)?+(.*?)</think>\s*", re.DOTALL)  # the header may hold the opening tag
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_WORDS = {"True": True, "False": False, "None": None}  # some templates write these as Python does


def read(text: str, tools: Sequence[ToolSpec]) -> Message:
    thought = _THINK.match(text)
    thinking, rest = (thought[1], text[thought.end() :]) if thought else ("", text)
    bodies, content = _cut(rest)
    found = [_tagged(body, tools) if "<function=" in body.split("{")[0] else read_call(body) for body in bodies]
    if _OPEN in content or _CLOSE in content:
        found.append("<tool_call> and </tool_call> do not match")
    return message_of(content, found, thinking)


def _cut(text: str) -> tuple[list[str], str]:
    """The bodies of the calls, and what stands around them, in time that is linear whatever the policy wrote."""
    bodies, around, place = list[str](), list[str](), 0
    while (start := text.find(_OPEN, place)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        around.append(text[place:start])
        bodies.append(text[start + len(_OPEN) : end])
        place = end + len(_CLOSE)
    return bodies, "".join([*around, text[place:]])


def write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{call_json(call)}\n</tool_call>" for call in calls)


def _tagged(body: str, tools: Sequence[ToolSpec]) -> ToolCall | str:
    """A call in tags. Its values have no quotes: what is text and what a number, the tool's schema says."""
    fault = "a tool call is <function=name><parameter=name>value</parameter></function>"
    function = _FUNCTION.fullmatch(body)
    if not function:
        return fault
    schemas = (tool.parameters for tool in tools if tool.name == function[1])
    properties: dict[str, Any] = next(schemas, {}).get("properties") or {}
    *parts, after = function[2].split("</parameter>")
    values = {}
    for part in parts:
        opened = _PARAMETER.match(part)
        if not opened:
            return fault
        values[opened[1]] = _value(part[opened.end() :].removesuffix("\n"), properties.get(opened[1]))
    return fault if after.strip() else ToolCall(function[1], values)


def _value(text: str, schema: Any) -> Any:
    wanted = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if wanted == "string" or (isinstance(wanted, list) and "string" in wanted):
        return text
    try:
        return _WORDS[text] if text in _WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text  # of the wrong type, as the tool will say


DIALECT = Dialect(
    family="ChatML (Qwen)",
    control=("<|im_start|>", "<|im_end|>"),
    end="<|im_end|>",
    read=read,
    write=write,
    form=(
        "To call functions, write for each:\n<tool_call>\n"
        '{"name": <function name>, "arguments": <its arguments as a JSON object>}\n</tool_call>'
    ),
    result="<tool_response>\n{}\n</tool_response>",
    foreign=("<|tool_call_start|>", "<|tool_list_start|>"),
)
