"""Rewards by comparison: right answers in other dress win, and empty talk does not."""

from __future__ import annotations

import pytest
from drawn import drawn
from growing import growth
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.rewards.match import (
    CALIBRATION,
    brier,
    calibrated_match,
    exact_match,
    last_number,
    normalise,
    tagged_match,
)


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


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("I looked it up: <answer>The Eiffel Tower.</answer>", 1.0),
        ("<answer>Big Ben</answer> no, <answer>Eiffel tower</answer>", 1.0),
        ("<answer>Eiffel tower</answer> no, <answer>Big Ben</answer>", 0.0),
        ("<answer>\neiffel\ntower\n</answer>", 1.0),
        ("Eiffel tower", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>Eiffel tower", 0.0),
        ("<information>Eiffel tower</information>", 0.0),
    ],
)
def test_the_last_tagged_answer_counts_and_nothing_outside_of_tags(answer: str, reward: float) -> None:
    assert tagged_match(answer, "Eiffel Tower")[0] == reward


def test_one_tag_is_enough_because_the_prompt_is_not_scored() -> None:
    """Search-R1 wants two, one of them being the prompt's own example."""
    assert tagged_match("<answer>52</answer>", "52") == (1.0, "right answer")


@pytest.mark.parametrize(("q", "y", "wanted"), [(1.0, 1.0, 0.0), (0.0, 1.0, -1.0), (0.5, 0.0, -0.25), (0.8, 1.0, -0.04)])
def test_brier_by_hand(q: float, y: float, wanted: float) -> None:
    assert brier(q, y) == pytest.approx(wanted)


def test_the_confidence_that_pays_best_is_the_true_chance() -> None:
    for p in (0.0, 0.3, 0.75, 1.0):
        expected = {q / 20: p * brier(q / 20, 1.0) + (1 - p) * brier(q / 20, 0.0) for q in range(21)}
        assert max(expected, key=lambda q: expected[q]) == pytest.approx(p, abs=0.05)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("52, confidence: 1", {"outcome": 1.0, "calibration": 0.0}),
        ("52 Confidence: 0.5", {"outcome": 1.0, "calibration": -0.25 * CALIBRATION}),
        ("25 confidence: 0.9", {"outcome": 0.0, "calibration": -0.81 * CALIBRATION}),
        ("25 confidence: 0", {"outcome": 0.0, "calibration": 0.0}),
        ("52", {"outcome": 1.0, "calibration": -CALIBRATION}),
        ("52 confidence: 7", {"outcome": 1.0, "calibration": -CALIBRATION}),
        ("", {"outcome": 0.0, "calibration": -CALIBRATION}),
    ],
)
def test_calibration_is_a_part_of_its_own_beside_the_outcome(answer: str, parts: dict[str, float]) -> None:
    assert calibrated_match(answer, "52")[0] == pytest.approx(parts)


def test_no_confidence_makes_a_wrong_answer_worth_a_right_one() -> None:
    said = [f"{word} confidence: {q / 10}" for word in ("52", "25") for q in range(11)] + ["52", "25"]
    worth = {text: sum(calibrated_match(text, "52")[0].values()) for text in said}
    right = [value for text, value in worth.items() if text.startswith("52")]
    assert min(right) > max(value for text, value in worth.items() if text.startswith("25"))


@pytest.mark.parametrize("piece", ["<answer>", "<answer></answer>", "1", "confidence: 1", "confidence:", " "])
def test_hostile_answers_are_compared_in_linear_time(piece: str) -> None:
    assert growth(lambda text: tagged_match(text, "x"), piece, 25_000, 100_000) < 10
    assert growth(lambda text: calibrated_match(f"confidence:{text}!", "x"), piece, 25_000, 100_000) < 10


def test_the_last_confidence_and_the_last_whole_tag_count() -> None:
    assert calibrated_match("confidence: 1 no, Ulm CONFIDENCE:\t.5 \n", "confidence 1 no ulm")[0]["calibration"] == -0.05
    assert calibrated_match("Ulm confidence: 1.", "Ulm")[0]["calibration"] == -CALIBRATION
    assert tagged_match("<answer>a</answer> <answer>b</answer> <answer>c", "b")[0] == 1.0
