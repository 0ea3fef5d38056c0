"""Episodes that are runs of the user's own programs: each has a door of its own, and what is sampled there becomes rows.

Calls whose prompt extends a row exactly, token for token, go on in it. Where the program rewrote its context, turned back, or
runs another agent beside, a new segment of the same rollout begins; what is repeated there of earlier turns is context and is
not trained on twice. However many segments a rollout has, together they weigh what one row weighs (`credit.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from jaxagent.agent import Limits, beside
from jaxagent.door.session import Row, Rules, Session, Slots
from jaxagent.envs.env import Ablated, Env, Task
from jaxagent.envs.program import Door, Outcome, ProgramEpisode, ProgramFailed
from jaxagent.serve import ServeLimits, Server
from jaxagent.types import Message, Sample, Sampling, StopReason, ToolRecord, Trajectory, Turn

_EXHAUSTED = {"calls": StopReason.MAX_TURNS, "tokens": StopReason.MAX_TOKENS}


class Unanswered(Exception):
    """The door had no answer for a program, by no fault of the program or the policy."""


class Programs:
    """Implements `agent.Player`. `limits` bound an episode's calls and the tokens of each of its rows."""

    def __init__(self, slots: Slots, limits: Limits):
        self.slots, self.limits = slots, limits
        self._server: Server | None = None
        self._url = ""
        self._gate = asyncio.Lock()

    async def play(self, env: Env, task: Task, rows: list[Trajectory], key: tuple[int, int], sampling: Sampling) -> None:
        """Runs the program of one episode; `rows` gets what it had sampled. Raises as `episode.run` does."""
        episode = env.env if isinstance(env, Ablated) else env
        assert isinstance(episode, ProgramEpisode)
        first, token = rows[0], secrets.token_hex(24)
        first.waiting = "door"
        server = await self._serving()
        name = f"{first.group}#{first.rollout}.{first.attempts}"
        rules = Rules(self.limits.max_tokens, sampling, self.limits.max_turns, blind=isinstance(env, Ablated))
        session, record = Session(name, self.slots, rules, key, first.group), Record(self.slots, rows)
        session.heard = record.heard
        server.sessions[token] = session
        first.waiting = "program"
        try:
            said = await episode.run(task, Door(self._url, token))
            _want_answered(session)
            outcome = await episode.earned(task, said, record.said)
        except ProgramFailed:
            _want_answered(session)
            # A program whose calls were refused may well fail, each client in its own way: that is the policy's budget.
            if not session.exhausted:
                raise
            outcome = Outcome(0.0, f"the program ended when it had no more {session.exhausted}")
        finally:
            del server.sessions[token]
            session.close()
        first.waiting = ""
        record.end(outcome, _EXHAUSTED.get(session.exhausted, StopReason.ANSWERED))

    def release(self, rows: Sequence[Trajectory]) -> None:
        """A session lets its rows go when it is closed."""

    async def close(self) -> None:
        if self._server:
            await self._server.stop()

    async def _serving(self) -> Server:
        async with self._gate:
            if self._server is None:
                server = Server(self.slots, "policy", ServeLimits(requests=1 << 16, deadline_s=86400.0), any_model=True)
                self._url, self._server = await server.start(), server
        return self._server


def _want_answered(session: Session) -> None:
    """Raises Unanswered: a program may swallow what the door could not do, and its reward is not the policy's then."""
    if session.faults:
        faults = [asked.fault for asked in session.faults]
        raise Unanswered(f"the door left {len(faults)} of the program's requests without an answer; the last: {faults[-1]}")


class Record:
    """What an episode's door heard, as rows to train on."""

    def __init__(self, slots: Slots, rows: list[Trajectory]):
        self.template, self.rows = slots.template, rows
        self._row_of: dict[Row, Trajectory] = {}
        self._called: dict[str, tuple[Turn, float]] = {}  # by the id of a call: the turn that it is of, and when it was told
        self._last: Turn | None = None
        self.said = Message("assistant")  # last, by the policy

    def heard(self, row: Row, before: int, sample: Sample, told: Sequence[Message]) -> None:
        """One more sampled turn, after the first `before` tokens of its row."""
        trajectory = self._row_of.get(row)
        if trajectory is None:
            trajectory = self._row_of[row] = self._begun()
        fed = row.tokens[before : len(row.tokens) - len(sample.tokens)]
        if sample.fed_start < before:  # the sampler had let the row go and was fed all of it again
            trajectory.routing.clear()
        trajectory.feed(fed)
        # The session has compared what the sampler was fed with the prompt, which begins with this row.
        turn = trajectory.sampled(replace(sample, fed_start=before, fed=fed), "", self.template.text(sample.tokens))
        turn.error = (told[-1].error if told else "") or (
            "" if sample.stopped else "the turn did not end within its token budget"
        )
        self._note_results(told[:-1])
        self._called |= {call.id: (turn, time.monotonic()) for call in told[-1].calls} if told else {}
        self._last = turn
        self.said = told[-1] if told else Message("assistant", turn.text)

    def _begun(self) -> Trajectory:
        if not self.rows[0].tokens:
            return self.rows[0]
        row = beside(self.rows[0])
        row.role = self.rows[0].role
        row.segment = len(self.rows)
        self.rows.append(row)
        return row

    def _note_results(self, told: Sequence[Message]) -> None:
        """The results with which the program came back are the tools' of the turn that called them."""
        first = next((i + 1 for i in range(len(told) - 1, -1, -1) if told[i].role == "assistant"), 0)
        results = [message for message in told[first:] if message.role == "tool"]
        for call, message in zip(told[first - 1].calls if first else (), results, strict=False):
            if call.id in self._called:
                turn, since = self._called.pop(call.id)
                seconds, size = time.monotonic() - since, len(message.content.encode())
                record = ToolRecord(call.name, call.arguments, "ok", message.content, seconds / len(results), size, since)
                turn.tools.append(record)

    def end(self, outcome: Outcome, stop: StopReason) -> None:
        """The episode is over; its reward comes with its last turn."""
        if self._last is None:
            raise ProgramFailed("the program ended without asking the policy anything")
        turn, rest = self._last, outcome.reward - sum(outcome.parts.values())
        turn.reward, turn.reason, turn.parts, turn.checks = outcome.reward, outcome.reason, outcome.parts, outcome.checks
        turn.outcome = outcome.parts.get("outcome", rest) if outcome.parts else None
        whole, done = sum(row.reward for row in self.rows), sum(row.outcome for row in self.rows)
        for row in self.rows:
            row.stop = stop
            row.elsewhere, row.outcome_elsewhere = whole - row.reward, done - row.outcome
