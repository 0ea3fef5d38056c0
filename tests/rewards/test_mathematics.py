"""Mathematical answers: equal in other dress, at once or by math-verify, and hostile ones do not hold anybody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from jaxagent.rewards.compose import Case, Scorer
from jaxagent.rewards.mathematics import Verifier, boxed, form_of, math_match, number_of


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
        ("1.5/2", None),
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
        (r"\boxed{400 \text{ cm}}", "400", 1.0),
        (r"\boxed{1\frac{1}{2}}", "3/2", 1.0),
        (r"\boxed{1.5/2}", "3/4", 0.0),
        (r"\boxed{2 \cdot a}", "2a", 1.0),
        (r"\boxed{(y+1)(y-1)}", "y^2-1", 0.0),  # the question says so
        (r"\boxed{y^2 - 1}", "y^2-1", 1.0),
    ],
)
def test_equal_answers_win_in_any_dress(answer: str, right: str, reward: float, scorer: Scorer) -> None:
    assert asyncio.run(scorer(Case({"question": "Expand (y+1) (y-1).", "answer": right}, answer)))[0] == reward


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("What is 600/3?", "600/3", "200"),
        ("Simplify 6/8.", "6/8", "3/4"),
        ("Write 3/4 as a decimal.", "3/4", "0.75"),
        ("Write 0.75 as a fraction.", "0.75", "3/4"),
        ("How many pairs of five?", r"\binom{5}{2}", "10"),
        ("What divides both?", r"\gcd(24,36)", "12"),
        ("What is the root of 16?", r"\sqrt{16}", "4"),
        ("Half of a half of 8?", r"\frac{\frac{8}{2}}{2}", "2"),
        ("What is 20 times 20?", "20 20", "400"),
        ("What is 20 times 20?", r"20\,20", "400"),
        ("What is 8 by 2?", "8/2", "4"),
    ],
)
def test_a_number_that_is_not_worked_out_is_no_answer(question: str, answer: str, right: str, scorer: Scorer) -> None:
    score = asyncio.run(scorer(Case({"question": question, "answer": right}, rf"\boxed{{{answer}}}")))
    assert score[0] == 0.0


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [("Which is larger, 1/2 or 3/4?", "3/4", r"\frac{3}{4}"), ("Of 5 apples none is eaten. How many are left?", "5.0", "5")],
)
def test_a_number_that_the_question_says_may_be_the_answer(question: str, answer: str, right: str, scorer: Scorer) -> None:
    assert asyncio.run(scorer(Case({"question": question, "answer": right}, rf"\boxed{{{answer}}}")))[0] == 1.0


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("1,234.5", "plain"),
        (r"x = \$-3.", "plain"),
        (r"45^{\circ} \text{ C}", "plain"),
        (r"4 \cdot 10^{-2}", "scientific"),
        (r"-\dfrac{3}{4}", "fraction"),
        (r"\frac43", "fraction"),
        ("4/1", ""),
        ("6/8", ""),
        ("3!", ""),
        (r"4\text{2}", ""),
        ("", ""),
    ],
)
def test_the_form_of_a_number(text: str, form: str) -> None:
    assert form_of(text) == form


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


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> Verifier:
    """A verifier whose process runs `lines` for every line that it is told."""
    program = f"import json, sys\nprint(json.dumps({{'ready': True}}), flush=True)\nfor line in sys.stdin:\n    {lines}\n"
    (tmp_path / "talk.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jaxagent.rewards.mathematics.__name__", "talk")
    return Verifier(timeout_s=20.0)


def test_a_line_that_is_no_verdict_ends_the_process_so_that_no_later_answer_is_off_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stub(tmp_path, monkeypatch, "print('hello\\n' + json.dumps({'equal': 'right' in line}), flush=True)")
    assert found.equal("a", "b") is None
    assert found._process is None
    found.close()


def test_a_process_that_died_between_two_questions_gets_a_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stub(tmp_path, monkeypatch, "print(json.dumps({'equal': True}), flush=True)")
    assert found.equal("a", "b") is True
    dead = found._process
    assert dead
    monkeypatch.setattr(dead, "poll", lambda: None)  # as if it died after the look
    dead.kill()
    dead.wait()
    assert found.equal("a", "b") is True
    assert found._process is not dead
    found.close()
