"""One episode, token-exact: environment <-> chat <-> sampler. It sees a `Sampler`, so a scripted one tests it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxagent.chat.template import Template
from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, Sampler, SampleRequest, Sampling, StopReason, ToolSpec, Trajectory


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode. `max_tokens` counts everything in the row: prompt, turns and observations."""

    max_turns: int = 8
    max_tokens: int = 1024


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

    async def play(
        self, env: Env, task: Task, trajectory: Trajectory, key: tuple[int, int], sampling: Sampling
    ) -> list[Trajectory]:
        """Plays one episode into `trajectory`, and one more row for every further seat; returns all rows.

        Raises what the environment or the sampler raises: `rollout.py` turns that into data.
        """
        seats: dict[str, Seat] = {}
        try:
            step = await env.reset(task, trajectory.seed)
            while True:
                seat = self._seat(seats, step, trajectory, key)
                stop = self._told(seat, step, sampling)
                if stop:
                    break
                step = await self._act(seat, env, step, sampling)
                for agent, reward in step.rewards.items():
                    seats[agent].trajectory.turns[-1].reward += reward
            for seat in seats.values():
                seat.trajectory.stop, seat.trajectory.error, seat.trajectory.waiting = stop, step.error, ""
        finally:
            for seat in seats.values():
                self.sampler.release(seat.name)
        return [seat.trajectory for seat in seats.values()]

    def _seat(self, seats: dict[str, Seat], step: Step, first: Trajectory, key: tuple[int, int]) -> Seat:
        if step.agent not in seats:
            trajectory = replace(first, role=step.agent) if seats else first
            if seats:  # a further seat starts with an empty row of its own
                trajectory.tokens, trajectory.mask, trajectory.logprob = [], [], []
                trajectory.version, trajectory.turn, trajectory.turns = [], [], []
            trajectory.role = step.agent
            name = f"{first.group}#{first.rollout}.{first.attempts}/{step.agent}"
            number = len(seats)
            seats[step.agent] = Seat(trajectory, name, (key[0], key[1] ^ number), [])
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
        turn.reward, turn.reason, turn.tools = answer.reward, answer.reason, answer.tools
        return answer
