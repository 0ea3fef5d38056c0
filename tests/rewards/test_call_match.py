"""Calls against possible answers: a case for every rule, and calls that are read from text."""

from __future__ import annotations

from typing import Any

import pytest
from calls_made import as_calls, rendered
from growing import growth

from jaxagent.rewards.call_match import bare, call_match, read_calls
from jaxagent.types import ToolCall


def schema(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    named = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()}
    return {"name": "f", "parameters": {"type": "dict", "properties": named, "required": list(required)}}


def items(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": kind}}


def right(kind: Any, listed: list[Any], value: Any) -> bool:
    """Whether f(x=value) is right where x is of a kind and these are listed."""
    return call_match([ToolCall("f", {"x": value})], [schema(x=kind)], [{"f": {"x": listed}}])[0] == 1.0


@pytest.mark.parametrize(
    ("kind", "listed", "value", "wanted"),
    [
        ("integer", [5], 5, True),
        ("integer", [5, 6], 6, True),
        ("integer", [5], 6, False),
        ("integer", [5], 5.0, False),
        ("integer", [5], "5", False),
        ("integer", [1], True, False),
        ("float", [5.0], 5, True),  # a whole number may stand for a float
        ("float", [5], 5, True),
        ("float", [0.1], 0.1, True),
        ("float", [5.0], "5.0", False),
        ("boolean", [True], True, True),
        ("boolean", [True], False, False),
        ("boolean", [True], 1, False),
        ("string", ["New York"], "new york", True),
        ("string", ["April 1, 2024"], "April 1 2024", True),
        ("string", ["a_b-c/d*e^f.g"], "ABCDEFG", True),
        ("string", ["it's"], 'it"s', True),
        ("string", ["New York"], "York", False),
        ("string", ["5"], 5, False),
        ("any", ["x"], "X", True),
        ("integer", ["width"], "width", True),  # a variable's name
        ("integer", ["width"], "Width", False),  # to the letter
        (items("integer"), [[1, 2]], [1, 2], True),
        (items("integer"), [[1, 2]], [2, 1], False),
        (items("integer"), [[1, 2], [2, 1]], [2, 1], True),
        (items("integer"), [[1, 2]], [1], False),
        (items("integer"), [[1, 2]], [1, 2.0], False),
        (items("float"), [[1.0, 2.5]], [1.0, 2.5], True),
        (items("float"), [[1, 2]], [1, 2], True),  # as the answer's own items are
        (items("string"), [["New York", "LA"]], ["new york", "l.a."], True),
        (items("string"), [["a"]], "a", False),
        (items("string"), [["a"], ""], [], True),
        (items("string"), [["a"]], [], False),
        (items("array"), [[[1, 2], [3]]], [[1, 2], [3]], True),
        (items("array"), [[["A b"], []]], [["ab"], []], True),
        ("tuple", [[1, 2]], [1, 2], True),
        ("dict", [{"a": [1], "b": ["x", ""]}], {"a": 1}, True),
        ("dict", [{"a": [1], "b": ["x", ""]}], {"a": 1, "b": "X."}, True),
        ("dict", [{"a": [1], "b": ["x", ""]}], {"b": "x"}, False),
        ("dict", [{"a": [1]}], {"a": 1, "c": 2}, False),
        ("dict", [{"a": [1, 2]}], {"a": 2}, True),
        ("dict", [{"a": [1]}, {"a": [2]}], {"a": 2}, True),
        ("dict", [{"a": [{"b": ["New York"], "c": [""]}]}], {"a": {"b": "new york"}}, True),
        ("dict", [{"a": [{"b": ["New York"]}]}], {"a": {"b": "Boston"}}, False),
        (items("dict"), [[{"a": [1]}, {"a": [2]}]], [{"a": 1}, {"a": 2}], True),
        (items("dict"), [[{"a": [1]}, {"a": [2]}]], [{"a": 2}, {"a": 1}], False),
        (items("dict"), [[{"a": [1]}]], [{"a": 1}, {"a": 1}], False),
    ],
)
def test_a_value_by_type_and_list(kind: Any, listed: list[Any], value: Any, wanted: bool) -> None:
    assert right(kind, listed, value) == wanted


ANSWER = [{"f": {"x": [1], "y": ["", 2], "z": [3]}}]
SCHEMA = [schema(("x",), x="integer", y="integer", z="integer", w="integer")]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"x": 1, "z": 3}, ""),
        ({"x": 1, "y": 2, "z": 3}, ""),
        ({"z": 3}, "f needs x"),
        ({"x": 1}, "f wants z"),  # not required by the schema, and yet not optional
        ({"x": 1, "z": 3, "w": 1}, "f was called with w"),  # of the schema, in no answer
        ({"x": 1, "z": 3, "v": 1}, "f was called with v"),
        ({"x": 1, "y": 4, "z": 3}, "y of f is 4, wanted was one of ['', 2]"),
    ],
)
def test_parameters_that_must_may_and_must_not_be_there(arguments: dict[str, Any], fault: str) -> None:
    score, why = call_match([ToolCall("f", arguments)], SCHEMA, ANSWER)
    assert (score, why) == ((0.0, fault) if fault else (1.0, "the right calls"))


F, G = ToolCall("f", {"x": 1}), ToolCall("g", {"x": 2})
BOTH = [schema(x="integer"), {**schema(x="integer"), "name": "g"}]


@pytest.mark.parametrize(
    ("calls", "answers", "wanted"),
    [
        ([F], [{"f": {"x": [1]}}], 1.0),
        ([F, F], [{"f": {"x": [1]}}], 0.0),
        ([], [{"f": {"x": [1]}}], 0.0),
        ([G], [{"f": {"x": [1]}}], 0.0),
        ([F, G], [{"f": {"x": [1]}}, {"g": {"x": [2]}}], 1.0),
        ([G, F], [{"f": {"x": [1]}}, {"g": {"x": [2]}}], 1.0),  # in any order
        ([F, F], [{"f": {"x": [1]}}, {"g": {"x": [2]}}], 0.0),
        ([F, F], [{"f": {"x": [1]}}, {"f": {"x": [1, 5]}}], 1.0),  # each call serves one answer
        ([F, ToolCall("f", {"x": 5})], [{"f": {"x": [1]}}, {"f": {"x": [1]}}], 0.0),
        ([], [], 1.0),
        ([F], [], 0.0),
    ],
)
def test_several_calls_and_none(calls: list[ToolCall], answers: list[Any], wanted: float) -> None:
    assert call_match(calls, BOTH, answers)[0] == wanted


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(x=1)]", [F]),
        ("f(x=1)", [F]),
        ("f(x=1), g(x=2)", [F, G]),
        ("```python\n[f(x=1), g(x=2)]\n```", [F, G]),
        ("[a.b.c(x=-1.5, y='it', z=[True, None], w={'k': (1, 2)})]", None),
        ("[]", []),
        ("no function fits", []),
        ("[f(1)]", []),
        ("[f(**{'x': 1})]", []),
        ("[f(x=__import__('os').system('true'))]", []),
        ("[f(x=1), 5]", []),
        ("[" * 5000, []),
        ("-" * 8000 + "1", []),
        ("f(x=" + "9" * 19_000 + ")", []),
        ("f(x=1)\x00", []),
    ],
)
def test_calls_are_read_and_nothing_is_executed(text: str, calls: list[ToolCall] | None) -> None:
    found, fault = read_calls(text)
    if calls is None:
        assert found == [ToolCall("a.b.c", {"x": -1.5, "y": "it", "z": [True, None], "w": {"k": [1, 2]}})]
    else:
        assert found == calls
    assert bool(fault) == (not found and text != "[]")


def test_right_calls_are_made_of_answers_and_can_be_read_again() -> None:
    answers = [{"f": {"x": [1], "y": ["", "it's"], "z": [""]}}, {"g": {"x": [{"a": ["", 2], "b": [""]}]}}]
    calls = as_calls(answers)
    assert calls == [ToolCall("f", {"x": 1, "y": "it's"}), ToolCall("g", {"x": {"a": 2}})]
    assert read_calls(rendered(calls)) == (calls, "")


def test_texts_are_compared_bare() -> None:
    assert bare(" A-b_c.D/e*f^g, 'h' ") == 'abcdefg"h"'


@pytest.mark.parametrize("piece", ["```", "f(", "f(x=1),", "a.", "'"])
def test_hostile_texts_are_read_in_linear_time(piece: str) -> None:
    assert growth(read_calls, piece, 4_000, 16_000) < 10
