"""One episode, token-exact: environment <-> chat <-> sampler. It sees a `Sampler`, so a scripted one tests it all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxagent.chat.template import Template
from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, Sampler, SampleRequest, Sampling, StopReason, ToolSpec, Trajectory


@dataclass(frozen=True)
class Limits:
    """Budgets. `max_turns` is each seat's; `max_tokens` counts everything in a row: prompt, turns and observations."""

    max_turns: int = 8
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"agent.max_turns must be at least 1, got {self.max_turns}")


@dataclass
class Seat:
    """One agent at the table: its token row and what it has not been told yet.

    A seat has a further row for every segment, where its conversation is begun anew: see `ChatOptions.history`.
    """

    rows: list[Trajectory]
    name: str  # in the sampler
    key: tuple[int, int]
    unfed: list[int] = field(default_factory=list)
    held: int = 0  # tokens that the sampler has
    told: list[Message] = field(default_factory=list)  # the dialogue so far

    @property
    def trajectory(self) -> Trajectory:
        """The row that grows."""
        return self.rows[-1]

    @property
    def turns(self) -> int:
        return sum(len(row.turns) for row in self.rows)


class Agent:
    """Plays episodes with one policy in every seat."""

    def __init__(
        self,
        template: Template,
        tools: Sequence[ToolSpec],
        sampler: Sampler,
        limits: Limits,
        *,
        constrain_calls: bool = False,
    ):
        """Args: constrain_calls: only calls of known tools with arguments of their schemas can be sampled. Not for training:
        what the learner computes knows nothing of what could not be sampled.

        Raises ValueError where the template's calls cannot be constrained.
        """
        self.template, self.tools, self.sampler, self.limits = template, tools, sampler, limits
        self.constraint = template.constraint(tools) if constrain_calls and tools else None

    def through(self, sampler: Sampler) -> Agent:
        """The same agent with another sampler."""
        other = copy.copy(self)
        other.sampler = sampler
        return other

    async def play(self, env: Env, task: Task, rows: list[Trajectory], key: tuple[int, int], sampling: Sampling) -> None:
        """Plays one episode into `rows`, which holds the first seat's row and gets one more for every further seat or segment.

        Raises what the environment or the sampler raises: `rollout.py` turns that into data.
        """
        seats: dict[str, Seat] = {}
        try:
            rows[0].waiting = "environment"
            step = await env.reset(task, rows[0].seed)
            rows[0].waiting = ""
            seat = self._seat(seats, step, rows, key)
            while not (stop := self._told(seat, step, rows, sampling)):
                step = await self._act(seat, env, step, sampling)
                for agent, reward in step.rewards.items():
                    if agent in seats:  # who never acted has nothing to learn from
                        seats[agent].trajectory.turns[-1].earn(reward)
                if not (step.terminated or step.truncated):
                    seat = self._seat(seats, step, rows, key)
            for row in rows:
                row.stop, row.error = stop, step.error
        finally:
            for seat in seats.values():
                self.sampler.release(seat.name)
                whole, outcome = sum(row.reward for row in seat.rows), sum(row.outcome for row in seat.rows)
                for row in seat.rows:
                    row.elsewhere, row.outcome_elsewhere = whole - row.reward, outcome - row.outcome

    def _seat(self, seats: dict[str, Seat], step: Step, rows: list[Trajectory], key: tuple[int, int]) -> Seat:
        if step.agent not in seats:
            first, number = rows[0], len(seats)
            if number:  # a further seat starts with an empty row of its own
                rows.append(_beside(first, step.agent))
            rows[-1].role = step.agent
            seats[step.agent] = Seat([rows[-1]], seat_name(rows[-1]), (key[0], key[1] ^ number))
        return seats[step.agent]

    def _told(self, seat: Seat, step: Step, rows: list[Trajectory], sampling: Sampling) -> StopReason | None:
        """Appends the observation; says why the episode ends, if it does."""
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if step.terminated:
            return StopReason.ANSWERED if step.answered else StopReason.ENV_TERMINATED
        if seat.turns >= self.limits.max_turns:
            return StopReason.MAX_TURNS
        held, anew = seat.trajectory.tokens, False
        if not held:
            ids = self.template.prompt(step.messages, self.tools)
        elif ids := self.template.restart(seat.told, step.messages, self.tools):
            held, anew = [], True
        else:
            closed = held[-1] in self.template.stop
            ids = self.template.extend(step.messages, closed=closed, after=seat.told[-1])
        if len(held) + len(ids) + sampling.max_tokens > self.limits.max_tokens:
            return StopReason.MAX_TOKENS
        if anew:
            self._begin_segment(seat, rows)
        seat.trajectory.feed(ids)
        seat.unfed += ids
        seat.told += step.messages
        return None

    def _begin_segment(self, seat: Seat, rows: list[Trajectory]) -> None:
        """Gives the seat a row of its own for what follows; the sampler lets the old one go."""
        self.sampler.release(seat.name)
        number = len(seat.rows)
        row = _beside(rows[0], seat.trajectory.role)
        row.segment = number
        rows.append(row)
        seat.rows.append(row)
        seat.name = seat_name(row)
        seat.held = 0

    async def _act(self, seat: Seat, env: Env, step: Step, sampling: Sampling) -> Step:
        """Samples one turn and takes it to the world."""
        trajectory = seat.trajectory
        # Positions begin again in a segment: with the same key they would be drawn alike. Its prompt is nobody else's.
        key = (seat.key[0] ^ trajectory.segment, seat.key[1])
        group = "" if trajectory.segment else trajectory.group
        if self.constraint:
            sampling = replace(sampling, constraint=self.constraint)
        request = SampleRequest(seat.name, tuple(seat.unfed), seat.held, key, self.template.stop, sampling, group)
        trajectory.waiting = "engine"
        sample = await self.sampler.generate(request)
        seat.held += len(seat.unfed) + len(sample.tokens)
        seat.unfed = []
        turn = trajectory.sampled(sample, step.state, self.template.text(sample.tokens))
        action: Message = self.template.parse(sample.tokens, self.tools)
        turn.error = action.error
        closed = sample.tokens[-1:] and sample.tokens[-1] in self.template.stop  # a stop string leaves all that it ends in
        words = sample.tokens[:-1] if closed else sample.tokens
        seat.told.append(Message("assistant", self.template.text(words)) if action.error else action)
        calls = ", ".join(call.name for call in action.calls)
        trajectory.waiting = f"environment, asked for {calls}" if calls else "environment"
        answer = await env.step(action)
        trajectory.waiting = ""
        turn.reward, turn.reason, turn.tools = answer.reward, answer.reason, answer.tools
        turn.parts, turn.checks = dict(answer.parts), dict(answer.checks)
        rest = answer.reward - sum(answer.parts.values())
        turn.outcome = answer.parts.get("outcome", rest) if answer.parts else None
        return answer


def seat_name(row: Trajectory) -> str:
    """What the sampler knows a row by."""
    return f"{row.group}#{row.rollout}.{row.attempts}/{row.role}" + f"+{row.segment}" * bool(row.segment)


def _beside(first: Trajectory, role: str) -> Trajectory:
    """An empty row of the same rollout."""
    row = Trajectory(first.task, first.seed, first.group, first.rollout, role=role, attempts=first.attempts)
    row.difficulty = first.difficulty
    return row
