"""The smallest policy that learns: a table of logits behind the sampler's door. Everything around it is the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.env import World
from jaxagent.types import Group, Message, Sample, SampleRequest, Sampling, Trajectory

PLAIN = PlainTemplate()
LIMITS, SAMPLING = Limits(max_turns=16, max_tokens=600), Sampling(max_tokens=8)


class Table:
    """Logits of a few turns in every state, which `state_of` makes of the text that was read. Implements `Sampler`."""

    def __init__(self, turns: Sequence[str | Sequence[int]], state_of: Callable[[str], str], seed: int):
        """Args: turns: texts, or tokens as they are."""
        self.turns = [PLAIN.turn(Message("assistant", turn)) if isinstance(turn, str) else list(turn) for turn in turns]
        self.state_of, self.rng = state_of, np.random.default_rng(seed)
        self.logits: dict[str, np.ndarray] = {}
        self.rows: dict[str, list[int]] = {}

    def odds(self, state: str) -> np.ndarray:
        z = np.exp(self.logits.get(state, np.zeros(len(self.turns))))
        return z / z.sum()

    async def generate(self, request: SampleRequest) -> Sample:
        row = self.rows.setdefault(request.trajectory, [])
        row += request.tokens
        odds = self.odds(self.state_of(PLAIN.text(row)))
        chosen = int(self.rng.choice(len(odds), p=odds))
        tokens = self.turns[chosen]
        row += tokens
        logprobs = [float(np.log(odds[chosen])), *[0.0] * (len(tokens) - 1)]
        return Sample(tokens, logprobs, [0] * len(tokens), True, request.start, list(request.tokens))

    def release(self, trajectory: str) -> None:
        self.rows.pop(trajectory, None)

    def learn(self, rows: Sequence[Trajectory], lr: float) -> None:
        """One step along sum of A (onehot - p) over the turns of the rows, as `credit.assign` has left their advantages."""
        change: dict[str, np.ndarray] = {}
        for row in rows:
            for turn in row.turns:
                state = self.state_of(PLAIN.text(row.tokens[: turn.start]))
                onehot = np.asarray([row.tokens[turn.start : turn.end] == tokens for tokens in self.turns], float)
                change.setdefault(state, np.zeros(len(self.turns)))
                change[state] += (turn.advantage or 0.0) * (onehot - self.odds(state))
        for state, total in change.items():
            self.logits[state] = self.logits.get(state, np.zeros(len(self.turns))) + lr * total / max(1, len(rows))

    def copy(self) -> Table:
        """As it is now, with luck of its own."""
        made = Table([], self.state_of, int(self.rng.integers(2**31)))
        made.turns, made.logits = self.turns, {state: z.copy() for state, z in self.logits.items()}
        return made


def play(
    world: World, policy: Table, tasks: Sequence[int], rollouts: int, *, past: Table | None = None, step: int = 0
) -> list[Group]:
    """Groups of whole episodes of the training tasks with these numbers."""

    async def games() -> list[Group]:
        agent = Agent(PLAIN, world.tools, policy, LIMITS, past=past)
        groups = []
        for index in tasks:
            task, name, rows = world.task("train", index), f"{step}/{index}", []
            for i in range(rollouts):
                mine = [Trajectory(task["id"], task["seed"], name, i)]
                await agent.play(world.episode(f"{name}#{i}", None), task, mine, (0, 0), SAMPLING)
                rows += mine
            groups.append(Group.of(name, rows))
        return groups

    return asyncio.run(games())


def success(groups: Sequence[Group]) -> float:
    rows = [row for group in groups for row in group.trajectories]
    return sum(row.solved for row in rows) / len(rows)


def rows_of(groups: Sequence[Group]) -> list[Trajectory]:
    return [row for group in groups for row in group.trajectories]
