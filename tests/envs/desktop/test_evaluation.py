"""OSWorld's metrics that are known here, by hand; and which of its tasks are refused, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from jaxagent.envs.desktop.evaluation import METRICS, fault_of

RULE = {"type": "rule", "rules": {"expected": "x"}}
SAYS = {"type": "vm_command_line", "command": ["cat", "f"]}


@pytest.mark.parametrize(
    ("metric", "got", "wanted", "options", "score"),
    [
        ("exact_match", "a\n", {"expected": "a\n"}, {}, 1.0),
        ("exact_match", "a", {"expected": "a\n"}, {}, 0.0),
        ("exact_match", None, {"expected": "a"}, {}, 0.0),
        ("literal_match", "Ab", "aB", {"ignore_case": True}, 1.0),
        ("literal_match", "Ab", "aB", {}, 0.0),
        ("literal_match", 3, "3", {}, 1.0),
        ("literal_match", ["a", "b"], ["A", "b"], {"type": "list", "ignore_case": True}, 1.0),
        ("literal_match", ["a", "b"], ["b", "a"], {"type": "list"}, 0.0),
        ("literal_match", "ab", ["a", "b"], {"type": "list"}, 0.0),
        ("check_include_exclude", "a b c", {"include": ["a", "c"], "exclude": ["d"]}, {}, 1.0),
        ("check_include_exclude", "a b c", {"include": ["a", "d"]}, {}, 0.0),
        ("check_include_exclude", "a b c", {"include": ["a"], "exclude": ["c"]}, {}, 0.0),
        ("check_include_exclude", None, {"exclude": ["x"]}, {}, 0.0),
        ("is_in_list", ["a", "b"], {"expected": "b"}, {}, 1.0),
        ("is_in_list", ["a", "b"], {"expected": "c"}, {}, 0.0),
        ("is_in_list", None, {"expected": "c"}, {}, 0.0),
        ("compare_text_file", b"a\r\nb", b"a\nb", {}, 1.0),
        ("compare_text_file", b"a  b\n", b"a\n\tb", {}, 0.0),
        ("compare_text_file", b"a  b\n", b"a\n\tb", {"ignore_blanks": True}, 1.0),
        ("compare_text_file", b"Ab", b"aB", {"ignore_case": True}, 1.0),
        ("compare_text_file", None, b"", {}, 0.0),
    ],
)
def test_a_metric_by_hand(metric: str, got: Any, wanted: Any, options: dict[str, Any], score: float) -> None:
    assert METRICS[metric](got, wanted, **options) == score


def task(**evaluator: Any) -> dict[str, Any]:
    return {"id": "1", "instruction": "do", "evaluator": {"func": "exact_match", "result": SAYS, "expected": RULE, **evaluator}}


def test_tasks_whose_rules_are_known_are_played() -> None:
    assert fault_of(task()) == ""
    assert fault_of(task(func="infeasible", result=None, expected=None)) == ""
    several = task(func=["exact_match", "exact_match"], result=[SAYS, SAYS], expected=[RULE, RULE], conj="or")
    assert fault_of(several) == ""


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ({**task(), "instruction": ""}, "it has no instruction"),
        ({**task(), "config": [{"type": "chrome_open_tabs"}]}, "its setup 'chrome_open_tabs' is not known"),
        (task(postconfig=[{"type": "login"}]), "its setup 'login' is not known"),
        (task(func="compare_pptx_files"), "its metric 'compare_pptx_files' is not known"),
        (task(result={"type": "bookmarks"}), "its getter 'bookmarks' is not known"),
        (task(result=None), "its getter None is not known"),
        (task(result={"type": "vm_file", "multi": True}), "wants several files"),
        (task(func=["exact_match"], result=[SAYS, SAYS], expected=[RULE]), "are not as many"),
    ],
)
def test_a_task_that_cannot_be_scored_here_is_refused_by_what_it_wants(refused: dict[str, Any], why: str) -> None:
    assert why in fault_of(refused)
