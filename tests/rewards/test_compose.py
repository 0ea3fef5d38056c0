"""Several scorers as one reward, and scorers by name."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from jaxagent.rewards.compose import Case, Score, Scorer, composed
from jaxagent.rewards.match import f1_match
from jaxagent.rewards.scorers import fault_of_task, scorer_of
from jaxagent.types import ToolCall


def giving(value: Any) -> Scorer:
    async def score(case: Case) -> Score:
        return value, f"gave {value}"

    return score


VALUES = {"low": 0.25, "high": 0.5, "minus": -1.0, "parts": {"outcome": 1.0, "form": 0.1}, "nan": math.nan, "inf": math.inf}


def value_of(expression: str) -> Score:
    return asyncio.run(composed(expression, lambda name: giving(VALUES[name]))(Case({}, "")))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("high", 0.5),
        ("min(low, high)", 0.25),
        ("product(low,high)", 0.125),
        ("product(minus, low)", 0.0),
        ("min(minus, low)", -1.0),
        ("sum(0.8*high, 0.2*low)", 0.45),
        ("min(high, parts)", 0.5),
        ("sum(0.5*parts, 0.5*minus)", 0.0),
    ],
)
def test_a_composition_is_the_least_the_product_or_the_sum(expression: str, value: float) -> None:
    found, why = value_of(expression)
    assert found == pytest.approx(value)
    assert why
    assert value_of("parts")[0] == VALUES["parts"]


@pytest.mark.parametrize("fault", [ValueError, RecursionError, OverflowError])
def test_an_answer_that_a_scorer_cannot_read_is_worth_nothing(fault: type[Exception]) -> None:
    async def score(case: Case) -> Score:
        raise fault("too deep")

    for expression in ("one", "min(one, other)"):
        value, why = asyncio.run(composed(expression, lambda name: score)(Case({}, "")))
        assert value == 0.0 and f"{fault.__name__}: too deep" in why


def test_the_reason_names_every_scorer() -> None:
    assert value_of("min(low, high)")[1] == "low 0.25: gave 0.25; high 0.5: gave 0.5"


@pytest.mark.parametrize("expression", ["nan", "min(low, nan)", "sum(0.5*inf, 0.5*low)", "product(inf, low)"])
def test_a_number_that_is_none_is_refused(expression: str) -> None:
    with pytest.raises(ArithmeticError, match="must be finite"):
        value_of(expression)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("sum(0.8*exact_match, 0.4*f1_match)", "add up to 1"),
        ("min(0.8*exact_match, f1_match)", "a name is wanted"),
        ("min(exact_match, exact_match)", "stands there twice"),
        ("max(exact_match, f1_match)", "must be made of"),
        ("min(exact_match, luck)", "got 'luck'"),
        ("min(exact_match, tool_calls)", "stands alone"),
        ("exact_match,f1_match", "must be made of"),
        ("judge", "missing a required argument|missing 2 required"),
    ],
)
def test_an_expression_that_means_nothing_is_told(expression: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scorer_of(expression, {})


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("the Eiffel Tower", "Eiffel tower", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),
        ("big old tower", "tower", 0.5),
        ("yes it is", "yes", 0.0),
        ("yes", "yes", 1.0),
        ("", "yes", 0.0),
        ("", "tower", 0.0),
        ("tower tower tower", "tower", 0.5),
    ],
)
def test_f1_counts_common_words(answer: str, right: str, score: float) -> None:
    assert f1_match(answer, right)[0] == pytest.approx(score)


def test_of_several_right_answers_the_best_counts() -> None:
    scorer = scorer_of("exact_match", {})
    assert asyncio.run(scorer(Case({"answer": ["NYC", "New York"]}, "new york")))[0] == 1.0
    assert asyncio.run(scorer(Case({"answer": ["NYC", "New York"]}, "york")))[0] == 0.0


@pytest.mark.parametrize(
    ("calls", "error", "parts"),
    [
        ([ToolCall("f", {"x": 1, "y": 2})], "", {"outcome": 1.0, "correctness": 0.3, "format": 0.1}),
        ([ToolCall("f", {"x": 1, "z": 2})], "", {"outcome": 0.0, "correctness": 0.05, "format": 0.1}),  # 0.5 of 3
        ([], "", {"outcome": 0.0, "correctness": -0.3, "format": 0.1}),
        ([], "unreadable", {"outcome": 0.0, "correctness": -0.3, "format": 0.0}),
    ],
)
def test_calls_are_scored_by_outcome_correctness_and_format(calls: Any, error: str, parts: dict[str, float]) -> None:
    task = {"answer": "", "calls": [{"name": "f", "arguments": {"x": 1, "y": 2}}]}
    score, _ = asyncio.run(scorer_of("tool_calls", {})(Case(task, "", calls, error)))
    assert score == pytest.approx(parts)


@pytest.mark.parametrize(
    ("expression", "task", "said"),
    [
        ("last_number", {"answer": "seven"}, "needs numbers"),
        ("last_number", {"answer": ["7", "x"]}, "needs numbers"),
        ("min(exact_match, code_tests)", {"answer": ""}, "a list `tests`"),
        ("rubric", {"answer": ""}, "a list `rubric`"),
        ("rubric", {"rubric": [{"criterion": "x", "weight": -1}]}, "positive weight"),
        ("tool_calls", {"calls": [{"arguments": {}}]}, "a list `calls`"),
        ("exact_match", {"answer": "x"}, ""),
    ],
)
def test_a_task_that_cannot_be_scored_is_told(expression: str, task: Any, said: str) -> None:
    fault = fault_of_task(expression, task)
    assert said in fault and bool(said) == bool(fault)
