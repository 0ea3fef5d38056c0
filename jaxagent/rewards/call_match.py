"""Function calls against possible answers, by the rule of the Berkeley Function Calling Leaderboard; calls read from text.

An answer is a mapping from a function's name to its parameters, each with a list of all values that are right; "" among them
says that the parameter may be left away. A call is right where

    its name is the answer's; every required parameter is there, and no parameter that schema or answer do not know;
    every value has its schema's type and is one of the listed values; every parameter that is left away may be.

Types: a whole number may stand for a float, and nothing else for anything else; `true` is no number. Where all listed values
have another type than the schema says, as the name of a variable in place of a number, that type is taken and the value must
be listed to the letter. Texts are equal without case, spaces and any of , . / - _ * ^, and either quote is the other. Lists are
equal item by item, dicts by their keys' lists of values, with "" as above, and so on inwards: there we know dicts in dicts,
which the leaderboard's own checker compares to the letter. An empty list may stand where its parameter may be left away.

The rule is re-implemented from that checker's behaviour (package bfcl-eval 2026.3.23, file ast_checker.py) for Python's types;
its Java and JavaScript rows write their values in those languages and are not read here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.types import ToolCall

Answer = Mapping[str, Mapping[str, Sequence[Any]]]  # one name, and the values that are right
_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
_NOTHING = re.compile(r"[ ,./\-_*^]")
_FENCED = re.compile(r"```(?:python)?\s*(.*?)```", re.DOTALL)
_MOST_CHARS, _DEEPEST = 20_000, 30  # of a text that is read as calls


def call_match(
    calls: Sequence[ToolCall], functions: Sequence[Mapping[str, Any]], answers: Sequence[Answer]
) -> tuple[float, str]:
    """1 if the calls are as many as the answers and each answer takes one of them, in any order, else 0; and why.

    Answers take calls in their order, each the first that is right for it and not taken. No answers at all: no call is right.
    """
    if not answers:
        return (0.0, f"no function fits, {len(calls)} were called") if calls else (1.0, "no function fits, none was called")
    if len(calls) != len(answers):
        return 0.0, f"{len(answers)} calls were wanted, {len(calls)} were made"
    schemas = {schema["name"]: schema for schema in functions}
    left = list(calls)
    for answer in answers:
        name, wanted = next(iter(answer.items()))
        faults = []
        for place, call in enumerate(left):
            if not (fault := fault_of_call(call, name, schemas[name]["parameters"], wanted)):
                del left[place]
                break
            faults.append(fault)
        else:
            return 0.0, faults[0]
    return 1.0, "the right calls"


def fault_of_call(call: ToolCall, name: str, schema: Mapping[str, Any], wanted: Mapping[str, Sequence[Any]]) -> str:
    """Why a call is not the wanted one, or nothing. Args: schema: of its parameters, an object or `dict`."""
    if call.name != name:
        return f"{name} was wanted, {call.name} was called"
    given, known = call.arguments, schema["properties"]
    if missing := [one for one in schema.get("required", ()) if one not in given]:
        return f"{name} needs {missing[0]}"
    for parameter, value in given.items():
        if parameter not in known or parameter not in wanted:
            return f"{name} was called with {parameter}"
        if not _right(value, known[parameter], wanted[parameter]):
            return f"{parameter} of {name} is {value!r:.80}, wanted was one of {list(wanted[parameter])!r:.80}"
    left_away = [one for one in wanted if one not in given and "" not in wanted[one]]
    return f"{name} wants {left_away[0]}" if left_away else ""


def _right(value: Any, schema: Mapping[str, Any], listed: Sequence[Any]) -> bool:
    """Whether a value has its type and is among those listed."""
    kind = _TYPES.get(schema["type"], str)
    if kind is float and type(value) is int:
        value = float(value)
    listed_kind = next((type(one) for one in listed if one != ""), None)
    if listed_kind not in (None, kind):  # a variable's name, say: the letter counts
        return type(value) in (kind, listed_kind) and value in listed
    if type(value) is not kind or (isinstance(value, list) and not _items_typed(value, schema, listed)):
        return False
    if value == [] and "" in listed:
        return True
    if kind in (dict, list, str):
        return any(_alike(value, one) for one in listed if one != "" or kind is str)
    return value in listed


def _items_typed(value: list[Any], schema: Mapping[str, Any], listed: Sequence[Any]) -> bool:
    """Whether all items have the type that the schema says, or that of the listed lists' own items."""
    kind = _TYPES.get(schema.get("items", {}).get("type", ""))
    if kind is None:
        return True
    kinds = [{kind, *(type(one) for one in right[:1])} for right in listed if isinstance(right, list)]
    return any(all(type(item) in known for item in value) for known in kinds)


def _alike(value: Any, wanted: Any) -> bool:
    """Whether a value is a listed one, texts by `bare`, dicts by their lists, lists item by item."""
    if isinstance(value, str) and isinstance(wanted, str):
        return bare(value) == bare(wanted)
    if isinstance(value, dict) and isinstance(wanted, dict):
        if any(key not in wanted for key in value):
            return False
        return all(_among(value, key, several) for key, several in wanted.items())
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(_alike(one, other) for one, other in zip(value, wanted, strict=True))
    return bool(value == wanted)


def _among(value: dict[str, Any], key: str, several: Any) -> bool:
    if key not in value:
        return "" in several if isinstance(several, list | str) else False
    choices = several if isinstance(several, list) else [several]
    return any(_alike(value[key], one) for one in choices)


def bare(text: str) -> str:
    """A text as it is compared: without case, spaces and , . / - _ * ^, with one kind of quote."""
    return _NOTHING.sub("", text).lower().replace("'", '"')


def read_calls(text: str) -> tuple[list[ToolCall], str]:
    """The calls in a text like `[f(a=1), g.h(b=["x"])]`, and what is wrong with it; nothing is executed.

    A text in a fence is read without it. Values are Python's literals; arguments have names. A text that is no such list has no
    calls: whoever says in words that no function fits has called none.
    """
    fenced = _FENCED.search(text[: 2 * _MOST_CHARS])
    body = (fenced[1] if fenced else text).strip()
    if len(body) > _MOST_CHARS or _depth(body) > _DEEPEST:
        return [], "too long or too deep to be read as calls"
    try:
        found = ast.parse(body, mode="eval").body
        nodes = found.elts if isinstance(found, ast.List | ast.Tuple) else [found]
        return [_call(node) for node in nodes], ""
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return [], f"not a list of calls: {error}"


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("a call f(name=value, ...) was wanted")
    arguments = {str(keyword.arg): _listed(ast.literal_eval(keyword.value)) for keyword in node.keywords}
    return ToolCall(ast.unparse(node.func), arguments)


def _listed(value: Any) -> Any:
    """JSON knows no tuples."""
    if isinstance(value, tuple | list):
        return [_listed(one) for one in value]
    return {key: _listed(one) for key, one in value.items()} if isinstance(value, dict) else value


def _depth(text: str) -> int:
    """How deep brackets go, and signs in a row, which Python's parser goes down for too."""
    deepest = depth = signs = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        signs = signs + 1 if letter in "-+~" else 0
        deepest = max(deepest, depth, signs)
    return deepest
