"""The value of an arithmetic expression in whole numbers, by a parser of its own: nothing that a policy wrote is ever executed.

    sum = product {("+" | "-") product}
    product = factor {("*" | "//" | "%") factor}
    factor = digits | "-" factor | "(" sum ")"

Division and remainder are Python's. There are no names, powers or fractions: a value takes as long as its text is. The
calculator of toolbox/ has a larger language on purpose, with a parser of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(r"\s*(//|[-+*%()]|\d+)")
_DEPTH = 32  # of parentheses and signs
_DIGITS = 100  # of a number that is claimed; Python refuses to read one of thousands
_RUN = re.compile(r"[-+*/%()\d\s]*")
_CLAIMED = re.compile(r"\s*(-?\d+)")


@dataclass(frozen=True)
class Value:
    """What an expression comes to, and in how many operations."""

    value: int
    operations: int


def evaluate(text: str, limit: int = 10**9) -> Value:
    """The value of an expression. Raises ValueError that says why it has none.

    Args:
        limit: no number on the way may be further from 0.
    """
    reader = _Reader(text, limit)
    value = reader.sum(0)
    if reader.at < len(reader.tokens):
        raise ValueError(f"{reader.tokens[reader.at]!r} stands where the expression should end")
    return Value(value, reader.operations)


def claims(text: str) -> tuple[int, int]:
    """How many statements `expression = number` of a text are true, and how many are not; a bare `7 = 7` claims nothing."""
    true = false = taken = 0
    for left, right in pairwise(text.split("=")):  # in time that is linear, whatever the policy wrote
        expression = _run_at_the_end(left[taken:])
        number = _CLAIMED.match(right) if expression else None
        taken = number.end() if number else 0  # a number that was claimed begins no further expression
        if not number:
            continue
        try:
            found = evaluate(expression)
        except ValueError:
            continue
        if found.operations:
            is_so = len(number[1]) <= _DIGITS and found.value == int(number[1])
            true += is_so
            false += not is_so
    return true, false


def _run_at_the_end(text: str) -> str:
    backwards = _RUN.match(text[::-1])
    return backwards[0][::-1] if backwards else ""


class _Reader:
    def __init__(self, text: str, limit: int):
        self.tokens: list[str] = []
        self.at, self.limit, self.operations = 0, limit, 0
        place, text = 0, text.strip()
        while place < len(text):
            found = _TOKEN.match(text, place)
            if not found or not found[1].isascii():
                raise ValueError(f"{text[place:].strip()[0]!r} belongs to no expression")
            self.tokens.append(found[1])
            place = found.end()

    def next(self, *wanted: str) -> str:
        """The next token if it is one of these, or else nothing."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def within(self, value: int) -> int:
        if abs(value) > self.limit:
            raise ValueError(f"a number beyond {self.limit}")
        return value

    def sum(self, depth: int) -> int:
        value = self.product(depth)
        while sign := self.next("+", "-"):
            self.operations += 1
            other = self.product(depth)
            value = self.within(value + other if sign == "+" else value - other)
        return value

    def product(self, depth: int) -> int:
        value = self.factor(depth)
        while sign := self.next("*", "//", "%"):
            self.operations += 1
            other = self.factor(depth)
            if sign != "*" and not other:
                raise ValueError("division by zero")
            value = self.within(value * other if sign == "*" else value // other if sign == "//" else value % other)
        return value

    def factor(self, depth: int) -> int:
        if depth > _DEPTH:
            raise ValueError(f"nested deeper than {_DEPTH}")
        if self.next("-"):
            return -self.factor(depth + 1)
        if self.next("("):
            value = self.sum(depth + 1)
            if not self.next(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        if self.at == len(self.tokens):
            raise ValueError("it ends where a number should stand")
        token = self.tokens[self.at]
        if not token.isdigit():
            raise ValueError(f"{token!r} stands where a number should stand")
        if len(token) > len(str(self.limit)):
            raise ValueError(f"a number beyond {self.limit}")
        self.at += 1
        return self.within(int(token))
