"""`critique`: a draft, what is wrong with it, and a second attempt: three seats, one team, questions with known answers.

The drafter answers; the critic reads question and draft and says what is wrong; the reviser reads all and answers again. The
team's reward is R(final), whether the last answer is right. Drafter and reviser earn it; the critic earns the difference it
made, R(final) - R(draft), so that it gains nothing by praising what was right before. The difference's second half is the part
`draft` of its reward: every seat's outcome is the team's, and success is that of the final answer. `reward/check_draft` is how
often drafts are right, and `reward/gap_draft` what the other two made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.questions import Questions
from jaxagent.rewards.compose import Case
from jaxagent.types import Message, ToolSpec

REWARDS = ("exact_match", "f1_match", "last_number", "tagged_match", "math_match")  # one number, from the words alone


class Critique:
    """The world. Args: path, test_path, reward: as of `questions`, but one of REWARDS."""

    functions = ""
    tools: Sequence[ToolSpec] = ()
    seats = 3

    def __init__(self, path: str, test_path: str = "", reward: str = "last_number"):
        if reward not in REWARDS:
            raise ValueError(f"env.options.reward must be one of {', '.join(REWARDS)}; got {reward!r}")
        self.questions = Questions(path, test_path, toolbox=(), reward=reward)
        self.sizes = self.questions.sizes

    def task(self, split: str, index: int) -> Task:
        return {**self.questions.task(split, index), "id": f"critique/{split}/{index}"}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Round(self)


class Round:
    """One episode."""

    def __init__(self, world: Critique):
        self.world = world

    async def reset(self, task: Task, seed: int) -> Step:
        self.task, self.question = task, task["question"]
        self.said: list[str] = []
        return Step([Message("user", f"{self.question}\nAnswer it.")], agent="drafter")

    async def step(self, action: Message) -> Step:
        self.said.append("" if action.error or action.calls else action.content.strip())
        if len(self.said) == 1:
            self.draft, why = await self._score(self.said[0])
            asked = f"{self.question}\nDraft: {self.said[0]}\nSay what is wrong with the draft, if anything."
            return Step([Message("user", asked)], agent="critic", checks={"draft": self.draft}, reason=f"draft: {why}")
        if len(self.said) == 2:
            asked = f"{self.question}\nDraft: {self.said[0]}\nCritique: {self.said[1]}\nAnswer the question."
            return Step([Message("user", asked)], agent="reviser", reward=0.0 - self.draft, parts={"draft": 0.0 - self.draft})
        final, why = await self._score(self.said[2])
        team = {"drafter": final, "critic": final}
        return Step(reward=final, reason=why, rewards=team, terminated=True, answered=True)

    async def _score(self, answer: str) -> tuple[float, str]:
        score, why = await self.world.questions.score(Case(self.task, answer))
        assert not isinstance(score, dict)  # of none of REWARDS
        return score, why

    async def close(self) -> None:
        pass


make_world = Critique
