"""Constraints as automata: what they allow is right, what is right they allow, and what is not known is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.engine.constraints import Automaton, Compiler
from jaxagent.types import Constraint, Either, Json, Vocabulary

END, CALL, END_CALL, OTHER = range(300, 304)
WORDS = [b'{"', b'": "', b'", "', b'"}', b"true", b"name", b"look", b" 12", b"\n\n", "é".encode(), "€uro".encode()]
LONG = b"x" * 20  # longer than what is drawn inside a form
PIECES = [bytes([i]) for i in range(256)] + WORDS + [LONG, b"name"]
PIECES += [b""] * (300 - len(PIECES)) + [b"<end>", b"<call>", b"</call>", b"<other>"]
VOCABULARY = Vocabulary(tuple(PIECES), frozenset({END, CALL, END_CALL, OTHER}))
MODEL = 320  # ids of the model, of which the last have no token
COMPILER = Compiler(VOCABULARY, MODEL, 4000)

SCHEMA = {
    "type": "object",
    "properties": {
        "key": {"type": "string", "description": "what to look up"},
        "count": {"type": "integer"},
        "unit": {"enum": ["C", "F", 3]},
        "deep": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "x": {"type": ["number", "null"]}},
            "required": ["on"],
        },
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "any": {"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "boolean"}}]},
    },
    "required": ["key", "deep"],
}


def compiled(constraint: Constraint) -> Automaton:
    return COMPILER.compile(constraint, (END,))


def masked(automaton: Automaton, state: int) -> np.ndarray:
    bits = np.unpackbits(automaton.mask_GW[state].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:MODEL])


def step(automaton: Automaton, state: int, token: int) -> int:
    """As the device does it."""
    for symbol in COMPILER.pieces.symbol_VM[token]:
        if symbol >= 0:
            state = int(automaton.next_GA[state, symbol])
    return state


def accepts(automaton: Automaton, tokens: list[int]) -> bool:
    state = automaton.start
    for token in tokens:
        if token not in masked(automaton, state):
            return False
        state = step(automaton, state, token)
    return True


def spelled(text: str, seed: int = 0) -> list[int]:
    """The tokens of a text, cut at random."""
    rng, data, tokens = random.Random(seed), text.encode(), []
    while data:
        fits = [i for i, piece in enumerate(PIECES[:300]) if piece and len(piece) <= 16 and data.startswith(piece)]
        tokens.append(rng.choice(fits))
        data = data[len(PIECES[tokens[-1]]) :]
    return tokens


def written(automaton: Automaton, seed: int, most: int = 400) -> list[int]:
    """A turn drawn by the masks alone."""
    rng, state, tokens = random.Random(seed), automaton.start, []
    while len(tokens) < most:
        allowed = masked(automaton, state).tolist()
        closing = [token for token in allowed if token == END or PIECES[token][:1] in (b'"', b"}", b"]")]
        tokens.append(rng.choice(closing if closing and rng.random() < 0.3 else allowed))
        if tokens[-1] == END:
            return tokens
        state = step(automaton, state, tokens[-1])
    return tokens


def text_of(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode()  # raises for what is not UTF-8


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema, by the meaning of its words."""
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(_is(value, kind, schema) for kind in kinds)


def _is(value: Any, kind: str, schema: dict[str, Any]) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    plain = {
        "string": isinstance(value, str),
        "integer": number and isinstance(value, int),
        "number": number,
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    if kind == "array":
        most = schema.get("maxItems", 10**6)
        return (
            isinstance(value, list)
            and schema.get("minItems", 0) <= len(value) <= most
            and all(fits(one, schema["items"]) for one in value)
        )
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema.get("required", ())) <= set(value) <= set(known)
            and all(fits(one, known[name]) for name, one in value.items())
        )
    return plain[kind]


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema, properties in their order."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if "anyOf" in schema:
        return st.one_of(*(values(one) for one in schema["anyOf"]))
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of(*(_values(kind, schema) for kind in kinds))


def _values(kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "array":
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 5))
    if kind == "object":
        required = schema.get("required", ())
        parts = {
            name: values(one) if name in required else st.one_of(st.just(...), values(one))
            for name, one in schema["properties"].items()
        }
        return st.fixed_dictionaries(parts).map(lambda d: {name: d[name] for name in parts if d[name] is not ...})
    return {
        "string": st.text(max_size=8),
        "integer": st.integers(-(10**9), 10**9),
        "number": st.one_of(st.integers(-999, 999), st.floats(allow_nan=False, allow_infinity=False)),
        "boolean": st.booleans(),
        "null": st.none(),
    }[kind]


JSON = Constraint(Json(json.dumps(SCHEMA)))


@pytest.mark.parametrize("seed", range(60))
def test_what_the_masks_let_through_is_json_of_the_schema(seed: int) -> None:
    tokens = written(compiled(JSON), seed)
    if tokens[-1] == END:
        assert fits(json.loads(text_of(tokens[:-1])), SCHEMA)


def test_most_turns_of_the_test_above_come_to_their_end() -> None:
    assert sum(written(compiled(JSON), seed)[-1] == END for seed in range(60)) > 30


@drawn
@given(value=values(SCHEMA), ascii=st.booleans(), compact=st.booleans(), seed=st.integers(0, 9))
def test_every_value_of_the_schema_can_be_written_however_its_text_is_cut(
    value: Any, ascii: bool, compact: bool, seed: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, separators=(",", ":") if compact else None)
    assert accepts(compiled(JSON), [*spelled(text, seed), END])


@pytest.mark.parametrize(
    "text",
    [
        "{}",  # a required property is missing
        '{"key": "a"}',
        '{"deep": {"on": true}, "key": "a"}',  # not in their order
        '{"key": "a", "deep": {"on": true}, "more": 1}',
        '{"key": "a", "deep": {"on": 1}}',
        '{"key": "a", "count": 01, "deep": {"on": true}}',
        '{"key": "a\n", "deep": {"on": true}}',
        '{"key": "a", "deep": {"on": true},}',
        '{"key": "a", "deep": {"on": true}, "list": []}',
        '{"key": "a", "deep": {"on": true}, "list": [1, 2, 3, 4]}',
        '{"key": "a", "unit": "K", "deep": {"on": true}}',
        '{"key":  "a", "deep": {"on": true}}',  # two spaces
    ],
)
def test_what_is_no_value_of_the_schema_cannot_be_written(text: str) -> None:
    assert not accepts(compiled(JSON), [*spelled(text), END])


def test_bytes_that_are_not_utf8_cannot_be_written() -> None:
    string = compiled(Constraint(Json('{"type": "string"}')))
    for bad in (b"\xff", b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"):
        assert not accepts(string, [ord('"'), *bad, ord('"')])
    assert accepts(string, [ord('"'), *"aé€😀\\u12aF".encode(), ord('"'), END])


def test_a_mask_allows_exactly_the_tokens_whose_bytes_lead_somewhere() -> None:
    automaton = compiled(JSON)
    for state in range(automaton.states):
        mask = masked(automaton, state)
        if not len(mask):
            continue  # met in the middle of tokens only, or behind the last
        for token in range(MODEL):
            piece = PIECES[token] if token < len(PIECES) else b""
            leads = token in VOCABULARY.control or (0 < len(piece) <= 16)
            assert (token in mask) == (leads and walked(automaton, state, token) >= 0)


def walked(automaton: Automaton, state: int, token: int) -> int:
    symbols = [256 + sorted(VOCABULARY.control).index(token)] if token in VOCABULARY.control else list(PIECES[token])
    for symbol in symbols:
        if state >= 0:
            state = int(automaton.next_GA[state, symbol])
    return state


def test_one_of_some_texts_is_written_and_then_the_turn_ends() -> None:
    names = compiled(Constraint(Either(("look", "look_up", "read"))))
    said = {text_of(written(names, seed)) for seed in range(60)}
    assert said == {"look<end>", "look_up<end>", "read<end>"}
    assert masked(names, step(names, names.start, WORDS.index(b"look") + 256)).tolist() == [ord("_"), END]
    assert masked(names, names.start).tolist() == [ord("l"), ord("r"), WORDS.index(b"look") + 256]


def test_a_free_turn_is_held_to_the_form_after_its_trigger_until_the_form_is_written() -> None:
    call = (
        '{"name": "look", "arguments": ',
        Json('{"type": "object", "properties": {"n": {"type": "integer"}}}'),
        "}",
        END_CALL,
    )
    tools = compiled(Constraint(call, after=(CALL,)))
    everything = np.arange(MODEL).tolist()
    free = step(tools, tools.start, 257)
    assert free == tools.start
    assert masked(tools, free).tolist() == everything
    inside = step(tools, free, CALL)
    assert masked(tools, inside).tolist() == [ord("{"), WORDS.index(b'{"') + 256]
    for text in ('{"name": "look", "arguments": {"n": 12}}', '{"name": "look", "arguments": {}}'):
        assert accepts(tools, [65, OTHER, 319, 267, CALL, *spelled(text), END_CALL, 66, CALL, *spelled(text), END_CALL, END])
        assert not accepts(tools, [CALL, *spelled(text), END])
    assert not accepts(tools, [CALL, *spelled('{"name": "take'), END_CALL])


def test_equal_constraints_are_compiled_once_and_equal_states_are_one() -> None:
    again = Constraint(Json(json.dumps(SCHEMA)))
    assert compiled(again) is compiled(JSON)
    assert compiled(Constraint(Either(("ab", "cb")))).states == 4  # the two tails are one; the last is behind the stop token


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "string", "pattern": "a+"}, "schema: pattern of type string is not supported"),
        ({"type": "integer", "minimum": 3, "maximum": 4}, "schema: maximum, minimum of type integer is not supported"),
        ({"$ref": "#/x", "type": "object", "properties": {}}, r"schema: \$ref of type object is not supported"),
        ({"type": "object", "properties": {"a": {"oneOf": []}}}, "schema.properties.a has no type"),
        ({"type": "object"}, "an object without properties"),
        ({"type": "array"}, "an array without items"),
        ({"type": "date"}, "schema.type is 'date', known are object, array"),
        ({"type": "array", "items": {"type": "string", "maxLength": 3}}, "schema.items: maxLength of type string"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "schema.required names 'a'"),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "null"}}, "a schema as additionalProperties"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "minItems and maxItems must be rising"),
        ({"type": "array", "items": {"type": "null"}, "minItems": "3"}, "whole numbers, got '3' and None"),
        ({"type": "object", "properties": ["a"]}, "properties is an object and required a list of names"),
        ({"type": "object", "properties": {}, "required": "a"}, "properties is an object and required a list of names"),
        ({"enum": []}, "schema.enum must be a list of at least one"),
        ({"enum": [1], "items": {}}, "items beside enum is not supported"),
        (["string"], "must be a JSON object that describes a value"),
    ],
    ids=str,
)
def test_what_of_json_schema_is_not_known_is_refused_by_name(schema: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        compiled(Constraint(Json(json.dumps(schema))))


def test_forms_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token 65 stands in a constraint .* no control token"):
        compiled(Constraint(("a", 65)))
    with pytest.raises(ValueError, match="ends with a stop token"):
        COMPILER.compile(Constraint("a"), ())
    with pytest.raises(ValueError, match="has no forms"):
        compiled(Constraint(Either(())))
    with pytest.raises(ValueError, match=r"of 52 states does not fit: engine\.constraint_states is 10"):
        Compiler(VOCABULARY, MODEL, 10).compile(Constraint("x" * 50), (END,))
    many: dict[str, Any] = {"type": "null"}
    for _ in range(4):
        many = {"type": "array", "items": many, "minItems": 64}
    with pytest.raises(ValueError, match="a form of more than 100000 pieces"):
        compiled(Constraint(Json(json.dumps(many))))
    few = Vocabulary((b"a", b"b", b"<end>"), frozenset({2}))
    with pytest.raises(ValueError, match=r"no token with which this constraint goes on: symbols \[99\]"):
        Compiler(few, 3, 100).compile(Constraint("abc"), (2,))
    with pytest.raises(ValueError, match="the vocabulary has 3 ids, the model's only 2"):
        Compiler(few, 2, 100)
