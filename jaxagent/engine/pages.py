"""Which pages of a paged cache hold which slot's tokens. Host side, numpy only; models/attention_paged.py reads the table.

Slots take pages as they grow. A fork shares the full pages of its source, which nobody writes again, and copies the last,
half-filled one. Page 0 belongs to nobody: unused entries of the table point there.
"""

from __future__ import annotations

import numpy as np


class PagesExhausted(Exception):
    """There are not enough free pages; nothing has changed."""


class PageTable:
    """The pages of every slot, in order."""

    def __init__(self, slots: int, slot_tokens: int, page_tokens: int, pages: int):
        """Args: pages: of the cache, page 0 among them. Raises ValueError where not even one slot can grow to its end."""
        self.page_tokens = page_tokens
        self.table = np.zeros((slots, -(-slot_tokens // page_tokens)), np.int32)
        if pages <= self.table.shape[1]:
            raise ValueError(
                f"a cache of {pages} pages of {page_tokens} tokens cannot hold one slot of {slot_tokens}: it needs at least "
                f"{self.table.shape[1] + 1}"
            )
        self._held = np.zeros(slots, np.int64)  # pages of each slot
        self._owners = np.zeros(pages, np.int64)  # slots that hold each page
        self._free = list(range(pages - 1, 0, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def enough(self, tokens: int) -> bool:
        """Whether so many tokens of a slot that holds none would find pages."""
        return -(-tokens // self.page_tokens) <= self.free

    def holds(self, slot: int) -> bool:
        """Whether a slot has any page."""
        return bool(self._held[slot])

    def of(self, slot: int, tokens: int) -> list[int]:
        """The pages of a slot's first tokens."""
        return self.table[slot, : -(-tokens // self.page_tokens)].tolist()

    def lacks(self, slot: int, tokens: int) -> int:
        """How many more pages a slot needs to hold so many tokens."""
        return max(0, -(-tokens // self.page_tokens) - int(self._held[slot]))

    def grow(self, slot: int, tokens: int) -> None:
        """Gives a slot the pages that it lacks to hold so many tokens. Raises PagesExhausted, ValueError beyond its end."""
        wanted, held = -(-tokens // self.page_tokens), self._held[slot]
        if wanted > self.table.shape[1]:
            raise ValueError(f"slot {slot} holds at most {self.table.shape[1] * self.page_tokens} tokens, asked for {tokens}")
        if wanted - held > self.free:
            raise PagesExhausted(f"slot {slot} needs {wanted - held} more pages and {self.free} are free: release a slot")
        for i in range(held, wanted):
            self._give(slot, i, self._free.pop())

    def fork(self, source: int, target: int, tokens: int) -> list[tuple[int, int]]:
        """Lets a slot begin with the first tokens of another; returns the pages to copy, (from, to).

        What the target held before is released. Raises PagesExhausted, ValueError where the source holds fewer tokens.
        """
        if source == target or tokens > self._held[source] * self.page_tokens:
            raise ValueError(f"slot {source} cannot give its first {tokens} tokens to slot {target}")
        full, rest = divmod(tokens, self.page_tokens)
        if rest and not self.free and not self._freed_by(target):
            raise PagesExhausted(f"slot {target} needs a page of its own and none is free: release a slot")
        self.release(target)
        for i in range(full):
            self._give(target, i, int(self.table[source, i]))
        if not rest:
            return []
        self._give(target, full, self._free.pop())
        return [(int(self.table[source, full]), int(self.table[target, full]))]

    def release(self, slot: int) -> None:
        """Takes a slot's pages back; those that another shares stay with it."""
        for page in self.table[slot, : self._held[slot]]:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(int(page))
        self.table[slot] = 0
        self._held[slot] = 0

    def _freed_by(self, slot: int) -> int:
        return int(np.sum(self._owners[self.table[slot, : self._held[slot]]] == 1))

    def _give(self, slot: int, index: int, page: int) -> None:
        self.table[slot, index] = page
        self._held[slot] = index + 1
        self._owners[page] += 1
