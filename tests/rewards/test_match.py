"""Rewards by comparison: right answers in other dress win, and empty talk does not."""

from __future__ import annotations

import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.rewards.match import exact_match, last_number, normalise


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("  The  Eiffel Tower. ", "eiffel tower"),
        ("an apple, a day", "apple day"),
        ("Theatre another banana", "theatre another banana"),
        ("U.S.A.", "usa"),
        ("a\tb\nc", "b c"),
        ("A", "a"),
        ("The", "the"),
        ("+", "+"),
        ("  ", ""),
    ],
)
def test_normalising_drops_case_punctuation_articles_and_spaces_but_never_everything(text: str, bare: str) -> None:
    assert normalise(text) == bare


@pytest.mark.parametrize(
    ("answer", "right", "reward"),
    [
        ("the Eiffel tower!", "Eiffel Tower", 1.0),
        ("52", "52", 1.0),
        ("52.", "52", 1.0),
        ("Eiffel", "Eiffel Tower", 0.0),
        ("", "Eiffel Tower", 0.0),
        ("", "A", 0.0),
        ("the", "A", 0.0),
        ("a", "A", 1.0),
        ("", "+", 0.0),
        ("-", "+", 0.0),
    ],
)
def test_an_exact_match_pays_one_and_says_why(answer: str, right: str, reward: float) -> None:
    why = "right answer" if reward else f"answered {answer!r}, right was {right!r}"
    assert exact_match(answer, right) == (reward, why)


@drawn
@given(st.text())
def test_every_text_is_its_own_right_answer_and_silence_is_right_only_where_silence_is_wanted(text: str) -> None:
    assert exact_match(text, text)[0] == 1.0
    assert exact_match("", text)[0] == float(not text.strip())


@pytest.mark.parametrize(
    ("answer", "right", "reward", "why"),
    [
        ("3 + 4 = 7", "7", 1.0, "right number"),
        ("The total is $1,234.50.", "1234.5", 1.0, "right number"),
        ("it is -5", "-5", 1.0, "right number"),
        ("12,000", "12,000", 1.0, "right number"),
        ("7, or rather 8", "7", 0.0, "last number was 8, right was 7"),
        ("seven", "7", 0.0, "no number in 'seven', right was '7'"),
        ("", "0", 0.0, "no number in '', right was '0'"),
        (". , -", "0", 0.0, "no number in '. , -', right was '0'"),
    ],
)
def test_the_last_number_of_an_answer_counts(answer: str, right: str, reward: float, why: str) -> None:
    assert last_number(answer, right) == (reward, why)


@drawn
@given(st.text(alphabet="0123456789.,-e ٣½x"))
def test_no_answer_makes_the_number_reward_fail(answer: str) -> None:
    assert last_number(answer, "7")[0] in (0.0, 1.0)
