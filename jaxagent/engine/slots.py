"""Which trajectory owns which slot, and what it waits for: the engine's bookkeeping. Plain Python, no JAX.

The host decides all placement; the device is told. A trajectory holds its slot, and so its keys and values, from its first
request until it is released, also while its tool runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxagent.types import SampleRequest


@dataclass
class Row:
    """A resident trajectory: what its slot holds, and the turn that is being sampled, if any."""

    trajectory: str
    group: str
    slot: int
    known: int = 0  # tokens fed and sampled so far; the last of them is pending, not in the cache
    pending: int = -1
    prompt: tuple[int, ...] = ()  # tokens of the first request, which group mates may fork
    backlog: list[int] = field(default_factory=list)  # tokens that still have to be prefilled
    cached: int = 0  # tokens whose keys and values are in the cache
    request: SampleRequest | None = None
    ticket: Any = None  # how the waiting caller is answered
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    source: Row | None = None  # the row whose cache this one forks before its first turn
    turns_done: int = 0
    routing: list[Any] = field(default_factory=list)  # recorded experts of this turn's tokens, in pieces
    prompt_routing: list[Any] = field(default_factory=list)  # those of the prompt's cached tokens, for who forks them
    history: list[int] = field(default_factory=list)  # all known tokens
    fed_logprobs: list[float | None] = field(default_factory=list)  # of this turn's fed tokens, where they are asked for
    top: list[tuple[Any, Any]] = field(default_factory=list)  # likeliest tokens of this turn and their log-probs, in pieces


class SlotTable:
    """Slots, their owners, and the queue of requests that have no slot yet."""

    def __init__(self, slots: int, length: int, fork_min: int):
        self.length = length
        self.fork_min = fork_min  # shorter prompts are prefilled again instead of copied
        self.rows: dict[str, Row] = {}
        self.by_slot: list[Row | None] = [None] * slots
        self.free: deque[int] = deque(range(slots))
        self.waiting: deque[tuple[SampleRequest, Any]] = deque()
        self.begun: list[Row] = []
        self.leaders: dict[str, Row] = {}  # group -> the resident row that prefills the group's prompt

    def check(self, request: SampleRequest) -> str:
        """What is wrong with a request, or an empty string."""
        row = self.rows.get(request.trajectory)
        known = row.known if row else 0
        if row and row.request:
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
        if row:
            self._begin(row, request, ticket)
        else:
            self.waiting.append((request, ticket))

    def admit(self) -> None:
        """Gives free slots to waiting trajectories, in order of arrival."""
        while self.waiting and self.free:
            request, ticket = self.waiting.popleft()
            row = Row(request.trajectory, request.group, self.free.popleft(), prompt=request.tokens)
            self.rows[request.trajectory] = row
            self.by_slot[row.slot] = row
            self._begin(row, request, ticket)
            if row.group and len(row.prompt) >= self.fork_min:
                leader = self.leaders.setdefault(row.group, row)
                scored = request.sampling.prompt_logprobs  # the log-probs of a prompt come with its prefill
                if leader is not row and leader.prompt == row.prompt and not scored:
                    row.source, row.cached, row.backlog = leader, len(row.prompt) - 1, []

    def _begin(self, row: Row, request: SampleRequest, ticket: Any) -> None:
        unfed = [row.pending] if row.known else []
        row.backlog = [*unfed, *request.tokens[:-1]]
        row.cached = row.known - len(unfed)
        row.known += len(request.tokens)
        row.pending = request.tokens[-1]
        row.request, row.ticket = request, ticket
        row.tokens, row.logprobs, row.versions, row.routing, row.top = [], [], [], [], []
        row.history += request.tokens
        row.fed_logprobs = [] if unfed else [None]  # nothing says how likely a trajectory's first token is
        self.begun.append(row)

    def take_begun(self) -> list[Row]:
        """Rows whose turn began since the last call, in the order of their arrival."""
        begun, self.begun = self.begun, []
        return begun

    def chunks(self, buckets: tuple[int, ...], rows_per_call: int) -> Iterator[tuple[int, list[tuple[Row, list[int]]]]]:
        """Cuts all backlogs into calls of (bucket, [(row, tokens)]).

        A row's cut depends on its own backlog only, never on its neighbours: with a fixed number of rows per call, its bits
        are its own.
        """
        while True:
            by_bucket: dict[int, list[tuple[Row, list[int]]]] = {}
            for row in self.rows.values():
                if row.backlog:
                    bucket = next((b for b in buckets if b >= len(row.backlog)), buckets[-1])
                    by_bucket.setdefault(bucket, []).append((row, row.backlog[:bucket]))
            if not by_bucket:
                return
            for bucket, work in by_bucket.items():
                for i in range(0, len(work), rows_per_call):
                    yield bucket, work[i : i + rows_per_call]
            for work in by_bucket.values():
                for row, tokens in work:
                    row.backlog = row.backlog[len(tokens) :]
                    row.cached += len(tokens)

    def release(self, trajectory: str) -> Any:
        """Frees a trajectory's slot, or takes it out of the queue; returns the ticket of an unanswered request."""
        row = self.rows.pop(trajectory, None)
        if row:
            self.by_slot[row.slot] = None
            self.free.append(row.slot)
            self.begun = [other for other in self.begun if other is not row]
            if self.leaders.get(row.group) is row:
                del self.leaders[row.group]
            for other in self.rows.values():
                if other.source is row:  # too late to fork from it
                    other.source, other.cached, other.backlog = None, 0, list(other.prompt[:-1])
            return row.ticket if row.request else None
        for i, (request, ticket) in enumerate(self.waiting):
            if request.trajectory == trajectory:
                del self.waiting[i]
                return ticket
        return None

    @property
    def sampling(self) -> int:
        """Rows that have a turn in progress."""
        return sum(row.request is not None for row in self.rows.values())
