"""What a family of checkpoints adds to its tokenizer's own chat template, and reading calls that are written in JSON.

The template says how messages are rendered. It does not say how to read what the policy wrote, which tokens end a turn, or
what to do where the template has no words for tools: that is a family's dialect, one small file each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxagent.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class Dialect:
    """One family.

    Args:
        family: its name, for messages.
        control: the tokens that all its tokenizers have; by them a tokenizer is recognised.
        end: the token that closes a turn.
        read: the text of a sampled turn, without its stop token, and the tools, to a message.
        write: calls as the policy writes them. The template's own form goes before; this stands in where it has none, refuses
            several calls, or drops what is said beside them.
        form: tells the policy how to call and what results look like, where the template ignores tools.
        result: a tool's result there, `{}` for its text, in a message of role `result_role`.
        stops: further tokens that end a turn, where the vocabulary has them.
        foreign: tokens of other families that have `control` too.
    """

    family: str
    control: tuple[str, ...]
    end: str
    read: Callable[[str, Sequence[ToolSpec]], Message]
    write: Callable[[Sequence[ToolCall]], str]
    form: str
    result: str
    result_role: str = "user"
    stops: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def speaks(self, tokens: set[str]) -> bool:
        """Whether a tokenizer with these added tokens is of this family."""
        return tokens.issuperset(self.control) and tokens.isdisjoint(self.foreign)

    def tell(self, tools: Sequence[ToolSpec]) -> str:
        """The tools in words, for templates that ignore them."""
        listed = "\n".join(json.dumps(schema(tool)["function"], ensure_ascii=False) for tool in tools)
        return f"You may call these functions, described in JSON:\n{listed}\n\n{self.form}"


def schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates want it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def call_id(call: ToolCall, place: int) -> str:
    """What a call is named in its turn: as the policy named it, if in nine letters and digits, or by its place."""
    return call.id if _ID.fullmatch(call.id) else f"call{place:05d}"


def call_json(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def message_of(content: str, found: Sequence[ToolCall | str], thinking: str = "") -> Message:
    """A sampled turn from its parts: the calls, and what was wrong with those that are none."""
    calls = tuple(call for call in found if isinstance(call, ToolCall))
    faults = [fault for fault in found if isinstance(fault, str)]
    return Message("assistant", content.strip(), thinking.strip(), calls, error="; ".join(faults))


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends. Raises ValueError that says what is wrong."""
    try:
        return _DECODER.raw_decode(text, len(text) - len(text[start:].lstrip()))
    except json.JSONDecodeError as error:
        raise ValueError(f"the tool call is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # NaN, a number without end, brackets without end
        raise ValueError(f"the tool call is not JSON that can be read: {error}") from None


def read_call(body: str) -> ToolCall | str:
    """The call in a text that should be one JSON object, or what is wrong with it."""
    try:
        value, end = read_json(body)
    except ValueError as error:
        return str(error)
    rest = body[end:].strip()
    return f"the tool call is not JSON: Extra data at character {end}" if rest else call_of(value)


def call_of(value: Any) -> ToolCall | str:
    """The call that a JSON value says, or what is wrong with it. Families name its arguments in two ways."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a tool call is {"name": ..., "arguments": {...}}'
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    name = value.get("id")
    return ToolCall(value["name"], arguments, name if isinstance(name, str) else "")


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


_ID = re.compile(r"[A-Za-z0-9]{9}")
_DECODER = json.JSONDecoder(parse_constant=_no_number)
