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

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)  # the header may hold the opening tag
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None}  # some templates write these as Python does


def read(text: str, tools: Sequence[ToolSpec]) -> Message:
    thought = _THINK.match(text)
    thinking, rest = (thought[1], text[thought.end() :]) if thought else ("", text)
    found = [_tagged(body, tools) if "<function=" in body.split("{")[0] else read_call(body) for body in _CALL.findall(rest)]
    content = _CALL.sub("", rest)
    if "<tool_call>" in content or "</tool_call>" in content:
        found.append("<tool_call> and </tool_call> do not match")
    return message_of(content, found, thinking)


def write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{call_json(call)}\n</tool_call>" for call in calls)


def _tagged(body: str, tools: Sequence[ToolSpec]) -> ToolCall | str:
    """A call in tags. Its values have no quotes: what is text and what a number, the tool's schema says."""
    function = _FUNCTION.fullmatch(body)
    if not function or _PARAMETER.sub("", function[2]).strip():
        return "a tool call is <function=name><parameter=name>value</parameter></function>"
    schemas = (tool.parameters for tool in tools if tool.name == function[1])
    properties: dict[str, Any] = next(schemas, {}).get("properties", {})
    values = {name: _value(text, properties.get(name, {})) for name, text in _PARAMETER.findall(function[2])}
    return ToolCall(function[1], values)


def _value(text: str, schema: dict[str, Any]) -> Any:
    if schema.get("type", "string") == "string":
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
