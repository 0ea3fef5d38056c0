"""One episode, token-exact: environment <-> chat <-> sampler. It sees a `Sampler`, so a scripted one tests it all."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from jaxagent.chat.template import Template
from jaxagent.envs.env import Env, Step, Task
from jaxagent.stem import Diverged, Resumed, Stem
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
    sampler: Sampler
    name: str  # in the sampler
    key: tuple[int, int]
    unfed: list[int] = field(default_factory=list)
    held: int = 0  # tokens that the sampler has
    told: list[Message] = field(default_factory=list)  # the dialogue so far
    before: int = 0  # turns of a stem, which are in no row of its own

    @property
    def trajectory(self) -> Trajectory:
        """The row that grows."""
        return self.rows[-1]

    @property
    def turns(self) -> int:
        return self.before + sum(len(row.turns) for row in self.rows)


class Player(Protocol):
    """What plays episodes: an `Agent`, or a program of the user's behind a door (`programs.py`)."""

    async def play(self, env: Env, task: Task, rows: list[Trajectory], key: tuple[int, int], sampling: Sampling) -> None: ...

    def release(self, rows: Sequence[Trajectory]) -> None: ...

    async def close(self) -> None: ...


class Agent:
    """Plays episodes with one policy in every seat, or with an earlier version of it where the world asks for that."""

    def __init__(
        self,
        template: Template,
        tools: Sequence[ToolSpec],
        sampler: Sampler,
        limits: Limits,
        *,
        constrain_calls: bool = False,
        past: Sampler | None = None,
    ):
        """Args:
            constrain_calls: only calls of known tools with arguments of their schemas can be sampled. Not for training: what
                the learner computes knows nothing of what could not be sampled.
            past: samples for the seats of an earlier version.

        Raises ValueError where the template's calls cannot be constrained.
        """
        self.template, self.tools, self.sampler, self.limits, self.past = template, tools, sampler, limits, past
        self.constraint = template.constraint(tools) if constrain_calls and tools else None
        self._playing: dict[int, dict[str, Seat]] = {}  # by the id of the list of an episode's rows

    def through(self, recorded: Callable[[Sampler], Sampler]) -> Agent:
        """The same agent with other samplers, made of its own."""
        other = copy.copy(self)
        other.sampler, other.past = recorded(self.sampler), recorded(self.past) if self.past else None
        return other

    def release(self, rows: Sequence[Trajectory]) -> None:
        """Lets go what samplers hold for the rows of an episode that is left behind."""
        for seat in self._playing.get(id(rows), {}).values():
            seat.sampler.release(seat.name)

    async def play(
        self,
        env: Env,
        task: Task,
        rows: list[Trajectory],
        key: tuple[int, int],
        sampling: Sampling,
        stem: Stem | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """Plays one episode into `rows`, which holds the first seat's row and gets one more for every further seat or segment.

        With a stem it is a continuation: the world is brought back to the stem's end, unless `resumed` says that it is there.

        Raises what the environment or the sampler raises, or Diverged: `rollout.py` turns that into data.
        """
        seats = self._playing[id(rows)] = dict[str, Seat]()
        try:
            rows[0].waiting = "environment"
            if stem and not resumed:
                resumed = await self.retrace(env, task, stem)
            step = resumed.step if resumed else await env.reset(task, rows[0].seed)
            rows[0].waiting = ""
            seat = self._seat(seats, step, rows, key)
            if stem and resumed:
                self._take_up(seat, stem, resumed)
            while not (stop := self._told(seat, step, rows, sampling)):
                step = await self._act(seat, env, step, sampling)
                for agent, reward in step.rewards.items():
                    if agent in seats:  # who never acted has nothing to learn from
                        seats[agent].trajectory.turns[-1].earn(reward)
                if not (step.terminated or step.truncated):
                    if stem and step.agent != stem.role:
                        raise _not_alone(stem, step)
                    seat = self._seat(seats, step, rows, key)
            for row in rows:
                row.stop, row.error = stop, step.error
        finally:
            del self._playing[id(rows)]
            for seat in seats.values():
                seat.sampler.release(seat.name)
                whole, outcome = sum(row.reward for row in seat.rows), sum(row.outcome for row in seat.rows)
                for row in seat.rows:
                    row.elsewhere, row.outcome_elsewhere = whole - row.reward, outcome - row.outcome

    async def close(self) -> None:
        """Nothing is left open between episodes."""

    async def retrace(self, env: Env, task: Task, stem: Stem) -> Resumed:
        """Takes the turns of a stem again, as they were sampled, and returns where that leads.

        Raises Diverged where the world says other things than it did, token for token, or ends.
        """
        step, told, held = await env.reset(task, stem.seed), list[Message](), 0
        for number in range(stem.turns + 1):
            if step.terminated or step.truncated:
                raise Diverged(f"retracing {stem.group}: the episode ended before turn {number}: {step.error or step.reason}")
            if step.agent != stem.role:
                raise _not_alone(stem, step)
            start, end = stem.spans[number] if number < stem.turns else (len(stem.tokens), 0)
            if not held:
                ids = self.template.prompt(step.messages, self.tools)
            elif self.template.restart(told, step.messages, self.tools):
                raise Diverged(f"retracing {stem.group}: before turn {number} the conversation was begun anew in another row")
            else:
                closed = stem.tokens[held - 1] in self.template.stop
                ids = self.template.extend(step.messages, closed=closed, after=told[-1])
            if tuple(ids) != stem.tokens[held:start]:
                said, was = self.template.text(ids), self.template.text(stem.tokens[held:start])
                raise Diverged(
                    f"retracing {stem.group}: before turn {number} the world said {said!r} where it had said {was!r}; "
                    "only what (task, seed) and the actions reproduce can be branched"
                )
            if number < stem.turns:
                action, heard = self._read(list(stem.tokens[start:end]))
                told += [*step.messages, heard]
                step, held = await env.step(action), end
        return Resumed(step, tuple(told))

    def _take_up(self, seat: Seat, stem: Stem, resumed: Resumed) -> None:
        """Puts a seat where a stem's last turn ended; what was said after it is told as ever."""
        taken = list(stem.tokens[: stem.spans[-1][1]]) if stem.spans else []
        seat.trajectory.feed(taken)
        seat.unfed, seat.told, seat.before = taken, list(resumed.told), stem.turns

    def _read(self, tokens: Sequence[int]) -> tuple[Message, Message]:
        """A sampled turn as the world is given it, and as it stands in the dialogue."""
        action: Message = self.template.parse(tokens, self.tools)
        closed = tokens[-1:] and tokens[-1] in self.template.stop  # a stop string leaves all that it ends in
        words = tokens[:-1] if closed else tokens
        return action, Message("assistant", self.template.text(words)) if action.error else action

    def _seat(self, seats: dict[str, Seat], step: Step, rows: list[Trajectory], key: tuple[int, int]) -> Seat:
        if step.agent not in seats:
            first, number = rows[0], len(seats)
            if number:  # a further seat starts with an empty row of its own
                rows.append(beside(first))
            rows[-1].role, rows[-1].seat, rows[-1].past = step.agent.partition("#")[0], number, step.past
            sampler = self.past if step.past else self.sampler
            if sampler is None:
                raise ValueError(f"{step.agent} is to be an earlier version of the policy, but none is kept: see World.past")
            name = f"{first.group}#{first.rollout}.{first.attempts}/{step.agent}"
            seats[step.agent] = Seat([rows[-1]], sampler, name, (key[0], key[1] ^ number))
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
        seat.sampler.release(seat.name)
        number = len(seat.rows)
        row = beside(rows[0])
        row.role, row.seat, row.past = seat.trajectory.role, seat.trajectory.seat, seat.trajectory.past
        row.segment = number
        rows.append(row)
        seat.rows.append(row)
        seat.name = f"{seat.name.removesuffix(f'+{number - 1}')}+{number}"
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
        asked_s = time.monotonic()
        sample = await seat.sampler.generate(request)
        seat.held += len(seat.unfed) + len(sample.tokens)
        seat.unfed = []
        turn = trajectory.sampled(sample, step.state, self.template.text(sample.tokens))
        turn.asked_s, turn.sampled_s = asked_s, time.monotonic()
        action, heard = self._read(sample.tokens)
        turn.error = action.error
        seat.told.append(heard)
        calls = ", ".join(call.name for call in action.calls)
        trajectory.waiting = f"environment, asked for {calls}" if calls else "environment"
        answer = await env.step(action)
        trajectory.waiting = ""
        turn.reward, turn.reason, turn.tools = answer.reward, answer.reason, answer.tools
        turn.parts, turn.checks = dict(answer.parts), dict(answer.checks)
        rest = answer.reward - sum(answer.parts.values())
        turn.outcome = answer.parts.get("outcome", rest) if answer.parts else None
        return answer


def _not_alone(stem: Stem, step: Step) -> Diverged:
    return Diverged(
        f"continuing {stem.group}: {step.agent!r} is to act, and only episodes of {stem.role!r} alone can be branched"
    )


def beside(first: Trajectory) -> Trajectory:
    """An empty row of the same rollout."""
    row = Trajectory(first.task, first.seed, first.group, first.rollout, attempts=first.attempts)
    row.difficulty, row.trunk, row.trunk_turns = first.difficulty, first.trunk, first.trunk_turns
    return row
