"""Finite automata over symbols: a network of alternatives is built piece by piece, then made deterministic and small.

A symbol is a byte or, from 256 on, a control token. Host side, numpy only; constraints.py says what the pieces are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from jaxtyping import Int

DEAD = -1
MAX_STATES = 100_000  # of a network, and of its subsets: a form may ask for more than any table holds


class Network:
    """A non-deterministic automaton. State 0 begins it, and is there from the start."""

    def __init__(self) -> None:
        self.free: list[list[int]] = [[]]  # moves that take no symbol
        self.moves: list[list[tuple[int, int, int]]] = [[]]  # (first symbol, last symbol, where to)

    def state(self) -> int:
        if len(self.free) == MAX_STATES:
            raise ValueError(f"a form of more than {MAX_STATES} pieces is refused: ask for less, such as fewer items")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def link(self, source: int, target: int) -> None:
        """A move that takes no symbol."""
        self.free[source].append(target)

    def move(self, source: int, target: int, first: int, last: int | None = None) -> None:
        self.moves[source].append((first, first if last is None else last, target))

    def symbol(self, source: int, first: int, last: int | None = None) -> int:
        """A new state behind one symbol of a range."""
        target = self.state()
        self.move(source, target, first, last)
        return target

    def text(self, source: int, data: bytes) -> int:
        """The state behind these bytes."""
        for byte in data:
            source = self.symbol(source, byte)
        return source

    def join(self, ends: Iterable[int]) -> int:
        """One state behind several."""
        target = self.state()
        for end in ends:
            self.link(end, target)
        return target


def determine(network: Network, symbols: int) -> tuple[Int[np.ndarray, "G A"], int]:
    """The smallest deterministic automaton of a network: the state after every symbol, DEAD for none; and where it begins.

    By subsets, then by refining a partition (Moore 1956). Raises ValueError for a network of too many subsets.
    """
    table, start = _subsets(network, symbols)
    columns = np.unique(table, axis=1)
    weight = np.random.default_rng(0).integers(1, 2**63, columns.shape[1] + 1, dtype=np.uint64)
    part = np.zeros(len(table), np.int64)
    while True:
        seen = np.where(columns >= 0, part[columns], DEAD)
        signature = np.concatenate([seen, part[:, None]], 1).astype(np.uint64)
        names, first, finer = np.unique((signature * weight).sum(1, dtype=np.uint64), return_index=True, return_inverse=True)
        if len(names) == part.max() + 1:
            break
        part = finer
    small = table[first]
    return np.where(small >= 0, finer[small], DEAD).astype(np.int32), int(finer[start])


def _subsets(network: Network, symbols: int) -> tuple[np.ndarray, int]:
    known: dict[frozenset[int], int] = {}
    waiting: list[frozenset[int]] = []

    def number(states: Iterable[int]) -> int:
        closed, ahead = set(states), list(states)
        while ahead:
            new = [state for state in network.free[ahead.pop()] if state not in closed]
            closed.update(new)
            ahead += new
        # States that only pass on say nothing by themselves.
        subset = frozenset(state for state in closed if network.moves[state] or not network.free[state])
        if len(known) > MAX_STATES:
            raise ValueError(f"a form whose beginnings fall into more than {MAX_STATES} kinds is refused: ask for less")
        if subset not in known:
            known[subset] = len(known)
            waiting.append(subset)
        return known[subset]

    start = number([0])
    rows: list[np.ndarray] = []
    while len(rows) < len(known):
        moves = [move for state in waiting[len(rows)] for move in network.moves[state]]
        row = np.full(symbols, DEAD, np.int32)
        cuts = sorted({first for first, _, _ in moves} | {last + 1 for _, last, _ in moves})
        for low, high in pairwise(cuts):
            targets = {target for first, last, target in moves if first <= low and high - 1 <= last}
            if targets:
                row[low:high] = number(targets)
        rows.append(row)
    return np.stack(rows), start
