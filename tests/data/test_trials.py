"""Runs of tests: a bug meets the tests that reach it and no other's bytecode, and what does not end is ended."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import pytest
from package_with_tests import FILES

from jaxagent.data.packages import Package
from jaxagent.data.trials import Run, Runner, Seen, touching

WALK, TEST = "src/pathlen/walk.py", "tests/test_walk.py"


class Elsewhere(BaseManager):
    """A process without JAX, which is none to fork in."""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Any]:
    with Elsewhere(ctx=multiprocessing.get_context("spawn")) as manager:
        yield manager


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials") / "tree"


@pytest.fixture(scope="module")
def runner(elsewhere: Any, folder: Path) -> Any:
    package = Package("pathlen", FILES, (TEST,), ("src/pathlen/__init__.py", WALK))
    made = elsewhere.Runner(package, folder, timeout_s=60.0)
    made.warm()
    return made


def children_s() -> float:
    """Seconds of the processor that ended children took."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


Elsewhere.register("Runner", Runner)
Elsewhere.register("children_s", children_s)


def named(*names: str) -> set[str]:
    return {f"{TEST}::test_{name}" for name in names}


def test_a_change_is_seen_though_bytecode_of_the_same_second_and_size_was_there(runner: Any, folder: Path) -> None:
    every = named("forth", "back", "none", "longest", "constant")
    for _ in range(2):
        told = runner.outcomes()
        assert told and told.passed & every == every
        runner.write(WALK, FILES[WALK].replace("b - a", "a - b"))
        told = runner.outcomes()
        assert told and told.passed & every == every - named("forth", "longest")
        runner.restore(WALK)
    assert list((folder / "src" / "pathlen" / "__pycache__").glob("walk.*"))


def test_only_the_tests_that_are_asked_for_run(runner: Any) -> None:
    told = runner.outcomes(Run(only=frozenset(named("back", "constant"))))
    assert told and told.passed == named("back", "constant") and not told.failed


def test_lines_know_the_tests_that_ran_them(runner: Any) -> None:
    lines = runner.lines()
    stable = named("forth", "back", "none", "longest", "constant")
    seen = Seen(FILES[WALK], lines[WALK])
    number = {text.strip(): n for n, text in enumerate(FILES[WALK].splitlines(), 1)}
    assert touching(seen.by(number["total += a - b"]), stable) == named("back", "longest")
    assert touching(seen.by(number["best = path"]), stable) == named("longest")
    assert touching(seen.by(number["def length(points):"]), stable) == stable  # it ran by import


def test_a_line_belongs_to_its_statement() -> None:
    source = (
        "def f(a):\n    x = g(\n        a,\n        1,\n    )\n    if (\n        a\n    ):\n        return x\n    return 2\n"
    )
    seen = Seen(source, {2: {"one"}, 6: {"two"}, 9: {"three"}, 1: {""}})
    assert [seen.by(line) for line in (3, 4, 7, 9, 10)] == [{"one"}, {"one"}, {"two"}, {"three"}, set()]
    assert touching(set(), {"a"}) == frozenset() and touching({"a", "flaky"}, {"a", "b"}) == {"a"}


def test_a_bug_that_loops_costs_seconds_of_the_processor_and_not_the_whole_limit(runner: Any, elsewhere: Any) -> None:
    told = runner.outcomes()
    assert told and told.passed
    runner.write(WALK, FILES[WALK].replace("best = None", "while True: pass"))
    before = elsewhere.children_s()._getvalue()
    told = runner.outcomes()
    runner.restore(WALK)
    assert told is not None and told.passed == set()
    assert 1 < elsewhere.children_s()._getvalue() - before < 30  # not the 60 s of the limit
