"""`proposals`: the policy makes its own tasks (Absolute Zero, arXiv:2505.03335): one seat proposes a sum, others solve it.

The proposer writes an expression in whole numbers; `rewards/arithmetic.py` computes it, and nothing is executed. A gate lets
pass what can be computed, is of the wanted size, stays within the limit on the way, and is none of the examples shown. Then
every solver gets it, none of them seeing another. A solver earns 1 for the right number; the proposer earns

    r = 1 - p where 0 < p < 1, else 0        p = the share of the solvers who are right

so what all or none can solve is worth nothing, and what few can solve the most. What does not pass the gate costs the proposer
`invalid` and ends the episode. Held-out tasks are sums drawn by seed, for a solver alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.rewards.arithmetic import evaluate
from jaxagent.rewards.match import last_number
from jaxagent.types import Message, ToolSpec

_SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
_SPLIT_SIZE = 10**9
_SIGNS = ("+", "-", "*")


def proposer_reward(rate: float) -> float:
    """1 - p for 0 < p < 1, else 0 (Absolute Zero, arXiv:2505.03335)."""
    return 1.0 - rate if 0.0 < rate < 1.0 else 0.0


class Proposals:
    """The world.

    Args:
        solvers: seats that try a proposed task.
        operations: of a sum, at least and at most.
        limit: no number in a sum may be further from 0.
        invalid: what a proposal that does not pass the gate earns; below 0, which is what a useless one earns.
        demo_right: how often the demonstrator's answers are right.
    """

    functions = ""
    tools: Sequence[ToolSpec] = ()

    def __init__(
        self,
        solvers: int = 4,
        operations: tuple[int, int] = (1, 3),
        limit: int = 9999,
        invalid: float = -0.5,
        demo_right: float = 0.5,
    ):
        if solvers < 2:
            raise ValueError(f"env.options.solvers must be at least 2: one alone solves all or nothing; got {solvers}")
        if not 1 <= operations[0] <= operations[1]:
            raise ValueError(f"env.options.operations must be (least, most) with 1 <= least <= most, got {operations}")
        if not invalid < 0:
            raise ValueError(f"env.options.invalid must be below the 0 of a useless proposal, got {invalid}")
        if limit < 9:
            raise ValueError(f"env.options.limit must be at least 9, got {limit}")
        self.solvers, self.operations, self.limit = solvers, (operations[0], operations[1]), limit
        self.invalid, self.demo_right = invalid, demo_right
        self.seats = 1 + solvers

    def task(self, split: str, index: int) -> Task:
        seed = _SPLITS[split] * _SPLIT_SIZE + index
        rng = random.Random(f"{seed}/sums")
        task = {"id": f"proposals/{split}/{index}", "seed": seed, "difficulty": "proposed"}
        if split in ("train", "demo"):
            return {**task, "examples": [self.draw(rng) for _ in range(2)]}
        given = self.draw(rng)
        return {**task, "given": given, "difficulty": f"operations: {evaluate(given).operations}"}

    def draw(self, rng: random.Random) -> str:
        """A sum that passes the gate."""
        while True:
            parts = [str(rng.randrange(10))]
            for _ in range(rng.randint(*self.operations)):
                parts += [rng.choice(_SIGNS), str(rng.randrange(10))]
            if not self.fault("".join(parts), ()):
                return "".join(parts)

    def fault(self, text: str, examples: Sequence[str]) -> str:
        """Why a proposal does not pass the gate; nothing if it does."""
        least, most = self.operations
        try:
            found = evaluate(text, self.limit)
        except ValueError as error:
            return str(error)
        if not least <= found.operations <= most:
            return f"{found.operations} operations, not {least} to {most}"
        bare = "".join(text.split())
        return "it repeats an example" if bare in ("".join(example.split()) for example in examples) else ""

    def episode(self, name: str, sandbox: Any) -> Env:
        return Proposal(self)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A sum that passes the gate, or the answer to one, which is often wrong."""
        proposed = self.draw(rng)
        while proposed in task["examples"]:
            proposed = self.draw(rng)
        if rng.random() < 0.5:
            return [self.ask(task["examples"]), Message("assistant", proposed)]
        value = evaluate(proposed).value
        return [solve(proposed), Message("assistant", str(value if rng.random() < self.demo_right else rng.randrange(100)))]

    def ask(self, examples: Sequence[str]) -> Message:
        least, most = self.operations
        return Message("user", f"Write a new sum with {least} to {most} operations, as {' or '.join(examples)}.")


def solve(expression: str) -> Message:
    return Message("user", f"{expression} = ?")


class Proposal:
    """One episode: a proposal and its solvers, or a given sum and one solver."""

    def __init__(self, world: Proposals):
        self.world = world

    async def reset(self, task: Task, seed: int) -> Step:
        self.examples = task.get("examples", ())
        self.solved: list[float] = []
        self.expression, self.seats = task.get("given", ""), 1
        if self.expression:
            return self._solver()
        self.seats = self.world.solvers
        return Step([self.world.ask(self.examples)], agent="proposer")

    def _solver(self) -> Step:
        """The next solver; a held-out sum has but one, and no proposer."""
        return Step([solve(self.expression)], agent=f"solver#{len(self.solved) + 1}", state=self.expression)

    async def step(self, action: Message) -> Step:
        said = "" if action.error or action.calls else action.content.strip()
        if self.expression:
            return self._answered(said)
        if fault := self.world.fault(said, self.examples):
            return Step(reward=self.world.invalid, reason=f"proposed {said!r}: {fault}", terminated=True)
        self.expression = said
        return self._solver()

    def _answered(self, said: str) -> Step:
        score, reason = last_number(said, str(evaluate(self.expression).value))
        self.solved.append(score)
        if len(self.solved) < self.seats:
            step = self._solver()
            step.reward, step.reason = score, reason
            return step
        earned = {"proposer": proposer_reward(sum(self.solved) / self.seats)}
        return Step(reward=score, reason=reason, rewards=earned, terminated=True, answered=True)

    async def close(self) -> None:
        pass


make_world = Proposals
