"""A calculator: an expression evaluator of its own, since Python's would run whatever it is given.

    sum     = product (("+" | "-") product)*
    product = sign (("*" | "/" | "//" | "%") sign)*
    sign    = ("+" | "-") sign | power
    power   = atom (("**" | "^") sign)?
    atom    = number | constant | function "(" sum ("," sum)* ")" | "(" sum ")"

Numbers are exact fractions until a function has no exact value. Length, depth and size are bounded. rewards/arithmetic.py
reads a smaller language on purpose: whole numbers, and what a reward may count as an operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jaxagent.toolbox.kit import Kit, Task, Workplace
from jaxagent.tools import Tool, ToolFailed, tool

Number = Fraction | float
MAX_CHARS, MAX_DEPTH, MAX_BITS = 1000, 50, 4096
_TOKEN = re.compile(
    r"\s*(?:(\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+(?:[eE][+-]?\d{1,3})?)|([A-Za-z_]\w*)|(\*\*|//|.))", re.S
)
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}


def _whole(x: Number) -> int:
    if x != int(x):
        raise ToolFailed(f"error: a whole number is wanted, got {spoken(x)}")
    return int(x)


def _factorial(x: Number) -> Number:
    n = _whole(x)
    if not 0 <= n <= 400:
        raise ToolFailed(f"error: factorial of 0 to 400, got {n}")
    return Fraction(math.factorial(n))


def _sqrt(x: Number) -> Number:
    if isinstance(x, Fraction) and x >= 0:
        roots = math.isqrt(x.numerator), math.isqrt(x.denominator)
        if roots[0] ** 2 == x.numerator and roots[1] ** 2 == x.denominator:
            return Fraction(*roots)
    return math.sqrt(x)


def _round(x: Number, digits: Number = Fraction(0)) -> Number:
    n = _whole(digits)
    if not -20 <= n <= 20:
        raise ToolFailed(f"error: -20 to 20 digits, got {n}")
    return Fraction(round(Fraction(x), n))


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": _sqrt,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "factorial": _factorial,
    "gcd": lambda *xs: Fraction(math.gcd(*map(_whole, xs))),
    "lcm": lambda *xs: Fraction(math.lcm(*map(_whole, xs))),
    "exp": math.exp,
    "ln": math.log,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
}


class _Reader:
    """Reads one expression from left to right and computes as it goes."""

    def __init__(self, text: str):
        if len(text) > MAX_CHARS:
            raise ToolFailed(f"error: at most {MAX_CHARS} characters, got {len(text)}")
        self.tokens = [found.groups() for found in _TOKEN.finditer(text.strip())]
        self.at = self.depth = 0

    def next_is(self, *signs: str) -> str:
        """The sign that comes next, taken, if it is one of these."""
        if self.at < len(self.tokens) and self.tokens[self.at][2] in signs:
            self.at += 1
            return self.tokens[self.at - 1][2]
        return ""

    def whole(self) -> Number:
        value = self.sum()
        if self.at < len(self.tokens):
            raise ToolFailed(f"error: {''.join(filter(None, self.tokens[self.at]))!r} was not expected")
        return value

    def sum(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolFailed(f"error: nested deeper than {MAX_DEPTH}")
        value = self.product()
        while sign := self.next_is("+", "-"):
            other = self.product()
            value = bounded(value + other if sign == "+" else value - other)
        self.depth -= 1
        return value

    def product(self) -> Number:
        value = self.sign()
        while sign := self.next_is("*", "/", "//", "%"):
            other = self.sign()
            if sign == "*":
                value = bounded(value * other)
            elif not other:
                raise ToolFailed("error: division by zero")
            else:
                value = bounded(value / other if sign == "/" else Fraction(value // other) if sign == "//" else value % other)
        return value

    def sign(self) -> Number:
        negative = False
        while sign := self.next_is("+", "-"):
            negative ^= sign == "-"
        value = self.power()
        return -value if negative else value

    def power(self) -> Number:
        base = self.atom()
        if not self.next_is("**", "^"):
            return base
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolFailed(f"error: nested deeper than {MAX_DEPTH}")
        exponent = self.sign()
        self.depth -= 1
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
            if not base and exponent < 0:
                raise ToolFailed("error: division by zero")
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if bits * abs(exponent) > MAX_BITS and abs(base) != 1:
                raise ToolFailed(f"error: a number of more than {MAX_BITS} bits")
            return base ** int(exponent)
        if base < 0:
            raise ToolFailed("error: a fractional power of a negative number")
        return float(base) ** float(exponent)

    def atom(self) -> Number:
        if self.at == len(self.tokens):
            raise ToolFailed("error: the expression ends too early")
        number, name, sign = self.tokens[self.at]
        self.at += 1
        if number:
            return bounded(Fraction(number.replace("_", "").rstrip(".") if "e" not in number.lower() else number))
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _FUNCTIONS and self.next_is("("):
            arguments = [self.sum()]
            while self.next_is(","):
                arguments.append(self.sum())
            return self._close(bounded(_FUNCTIONS[name](*arguments)))
        if name:
            raise ToolFailed(f"error: {name!r} is not known; there are {', '.join((*_CONSTANTS, *_FUNCTIONS))}")
        if sign == "(":
            return self._close(self.sum())
        raise ToolFailed(f"error: {sign!r} was not expected")

    def _close(self, value: Number) -> Number:
        if not self.next_is(")"):
            raise ToolFailed("error: a closing bracket is missing")
        return value


def bounded(value: Any) -> Number:
    """The number. Raises ToolFailed for one that is too long or no number."""
    if isinstance(value, int):
        value = Fraction(value)
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise ToolFailed(f"error: a number of more than {MAX_BITS} bits")
    elif not math.isfinite(value):
        raise ToolFailed(f"error: the result is {value}")
    return value


def spoken(value: Number) -> str:
    """A number in digits: exact where it ends, else with the 17 that a double has."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
    if value.denominator == 1:
        return str(value.numerator)
    rest, places = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        places = max(places, count)
    if rest != 1 or places > 30:
        return repr(float(value))
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def evaluate(expression: str) -> str:
    """The value of an expression. Raises ToolFailed for what is none, or too large."""
    try:
        return spoken(_Reader(expression).whole())
    except (ValueError, OverflowError, TypeError, ZeroDivisionError) as error:
        raise ToolFailed(f"error: {error}") from None


def calculator() -> Kit:
    """The kit `calculator`."""

    async def calculate(expression: str) -> str:
        """Computes an arithmetic expression, such as (3 + 4) * sqrt(2) or 2^10 / 3."""
        return evaluate(expression)

    def tools(place: Workplace, task: Task) -> list[Tool]:
        return [tool(calculate, pure=True)]

    return Kit(tools)
