"""One episode, token-exact: environment <-> chat <-> sampler. It sees a `Sampler`, so a scripted one tests it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxagent.chat.template import Template
from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, Sampler, SampleRequest, Sampling, StopReason, ToolSpec, Trajectory


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode. `max_tokens` counts everything in the row: prompt, turns and observations."""

    max_turns: int = 8
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"agent.max_turns must be at least 1, got {self.max_turns}")


@dataclass
class Seat:
    """One agent at the table: its token row and what it has not been told yet."""

    trajectory: Trajectory
    name: str  # in the sampler
    key: tuple[int, int]
    unfed: list[int]
    held: int = 0  # tokens that the sampler has


class Agent:
    """Plays episodes with one policy in every seat."""

    def __init__(self, template: Template, tools: Sequence[ToolSpec], sampler: Sampler, limits: Limits):
        self.template, self.tools, self.sampler, self.limits = template, tools, sampler, limits

    async def play(self, env: Env, task: Task, rows: list[Trajectory], key: tuple[int, int], sampling: Sampling) -> None:
        """Plays one episode into `rows`, which holds the first seat's row and gets one more for every further seat.

        Raises what the environment or the sampler raises: `rollout.py` turns that into data.
        """
        seats: dict[str, Seat] = {}
        try:
            rows[0].waiting = "environment"
            step = await env.reset(task, rows[0].seed)
            rows[0].waiting = ""
            seat = self._seat(seats, step, rows, key)
            while not (stop := self._told(seat, step, sampling)):
                step = await self._act(seat, env, step, sampling)
                for agent, reward in step.rewards.items():
                    if agent in seats:  # who never acted has nothing to learn from
                        seats[agent].trajectory.turns[-1].reward += reward
                if not (step.terminated or step.truncated):
                    seat = self._seat(seats, step, rows, key)
            for row in rows:
                row.stop, row.error = stop, step.error
        finally:
            for seat in seats.values():
                self.sampler.release(seat.name)

    def _seat(self, seats: dict[str, Seat], step: Step, rows: list[Trajectory], key: tuple[int, int]) -> Seat:
        if step.agent not in seats:
            first, number = rows[0], len(seats)
            if number:  # a further seat starts with an empty row of its own
                row = Trajectory(first.task, first.seed, first.group, first.rollout, attempts=first.attempts)
                row.difficulty = first.difficulty
                rows.append(row)
            rows[number].role = step.agent
            name = f"{first.group}#{first.rollout}.{first.attempts}/{step.agent}"
            seats[step.agent] = Seat(rows[number], name, (key[0], key[1] ^ number), [])
        return seats[step.agent]

    def _told(self, seat: Seat, step: Step, sampling: Sampling) -> StopReason | None:
        """Appends the observation; says why the episode ends, if it does."""
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if step.terminated:
            return StopReason.ANSWERED if step.answered else StopReason.ENV_TERMINATED
        first = not seat.trajectory.tokens
        if not first and len(seat.trajectory.turns) >= self.limits.max_turns:
            return StopReason.MAX_TURNS
        if first:
            ids = self.template.prompt(step.messages, self.tools)
        else:
            closed = seat.trajectory.tokens[-1] in self.template.stop
            ids = self.template.extend(step.messages, closed=closed)
        if len(seat.trajectory.tokens) + len(ids) + sampling.max_tokens > self.limits.max_tokens:
            return StopReason.MAX_TOKENS
        seat.trajectory.feed(ids)
        seat.unfed += ids
        return None

    async def _act(self, seat: Seat, env: Env, step: Step, sampling: Sampling) -> Step:
        """Samples one turn and takes it to the world."""
        trajectory = seat.trajectory
        request = SampleRequest(
            seat.name, tuple(seat.unfed), seat.held, seat.key, self.template.stop, sampling, trajectory.group
        )
        trajectory.waiting = "engine"
        sample = await self.sampler.generate(request)
        seat.held += len(seat.unfed) + len(sample.tokens)
        seat.unfed = []
        turn = trajectory.sampled(sample, step.state, self.template.text(sample.tokens))
        action: Message = self.template.parse(sample.tokens, self.tools)
        turn.error = action.error
        trajectory.waiting = "environment"
        answer = await env.step(action)
        trajectory.waiting = ""
        turn.reward, turn.reason, turn.tools = answer.reward, answer.reason, answer.tools
        return answer
