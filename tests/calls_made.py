"""Calls made of possible answers, and as the text that `read_calls` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxagent.rewards.call_match import Answer
from jaxagent.types import ToolCall


def as_calls(answers: Sequence[Answer]) -> list[ToolCall]:
    """Calls that are right: of every parameter the first value that is listed; one that may only be missing is."""
    return [
        ToolCall(name, {key: _first(value) for key, values in parameters.items() for value in _given(values)})
        for answer in answers
        for name, parameters in answer.items()
    ]


def _given(values: Sequence[Any]) -> list[Any]:
    return [one for one in values if one != ""][:1]


def _first(value: Any) -> Any:
    """A listed value as a call has it: of dicts, their keys' first values."""
    if isinstance(value, dict):
        several = {key: one if isinstance(one, list) else [one] for key, one in value.items()}
        return {key: _first(one) for key, values in several.items() for one in _given(values)}
    return [_first(one) for one in value] if isinstance(value, list) else value


def rendered(calls: Sequence[ToolCall]) -> str:
    """Calls as a text that `read_calls` reads."""
    said = [f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in calls]
    return f"[{', '.join(said)}]"
