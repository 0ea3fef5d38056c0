"""Gemma 1 to 3: no roles but user and model, which alternate, and no tools: they are told and called in words.

    <start_of_turn>user\\n...<end_of_turn>\\n<start_of_turn>model\\n
    ```tool_call\\n{"name": "look", "arguments": {"key": "37"}}\\n```<end_of_turn>\\n
    <start_of_turn>user\\n```tool_output\\n52\\n```<end_of_turn>\\n<start_of_turn>model\\n

The fenced JSON is what the prompt asks for. Also read are <tool_call>...</tool_call> around the JSON, and calls as Python
writes them in a fence of tool_code, in a list or one to a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from jaxagent.chat.dialect import Dialect, call_json, message_of, read_call
from jaxagent.types import Message, ToolCall, ToolSpec

_BLOCK = re.compile(r"```tool_call[ \t]*\n(.*?)\n?```|<tool_call>(.*?)</tool_call>|```tool_code[ \t]*\n(.*?)\n?```", re.DOTALL)
_LOOSE = re.compile(r"```tool_(?:call|code)|</?tool_call>")


def read(text: str, tools: Sequence[ToolSpec]) -> Message:
    found: list[ToolCall | str] = []
    for block in _BLOCK.finditer(text):
        found += _python_calls(block[3]) if block[3] is not None else [read_call(block[1] if block[2] is None else block[2])]
    content = _BLOCK.sub("", text)
    if _LOOSE.search(content):
        found.append("a block of tool_call or tool_code does not end")
    return message_of(content, found)


def write(calls: Sequence[ToolCall]) -> str:
    # A backtick stands in JSON only inside a string, where it may be escaped: no fence ends early.
    return "\n".join("```tool_call\n{}\n```".format(call_json(call).replace("`", "\\u0060")) for call in calls)


def _python_calls(text: str) -> list[ToolCall | str]:
    """Calls such as f(x=1), [f(x=1), g()] or print(f(x=1)), with values that are written out."""
    try:
        body = ast.parse(text.strip()).body
        nodes: list[ast.AST] = [statement.value for statement in body if isinstance(statement, ast.Expr)]
        nodes = [inner for node in nodes for inner in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
        if nodes and len(nodes) >= len(body):
            return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    return ["tool_code must hold calls with values written out, such as f(x=1)"]


def _python_call(node: ast.AST) -> ToolCall:
    """Raises ValueError for anything else: nothing is run here."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "print" and len(node.args) == 1 and not node.keywords:
            return _python_call(node.args[0])
        if not node.args:
            return ToolCall(node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords})
    raise ValueError("not a call with named arguments")


DIALECT = Dialect(
    family="Gemma",
    control=("<start_of_turn>", "<end_of_turn>"),
    end="<end_of_turn>",
    read=read,
    write=write,
    form=(
        'To call functions, write for each:\n```tool_call\n{"name": <function name>, "arguments": <its arguments as a JSON '
        "object>}\n```\nTheir results come in blocks of tool_output."
    ),
    result="```tool_output\n{}\n```",
)
