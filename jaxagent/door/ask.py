"""What every dialect asks, in one form, what it is answered, and how it is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxagent.types import Message, Sampling, ToolSpec

MOST_CHOICES = 16
UNSAID = 0  # max_tokens of a request that names none: as many as there is room for


class Refused(Exception):
    """A request that is not answered, and why; each dialect has its own shape for it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


@dataclass(frozen=True)
class Ask:
    """One request.

    Args:
        choice: whether tools are called: auto, none, required, or `=name` for the one that must be.
        schema: JSON text of the schema that the answer is held to, or nothing.
        own: how many of the first messages are of this request alone, and of no dialogue that goes on from it.
        prompt: ids to go on from as they are, where there are no messages.
        logprobs: whether those of the sampled tokens are told; how many others, says sampling.top_logprobs.
        usage: whether a stream ends with the counts.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    strict: bool = False
    schema: str = ""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=UNSAID))
    own: int = 0
    prompt: tuple[int, ...] = ()
    n: int = 1
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    usage: bool = True

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools that the policy is told about."""
        return () if self.choice == "none" else self.tools


@dataclass(frozen=True)
class Answer:
    """One choice.

    Args:
        message: what was said, with an id in every call.
        finish: stop, length or calls.
        cached: tokens of the prompt that were held from an earlier call.
        retokenised: whether the prompt holds turns of an assistant that were not sampled here and had to be encoded.
    """

    message: Message
    finish: str
    stopped_by: str  # the stop string that ended it, or nothing
    tokens: list[int]
    prompt_tokens: int
    cached: int
    retokenised: bool = False
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """One event of a stream."""

    data: dict[str, Any]
    name: str = ""  # in dialects whose events have one


class Fields:
    """The body of a request: what is taken from it is checked; what nobody takes is refused by name."""

    def __init__(self, body: Any, where: str = ""):
        if not isinstance(body, dict):
            raise Refused(f"{where or 'the body'} must be a JSON object, got {_shown(body)}", param=where or None)
        self.body, self.where, self._left = body, where, set(body)

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a field, or the default where it is missing or null."""
        self._left.discard(name)
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool and kind is not object):
            kinds = " or ".join(_KINDS[one] for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise Refused(f"{self.path(name)} must be {kinds}, got {_shown(value)}", param=self.path(name))
        return value

    def want(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self.take(name, kind)
        if value is None:
            raise Refused(f"{self.path(name)} is missing", param=self.path(name))
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, (int, float), default)
        if not (math.isfinite(value) and low <= value <= high):
            raise Refused(f"{self.path(name)} must be between {low:g} and {high:g}, got {value}", param=self.path(name))
        return value

    def count(self, name: str, low: int, high: int, default: int) -> int:
        value = self.take(name, int, default)
        if not low <= value <= high:
            raise Refused(f"{self.path(name)} must be between {low} and {high}, got {value}", param=self.path(name))
        return int(value)

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that change nothing here, whatever they say."""
        self._left.difference_update(names)

    def done(self) -> None:
        """Refuses what is left, unless it says nothing."""
        for name in sorted(name for name in self._left if self.body[name] is not None):
            raise Refused(f"{self.path(name)} is not supported here: leave it out", param=self.path(name))


def sampling_of(body: Fields, budget: str, stops: str) -> Sampling:
    """What most dialects say alike about sampling. Args: budget, stops: their names of max_tokens and stop."""
    stop = body.take(stops, (str, list), [])
    strings = tuple([stop] if isinstance(stop, str) else stop)
    if len(strings) > 16 or not all(isinstance(string, str) and string for string in strings):
        raise Refused(f"{stops} must be a text or at most 16 of them, none empty", param=stops)
    return Sampling(
        temperature=body.number("temperature", 0, 5, 1.0),
        top_p=body.number("top_p", 1e-6, 1, 1.0),
        top_k=body.count("top_k", 0, 1 << 20, 0),
        max_tokens=body.count(budget, 1, 1 << 30, UNSAID) if body.body.get(budget) is not None else UNSAID,
        stop_strings=strings,
    )


def spec_of(function: Fields, parameters: str = "parameters") -> tuple[ToolSpec, bool]:
    """A tool and whether its calls are to be held to its schema."""
    name, nothing = function.want("name", str), {"type": "object", "properties": {}}
    spec = ToolSpec(name, function.take("description", str, ""), function.take(parameters, dict, nothing))
    strict = function.take("strict", bool, False)
    return spec, strict


def choice_of(value: Any, tools: Sequence[ToolSpec], name_of: Callable[[dict[str, Any]], Any], words: dict[str, str]) -> str:
    """The form of `Ask.choice` for what a dialect says. Args: words: its words for auto, none and required."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value in words:
        chosen = words[value]
    elif isinstance(value, dict) and isinstance(name := name_of(value), str):
        chosen = f"={name}"
    else:
        raise Refused(
            f"tool_choice must be one of {', '.join(words)}, or name a tool; got {_shown(value)}", param="tool_choice"
        )
    if chosen.startswith("=") and chosen[1:] not in [tool.name for tool in tools]:
        raise Refused(f"tool_choice names {chosen[1:]!r}, which is not among the tools", param="tool_choice")
    if chosen == "required" and not tools:
        raise Refused("tool_choice wants a call, but there are no tools", param="tool_choice")
    return chosen


def arguments_of(text: Any, where: str) -> dict[str, Any]:
    """The arguments of a call, which travel as a text in JSON."""
    try:
        value = json.loads(text) if text else {}
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused(f"{where} must be the text of a JSON object, got {_shown(text)}", param=where)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    object: "a value",
}
