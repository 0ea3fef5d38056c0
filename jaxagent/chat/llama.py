"""Llama 3, 3.1 and 3.2: calls are JSON objects, alone or after the Python tag, or in a function tag; code is a call too.

    <|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "look", "parameters": {"key": "37"}}<|eot_id|>
    <|python_tag|>{"name": "look", "parameters": {"key": "37"}}; {"name": "look", "parameters": {"key": "38"}}<|eom_id|>
    <function=look>{"key": "37"}</function><|eot_id|>            <|python_tag|>print(37)<|eom_id|>

A JSON object is a call only where it begins a line and names a tool that there is: anything else is text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from jaxagent.chat.dialect import Dialect, call_json, call_of, message_of, read_json
from jaxagent.types import Message, ToolCall, ToolSpec

_TAG = "<|python_tag|>"
_CUSTOM = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_LINE = re.compile(r"(?:\A|(?<=\n))[ \t]*(?=\{)")
_NEXT = re.compile(r"\s*;?\s*")
_BUILTIN = re.compile(r"\s*(\w+)\.call\((.*)\)\s*", re.DOTALL)
_PYTHON = ("python", "code_interpreter", "ipython")  # names under which a tool that runs code is known


def read(text: str, tools: Sequence[ToolSpec]) -> Message:
    content, tag, tagged = text.partition(_TAG)
    if tag:
        return message_of(content, _after_tag(tagged, tools))
    if custom := _CUSTOM.findall(text):
        return message_of(_CUSTOM.sub("", text), [_arguments(name, body) for name, body in custom])
    known = [tool.name for tool in tools]
    for line in _LINE.finditer(text):
        found, end = _json_calls(text, line.end(), known)
        if found:
            return message_of(text[: line.start()] + text[end:], found)
    return message_of(text, [])


def write(calls: Sequence[ToolCall]) -> str:
    return "; ".join(call_json(call, "parameters") for call in calls)


def _json_calls(text: str, start: int, known: list[str]) -> tuple[list[ToolCall | str], int]:
    """Calls of known tools, one after another, and where they end; none where the text only looks like one."""
    found: list[ToolCall | str] = []
    end = start
    while text.startswith("{", start):
        try:
            value, start = read_json(text, start)
        except ValueError as error:
            named = re.match(r'\{\s*"name"\s*:\s*"([^"]*)"', text[start:])
            return ([*found, str(error)], len(text)) if named and named[1] in known else (found, end)
        if not isinstance(value, dict) or value.get("name") not in known:
            return found, end
        found.append(call_of(value))
        end = start = next(_NEXT.finditer(text, start)).end()  # it matches nothing, too
    return found, end


def _after_tag(text: str, tools: Sequence[ToolSpec]) -> list[ToolCall | str]:
    """What the Python tag promises is a call: of JSON, of a built-in tool, or of the tool that runs code."""
    named = re.match(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"', text)
    if named:
        found, end = _json_calls(text, len(text) - len(text.lstrip()), [tool.name for tool in tools])
        if found and not text[end:].strip():
            return found
        listed = ", ".join(tool.name for tool in tools)
        return [f"{_TAG} is followed by a call that cannot be read; there are the tools {listed}"]
    builtin = _BUILTIN.fullmatch(text)
    if builtin and any(tool.name == builtin[1] for tool in tools):
        return [_keywords(builtin[1], builtin[2])]
    runner = next((tool for name in _PYTHON for tool in tools if tool.name == name), None)
    if runner is None:
        return [f"{_TAG} is followed by code, but there is no tool that runs it ({', '.join(_PYTHON)})"]
    names = runner.parameter_names
    return [ToolCall(runner.name, {"code" if "code" in names or not names else names[0]: text})]


def _keywords(name: str, text: str) -> ToolCall | str:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        return ToolCall(name, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, AssertionError):
        return f'a built-in tool is called as {name}.call(key="value")'


def _arguments(name: str, body: str) -> ToolCall | str:
    try:
        arguments, end = read_json(body)
    except ValueError as error:
        return str(error)
    return ToolCall(name, arguments) if isinstance(arguments, dict) and not body[end:].strip() else _WRONG


_WRONG = "the arguments must be a JSON object"

DIALECT = Dialect(
    family="Llama 3",
    control=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    end="<|eot_id|>",
    read=read,
    write=write,
    form=(
        'To call a function, answer with {"name": <function name>, "parameters": <its arguments as a JSON object>} on a line '
        "of its own, and nothing after it; for several, put semicolons between them."
    ),
    result="{}",
    result_role="ipython",
    stops=("<|eom_id|>", "<|end_of_text|>"),
)
