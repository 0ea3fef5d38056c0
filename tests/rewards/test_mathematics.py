"""Mathematical answers: equal in other dress, at once or by math-verify, and hostile ones do not hold anybody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest

from jaxagent.rewards.compose import Case, Scorer
from jaxagent.rewards.mathematics import Verifier, boxed, math_match, number_of


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_the_last_box_counts(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.50", Fraction(2469, 2)),
        ("$-3/4$", Fraction(-3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (".5", Fraction(1, 2)),
        ("1,2", None),
        ("3/0", None),
        (r"\frac{1}{0}", None),
        ("1e9999999", None),
        ("9" * 1000, None),
        ("x", None),
        ("", None),
    ],
)
def test_numbers_are_read_exactly(text: str, number: Fraction | None) -> None:
    assert number_of(text) == number


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    return math_match(timeout_s=20.0)


@pytest.mark.parametrize(
    ("answer", "right", "reward"),
    [
        (r"thus \boxed{0.5}", "1/2", 1.0),
        ("0.50", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{x^2 + 1}", "(x+1)^2", 0.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("", "4", 0.0),
        ("so many words " * 100, "x", 0.0),
        (r"\boxed{__import__('os').system('echo pwned > /tmp/pwned')}", "x", 0.0),
        (r"\boxed{4} \boxed{\unknown{}", "4", 0.0),
        (r"\boxed{200+200}", "400", 0.0),
        (r"\boxed{2^{2}}", "4", 0.0),
        (r"\boxed{3!}", "6", 0.0),
        (r"\boxed{x = 400}", "400", 1.0),
        (r"\boxed{4 \times 10^{2}}", "400", 1.0),
        (r"\boxed{(y+1)(y-1)}", "y^2-1", 0.0),  # the question says so
        (r"\boxed{y^2 - 1}", "y^2-1", 1.0),
    ],
)
def test_equal_answers_win_in_any_dress(answer: str, right: str, reward: float, scorer: Scorer) -> None:
    assert asyncio.run(scorer(Case({"question": "Expand (y+1) (y-1).", "answer": right}, answer)))[0] == reward


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    found = Verifier(timeout_s=20.0)
    yield found
    found.close()


def test_an_answer_that_never_ends_is_given_up_and_the_next_is_answered(verifier: Verifier) -> None:
    assert verifier.equal("x+x", "2x") is True
    verifier.timeout_s = 1.0
    began = time.monotonic()
    assert verifier.equal("9^{9^{9^{9}}}!" + "+(x+1)^{9999}" * 20, "2x") in (None, False)
    assert time.monotonic() - began < 10
    verifier.timeout_s = 20.0
    assert verifier.equal("x+x", "2x") is True
