"""Which trajectory owns which slot, and what it waits for: the engine's bookkeeping. Plain Python, no JAX.

The host decides all placement; the device is told. A trajectory holds its slot, and so its keys and values, from its first
request until it is released, also while its tool runs; where others want the slot and the tool is slow, what the slot holds may
move to host memory meanwhile.

Where keys and values lie in pages, a slot holds as many as its trajectory needs. When none is free, a trajectory that waits for
its tool gives its own, moved to host memory; then the youngest turn in progress, which pauses. The eldest turn that has a slot
always goes on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxagent.engine.pages import PagesExhausted, PageTable
from jaxagent.types import Rank, SampleRequest

AWAY = -1  # the slot of a trajectory whose keys and values are in host memory


@dataclass
class Row:
    """A trajectory that the engine knows: what its slot holds, and the turn that is being sampled, if any."""

    trajectory: str
    group: str
    slot: int
    held: list[int] = field(default_factory=list)  # tokens fed and sampled in earlier turns, and fed in this one
    prompt: tuple[int, ...] = ()  # tokens of the first request, which group mates may fork
    backlog: list[int] = field(default_factory=list)  # tokens that still have to be prefilled
    cached: int = 0  # tokens whose keys and values are in the cache
    request: SampleRequest | None = None
    ticket: Any = None  # how the waiting caller is answered
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ahead: int = 0  # tokens that calls under way may add to them
    source: Row | None = None  # the row whose cache this one forks before its first turn
    turns_done: int = 0
    idle_since: float = 0.0  # when the last turn ended
    stash: Any = None  # its keys and values in host memory, while it has no slot or no pages
    number: int = 0  # counts trajectories in the order in which they first got a slot
    paused: bool = False  # its turn waits for pages
    copies: list[tuple[int, int]] = field(default_factory=list)  # pages that its fork copies, (from, to)
    routing: list[Any] = field(default_factory=list)  # recorded experts of this turn's tokens, in pieces
    prompt_routing: list[Any] = field(default_factory=list)  # those of the prompt's cached tokens, for who forks them
    fed_logprobs: list[float | None] = field(default_factory=list)  # of this turn's fed tokens, where they are asked for
    top: list[tuple[Any, Any]] = field(default_factory=list)  # likeliest tokens of this turn and their log-probs, in pieces
    stream: Any = None  # its tokens in its group's index of drafts

    @property
    def known(self) -> int:
        """Tokens before those that this turn sampled; the last of them is pending, not in the cache."""
        return len(self.held)

    @property
    def pending(self) -> int:
        """The token that is fed next."""
        return (self.tokens or self.held)[-1] if self.request else self.held[-1]

    @property
    def filled(self) -> int:
        """Positions in use: `cached`, and what this turn has sampled but for its pending token."""
        if self.backlog:
            return self.cached
        sampled = len(self.tokens) if self.request else 0
        return min(self.cached + sampled, len(self.held) + sampled - 1)

    @property
    def fed(self) -> bool:
        """Whether all that its turn has to be fed is in the cache, here or where it forks it from."""
        return not self.paused and not self.backlog and (self.source is None or self.source.cached >= self.cached)

    def sampled(self, tokens: list[int], logprobs: list[float], version: int, routing: Any) -> None:
        """Takes what a call has sampled for this turn."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        if routing is not None:
            self.routing.append(routing)


class SlotTable:
    """Slots, their owners, and the queue of requests that have no slot yet."""

    def __init__(self, slots: int, length: int, fork_min: int, pages: PageTable | None = None, ahead: int = 1):
        """Args: pages: who holds which, where slots hold pages; ahead: tokens that a call of decode may add to a row."""
        self.length, self.pages, self.ahead = length, pages, ahead
        self.fork_min = fork_min  # shorter prompts are prefilled again instead of copied
        self.rows: dict[str, Row] = {}
        self.by_slot: list[Row | None] = [None] * slots
        self.free: deque[int] = deque(range(slots))
        self.waiting: deque[tuple[SampleRequest, Any]] = deque()
        self.begun: list[Row] = []  # rows whose turn the device has not been told of, or is to be told of again
        self.returned: list[Row] = []  # rows with a slot again, whose keys and values must come back to it
        self._came = 0  # trajectories so far
        self.leaders: dict[str, Row] = {}  # group -> the resident row that prefills the group's prompt

    def check(self, request: SampleRequest) -> str:
        """What is wrong with a request, or an empty string."""
        row = self.rows.get(request.trajectory)
        known = row.known if row else 0
        if (row and row.request) or any(waits.trajectory == request.trajectory for waits, _ in self.waiting):
            return f"trajectory {request.trajectory!r} is already sampling a turn"
        if request.start != known:
            return (
                f"trajectory {request.trajectory!r}: the engine holds {known} tokens, the request starts at "
                f"{request.start}; send exactly the tokens that follow"
            )
        if not request.tokens:
            return f"trajectory {request.trajectory!r}: a request must feed at least one token"
        if request.sampling.max_tokens < 1:
            return f"trajectory {request.trajectory!r}: max_tokens must be at least 1"
        if known + len(request.tokens) + request.sampling.max_tokens > self.length:
            return (
                f"trajectory {request.trajectory!r}: {known} held + {len(request.tokens)} fed + "
                f"{request.sampling.max_tokens} to sample do not fit a slot of {self.length} tokens"
            )
        return ""

    def enqueue(self, request: SampleRequest, ticket: Any) -> None:
        """Takes a checked request: at once for a resident trajectory, else when a slot is free."""
        row = self.rows.get(request.trajectory)
        if row and row.slot != AWAY:
            self._begin(row, request, ticket)
        else:
            self.waiting.append((request, ticket))

    def admit(self) -> None:
        """Gives free slots to waiting trajectories: by rank, one without counts as (0, 0); equals in order of arrival."""
        if self.free and any(request.rank for request, _ in self.waiting):
            self.waiting = deque(sorted(self.waiting, key=lambda waits: _rank(waits[0]), reverse=True))  # equals keep theirs
        while self.waiting and self.free and self._has_pages(self.waiting[0][0]):
            request, ticket = self.waiting.popleft()
            row = self.rows.get(request.trajectory)
            if row:  # it was here before
                self._seat(row)
                self.returned.append(row)
                self._begin(row, request, ticket)
                self._grow(row)
                continue
            row = Row(request.trajectory, request.group, AWAY, prompt=request.tokens, number=self._came)
            self.rows[request.trajectory], self._came = row, self._came + 1
            self._seat(row)
            self._begin(row, request, ticket)
            if row.group and len(row.prompt) >= self.fork_min:
                leader = self.leaders.setdefault(row.group, row)
                scored = request.sampling.prompt_logprobs  # the log-probs of a prompt come with its prefill
                if leader is not row and leader.prompt == row.prompt and not scored:
                    row.source, row.cached, row.backlog = leader, len(row.prompt) - 1, []
                    if self.pages:
                        row.copies = self.pages.fork(leader.slot, row.slot, row.cached)
            self._grow(row)

    def _seat(self, row: Row) -> None:
        row.slot = self.free.popleft()
        self.by_slot[row.slot] = row

    def _begin(self, row: Row, request: SampleRequest, ticket: Any) -> None:
        row.held += request.tokens
        row.backlog = row.held[row.cached : -1]
        row.request, row.ticket = request, ticket
        row.tokens, row.logprobs, row.versions, row.routing, row.top = [], [], [], [], []
        row.ahead = 0
        row.fed_logprobs = [] if row.turns_done else [None]  # nothing says how likely a trajectory's first token is
        self.begun.append(row)
        if request.begun:
            request.begun()

    def end(self, row: Row, now: float) -> None:
        """The turn of a row is over; what it sampled is held, all but the last token in the cache."""
        row.request = row.ticket = None
        row.held += row.tokens
        row.cached = len(row.held) - 1
        row.turns_done += 1
        row.idle_since = now

    def idle_longest(self) -> Row | None:
        """The trajectory whose slot others want and that has waited longest for its tool."""
        if not self.waiting or (self.free and self._has_pages(self.waiting[0][0])):
            return None
        return min(self._idle(), key=lambda row: row.idle_since, default=None)

    def _idle(self) -> list[Row]:
        wanted = {id(row.source) for row in self.begun}  # about to be copied from
        return [row for row in self.by_slot if row and not row.request and id(row) not in wanted]

    def vacate(self, row: Row) -> None:
        """Takes the slot from a row, whose keys and values are in its stash."""
        self._leave(row)
        row.slot = AWAY

    # ------------------------------------------------------------------ pages

    def _needs(self, row: Row) -> int:
        """Positions that a row uses by the end of the next call of decode, behind those under way."""
        assert row.request is not None
        sampled = len(row.tokens) + row.ahead
        return row.known - 1 + min(sampled + self.ahead, row.request.sampling.max_tokens)

    def _grow(self, row: Row) -> bool:
        """Gives a row the pages for the next call; whether there were enough."""
        if self.pages:
            try:
                self.pages.grow(row.slot, self._needs(row))
            except PagesExhausted:
                return False
        return True

    def _has_pages(self, request: SampleRequest) -> bool:
        """Whether a turn could begin beside those that are here, which come first."""
        if self.pages is None:
            return True
        row = self.rows.get(request.trajectory)
        known = (row.known if row else 0) + len(request.tokens)
        tokens = known - 1 + min(self.ahead, request.sampling.max_tokens)
        first = [row for row in self.by_slot if row and row.request and not self.pages.holds(row.slot)]
        return not first and self.pages.enough(tokens)

    def _turns(self) -> list[Row]:
        """Those in progress, the eldest first."""
        return sorted((row for row in self.by_slot if row and row.request), key=lambda row: row.number)

    def ample(self) -> bool:
        """Whether `fit` takes no pages from a turn that a call under way samples: all up to the youngest find free ones."""
        if self.pages is None:
            return True
        turns = self._turns()
        while turns and not turns[-1].ahead:
            turns.pop()
        return sum(self.pages.lacks(row.slot, self._needs(row)) for row in turns) <= self.pages.free

    def fit(self) -> Iterator[Row]:
        """Gives all turns, eldest first, the pages for the next call; yields who must give up its own for it.

        What a yielded row has in the cache is to be saved before the next is asked for. None of them is under way if there is
        ample room.
        """
        if self.pages is None:
            return
        turns = self._turns()
        for i, row in enumerate(turns):
            while not (grown := self._grow(row)) and (victim := self._victim(turns[i + 1 :])):
                yield victim
                self._yield_pages(victim)
            if grown and row.paused:
                self._resume(row)
            elif not grown and not row.paused:
                yield row
                self._yield_pages(row)

    def _victim(self, younger: list[Row]) -> Row | None:
        assert self.pages is not None
        wanted = {id(row.source) for row in self.begun}
        holding = [row for row in younger if self.pages.holds(row.slot) and id(row) not in wanted]
        idle = [row for row in self._idle() if self.pages.holds(row.slot)]
        return min(idle, key=lambda row: row.idle_since, default=holding[-1] if holding else None)

    def _yield_pages(self, row: Row) -> None:
        """Who waits for its tool loses its slot too; a turn in progress keeps it, for what the device knows of the turn."""
        assert self.pages is not None
        if not row.request:
            self.vacate(row)
            return
        self.pages.release(row.slot)
        row.paused = True
        if row.source:
            self._lose_source(row)
        for other in self.rows.values():
            if other.source is row:
                self._lose_source(other)

    def _resume(self, row: Row) -> None:
        row.paused = False
        if row.stash is not None and not any(other is row for other in self.returned):
            self.returned.append(row)
        if row.tokens:  # the device was told that it is frozen
            self._begin_again(row)

    def _begin_again(self, row: Row) -> None:
        if not any(other is row for other in self.begun):
            self.begun.append(row)

    def _lose_source(self, row: Row) -> None:
        """Too late to fork, or too early: it has its prompt to prefill."""
        row.source, row.copies, row.cached, row.backlog = None, [], 0, list(row.prompt[:-1])
        if self.pages:
            self.pages.release(row.slot)

    def forget(self) -> None:
        """Nothing that is cached counts any more: all rows have everything to prefill, as under new weights."""
        for row in self.rows.values():
            tokens = row.held + row.tokens
            row.cached, row.source, row.stash, row.copies = 0, None, None, []
            row.backlog = tokens[:-1] if row.request else []
            if row.request and row.tokens:  # it is to be frozen until that is done
                self._begin_again(row)
            if self.pages and row.slot != AWAY:  # what rows share one of them would write while others have it already
                self.pages.release(row.slot)
        self.returned.clear()
        self.leaders.clear()

    def take_returned(self) -> list[Row]:
        """Rows that have a slot again since the last call."""
        returned = [row for row in self.returned if not row.paused]
        self.returned = [row for row in self.returned if row.paused]
        return returned

    def take_begun(self) -> list[Row]:
        """Rows whose turn began and that can be decoded now, each once, in the order of their arrival."""
        begun = [row for row in self.begun if row.fed]
        self.begun = [row for row in self.begun if not row.fed]
        return begun

    def chunks(
        self, buckets: tuple[int, ...], rows_per_call: int, budget: float = math.inf
    ) -> Iterator[tuple[int, list[tuple[Row, list[int]]]]]:
        """Cuts backlogs into calls of (bucket, [(row, tokens)]), the eldest turn's first, until they cost the budget.

        A call costs the tokens that it is compiled for; the last may cost more than is left. A row's cut depends on its own
        backlog only, never on its neighbours nor on when it comes: with a fixed number of rows per call, its bits are its own.
        """

        def bucket_of(row: Row) -> int:
            return next((bucket for bucket in buckets if bucket >= len(row.backlog)), buckets[-1])

        while budget > 0 and (waiting := [row for row in self.begun if row.backlog and not row.paused]):
            bucket = bucket_of(waiting[0])
            work = [(row, row.backlog[:bucket]) for row in waiting if bucket_of(row) == bucket][:rows_per_call]
            yield bucket, work
            for row, tokens in work:
                row.backlog = row.backlog[len(tokens) :]
                row.cached += len(tokens)
            budget -= bucket * rows_per_call

    def release(self, trajectory: str) -> Any:
        """Frees a trajectory's slot, or takes it out of the queue; returns the ticket of an unanswered request."""
        row = self.rows.pop(trajectory, None)
        if row and row.slot != AWAY:
            self.begun = [other for other in self.begun if other is not row]
            self.returned = [other for other in self.returned if other is not row]
            self._leave(row)
            ticket = row.ticket if row.request else None
            row.request = row.ticket = None
            return ticket
        for i, (request, ticket) in enumerate(self.waiting):
            if request.trajectory == trajectory:
                del self.waiting[i]
                return ticket
        return None

    def _leave(self, row: Row) -> None:
        self.by_slot[row.slot] = None
        self.free.append(row.slot)
        if self.leaders.get(row.group) is row:
            del self.leaders[row.group]
        for other in self.rows.values():
            if other.source is row:
                self._lose_source(other)
        if self.pages:
            self.pages.release(row.slot)

    def in_progress(self) -> Iterator[SampleRequest]:
        """The requests whose turns have a slot and have not ended."""
        return (row.request for row in self.rows.values() if row.request)

    @property
    def sampling(self) -> int:
        """Rows that have a turn in progress."""
        return sum(row.request is not None for row in self.rows.values())


def _rank(request: SampleRequest) -> Rank:
    return request.rank() if request.rank else (0, 0.0)
