"""The bookkeeping of a paged cache: growing, sharing, and giving back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.engine.pages import PagesExhausted, PageTable


def test_a_slot_takes_pages_as_it_grows_and_gives_them_back() -> None:
    pages = PageTable(slots=2, slot_tokens=16, page_tokens=4, pages=6)
    pages.grow(0, 3)
    pages.grow(0, 4)
    assert (pages.free, np.count_nonzero(pages.table[0])) == (4, 1)
    pages.grow(0, 5)
    pages.grow(1, 9)
    assert pages.free == 0
    assert len(set(pages.table[pages.table > 0])) == 5
    with pytest.raises(PagesExhausted, match="slot 0 needs 1 more pages and 0 are free"):
        pages.grow(0, 9)
    pages.release(1)
    assert (pages.free, pages.table[1].tolist()) == (3, [0, 0, 0, 0])


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    pages = PageTable(slots=3, slot_tokens=16, page_tokens=4, pages=9)
    pages.grow(0, 10)
    [(source, target)] = pages.fork(0, 1, 10)
    assert pages.table[1, :2].tolist() == pages.table[0, :2].tolist()
    assert (source, target) == (pages.table[0, 2], pages.table[1, 2])
    assert source != target
    assert pages.fork(0, 2, 8) == []  # ends with a page: nothing to copy
    pages.release(0)
    assert pages.free == 9 - 1 - 3  # the two shared pages and the copy stay
    pages.release(1)
    pages.release(2)
    assert pages.free == 8


def test_a_fork_into_a_slot_that_holds_something_releases_it_first() -> None:
    pages = PageTable(slots=2, slot_tokens=8, page_tokens=4, pages=4)
    pages.grow(0, 8)
    pages.grow(1, 4)
    assert pages.free == 0
    assert len(pages.fork(0, 1, 5)) == 1
    with pytest.raises(ValueError, match="slot 1 cannot give its first 9 tokens to slot 0"):
        pages.fork(1, 0, 9)


def test_a_cache_too_small_for_one_slot_and_a_slot_beyond_its_end_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one slot of 16: it needs at least 5"):
        PageTable(slots=2, slot_tokens=16, page_tokens=4, pages=4)
    with pytest.raises(ValueError, match="slot 0 holds at most 16 tokens, asked for 17"):
        PageTable(slots=2, slot_tokens=16, page_tokens=4, pages=9).grow(0, 17)


@given(
    st.lists(st.tuples(st.sampled_from(["grow", "fork", "release"]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 16)))
)
def test_no_page_is_lost_or_held_by_a_slot_that_does_not_share_it(steps: list[tuple[str, int, int, int]]) -> None:
    pages = PageTable(slots=4, slot_tokens=16, page_tokens=4, pages=10)
    for name, slot, other, tokens in steps:
        try:
            if name == "grow":
                pages.grow(slot, tokens)
            elif name == "fork":
                pages.fork(slot, other, tokens)
            else:
                pages.release(slot)
        except (PagesExhausted, ValueError):
            pass
    held = {int(page) for page in pages.table[pages.table > 0]}
    assert len(held) + pages.free == 9
    assert not held & set(pages._free)
