"""Tools: what a policy is told of a function, and what it is told when a call goes wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxagent.tools import Tool, dispatch, fault_of, tool
from jaxagent.types import ToolCall, ToolRecord, ToolSpec
from sandbox_client import RequestRefused, SessionLost


def search(query: str, limit: int = 10, exact: bool = False) -> list[str]:
    """Finds documents.

    This line is for programmers.
    """
    return [query] * limit if exact else []


def call(found: Tool, name: str = "", **arguments: Any) -> ToolRecord:
    return asyncio.run(dispatch([found], ToolCall(name or found.spec.name, arguments)))


# ====================================================================== what a policy is told


def test_name_first_line_and_schema_are_read_from_the_function() -> None:
    properties = {"query": {"type": "string"}, "limit": {"type": "integer"}, "exact": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["query"]}
    assert tool(search).spec == ToolSpec("search", "Finds documents.", schema)


def test_every_type_that_json_knows_has_its_word() -> None:
    def f(a: str, b: int, c: float, d: bool, e: list[int], g: dict[str, Any], h: list) -> None: ...

    properties = tool(f).spec.parameters["properties"]
    words = ["string", "integer", "number", "boolean", "array", "object", "array"]
    assert [p["type"] for p in properties.values()] == words
    assert tool(f).spec.description == ""


def _untyped(key) -> str:  # type: ignore[no-untyped-def]
    return str(key)


def _strange(key: bytes) -> str:
    return str(key)


def _several(*keys: str, **more: complex) -> str:
    return str(keys)


@pytest.mark.parametrize("function", [_untyped, _strange, _several])
def test_a_parameter_without_a_type_that_json_knows_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"tool {function.__name__}: parameter '\w+' needs one of the types str, int, float"):
        tool(function)


# ====================================================================== calls


def test_a_result_is_text_or_json() -> None:
    record = call(tool(search), query="é", limit=2, exact=True)
    assert (record.outcome, record.result) == ("ok", '["\\u00e9", "\\u00e9"]')

    async def greet(who: str) -> str:
        return f"hé {who}"

    record = call(tool(greet), who="x")
    assert (record.outcome, record.result, record.size_bytes) == ("ok", "hé x", 5)


def test_an_unknown_tool_is_answered_with_the_known_ones() -> None:
    record = call(tool(search), name="serach")
    assert record.outcome == "unknown_tool"
    assert record.result == "error: no tool 'serach'; there are search"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "'query' is missing"),
        ({"query": 3}, "'query' must be of type string"),
        ({"query": "x", "limit": "3"}, "'limit' must be of type integer"),
        ({"query": "x", "limit": True}, "'limit' must be of type integer"),
        ({"query": "x", "limit": 1.5}, "'limit' must be of type integer"),
        ({"query": "x", "exact": 1}, "'exact' must be of type boolean"),
        ({"query": "x", "depth": 1}, "there is no parameter 'depth'"),
        ({"depth": 1, "limit": None}, "'query' is missing; there is no parameter 'depth'; 'limit' must be of type integer"),
        ({"query": "x", "limit": 3}, ""),
    ],
)
def test_bad_arguments_are_told_all_at_once(arguments: dict[str, Any], fault: str) -> None:
    assert fault_of(tool(search).spec, arguments) == fault
    record = call(tool(search), **arguments)
    assert (record.outcome, record.result) == (("bad_arguments", f"error: {fault}") if fault else ("ok", "[]"))


def test_a_number_may_be_whole_but_not_a_flag() -> None:
    def half(x: float) -> float:
        return x / 2

    assert call(tool(half), x=3).result == "1.5"
    assert call(tool(half), x=True).outcome == "bad_arguments"


# ====================================================================== tools that go wrong


def _divide(x: int) -> float:
    return 1 / x


def _leave(x: int) -> None:
    sys.exit(x)


def _exhausted(x: int) -> int:
    return next(iter(()))


def _unspeakable(x: int) -> object:
    return object()


def _own_timeout(x: int) -> None:
    raise TimeoutError("the service did not answer")


async def _leave_later(x: int) -> None:
    sys.exit(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_divide, "ZeroDivisionError: division by zero"),
        (_leave, "SystemExit: 0"),
        (_leave_later, "SystemExit: 0"),
        (_exhausted, "StopIteration"),
        (_unspeakable, "TypeError: Object of type object is not JSON serializable"),
        (_own_timeout, "TimeoutError: the service did not answer"),
    ],
)
def test_a_tool_that_raises_is_an_error_that_the_policy_can_read(function: Callable[..., Any], words: str) -> None:
    record = call(tool(function), x=0)
    assert record.outcome == "error"
    assert record.result.startswith("error: ")
    assert words in record.result


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_tool_that_never_returns_is_a_timeout(kind: str) -> None:
    ended = threading.Event()

    def wait(x: int) -> None:
        ended.wait()

    async def wait_async(x: int) -> None:
        await asyncio.Event().wait()

    record = call(tool(wait if kind == "plain" else wait_async, timeout_s=0.05), x=0)
    ended.set()
    assert (record.outcome, record.result) == ("timeout", "error: no result within 0.05 s")
    assert record.latency_s > 0


def test_many_tools_that_never_return_do_not_keep_others_from_running() -> None:
    ended = threading.Event()

    def wait(x: int) -> None:
        ended.wait()

    async def crowd() -> tuple[list[ToolRecord], ToolRecord]:
        stuck = tool(wait, timeout_s=0.05)
        late = await asyncio.gather(*(dispatch([stuck], ToolCall("wait", {"x": i})) for i in range(64)))
        return late, await dispatch([tool(search)], ToolCall("search", {"query": "x"}))

    late, record = asyncio.run(crowd())
    ended.set()
    assert {r.outcome for r in late} == {"timeout"}
    assert record.outcome == "ok"


def test_a_tool_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    program = """
import asyncio, threading
from jaxagent.tools import dispatch, tool
from jaxagent.types import ToolCall

def wait() -> None:
    threading.Event().wait()

print(asyncio.run(dispatch([tool(wait, timeout_s=0.05)], ToolCall("wait", {}))).outcome)
"""
    home = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=home, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "timeout"


def test_a_failure_of_the_infrastructure_is_raised_and_never_a_result() -> None:
    async def fetch(x: int) -> str:
        raise SessionLost("the sandbox is gone")

    with pytest.raises(SessionLost, match="the sandbox is gone"):
        call(tool(fetch), x=0)


def test_a_session_that_the_policys_program_ended_is_an_error_that_it_reads() -> None:
    async def fetch(x: int) -> str:
        raise SessionLost("it killed itself", caused_by_program=True)

    record = call(tool(fetch), x=0)
    assert record.outcome == "error" and "it killed itself" in record.result


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        ({"type": ["string", "null"]}, None, ""),
        ({"type": ["string", "null"]}, 3, "'x' must be of type string or null"),
        ({"type": ["string", "date"]}, 3, ""),
        ({"type": {}}, 3, ""),
        (True, 3, ""),
    ],
)
def test_schemas_of_others_may_name_several_types_or_none(schema: Any, value: Any, fault: str) -> None:
    spec = ToolSpec("look", "", {"type": "object", "properties": {"x": schema}})
    assert fault_of(spec, {"x": value}) == fault


def test_a_sandbox_that_refuses_is_raised_unless_it_refuses_what_the_policy_asked_for() -> None:
    def fetch_fn(code: str) -> Tool:
        async def fetch(x: int) -> str:
            raise RequestRefused(code, "not so")

        return tool(fetch)

    for code in ("unauthorized", "code_refused", "no_such_route", "claim_failed", "unsupported"):
        with pytest.raises(RequestRefused, match="not so"):
            call(fetch_fn(code), x=0)
    for code in ("too_large", "no_such_file"):
        assert call(fetch_fn(code), x=0).outcome == "error"


def test_a_result_that_is_no_text_is_made_one() -> None:
    def half_a_pair(x: str) -> str:
        return x + "\ud800!"

    record = call(tool(half_a_pair), x="a")
    assert (record.outcome, record.result, record.size_bytes) == ("ok", "a?!", 3)
