"""`questions`: a file of tasks with known answers, and a box of tools to work them out.

JSONL, Parquet or a data set on disk, one record per task: `question`, `answer` (or a list of them), and optionally

    id          keeps the task in its split, whatever else changes; by default the question does
    difficulty  a word for tables
    files       path -> text, in the sandbox's work directory before the first call
    database    SQL that makes the task's own database, for the kit `sql`
    context     what is shown first, for the kit `memory`: see below
    tests, calls, rubric    what the scorers of rewards/scorers.py want

A turn without a call is the answer. With the kit `memory`, a task that has a `context` is played in two phases: the writer
reads the context and takes notes until it makes a turn without a call; then the reader is asked the question in a dialogue of
its own, where nothing of the first is left but the notes. Both earn what the answer is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.data.records import read_records, split_of
from jaxagent.envs.env import Env, Step, Task
from jaxagent.rewards.compose import Case, Score, names_of
from jaxagent.rewards.scorers import fault_of_task, scorer_of
from jaxagent.toolbox.box import Toolbox
from jaxagent.toolbox.kit import Workplace
from jaxagent.tools import dispatch_all
from jaxagent.types import Message

WRITER, READER = "writer", "agent"
NOTE_IT = "Take notes: a question will be asked when this text is gone. Say done when you are."


class Questions:
    """The world.

    Args:
        path: tasks to train on.
        test_path: tasks to test on; without one, two tenths of `path` are held out, one to validate and one to test.
        toolbox: kits of toolbox/box.py, by name or with their options.
        reward: a scorer of rewards/scorers.py, or several: min(a, b), product(a, b), sum(0.8*a, 0.2*b).
        check: another of these that is reported beside the outcome and never trained on; empty for none.
        reward_options: of the scorers, by name.
        system: the system message; empty for none.
        observation_chars: of a tool's result that the policy reads: head and tail.
    """

    def __init__(
        self,
        path: str,
        test_path: str = "",
        toolbox: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("python",),
        reward: str = "exact_match",
        check: str = "",
        reward_options: Mapping[str, Mapping[str, Any]] | None = None,
        system: str = "",
        observation_chars: int = 2000,
    ):
        self.score = _scorer("reward", reward, reward_options)
        self.check = _scorer("check", check, reward_options) if check else None
        if check == reward:
            raise ValueError(f"env.options.check={check}: the scorer that is trained on cannot check itself; choose another")
        if observation_chars < 1:
            raise ValueError(f"env.options.observation_chars must be at least 1, got {observation_chars}")
        self.check_name, self.system, self.observation_chars = check, system, observation_chars
        self.toolbox = Toolbox(toolbox)
        self.calls_only = reward == "tool_calls"
        programs = "code_tests" in (*names_of(reward)[1], *names_of(check)[1])
        self.tools, self.functions = self.toolbox.specs, self.toolbox.functions
        self.runs_code = self.toolbox.runs_code or programs
        splits = ("train", "valid") if test_path else ("train", "valid", "test")
        self.tasks: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
        expressions = {"reward": reward, "check": check} if check else {"reward": reward}
        for record in _read(path, expressions):
            self.tasks[split_of(str(record.get("id", record["question"])), list(self.tasks))].append(record)
        if test_path:
            self.tasks["test"] = _read(test_path, expressions)
        if empty := [split for split, records in self.tasks.items() if not records]:
            raise ValueError(f"{path}: too few tasks, none is left for {' and '.join(empty)}; some dozens are wanted")
        self.sizes = {split: len(records) for split, records in self.tasks.items()}

    def task(self, split: str, index: int) -> Task:
        record = self.tasks[split][index]
        difficulty = str(record.get("difficulty", "all"))
        return {**record, "id": f"questions/{split}/{index}", "seed": index, "difficulty": difficulty}

    def episode(self, name: str, sandbox: Any) -> Env:
        return QuestionEpisode(self, name, sandbox)


def _scorer(key: str, expression: str, options: Mapping[str, Mapping[str, Any]] | None) -> Any:
    try:
        return scorer_of(expression, options or {})
    except ValueError as error:
        raise ValueError(f"env.options.{key} {error}") from None


def _read(path: str, expressions: Mapping[str, str]) -> list[dict[str, Any]]:
    records = []
    for where, record in read_records(path, ("question", "answer")):
        right = record["answer"]
        answer = [str(one) for one in right] if isinstance(right, list) else str(right)
        if not answer and isinstance(right, list):
            raise ValueError(f"{path}, {where}: the list of answers is empty")
        task = {**record, "question": str(record["question"]), "answer": answer}
        for key, expression in expressions.items():
            if fault := fault_of_task(expression, task):
                raise ValueError(f"{path}, {where}: env.options.{key}={expression}: {fault}")
        records.append(task)
    return records


class QuestionEpisode:
    """One episode, with a sandbox session once a tool needs it."""

    def __init__(self, world: Questions, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox
        self.place: Workplace | None = None
        self.scored = 0

    async def reset(self, task: Task, seed: int) -> Step:
        self.task = task
        self.place = self.world.toolbox.workplace(self.name, self.sandbox, task)
        self.tools = self.world.toolbox.tools(self.place, task)
        self.phase = WRITER if self.world.toolbox.remembers and task.get("context") else READER
        if self.phase == WRITER:
            return Step(self._said(f"{task['context']}\n\n{NOTE_IT}"), agent=WRITER)
        return Step(self._said(task["question"]))

    def _said(self, words: str) -> list[Message]:
        return [*([Message("system", self.world.system)] if self.world.system else []), Message("user", words)]

    async def step(self, action: Message) -> Step:
        if self.world.calls_only:
            return await self._score(action)
        if action.error:
            return Step([Message("tool", f"error: {action.error}")], agent=self.phase)
        if action.calls:
            records = await dispatch_all(self.tools, action.calls, self.world.observation_chars)
            messages = [Message("tool", record.result, name=record.name) for record in records]
            return Step(messages, tools=records, agent=self.phase)
        if self.phase == WRITER:
            self.phase = READER
            return Step(self._said(self.task["question"]), agent=READER)
        return await self._score(action)

    async def _score(self, action: Message) -> Step:
        """The end of the episode: the policy's last turn is scored, and nothing that it or its programs wrote before."""
        case = Case(self.task, action.content, action.calls, action.error, self._fresh_session)
        score, reason = await self.world.score(case)
        parts = score if isinstance(score, dict) else {}
        step = Step(reward=sum(parts.values()) if parts else score, reason=reason, parts=parts, terminated=True, answered=True)
        if self.world.toolbox.remembers and self.task.get("context"):
            step.rewards = {WRITER: step.reward}
        if self.world.check:
            checked: Score = await self.world.check(case)
            step.checks[self.world.check_name] = checked[0]["outcome"] if isinstance(checked[0], dict) else checked[0]
        return step

    async def _fresh_session(self) -> Any:
        self.scored += 1
        return await self.sandbox.open_session(f"{self.name}/scored-{self.scored}")

    async def close(self) -> None:
        if self.place is not None:
            await self.place.close()


make_world = Questions
