"""Tools: a typed Python function, or code in the sandbox, as something a policy may call. Every call has a deadline.

A fault of the policy (unknown tool, bad arguments, an exception of the tool, a timeout) becomes a result that it can read.
A fault of the infrastructure is raised, and never becomes a result or a reward. Collections of tools stand in `toolbox/`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import threading
import time
import typing
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxagent.types import ToolCall, ToolRecord, ToolSpec
from sandbox_client import InfrastructureError, RequestRefused, SessionLost

PURE_ATTEMPTS = 2  # of a call that changes nothing, where the infrastructure failed
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
}


class ToolFailed(Exception):
    """Raised by a tool: the call failed, and this is the text that the policy reads."""


@dataclass(frozen=True)
class Tool:
    """What the policy is told, and what runs: `run(**arguments)` gives the text of the result.

    A `pure` tool changes nothing: its calls of one turn run at once, and one that the infrastructure broke is tried again.
    """

    spec: ToolSpec
    run: Callable[..., Awaitable[str]]
    timeout_s: float = 10.0
    pure: bool = False


def tool(function: Callable[..., Any], timeout_s: float = 10.0, pure: bool = False) -> Tool:
    """A tool from a typed function: name, first docstring line and JSON schema are read from it.

    The function is the user's own trusted code and runs in the trainer's process; only its arguments come from the policy.
    A plain function runs in a thread of its own: one that never ends holds up neither the others nor the end of the
    process. Raises TypeError for a parameter without a type that JSON knows.
    """
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        base = typing.get_origin(hints.get(name)) or hints.get(name)
        if base not in _JSON_TYPES:
            known = ", ".join(t.__name__ for t in _JSON_TYPES)
            raise TypeError(f"tool {function.__name__}: parameter {name!r} needs one of the types {known}, got {base}")
        properties[name] = {"type": _JSON_TYPES[base]}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    summary = (inspect.getdoc(function) or "").partition("\n")[0]

    async def run(**arguments: Any) -> str:
        if inspect.iscoroutinefunction(function):
            value = await function(**arguments)
        else:
            value = await in_thread(functools.partial(function, **arguments))
        return value if isinstance(value, str) else json.dumps(value)

    return Tool(ToolSpec(function.__name__, summary, schema), run, timeout_s, pure)


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Runs trusted code in a thread of its own: one that never ends holds up neither others nor the end of the process."""
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # so that a result that comes too late is no error

    def run() -> None:
        try:
            result.set_result(work())
        except StopIteration as error:  # which no future can carry
            result.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return asyncio.wrap_future(result)


def fault_of(spec: ToolSpec, arguments: dict[str, Any]) -> str:
    """What is wrong with a call's arguments, in words for the policy, or an empty string."""
    properties = spec.parameters.get("properties") or {}
    faults = [f"{name!r} is missing" for name in spec.parameters.get("required", ()) if name not in arguments]
    for name, value in arguments.items():
        wanted = _types(properties.get(name))
        if name not in properties:
            faults.append(f"there is no parameter {name!r}")
        elif wanted and not any(_CHECKS[one](value) for one in wanted):
            faults.append(f"{name!r} must be of type {' or '.join(wanted)}")
    return "; ".join(faults)


def _types(schema: Any) -> list[str]:
    """The types that a JSON schema names, one or a list of them; none where it names none, or one that JSON does not know."""
    named = schema.get("type") if isinstance(schema, dict) else None
    several = named if isinstance(named, list) else [named]
    known = [one for one in several if isinstance(one, str) and one in _CHECKS]
    return known if len(known) == len(several) else []


async def dispatch_all(tools: Sequence[Tool], calls: Sequence[ToolCall], max_chars: int = 0) -> list[ToolRecord]:
    """Runs the calls of one turn; returns their records in the turn's order.

    Neighbouring calls of pure tools run at once; any other waits for those before it and holds up those after it.
    """
    pure = {tool.spec.name for tool in tools if tool.pure}
    records: list[ToolRecord] = []
    for at_once, several in itertools.groupby(calls, lambda call: call.name in pure):
        if at_once:
            done = await asyncio.gather(*(dispatch(tools, call, max_chars) for call in several), return_exceptions=True)
            records += [_given(result) for result in done]
        else:
            for call in several:
                records.append(await dispatch(tools, call, max_chars))
    return records


def _given(result: ToolRecord | BaseException) -> ToolRecord:
    if isinstance(result, BaseException):
        raise result
    return result


async def dispatch(tools: Sequence[Tool], call: ToolCall, max_chars: int = 0) -> ToolRecord:
    """Runs a call under its tool's deadline. Raises only InfrastructureError, and RequestRefused for a wrong set-up.

    A session that the policy's own program ended is no failure of the infrastructure but an error that the policy reads.

    Args: max_chars: of the result, see `shortened`; 0 leaves it whole.
    """
    record = ToolRecord(call.name, call.arguments, "ok", "")
    found = next((tool for tool in tools if tool.spec.name == call.name), None)
    fault = fault_of(found.spec, call.arguments) if found else ""
    began = record.began_s = time.monotonic()
    if found is None:
        known = ", ".join(tool.spec.name for tool in tools)
        record.outcome, record.result = "unknown_tool", f"error: no tool {call.name!r}; there are {known}"
    elif fault:
        record.outcome, record.result = "bad_arguments", f"error: {fault}"
    else:
        await _run(found, record)
    record.latency_s = time.monotonic() - began
    record.result = record.result.encode(errors="replace").decode()  # half a surrogate pair is no text
    record.result = shortened(record.result, max_chars) if max_chars else record.result
    record.size_bytes = len(record.result.encode())
    return record


async def _run(found: Tool, record: ToolRecord) -> None:
    deadline = asyncio.timeout(found.timeout_s)
    try:
        async with deadline:
            record.result = await _tried(found, record.arguments)
    except InfrastructureError as error:
        if not (isinstance(error, SessionLost) and error.caused_by_program):
            raise
        record.outcome, record.result = "error", f"error: {error}"  # the policy's own program ended it
    except ToolFailed as error:
        record.outcome, record.result = "error", str(error)
    except (Exception, SystemExit) as error:  # the tool's own fault: the policy may read it
        if isinstance(error, RequestRefused) and not error.caused_by_policy:
            raise  # a token that has run out is nothing that a policy could learn from
        if isinstance(error, TimeoutError) and deadline.expired():
            record.outcome, record.result = "timeout", f"error: no result within {found.timeout_s:g} s"
        else:
            record.outcome, record.result = "error", f"error: {type(error).__name__}: {error}"


async def _tried(found: Tool, arguments: dict[str, Any]) -> str:
    for left in reversed(range(PURE_ATTEMPTS if found.pure else 1)):
        try:
            return await found.run(**arguments)
        except InfrastructureError:
            if not left:
                raise
    raise AssertionError("the last attempt returns or raises")


def shortened(text: str, max_chars: int) -> str:
    """The text, or its head and tail and how much is missing between them: an error stands at the end, a heading at the start.

    The note comes on top of `max_chars`.
    """
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    dropped = len(text) - max_chars
    return f"{text[: max_chars - tail]}\n[{dropped} more characters]\n{text[len(text) - tail :]}"
