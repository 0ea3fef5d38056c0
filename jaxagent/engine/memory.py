"""Keys and values on the device, and how a trajectory's are copied, saved to the host and brought back: by slots or by pages.

The caller decides whose (slots.py); both forms answer to the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxagent.engine.cache import Cache
from jaxagent.engine.options import EngineOptions
from jaxagent.engine.pages import PageTable
from jaxagent.engine.programs import Call
from jaxagent.engine.slots import Row
from jaxagent.engine.steps import Steps


class SlotMemory:
    """Every slot has room for the longest trajectory."""

    table: None = None

    def __init__(self, steps: Steps, cache: Cache, options: EngineOptions):
        self.cache, self._steps, self._options = cache, steps, options

    def fork(self, forks: list[Row]) -> None:
        """Copies to rows what their sources have of their prompts."""
        o = self._options
        src_R = np.zeros(o.append_rows, np.int32)
        dst_R = np.full(o.append_rows, o.slots, np.int32)  # beyond the last slot: dropped
        for i, row in enumerate(forks):
            assert row.source is not None
            src_R[i], dst_R[i] = row.source.slot, row.slot
        length = copied_length(o, max(row.cached for row in forks))
        self.cache = self._steps.fork(self.cache, src_R, dst_R, length)

    def save(self, row: Row) -> Cache:
        """What a row has in the cache, in host memory."""
        return jax.device_get(self._steps.stash(self.cache, row.slot, copied_length(self._options, row.filled)))

    def bring_back(self, row: Row) -> None:
        """Puts what was saved into the row's slot."""
        self.cache, row.stash = self._steps.restore(self.cache, row.slot, row.stash), None

    def calls(self) -> Iterator[Call]:
        """One call of every program of this class, which changes nothing that counts."""
        o = self._options
        none, nowhere = np.zeros(o.append_rows, np.int32), np.full(o.append_rows, o.slots, np.int32)
        for length in copied_lengths(o):
            if o.fork_min_tokens <= o.slot_tokens:
                yield Call(self._steps.fork, lambda length=length: (self.cache, none, nowhere, length), self._keep)
            if o.offload_after_s:
                yield Call(self._steps.stash, lambda length=length: (self.cache, 0, length), lambda out: None)
                saved = jax.eval_shape(lambda cache, length=length: self._steps.stash(cache, 0, length), self.cache)
                yield Call(self._steps.restore, lambda saved=saved: (self.cache, o.slots, _zeros(saved)), self._keep)

    def _keep(self, cache: Cache) -> None:
        self.cache = cache


class PageMemory:
    """Slots hold pages, as many as their trajectories need; what one has is all in pages of its own or shared with a fork."""

    def __init__(self, steps: Steps, cache: Cache, options: EngineOptions, pages: PageTable):
        self.cache, self._steps, self._options, self._pages = cache, steps, options, pages

    @property
    def table(self) -> Int[np.ndarray, "C M"]:
        """The pages of every slot, as they are now."""
        return self._pages.table.copy()

    def fork(self, forks: list[Row]) -> None:
        """Copies the pages that rows do not share with their sources."""
        width = self._options.append_rows
        copies = [pair for row in forks for pair in row.copies]
        if not copies:
            return
        src_R, dst_R = np.zeros(width, np.int32), np.full(width, self._options.pages, np.int32)  # beyond the last: dropped
        src_R[: len(copies)], dst_R[: len(copies)] = zip(*copies, strict=True)
        self.cache = self._steps.fork(self.cache, src_R, dst_R)

    def save(self, row: Row) -> Cache:
        """What a row has in the cache, in host memory."""
        held = self._pages.of(row.slot, row.filled)
        page_n = np.zeros(copied_length(self._options, row.filled) // self._options.chunk, np.int32)
        page_n[: len(held)] = held
        return jax.device_get(self._steps.stash(self.cache, page_n))

    def bring_back(self, row: Row) -> None:
        """Puts what was saved into the row's pages."""
        held = self._pages.of(row.slot, row.filled)
        page_n = np.full(jax.tree.leaves(row.stash)[0].shape[0], self._options.pages, np.int32)  # beyond the last: dropped
        page_n[: len(held)] = held
        self.cache, row.stash = self._steps.restore(self.cache, page_n, row.stash), None

    def calls(self) -> Iterator[Call]:
        """One call of every program of this class, which changes nothing that counts."""
        o = self._options
        none, nowhere = np.zeros(o.append_rows, np.int32), np.full(o.append_rows, o.pages, np.int32)
        if o.fork_min_tokens <= o.slot_tokens:
            yield Call(self._steps.fork, lambda: (self.cache, none, nowhere), self._keep)
        for count in (length // o.chunk for length in copied_lengths(o)):
            page_n = np.zeros(count, np.int32)
            yield Call(self._steps.stash, lambda page_n=page_n: (self.cache, page_n), lambda out: None)
            saved = jax.eval_shape(self._steps.stash, self.cache, page_n)
            back = page_n + o.pages
            yield Call(self._steps.restore, lambda back=back, saved=saved: (self.cache, back, _zeros(saved)), self._keep)

    def _keep(self, cache: Cache) -> None:
        self.cache = cache


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), shapes)


def copied_length(options: EngineOptions, used: int) -> int:
    """The static length that is copied: a power of two of chunks, so that few programs exist."""
    length = options.chunk
    while length < used:
        length *= 2
    return min(length, options.slot_tokens)


def copied_lengths(options: EngineOptions) -> list[int]:
    """All that `copied_length` may give."""
    lengths = [copied_length(options, 0)]
    while lengths[-1] < options.slot_tokens:
        lengths.append(copied_length(options, lengths[-1] + 1))
    return lengths
