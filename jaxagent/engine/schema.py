"""JSON values as pieces of a network, from a JSON schema.

Known are `type` (one or several of object, array, string, number, integer, boolean, null), `properties` and `required`,
`items`, `minItems` and `maxItems`, `enum`, `const` and `anyOf`; titles, descriptions, defaults and examples say nothing about
the form. Everything else is refused by name. Every text that is allowed is a value of the schema; not every value is allowed:
properties stand in the order in which they are declared, none that is not declared is written, and white space is at most
one space after a colon or a comma.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxagent.engine.automaton import Network

_SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly"}
_KEYS = {"object": {"properties", "required", "additionalProperties"}, "array": {"items", "minItems", "maxItems"}}
MAX_ITEMS = 64  # each is a copy of the item's states


def value(network: Network, start: int, schema: Any, path: str = "schema") -> int:
    """The state behind a JSON value of `schema`. Raises ValueError for a part of a schema that is not known."""
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be a JSON object that describes a value, got {schema!r}")
    keys = set(schema) - _SILENT
    for chosen in ("enum", "const", "anyOf"):
        if chosen in keys:
            _refuse(keys - {chosen, "type"}, path, f"beside {chosen}")
            return _chosen(network, start, schema, chosen, path)
    types = schema.get("type")
    if types is None:
        raise ValueError(f"{path} has no type: say what it is, one of {', '.join(_VALUES)}")
    several = types if isinstance(types, list) else [types]
    known = {"type"}.union(*(_KEYS.get(name, set()) for name in several if isinstance(name, str)))
    _refuse(keys - known, path, f"of type {types}")
    ends = []
    for name in several:
        if name not in _VALUES:
            raise ValueError(f"{path}.type is {name!r}, known are {', '.join(_VALUES)}")
        ends.append(_VALUES[name](network, start, schema, path))
    return ends[0] if len(ends) == 1 else network.join(ends)


def _refuse(keys: set[str], path: str, where: str) -> None:
    if keys:
        raise ValueError(f"{path}: {', '.join(sorted(keys))} {where} is not supported; leave it out or check it afterwards")


def _chosen(network: Network, start: int, schema: dict[str, Any], how: str, path: str) -> int:
    options = [schema[how]] if how == "const" else schema[how]
    if not isinstance(options, list) or not options:
        raise ValueError(f"{path}.{how} must be a list of at least one, got {options!r}")
    if how == "anyOf":
        return network.join(value(network, start, option, f"{path}.anyOf[{i}]") for i, option in enumerate(options))
    return network.join(network.text(start, _text(option)) for option in options)


def _text(option: Any) -> bytes:
    return json.dumps(option, ensure_ascii=False).encode()


def _after(network: Network, start: int, mark: str) -> int:
    """Behind a colon or a comma, and a space if it likes."""
    end = network.text(start, mark.encode())
    network.link(end, spaced := network.state())
    network.move(end, spaced, ord(" "))
    return spaced


def _object(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    if "properties" not in schema:
        raise ValueError(f"{path} is an object without properties: say which it has, {{}} for none")
    if not isinstance(schema.get("additionalProperties", False), bool):
        raise ValueError(f"{path}: a schema as additionalProperties is not supported; declare the properties")
    properties, names = schema["properties"], schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: properties is an object and required a list of names, got {properties!r} and {names!r}")
    required = set(names)
    if strange := required - set(properties):
        raise ValueError(f"{path}.required names {sorted(strange)[0]!r}, which is not among its properties")
    first: int | None = network.text(start, b"{")  # nothing was written yet; None once something must have been
    later: int | None = None  # something was
    for name, inner in properties.items():
        key = network.state()
        if first is not None:
            network.link(first, key)
        if later is not None:
            network.link(_after(network, later, ","), key)
        end = value(network, _after(network, network.text(key, _text(name)), ":"), inner, f"{path}.properties.{name}")
        if name in required:
            first, later = None, end
        else:
            later = end if later is None else network.join([later, end])
    ends = [network.text(state, b"}") for state in (first, later) if state is not None]
    return network.join(ends)


def _array(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    if "items" not in schema:
        raise ValueError(f"{path} is an array without items: say what they are")
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise ValueError(f"{path}: minItems and maxItems are whole numbers, got {least!r} and {most!r}")
    if not 0 <= least <= MAX_ITEMS or (most is not None and not least <= most <= MAX_ITEMS):
        raise ValueError(f"{path}: minItems and maxItems must be rising and at most {MAX_ITEMS}, got {least} and {most}")
    at = network.text(start, b"[")
    ends = [at] if least == 0 else []
    for count in range(1, (most if most is not None else max(least, 1)) + 1):
        entry = at if count == 1 else _after(network, at, ",")
        item = network.state()
        network.link(entry, item)
        at = value(network, item, schema["items"], f"{path}.items")
        if count >= least:
            ends.append(at)
        if most is None and count == max(least, 1):
            network.link(_after(network, at, ","), item)
    return network.text(network.join(ends), b"]")


def _string(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    """Any text in UTF-8, without bare control characters; surrogates may stand alone when escaped, as in JSON."""
    inside = network.text(start, b'"')
    for low, high in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)):
        network.move(inside, inside, low, high)
    escape = network.symbol(inside, ord("\\"))
    for letter in b'"\\/bfnrt':
        network.move(escape, inside, letter)
    digits = network.symbol(escape, ord("u"))
    for i in range(4):
        target = inside if i == 3 else network.state()
        for low, high in (b"09", b"AF", b"af"):
            network.move(digits, target, low, high)
        digits = target
    one, two, three = network.state(), network.state(), network.state()  # continuation bytes to come
    for source, target in ((one, inside), (two, one), (three, two)):
        network.move(source, target, 0x80, 0xBF)
    # Table 3-7 of the Unicode standard: which second bytes are well formed.
    network.move(inside, one, 0xC2, 0xDF)
    for lead, last, low, high, rest in (
        (0xE0, 0xE0, 0xA0, 0xBF, one),
        (0xE1, 0xEC, 0x80, 0xBF, one),
        (0xED, 0xED, 0x80, 0x9F, one),
        (0xEE, 0xEF, 0x80, 0xBF, one),
        (0xF0, 0xF0, 0x90, 0xBF, two),
        (0xF1, 0xF3, 0x80, 0xBF, two),
        (0xF4, 0xF4, 0x80, 0x8F, two),
    ):
        network.move(network.symbol(inside, lead, last), rest, low, high)
    return network.text(inside, b'"')


def _integer(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    unsigned = network.state()
    network.link(start, unsigned)
    network.move(start, unsigned, ord("-"))
    zero, more = network.symbol(unsigned, ord("0")), network.symbol(unsigned, ord("1"), ord("9"))
    network.move(more, more, ord("0"), ord("9"))
    return network.join([zero, more])


def _number(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    whole = _integer(network, start, schema, path)
    fraction = network.symbol(network.text(whole, b"."), ord("0"), ord("9"))
    network.move(fraction, fraction, ord("0"), ord("9"))
    mantissa = network.join([whole, fraction])
    sign = network.join([network.text(mantissa, b"e"), network.text(mantissa, b"E")])
    power = network.state()
    network.link(sign, power)
    network.move(sign, power, ord("+"))
    network.move(sign, power, ord("-"))
    exponent = network.symbol(power, ord("0"), ord("9"))
    network.move(exponent, exponent, ord("0"), ord("9"))
    return network.join([mantissa, exponent])


def _boolean(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    return network.join([network.text(start, b"true"), network.text(start, b"false")])


def _null(network: Network, start: int, schema: dict[str, Any], path: str) -> int:
    return network.text(start, b"null")


_VALUES: dict[str, Callable[[Network, int, dict[str, Any], str], int]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "number": _number,
    "integer": _integer,
    "boolean": _boolean,
    "null": _null,
}
