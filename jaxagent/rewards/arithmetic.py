"""The value of an arithmetic expression in whole numbers, by a parser of its own: nothing that a policy wrote is ever executed.

    sum = product {("+" | "-") product}
    product = factor {("*" | "//" | "%") factor}
    factor = digits | "-" factor | "(" sum ")"

Division and remainder are Python's. There are no names, powers or fractions: a value takes as long as its text is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*(//|[-+*%()]|\d+)")
_DEPTH = 32  # of parentheses and signs
_CLAIM = re.compile(r"([-+*/%()\d\s]+)=\s*(-?\d+)")


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
    true = false = 0
    for expression, number in _CLAIM.findall(text):
        try:
            found = evaluate(expression)
        except ValueError:
            continue
        if found.operations:
            true += found.value == int(number)
            false += found.value != int(number)
    return true, false


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
