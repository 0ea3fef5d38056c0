"""The calculator: right where Python is right, bounded, and unable to run anything."""

from __future__ import annotations

import contextlib
import math

import pytest
from calling import called
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.toolbox.box import Toolbox
from jaxagent.toolbox.calculator import evaluate
from jaxagent.tools import ToolFailed


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ^ 2", "-4"),
        ("2 ^ -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", repr(1 / 3)),
        ("7 // 2 + 7 % 2", "4"),
        ("-7 // 2", "-4"),
        ("- -3", "3"),
        ("1_000 * 1.5e3", "1500000"),
        (".5 + 5.", "5.5"),
        ("sqrt(16) + sqrt(2)", repr(4 + math.sqrt(2))),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("round(2.675, 2)", "2.68"),
        ("factorial(5) / gcd(12, 18)", "20"),
        ("cos(0) + ln(e) + pi - pi", "2"),
        ("-1.05", "-1.05"),
        ("(1)", "1"),
    ],
)
def test_an_expression_has_its_value(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "division by zero"),
        ("1 // 0.0", "division by zero"),
        ("0 ^ -1", "division by zero"),
        ("9 ^ 9 ^ 9", "more than 4096 bits"),
        ("2 ^ 4000 * 2 ^ 4000", "more than 4096 bits"),
        ("factorial(100000)", "factorial of 0 to 400"),
        ("(" * 200 + "1", "nested deeper"),
        ("2 ^ " * 100 + "2", "nested deeper"),
        ("1" * 2000, "at most 1000 characters"),
        ("1 +", "ends too early"),
        ("", "ends too early"),
        ("1 2", "'2' was not expected"),
        ("(1 + 2", "closing bracket is missing"),
        ("sqrt(-1)", "error: "),
        ("exp(10000)", "error: "),
        ("(-8) ^ (1/3)", "fractional power of a negative number"),
        ("gcd(1.5, 2)", "whole number"),
        ("sqrt()", "was not expected"),
        ("sqrt(1, 2)", "error: "),
        ("__import__('os').system('id')", "'__import__' is not known"),
        ("().__class__", "was not expected"),
        ("open", "'open' is not known"),
        ("sqrt", "'sqrt' is not known"),
    ],
)
def test_what_has_none_is_an_error_that_can_be_read(expression: str, said: str) -> None:
    with pytest.raises(ToolFailed, match=r"^error: ") as told:
        evaluate(expression)
    assert said in str(told.value)


@drawn
@given(st.text(alphabet="0123456789+-*/%^(). e_sqrtpi,", max_size=40))
def test_no_text_makes_it_do_anything_but_answer_or_refuse(text: str) -> None:
    with contextlib.suppress(ToolFailed, OverflowError):  # a long whole number is no float
        assert math.isfinite(float(evaluate(text)))


@drawn
@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(-99, 99)), min_size=1, max_size=8))
def test_sums_of_whole_numbers_are_pythons(terms: list[tuple[str, int]]) -> None:
    expression = "0" + "".join(f" {sign} ({number})" for sign, number in terms)
    assert evaluate(expression) == str(eval(expression))  # noqa: S307  (made here)


def test_a_policy_calls_it_by_name() -> None:
    right, wrong = called(Toolbox("calculator"), ("calculate", {"expression": "6*7"}), ("calculate", {"expression": "6*"}))
    assert (right.outcome, right.result) == ("ok", "42")
    assert (wrong.outcome, wrong.result) == ("error", "error: the expression ends too early")
