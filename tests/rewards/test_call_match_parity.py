"""The rule for function calls beside the leaderboard's own checker, on all of its rows and on calls that are spoilt at random.

`pip install --no-deps bfcl-eval==2026.3.23` brings data and checker; imports that it does not need here are left away.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from calls_made import as_calls, rendered

from jaxagent.envs.bfcl import Bfcl, judged
from jaxagent.rewards.call_match import call_match, read_calls
from jaxagent.types import ToolCall

pytestmark = pytest.mark.parity

FOUND = importlib.util.find_spec("bfcl_eval")
KINDS = ("simple_python", "multiple", "parallel", "parallel_multiple")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
SPOILT = 5  # of each row
Checker = Callable[[str, list[Any], list[dict[str, Any]], list[Any]], bool]


@pytest.fixture(scope="module")
def data() -> Path:
    if FOUND is None or FOUND.submodule_search_locations is None:
        pytest.skip("bfcl-eval is not installed")
    return Path(FOUND.submodule_search_locations[0]) / "data"


@pytest.fixture(scope="module")
def theirs(data: Path) -> Checker:
    with pytest.MonkeyPatch.context() as patch:
        models = ModuleType("bfcl_eval.constants.model_config")  # imports the clients of every vendor
        models.__dict__["MODEL_CONFIG_MAPPING"] = defaultdict(lambda: SimpleNamespace(underscore_to_dot=False))
        patch.setitem(sys.modules, models.__name__, models)
        for language in ("java", "js"):  # need a parser each
            name = f"bfcl_eval.eval_checker.ast_eval.type_convertor.{language}_type_converter"
            converter = ModuleType(name)
            converter.__dict__[f"{language}_type_converter"] = None
            patch.setitem(sys.modules, name, converter)
        checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
        python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON

    def check(kind: str, functions: list[Any], calls: list[dict[str, Any]], answers: list[Any]) -> bool:
        return bool(checker.ast_checker(functions, copy.deepcopy(calls), answers, python, kind, "m")["valid"])

    return check


def spoilt(calls: list[ToolCall], rng: random.Random) -> list[ToolCall]:
    """Calls with one thing changed, which may still be right."""
    made = [ToolCall(call.name, copy.deepcopy(call.arguments)) for call in calls]
    place = rng.randrange(len(made))
    how, arguments = rng.randrange(7), made[place].arguments
    if how == 0:
        del made[place]
    elif how == 1:
        made[place] = ToolCall(f"{made[place].name}x", arguments)
    elif how == 2:
        rng.shuffle(made)
    elif arguments:
        key = rng.choice(list(arguments))
        if how == 3:
            del arguments[key]
        elif how == 4:
            arguments[f"{key}_x"] = arguments[key]
        else:
            arguments[key] = other(arguments[key], rng, deep=how == 6)
    return made


def other(value: Any, rng: random.Random, deep: bool) -> Any:
    """Another value: in other letters, of another type, emptied, or one that has such in it."""
    if isinstance(value, list | dict) and value and deep:
        changed, key = copy.copy(value), rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed[key] = other(value[key], rng, deep)
        return changed
    choices: list[Any] = [str(value), None, type(value)() if value is not None else 0]
    choices += [value.upper() + " .", value + "z"] if isinstance(value, str) else []
    choices += [float(value), value + 1] if isinstance(value, int | float) and not isinstance(value, bool) else []
    return rng.choice([*choices, not value] if isinstance(value, bool) else choices)


@pytest.mark.parametrize("kind", KINDS + LIVE)
def test_both_say_the_same_of_right_and_of_spoilt_calls(kind: str, data: Path, theirs: Checker) -> None:
    name, rng = f"BFCL_v4_{kind}.json", random.Random(kind)
    rows = {row["id"]: row for row in map(json.loads, (data / name).read_text().splitlines())}
    right = [json.loads(line) for line in (data / "possible_answer" / name).read_text().splitlines()]
    agreed = refused = 0
    for answer in right:
        functions, answers = rows[answer["id"]]["function"], answer["ground_truth"]
        calls = as_calls(answers)
        assert read_calls(rendered(calls)) == (calls, "")
        for made in [calls, *(spoilt(calls, rng) for _ in range(SPOILT))]:
            ours = call_match(made, functions, answers)[0] == 1.0
            assert ours == theirs(kind, functions, [{c.name: c.arguments} for c in made], answers), (answer["id"], made)
            agreed += 1
        refused += call_match(calls, functions, answers)[0] == 0.0
    assert agreed == len(right) * (1 + SPOILT)
    assert refused <= 3  # rows whose answers lack what their own schema requires, or have what it does not know


@pytest.mark.parametrize("kind", [*KINDS, "irrelevance", "live_multiple", "live_irrelevance"])
def test_the_files_are_played_as_they_are(kind: str, data: Path) -> None:
    world = Bfcl(str(data / f"BFCL_v4_{kind}.json"))
    tasks = [world.task(split, index) for split, size in world.sizes.items() for index in range(size)]
    assert len(tasks) >= 200
    won = [judged(task, as_calls(task["answers"]))[0] for task in tasks]
    assert len(won) - sum(won) <= 3
