"""`questions`: a file of questions with known answers, and Python in the sandbox to work them out.

One JSON object per line, `{"question": ..., "answer": ...}` and optionally `"difficulty"`. The policy may run programs, whose
names and values live as long as its episode; a turn without a call is its answer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

from jaxagent.data.tasks import read_jsonl
from jaxagent.envs.env import Env, Step, Task
from jaxagent.rewards.match import exact_match, last_number
from jaxagent.tools import Tool, ToolFailed, dispatch
from jaxagent.types import Message, ToolSpec
from sandbox_client import Outcome

REWARDS: dict[str, Callable[[str, str], tuple[float, str]]] = {"exact_match": exact_match, "last_number": last_number}
PYTHON = ToolSpec(
    "python",
    "Runs Python and returns what it prints and the value of its last expression. Names stay defined between calls.",
    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
_GRACE_S = 30.0  # for the sandbox to answer after a program's own deadline
_RESULT_CHARS = 2000  # of a program's output that the policy reads


class Questions:
    """The world.

    Args:
        path: task file to train on.
        test_path: task file to test on; without one, two tenths of `path` are held out, one to validate and one to test.
        python: whether the policy has the Python tool.
        reward: `exact_match` or `last_number`, see rewards/match.py.
        system: the system message; empty for none.
        tool_timeout_s: of one program.
    """

    functions = ""

    def __init__(
        self,
        path: str,
        test_path: str = "",
        python: bool = True,
        reward: str = "exact_match",
        system: str = "",
        tool_timeout_s: float = 10.0,
    ):
        if reward not in REWARDS:
            raise ValueError(f"env.options.reward must be one of {', '.join(REWARDS)}; got {reward!r}")
        self.reward, self.system, self.tool_timeout_s = REWARDS[reward], system, tool_timeout_s
        self.runs_code = python
        self.tools = (PYTHON,) if python else ()
        splits = ("train", "valid") if test_path else ("train", "valid", "test")
        self.tasks: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
        for record in _read(path):
            self.tasks[_split(record["question"], list(self.tasks))].append(record)
        if test_path:
            self.tasks["test"] = _read(test_path)
        if empty := [split for split, records in self.tasks.items() if not records]:
            raise ValueError(f"{path}: too few tasks, none is left for {' and '.join(empty)}; some dozens are wanted")
        if reward == "last_number" and (
            words := [r["answer"] for t in self.tasks.values() for r in t if not _number(r["answer"])]
        ):
            raise ValueError(f"{path}: env.options.reward=last_number needs numbers as answers, got {words[0]!r}")
        self.sizes = {split: len(records) for split, records in self.tasks.items()}

    def task(self, split: str, index: int) -> Task:
        record = self.tasks[split][index]
        difficulty = str(record.get("difficulty", "all"))
        return {**record, "id": f"questions/{split}/{index}", "seed": index, "difficulty": difficulty}

    def episode(self, name: str, sandbox: Any) -> Env:
        return QuestionEpisode(self, name, sandbox)


def _read(path: str) -> list[dict[str, Any]]:
    records = read_jsonl(path, ("question", "answer"))
    return [{**record, "question": str(record["question"]), "answer": str(record["answer"])} for record in records]


def _number(answer: str) -> bool:
    try:
        return math.isfinite(float(answer.replace(",", "")))
    except ValueError:
        return False


def _split(question: str, splits: list[str]) -> str:
    """By the question alone: a file may grow without a task changing sides. A tenth for each split after the first."""
    drawn = hashlib.blake2b(question.encode(), digest_size=2).digest()[0] % 10
    return splits[drawn + 1] if drawn + 1 < len(splits) else splits[0]


class QuestionEpisode:
    """One episode, with a sandbox session once a program is run."""

    def __init__(self, world: Questions, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox
        self.session: Any = None
        self.tools = [Tool(spec, self._python, world.tool_timeout_s + _GRACE_S) for spec in world.tools]

    async def reset(self, task: Task, seed: int) -> Step:
        self.right = task["answer"]
        system = [Message("system", self.world.system)] if self.world.system else []
        return Step([*system, Message("user", task["question"])])

    async def step(self, action: Message) -> Step:
        if action.error:
            return Step([Message("tool", f"error: {action.error}")])
        if not action.calls:
            reward, reason = self.world.reward(action.content, self.right)
            return Step(reward=reward, reason=reason, terminated=True, answered=True)
        records = [await dispatch(self.tools, call) for call in action.calls]
        return Step([Message("tool", record.result, name=record.name) for record in records], tools=records)

    async def _python(self, code: str) -> str:
        if self.session is None:
            self.session = await self.sandbox.open_session(self.name)
        result = await self.session.exec(code, timeout_s=self.world.tool_timeout_s)
        said = [result.stdout, result.stderr, result.value or ""]
        failed = result.outcome != Outcome.OK
        said += [f"error: {result.error or result.outcome}"] if failed else []
        text = "\n".join(part.strip("\n") for part in said if part) or "no output"
        if len(text) > _RESULT_CHARS:
            text = f"{text[:_RESULT_CHARS]}\n[{len(text) - _RESULT_CHARS} more characters]"
        if failed:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


make_world = Questions
