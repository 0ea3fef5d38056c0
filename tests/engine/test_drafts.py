"""A draft is what followed the longest end of a trajectory that its group's tokens held before."""

from __future__ import annotations

import random

from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.engine.drafts import GRAM, LONGEST, PLACES, Drafts

TOKENS = st.lists(st.integers(0, 2), max_size=16)


def longest(held: list[int], others: list[list[int]]) -> int:
    """The longest end of `held` that occurs with something behind it, tried place by place."""
    ends = [(tokens, at) for tokens in [held, *others] for at in range(1, len(tokens))]
    same = lambda tokens, at, n: n <= at and tokens[at - n : at] == held[len(held) - n :]  # noqa: E731
    return max((n for tokens, at in ends for n in range(GRAM, min(LONGEST, len(held)) + 1) if same(tokens, at, n)), default=0)


@settings(drawn, max_examples=40)
@given(TOKENS, st.lists(TOKENS, max_size=2), st.integers(1, 5))
def test_the_match_is_the_longest_there_is_and_the_draft_stands_behind_one(
    held: list[int], others: list[list[int]], most: int
) -> None:
    index = Drafts()
    for tokens in others:
        index.stream(tokens)
    own = index.stream(held)
    draft, match = own.draft(most)
    places = sum(tokens[i - GRAM : i] == held[-GRAM:] for tokens in [held, *others] for i in range(GRAM, len(tokens)))
    if places <= PLACES:
        assert match == longest(held, others)
    if match:
        assert 0 < len(draft) <= most
        behind = [
            tokens[i : i + most]
            for tokens in others
            for i in range(match, len(tokens))
            if tokens[i - match : i] == held[-match:]
        ]
        circles = [held[i:] for i in range(match, len(held)) if held[i - match : i] == held[-match:]]
        assert draft in behind or draft in [(circle * most)[:most] for circle in circles]


def test_what_a_sibling_said_and_was_told_is_drafted_before_what_is_older_or_matches_less() -> None:
    index = Drafts()
    index.stream([9, 1, 2, 3, 4])
    sibling = index.stream([0])
    own = index.stream([0])
    sibling.extend([8, 1, 2, 5, 6, 7])
    own.extend([8, 1, 2])
    assert own.draft(2) == ([5, 6], 4)
    own.extend([3])
    assert own.draft(4) == ([4], 3)
    own.extend([50, 60])
    assert own.draft(4) == ([], 0)


def test_of_equal_matches_the_one_with_enough_behind_it_is_taken() -> None:
    index = Drafts()
    index.stream([1, 2, 3, 4, 5])
    index.stream([0, 1, 2, 3])  # newer, and still at its end
    assert index.stream([7, 1, 2]).draft(3) == ([3, 4, 5], 2)


def test_a_trajectory_that_repeats_itself_is_expected_to_go_on_so() -> None:
    assert Drafts().stream([5, 1, 2, 3, 1, 2, 3, 1]).draft(7) == ([2, 3, 1, 2, 3, 1, 2], 4)


def test_a_prompt_that_a_group_shares_is_indexed_once_and_its_end_leads_to_what_siblings_began_with() -> None:
    index, prompt = Drafts(), tuple(range(100))
    first, second = index.stream(prompt), index.stream(prompt)
    assert index.size == len(prompt)
    first.extend([7, 8, 9])
    assert second.tokens == list(prompt)
    assert second.draft(2) == ([7, 8], LONGEST)


def test_little_is_too_short_to_match_and_no_room_is_no_draft() -> None:
    assert Drafts().stream([1]).draft(4) == ([], 0)
    assert Drafts().stream([1, 1, 1, 1]).draft(0) == ([], 0)


def test_a_long_history_of_few_different_tokens_is_not_compared_place_by_place() -> None:
    """10,000 places of each gram: a look-up that walked them all would take minutes for these."""
    rng, index = random.Random(0), Drafts()
    index.stream([rng.randrange(2) for _ in range(40_000)])
    own = index.stream([0, 1])
    for _ in range(2000):
        own.extend([rng.randrange(2)])
        assert own.draft(4)[0]
