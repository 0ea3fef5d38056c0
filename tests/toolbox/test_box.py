"""Kits by name: what is told before a run, what two kits may not share, and calls at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from calling import called

from jaxagent.toolbox.box import KITS, Toolbox
from jaxagent.toolbox.kit import Workplace
from jaxagent.tools import Tool, dispatch_all, shortened, tool
from jaxagent.types import ToolCall, ToolRecord
from sandbox_client import Unreachable


def shout(text: str, times: int = 1) -> str:
    """Says it aloud."""
    return text.upper() * times


def test_a_box_tells_the_tools_of_its_kits_in_order() -> None:
    box = Toolbox(("python", "calculator", "files", "tests", "memory"))
    names = ["python", "calculate", "view", "list_files", "search_files", "edit", "create", "run_tests"]
    names += ["remember", "recall", "search_notes"]
    assert [spec.name for spec in box.specs] == names
    assert all(spec.description for spec in box.specs)
    assert box.runs_code and box.remembers and not box.functions
    assert Toolbox("sql").functions == "jaxagent.toolbox.database"
    assert Toolbox("sql").runs_code and not Toolbox("calculator").runs_code
    assert Toolbox(()).specs == ()


def test_a_function_of_the_users_is_a_tool_by_its_dotted_name() -> None:
    box = Toolbox({"functions": {"names": (f"{__name__}.shout",)}})
    (record,) = called(box, ("shout", {"text": "a", "times": 2}))
    assert (record.outcome, record.result) == ("ok", "AA")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (("hammer",), "must be of calculator, python, .*; got 'hammer'"),
        ({"python": {"tiemout_s": 3}}, "python has no option 'tiemout_s'; it has timeout_s"),
        ({"calculator": {"x": 1}}, "calculator has no option 'x'; it has none"),
        ({"search": {}}, "search needs corpus"),
        (("files", "files_again"), "two tools named 'view'"),
        ({"functions": {"names": ("no.such.thing",)}}, "dotted names of functions, got 'no.such.thing'"),
        ({"functions": {"names": ("plain",)}}, "dotted names of functions, got 'plain'"),
        ({"sql": {"script": "nowhere.sql"}}, "no such file"),
        ({"retriever": {"url": "file:///etc/passwd"}}, "must be a URL of http or https"),
        ({"mcp": {}}, "either a command or a url"),
    ],
)
def test_what_cannot_be_is_told_before_the_run(chosen: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Toolbox(chosen)


def test_every_kit_says_what_it_is() -> None:
    assert all((kit.__doc__ or "").strip() for kit in KITS.values())


# ====================================================================== the calls of one turn


def turn(tools: list[Tool], *calls: ToolCall, max_chars: int = 0) -> list[ToolRecord]:
    return asyncio.run(dispatch_all(tools, calls, max_chars))


def waiting(seen: list[str], pure: bool) -> Tool:
    async def wait(name: str) -> str:
        """Waits."""
        seen.append(f"{name} begins")
        await asyncio.sleep(0.05)
        seen.append(f"{name} ends")
        return name

    return tool(wait, pure=pure)


def test_calls_of_pure_tools_run_at_once_and_others_one_after_another_all_in_order() -> None:
    calls = [ToolCall("wait", {"name": name}) for name in "abc"]
    for pure, order in ((True, "a begins, b begins, c begins"), (False, "a begins, a ends, b begins")):
        seen: list[str] = []
        records = turn([waiting(seen, pure)], *calls)
        assert [record.result for record in records] == ["a", "b", "c"]
        assert ", ".join(seen).startswith(order)


def test_a_change_waits_for_the_looks_before_it_and_is_seen_by_those_after_it() -> None:
    state = {"n": 0}

    async def look() -> int:
        """Looks."""
        await asyncio.sleep(0.01)
        return state["n"]

    async def add() -> int:
        """Adds."""
        state["n"] += 1
        return state["n"]

    tools = [tool(look, pure=True), tool(add)]
    records = turn(tools, *(ToolCall(name) for name in ("look", "look", "add", "look", "add", "look")))
    assert [record.result for record in records] == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize(("pure", "faults", "ends"), [(True, 1, "ok"), (True, 2, "raised"), (False, 1, "raised")])
def test_only_what_changes_nothing_is_tried_again(pure: bool, faults: int, ends: str) -> None:
    left = [faults]

    async def fetch() -> str:
        """Fetches."""
        if left[0]:
            left[0] -= 1
            raise Unreachable("no way")
        return "here"

    if ends == "raised":
        with pytest.raises(Unreachable):
            turn([tool(fetch, pure=pure)], ToolCall("fetch"))
        assert left[0] == 0
    else:
        assert turn([tool(fetch, pure=pure)], ToolCall("fetch"))[0].result == "here"


def test_one_slow_call_does_not_take_the_deadline_of_another() -> None:
    async def nap(seconds: float) -> str:
        """Sleeps."""
        await asyncio.sleep(seconds)
        return "awake"

    began = time.monotonic()
    records = turn([tool(nap, timeout_s=0.1, pure=True)], *(ToolCall("nap", {"seconds": s}) for s in (30, 0)))
    assert [record.outcome for record in records] == ["timeout", "ok"]
    assert time.monotonic() - began < 5


def test_a_long_result_keeps_head_and_tail() -> None:
    text = "head" + "." * 992 + "tail"
    assert shortened(text, 1000) == text
    cut = shortened(text, 20)
    assert cut == "head......\n[980 more characters]\n......tail"
    record = turn([tool(shout)], ToolCall("shout", {"text": "x" * 100}), max_chars=10)[0]
    assert record.result == "XXXXX\n[90 more characters]\nXXXXX"
    assert record.size_bytes == len(record.result)


def test_a_workplace_closes_all_that_was_opened_even_if_one_fails() -> None:
    closed: list[str] = []

    async def play() -> None:
        place = Workplace("w", None)

        async def good() -> None:
            closed.append("good")

        async def bad() -> None:
            closed.append("bad")
            raise OSError("stuck")

        for close in (good, bad, good):
            place.at_the_end(close)
        with pytest.raises(OSError, match="stuck"):
            await place.close()

    asyncio.run(play())
    assert closed == ["good", "bad", "good"]
