"""`bfcl`: which functions to call with what, from the Berkeley Function Calling Leaderboard's files, one turn an episode.

A row of a file has `id`, `question` (the messages of one turn) and `function` (schemas); the file of the same name in the
folder `possible_answer` beside it has `ground_truth` for each id. Functions differ from row to row, so they stand in the system
message and calls are written as text, `[f(a=1), g(b="x")]`, as the leaderboard asks models without tools of their own to do;
a family's own calls are taken too. The outcome is 1 where all calls are right by rewards/call_match.py, else 0.

    simple, multiple                one call, of one function or of several that are offered
    parallel, parallel_multiple     several calls, in any order
    irrelevance                     no function fits, and none may be called
    relevance                       some function fits: any readable call will do

Rows of several turns, of memory, of web search, and those in Java and JavaScript are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.data.records import read_records, split_of
from jaxagent.envs.env import Env, Step, Task
from jaxagent.rewards.call_match import call_match, read_calls
from jaxagent.types import Message, ToolSpec

_CATEGORY = re.compile(r"((?:[a-z]+_)*[a-z]+)_\d.*")
_KINDS = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance", "relevance")
_WITHOUT_ANSWERS = ("irrelevance", "relevance")
_TOLD = (
    "Here are functions, as JSON. Answer with the calls that the question needs and nothing else, in the form "
    "[name(parameter=value, ...), name(...)], with values as in Python. If no function fits, or a value that a function needs "
    "is missing, say so in words and call none."
)


class Bfcl:
    """The world.

    Args:
        path: a file of the leaderboard, or several with commas; a tenth each is held out to validate and to test.
        test_path: files to test on instead.
        answers: the folder of possible answers; empty for `possible_answer` beside each file.
    """

    functions = ""
    tools: Sequence[ToolSpec] = ()

    def __init__(self, path: str, test_path: str = "", answers: str = ""):
        splits = ("train", "valid") if test_path else ("train", "valid", "test")
        self.rows: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
        for row in _read(path, answers):
            self.rows[split_of(row["row"], list(self.rows))].append(row)
        if test_path:
            self.rows["test"] = _read(test_path, answers)
        if empty := [split for split, rows in self.rows.items() if not rows]:
            raise ValueError(f"{path}: too few rows, none is left for {' and '.join(empty)}; some dozens are wanted")
        self.sizes = {split: len(rows) for split, rows in self.rows.items()}

    def task(self, split: str, index: int) -> Task:
        row = self.rows[split][index]
        return {**row, "id": f"bfcl/{split}/{index}", "seed": index, "difficulty": row["kind"]}

    def episode(self, name: str, sandbox: Any) -> Env:
        return BfclEpisode()


class BfclEpisode:
    """One episode of one turn."""

    async def reset(self, task: Task, seed: int) -> Step:
        self.task = task
        told = f"{_TOLD}\n{json.dumps(task['function'])}"
        given = [Message(message["role"], message["content"]) for message in task["messages"]]
        if given[0].role == "system":
            told = f"{given.pop(0).content}\n\n{told}"
        return Step([Message("system", told), *given])

    async def step(self, action: Message) -> Step:
        if action.error:
            return Step([Message("user", f"error: {action.error}")], reason=action.error)
        calls, fault = (list(action.calls), "") if action.calls else read_calls(action.content)
        outcome, reason = judged(self.task, calls)
        return Step(reward=outcome, reason="; ".join(filter(None, (reason, fault))), terminated=True, answered=True)

    async def close(self) -> None:
        return None


def judged(task: Mapping[str, Any], calls: Sequence[Any]) -> tuple[float, str]:
    """What the calls of a turn are worth for a task of this world, and why."""
    if task["kind"] == "relevance":
        return (1.0, "some call was wanted") if calls else (0.0, "some call was wanted, none was made")
    return call_match(calls, task["function"], task["answers"])


def kind_of(identity: str) -> str:
    """The kind of a row, by its id. Raises ValueError for kinds that are not played here."""
    found = _CATEGORY.fullmatch(identity)
    kind = found[1].removeprefix("live_").removesuffix("_python") if found else identity
    if kind not in _KINDS:
        raise ValueError(f"rows of {', '.join(_KINDS)} are played here, in Python; got {identity!r}")
    return kind


def _read(paths: str, answers: str) -> list[dict[str, Any]]:
    found = []
    for path in (Path(one.strip()) for one in paths.split(",")):
        right: dict[str, Any] | None = None
        for where, row in read_records(path, ("id", "question", "function")):
            try:
                kind = kind_of(str(row["id"]))
                if right is None:
                    right = {} if kind in _WITHOUT_ANSWERS else _answers(path, answers)
                found.append(_row(row, kind, right))
            except ValueError as error:
                raise ValueError(f"{path}, {where}: {error}") from None
    return found


def _answers(path: Path, folder: str) -> dict[str, Any]:
    beside = (Path(folder) if folder else path.parent / "possible_answer") / path.name
    if not beside.is_file():
        raise ValueError(f"its possible answers are wanted in {beside}; env.options.answers names another folder")
    return {row["id"]: row["ground_truth"] for _, row in read_records(beside, ("id", "ground_truth"))}


def _row(row: Mapping[str, Any], kind: str, right: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a task has it. Raises ValueError for one that cannot be played."""
    turns = row["question"]
    if len(turns) != 1 or not turns[0]:
        raise ValueError(f"one turn was wanted, got {len(turns)}")
    if kind not in _WITHOUT_ANSWERS and row["id"] not in right:
        raise ValueError(f"no possible answer of {row['id']!r}")
    answers = right.get(row["id"], [])
    known = {schema["name"] for schema in row["function"]}
    if strange := [name for answer in answers for name in answer if name not in known]:
        raise ValueError(f"the answer calls {strange[0]!r}, which is not among the functions")
    return {"row": row["id"], "kind": kind, "messages": turns[0], "function": row["function"], "answers": answers}


make_world = Bfcl
