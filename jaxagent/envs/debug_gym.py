"""`debug_gym`: repair a repository with debug-gym's tools until its tests pass. Needs `jaxagent env install debug_gym`.

Tasks are those that `jaxagent swe` makes; the world `swe` plays the same in the sandbox with tools of ours. The whole library
runs locked as a program in the sandbox does (level L2, see sandbox_client/confine.py): without network, with nothing of the
host to be read but its tools and the library's own environment, which must hold what the package under test imports. Where
the machine gives no such lock, no episode begins. Tools that need a terminal (pdb) or a program that is rarely there
(listdir) are left out.

The reward is 1 when all tests of FAIL_TO_PASS and PASS_TO_PASS pass, at an `eval` or a `submit`; a `submit` ends the episode.
Before every run the tests are put as they were and a conftest that the policy added is removed; pytest is imported before
anything of the tree, reads no settings (as where the tasks are made), and Python is isolated from the user's own packages.
Grader and package are one process: a package written for this grader can fool it. Read what wins.
"""

from __future__ import annotations

import json
from typing import Any

from jaxagent.data.records import read_records, split_of
from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served
from jaxagent.types import ToolSpec

_FIELDS = ("instance_id", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS", "files", "test_files")
_SPLITS = ("train", "valid", "test")


def _spec(name: str, description: str, required: tuple[str, ...], **properties: str) -> ToolSpec:
    shown = {key: {"type": kind} for key, kind in properties.items()}
    return ToolSpec(name, description, {"type": "object", "properties": shown, "required": list(required)})


TOOLS = {
    "bash": _spec("bash", "Run a command in the repository; 30 seconds at most.", ("command",), command="string"),
    "view": _spec("view", "Show a file, or its lines start to end.", ("path",), path="string", start="integer", end="integer"),
    "edit": _spec(
        "edit",
        "Replace lines start to end of a file by new_code; without start, the whole file.",
        ("path", "new_code"),
        path="string",
        start="integer",
        end="integer",
        new_code="string",
    ),
    "grep": _spec("grep", "Look for a pattern in the files of the repository.", ("pattern",), pattern="string", path="string"),
    "eval": _spec("eval", "Run the tests.", ()),
    "submit": _spec("submit", "Hand in the repository as it is.", ()),
}


def make_world(
    path: str,
    tools: tuple[str, ...] = tuple(TOOLS),
    test_timeout_s: float = 120.0,
    rules: str = "",
    workers: int = 0,
    timeout_s: float = 300.0,
) -> Served:
    """The world.

    Args:
        path: tasks, as `jaxagent swe` writes them; a tenth is for validation and a tenth for tests, by the id.
        tools: of the library's that the policy has.
        test_timeout_s: of one run of the tests.
        rules: said before the first observation.
    """
    if unknown := [name for name in tools if name not in TOOLS]:
        raise ValueError(f"env.options.tools must be among {', '.join(TOOLS)}; got {unknown[0]!r}")
    if not 1 <= test_timeout_s < timeout_s:
        raise ValueError(f"env.options.test_timeout_s must be from 1 to below timeout_s, {timeout_s:g}; got {test_timeout_s:g}")
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in _SPLITS}
    for where, record in read_records(path, _FIELDS):
        try:
            names = {key: json.loads(record[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        except (TypeError, ValueError):
            raise ValueError(f"{path}, {where}: FAIL_TO_PASS and PASS_TO_PASS must be lists of names, as JSON texts") from None
        found[split_of(record["instance_id"], _SPLITS)].append({**record, **names})
    if empty := [split for split, records in found.items() if not records]:
        raise ValueError(f"{path}: too few tasks, none is left for {' and '.join(empty)}; some dozens are wanted")

    def describe(split: str, index: int) -> Task:
        record = found[split][index]
        name = record["instance_id"]
        return {**record, "id": f"debug_gym/{name}", "seed": index, "difficulty": str(record.get("kind", "all"))}

    specs = [TOOLS[name] for name in tools]
    options = {"tools": list(tools), "timeout_s": test_timeout_s}
    world = Served("debug_gym", options, describe, tools=specs, rules=rules, workers=workers, slots=1, timeout_s=timeout_s)
    world.sizes = {split: len(records) for split, records in found.items()}
    return world
