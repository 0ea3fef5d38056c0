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
from jaxagent.rewards.match import calibrated_match, exact_match, last_number, tagged_match
from jaxagent.tools import Tool, ToolFailed, dispatch
from jaxagent.types import Message, ToolSpec
from sandbox_client import Outcome

REWARDS: dict[str, Callable[[str, str], tuple[Any, str]]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "tagged_match": tagged_match,
    "calibrated_match": calibrated_match,
}
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
        reward: `exact_match`, `last_number`, `tagged_match` or `calibrated_match`, see rewards/match.py.
        check: another of these that is reported beside the outcome and never trained on; empty for none.
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
        check: str = "",
    ):
        for name, chosen in (("reward", reward), ("check", check)):
            if chosen not in REWARDS and (chosen or name == "reward"):
                raise ValueError(f"env.options.{name} must be one of {', '.join(REWARDS)}; got {chosen!r}")
        if check == reward:
            raise ValueError(f"env.options.check={check}: the scorer that is trained on cannot check itself; choose another")
        self.reward, self.system, self.tool_timeout_s = REWARDS[reward], system, tool_timeout_s
        self.check, self.check_name = REWARDS.get(check), check
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
        if "last_number" in (reward, check) and (
            words := [r["answer"] for t in self.tasks.values() for r in t if not _number(r["answer"])]
        ):
            key = "reward" if reward == "last_number" else "check"
            raise ValueError(f"{path}: env.options.{key}=last_number needs numbers as answers, got {words[0]!r}")
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
            return self._score(action.content)
        records = [await dispatch(self.tools, call) for call in action.calls]
        return Step([Message("tool", record.result, name=record.name) for record in records], tools=records)

    def _score(self, answer: str) -> Step:
        """The end of the episode: the policy's last turn is scored, and nothing that it or its programs wrote before."""
        score, reason = self.world.reward(answer, self.right)
        parts = score if isinstance(score, dict) else {}
        step = Step(reward=sum(parts.values()) if parts else score, reason=reason, parts=parts, terminated=True, answered=True)
        if self.world.check:
            checked, _ = self.world.check(answer, self.right)
            step.checks[self.world.check_name] = checked["outcome"] if isinstance(checked, dict) else checked
        return step

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
