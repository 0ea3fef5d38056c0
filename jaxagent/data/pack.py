"""Token rows packed into fixed-size micro-batches: the door between trajectories and arrays. numpy only.

Rows are placed first fit decreasing, so that little is padding. Every array is aligned to the token: `mask`, `logprob` and
`advantage` at t speak of tokens[t]. Masks are data; nothing is inferred from ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass
class Row:
    """One token row before packing. `weight` and `share` are its tokens' part in the loss: see algos/losses.py."""

    tokens: Sequence[int]
    mask: Sequence[bool]
    logprob: Sequence[float]
    advantage: Sequence[float]  # one per token
    weight: Sequence[float]  # one per token
    share: Sequence[float]  # one per token
    routing: np.ndarray | None = None  # [tokens - 1, L, k], the experts that the sampler took
    value: Sequence[float] | None = None  # of a critic before the step, one per token
    target: Sequence[float] | None = None  # that the critic is to say, one per token
    judged: Sequence[float] | None = None  # where, and how often that counts
    turn: Sequence[int] | None = None  # of every token
    age: Sequence[int] | None = None  # versions between the weights that sampled a token and those that it is trained on


@dataclass
class Batch:
    """A micro-batch of packed rows, all [M, T]. Segment 0 is padding; positions restart in every segment.

    What has no value is not there: `routing` without mixtures of experts, the rest without a critic or a reference.
    """

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    mask: np.ndarray
    logprob: np.ndarray  # of the behaviour policy
    old_logprob: np.ndarray  # of the policy at the start of the step, against which ratios are taken
    advantage: np.ndarray
    weight: np.ndarray
    share: np.ndarray
    routing: np.ndarray | None = None  # [M, T, L, k]; -1 leaves the choice to the router
    value: np.ndarray | None = None  # of the critic before the step: of the state in which the token is chosen
    target: np.ndarray | None = None
    judged: np.ndarray | None = None  # where the critic is to say the target; a process reward model at fed tokens too
    turn: np.ndarray | None = None  # by these two the gap between sampler and trainer is told apart
    age: np.ndarray | None = None
    reference: np.ndarray | None = None  # log-probs of the policy at the start of reinforcement

    @classmethod
    def empty(cls, rows: int, row_tokens: int) -> Batch:
        dtypes = {"tokens": np.int32, "segment": np.int32, "position": np.int32, "mask": np.bool_}
        names = [f.name for f in fields(cls) if f.default is not None]
        return cls(**{name: np.zeros((rows, row_tokens), dtypes.get(name, np.float32)) for name in names})

    def route(self, layers: int, per_token: int) -> None:
        """Makes room for recorded experts; none is recorded yet."""
        self.routing = np.full((*self.tokens.shape, layers, per_token), -1, np.int16)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.__dict__.items() if array is not None}


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths fit the capacity; longest first, ties in order, so the result is deterministic."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > capacity:
            raise ValueError(
                f"a trajectory of {lengths[i]} tokens does not fit a training row of {capacity}: raise "
                "learner.row_tokens or lower the token budget of an episode"
            )
        at = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if at is None:
            bins.append([])
            room.append(capacity)
            at = len(bins) - 1
        bins[at].append(i)
        room[at] -= lengths[i]
    return bins


@dataclass(frozen=True)
class Place:
    """Where a row went: micro-batch, packed row, and the span of its tokens there."""

    batch: int
    m: int
    span: slice


def places(lengths: Sequence[int], *, batch_rows: int, row_tokens: int) -> list[Place]:
    """Where `pack` puts rows of these lengths."""
    found: dict[int, Place] = {}
    for number, members in enumerate(first_fit_decreasing(lengths, row_tokens)):
        at = 0
        for i in members:
            found[i] = Place(*divmod(number, batch_rows), slice(at, at + lengths[i]))
            at += lengths[i]
    return [found[i] for i in range(len(lengths))]


def pack(rows: Sequence[Row], *, batch_rows: int, row_tokens: int) -> list[Batch]:
    """Micro-batches of `batch_rows` packed rows of `row_tokens` tokens; the last one is filled up with padding."""
    bins = first_fit_decreasing([len(row.tokens) for row in rows], row_tokens)
    return _filled(rows, bins, batch_rows, row_tokens)


def _filled(rows: Sequence[Row], bins: Sequence[Sequence[int]], batch_rows: int, row_tokens: int) -> list[Batch]:
    """Micro-batches of these bins."""
    batches = []
    for first in range(0, len(bins), batch_rows):
        batch = Batch.empty(batch_rows, row_tokens)
        for m, members in enumerate(bins[first : first + batch_rows]):
            at = 0
            for segment, i in enumerate(members, start=1):
                at = _place(batch, m, at, segment, rows[i])
        batch.old_logprob[:] = batch.logprob
        batches.append(batch)
    return batches


class Packer:
    """`pack` for rows that come group by group: a micro-batch is made as soon as there is more than fills one.

    What comes out depends on what was added, call by call, and on nothing else. The packed rows that are the fullest leave
    first; the others wait for more, so that as little is padding as if all were known.
    """

    def __init__(self, batch_rows: int, row_tokens: int):
        self.batch_rows, self.row_tokens = batch_rows, row_tokens
        self._rows: list[Row] = []

    def add(self, rows: Sequence[Row]) -> list[Batch]:
        """The micro-batches that are full now."""
        self._rows += rows
        bins = first_fit_decreasing([len(row.tokens) for row in self._rows], self.row_tokens)
        full = (len(bins) - 1) // self.batch_rows * self.batch_rows if bins else 0
        if not full:
            return []
        bins.sort(key=lambda members: -sum(len(self._rows[i].tokens) for i in members))
        batches = _filled(self._rows, bins[:full], self.batch_rows, self.row_tokens)
        self._rows = [self._rows[i] for i in sorted(i for members in bins[full:] for i in members)]
        return batches

    def rest(self) -> list[Batch]:
        """The micro-batches of what is left, the last one filled up with padding."""
        rows, self._rows = self._rows, []
        return pack(rows, batch_rows=self.batch_rows, row_tokens=self.row_tokens)


def unpack(rows: Sequence[Row], arrays: Sequence[np.ndarray], *, batch_rows: int, row_tokens: int) -> list[np.ndarray]:
    """What was computed of the micro-batches that `pack` made of these rows, [M, T] each, row by row."""
    there = places([len(row.tokens) for row in rows], batch_rows=batch_rows, row_tokens=row_tokens)
    return [arrays[place.batch][place.m, place.span] for place in there]


def _place(batch: Batch, m: int, at: int, segment: int, row: Row) -> int:
    if len(row.mask) and row.mask[0]:
        raise ValueError("the first token of a trajectory cannot be sampled: nothing came before it to predict it")
    n = len(row.tokens)
    span = slice(at, at + n)
    batch.tokens[m, span] = row.tokens
    batch.segment[m, span] = segment
    batch.position[m, span] = np.arange(n)
    batch.mask[m, span] = row.mask
    for name in ("logprob", "advantage", "weight", "share"):
        getattr(batch, name)[m, span] = np.where(row.mask, getattr(row, name), 0.0)
    for name in ("value", "target", "judged", "turn", "age"):
        if (given := getattr(row, name)) is not None:
            if getattr(batch, name) is None:
                setattr(batch, name, np.zeros(batch.tokens.shape, np.float32))
            getattr(batch, name)[m, span] = given
    if row.routing is not None:
        if batch.routing is None:
            batch.route(*row.routing.shape[1:])
        assert batch.routing is not None
        batch.routing[m, at : at + len(row.routing)] = row.routing
    return at + n


def fill(batches: Sequence[Batch]) -> float:
    """Share of the tokens of all rows that are not padding."""
    used = sum(int((batch.segment > 0).sum()) for batch in batches)
    return used / max(1, sum(batch.segment.size for batch in batches))
