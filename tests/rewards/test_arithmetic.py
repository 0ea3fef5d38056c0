"""Expressions: the parser agrees with Python where both know a text, and refuses the rest in words."""

from __future__ import annotations

import random

import pytest
from growing import growth

from jaxagent.rewards.arithmetic import claims, evaluate


@pytest.mark.parametrize(
    ("text", "value", "operations"),
    [
        ("7", 7, 0),
        ("3+4*2", 11, 2),
        ("(3+4)*2", 14, 2),
        ("10-4-3", 3, 2),
        ("7//2*2+7%2", 7, 4),
        ("-7//2", -4, 1),
        ("--3", 3, 0),
        (" 2 * (1 - -4) ", 10, 2),
    ],
)
def test_values_by_hand(text: str, value: int, operations: int) -> None:
    found = evaluate(text)
    assert (found.value, found.operations) == (value, operations)


def test_random_expressions_have_the_value_that_python_gives_them() -> None:
    rng = random.Random(0)

    def draw(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randrange(1, 30))
        kind = rng.random()
        if kind < 0.2:
            return f"({draw(depth - 1)})"
        if kind < 0.3:
            return f"-{draw(0)}"
        return f"{draw(depth - 1)} {rng.choice(('+', '-', '*', '//', '%'))} {draw(depth - 1)}"

    compared = 0
    for _ in range(300):
        text = draw(4)
        try:
            want = eval(text)  # noqa: S307  (of our own making)
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="division by zero"):
                evaluate(text)
            continue
        assert evaluate(text, 10**12).value == want
        compared += 1
    assert compared > 250


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "ends where a number"),
        ("3+", "ends where a number"),
        ("3 4", "'4' stands where the expression should end"),
        ("2**9", r"'\*' stands where a number"),
        ("(1+2", "not closed"),
        ("1)", r"'\)' stands where the expression"),
        ("4%0", "division by zero"),
        ("x+1", "'x' belongs to no expression"),
        ("__import__('os')", "'_' belongs to no expression"),
        ("1.5", r"'\.' belongs"),
        ("99999*99999", "beyond 10000"),
        ("9" * 10**6, "beyond 10000"),
        ("٣+1", "belongs to no expression"),
        ("(" * 10**5, "nested deeper"),
        ("-" * 10**5, "nested deeper"),
    ],
)
def test_what_is_no_expression_is_refused_and_never_executed(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        evaluate(text, 10**4)


def test_claims_are_counted_by_hand() -> None:
    assert claims("It is 47 because 66 - 19 = 47, and 40 + 7 = 47.") == (2, 0)
    assert claims("66 - 19 = 48") == (0, 1)
    assert claims("7 = 7 and x = 3 and 3 = ?") == (0, 0)
    assert claims("4 % 0 = 0, 2*3=6 and 2*3=7") == (1, 1)
    assert claims("2*3=6 2*4=8 and 2+3=5+1=6") == (3, 0)
    assert claims("1==1 and 1+1==2") == (0, 0)


def test_a_claim_of_more_digits_than_python_reads_is_false() -> None:
    assert claims("1+1=" + "9" * 5000) == (0, 1)


@pytest.mark.parametrize("piece", ["1+", "1+1=", " ", "=", "1"])
def test_claims_are_counted_in_linear_time(piece: str) -> None:
    assert growth(claims, piece, 25_000, 100_000) < 10
