"""Where a turn ends: the earliest of all its stops, found in whatever calls its tokens came."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxagent.engine.slots import Row
from jaxagent.engine.stops import end_of, sample_of
from jaxagent.types import SampleRequest, Sampling

PIECES = [b"a", b"b", b"ab", b"c", "é".encode()[:1], "é".encode()[1:], b"", b"bca"]


def ask(stop: tuple[int, ...] = (), **sampling: object) -> SampleRequest:
    return SampleRequest("t", (1,), 0, (0, 0), stop, Sampling(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "request_", "end"),
    [
        ([0, 3, 1], ask(stop=(1,)), 3),
        ([0, 1, 3], ask(stop_sequences=((1, 3),)), 3),
        ([0, 1, 3], ask(stop_sequences=((0, 3), (3, 1))), None),
        ([3, 0, 1], ask(stop=(7,), stop_sequences=((0, 1), (3, 0, 1))), 3),
        ([0, 1, 3], ask(stop=(3,), stop_strings=("b",)), 2),  # the earliest
        ([0, 7, 3], ask(stop_strings=("abc",)), 2),  # its last token says more than the string
        ([2, 3, 0], ask(stop_strings=("abc",)), 2),
        ([0, 6, 1, 6, 3, 6], ask(stop_strings=("abc",)), 5),  # tokens that say nothing stand between
        ([4, 5, 0], ask(stop_strings=("é",)), 2),  # cut in the middle of a letter
        ([0, 99, 1], ask(stop_strings=("ab",)), 3),  # an id that the tokenizer has not
        ([0, 1, 0, 1], ask(stop_strings=("ba", "b")), 2),
        ([0, 1], ask(), None),
    ],
)
def test_the_earliest_stop_ends_the_turn(tokens: list[int], request_: SampleRequest, end: int | None) -> None:
    assert end_of(tokens, 0, request_, PIECES) == end


@pytest.mark.parametrize("seed", range(50))
def test_a_stop_is_found_at_the_same_place_however_the_turn_was_cut_into_calls(seed: int) -> None:
    rng = random.Random(seed)
    tokens = rng.choices(range(8), k=30)
    request = ask(stop_strings=("abca", "cé", "caab"))
    want = next((n for n in range(1, 31) if end_of(tokens[:n], 0, request, PIECES) is not None), None)
    assert want is None or end_of(tokens[:want], 0, request, PIECES) == want
    since, found = 0, None
    while since < 30 and found is None:
        until = min(since + rng.randrange(1, 6), 30)
        found, since = end_of(tokens[:until], since, request, PIECES), until
    assert found == want


def test_what_was_sampled_behind_the_end_leaves_no_trace() -> None:
    request = ask(top_logprobs=1, prompt_logprobs=True)
    row = Row("t", "", 0, held=[1], request=request, fed_logprobs=[None])
    row.tokens, row.logprobs, row.versions = [5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0], [2] * 4
    row.routing = [np.zeros((3, 1, 1)), np.ones((4, 1, 1))]  # three fed tokens, four that were decoded
    row.top = [(np.asarray([[5, 0], [6, 0], [7, 0]]), -np.ones((3, 2))), (np.asarray([[8, 0]] * 3), -np.ones((3, 2)))]
    sample = sample_of(row, 2)
    assert (sample.tokens, sample.logprobs, sample.versions, sample.stopped) == ([5, 6], [-1.0, -2.0], [2, 2], True)
    assert sample.routing.shape == (5, 1, 1)
    assert sample.top_logprobs == [[(5, -1.0)], [(6, -1.0)]]
    assert sample.fed_logprobs == [None]
    assert row.tokens == [5, 6]
