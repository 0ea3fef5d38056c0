"""Rows packed into micro-batches: every token once, none split, little padding."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.data.pack import Batch, Packer, Row, fill, first_fit_decreasing, pack, places, unpack


def row(first: int, length: int, sampled_from: int = 1) -> Row:
    """A row whose tokens are `first`, `first` + 1, ...; values that tell where they came from."""
    tokens = list(range(first, first + length))
    mask = [i >= sampled_from for i in range(length)]
    scale = [float(token) for token in tokens]
    return Row(tokens, mask, [-s for s in scale], [2 * s for s in scale], [3 * s for s in scale], [4 * s for s in scale])


@pytest.mark.parametrize(
    ("lengths", "capacity", "bins"),
    [
        ([], 10, []),
        ([4], 10, [[0]]),
        ([4, 6], 10, [[1, 0]]),
        ([2, 7, 3, 8], 10, [[3, 0], [1, 2]]),  # 8+2, 7+3; in order of arrival it would be three
        ([5, 5, 5], 10, [[0, 1], [2]]),
        ([6, 5, 5, 4], 10, [[0, 3], [1, 2]]),
        ([10, 10], 10, [[0], [1]]),
        ([0, 3], 3, [[1, 0]]),
    ],
)
def test_the_longest_rows_are_placed_first_each_into_the_first_bin_with_room(
    lengths: list[int], capacity: int, bins: list[list[int]]
) -> None:
    assert first_fit_decreasing(lengths, capacity) == bins


def test_a_row_that_fits_no_bin_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"11 tokens does not fit a training row of 10: raise learner\.row_tokens"):
        first_fit_decreasing([3, 11], 10)


@drawn
@given(st.lists(st.integers(1, 32), max_size=40))
def test_bins_hold_every_row_once_never_too_much_and_few_bins_are_half_empty(lengths: list[int]) -> None:
    bins = first_fit_decreasing(lengths, 32)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert all(0 < load <= 32 for load in loads)
    assert sum(load <= 16 for load in loads) <= 1


def test_rows_stand_beside_each_other_with_their_own_segment_and_positions() -> None:
    (batch,) = pack([row(10, 3), row(20, 5), row(30, 2)], batch_rows=2, row_tokens=8)
    assert batch.tokens.tolist() == [[20, 21, 22, 23, 24, 10, 11, 12], [30, 31, 0, 0, 0, 0, 0, 0]]
    assert batch.segment.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.position.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.mask.astype(int).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.logprob.tolist() == [[0, -21, -22, -23, -24, 0, -11, -12], [0, -31, 0, 0, 0, 0, 0, 0]]
    assert batch.old_logprob.tolist() == batch.logprob.tolist()
    assert batch.advantage[0].tolist() == [0, 42, 44, 46, 48, 0, 22, 24]
    assert batch.weight[0].tolist() == [0, 63, 66, 69, 72, 0, 33, 36]
    assert batch.share[1].tolist() == [0, 124, 0, 0, 0, 0, 0, 0]
    assert fill([batch]) == 10 / 16


def test_the_old_log_probabilities_are_no_view_of_the_behaviours() -> None:
    (batch,) = pack([row(1, 4)], batch_rows=1, row_tokens=4)
    batch.old_logprob[:] = 0
    assert batch.logprob.any()


@drawn
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=20), st.integers(1, 4))
def test_every_token_is_packed_once_with_what_belongs_to_it(shapes: list[tuple[int, int]], batch_rows: int) -> None:
    rows = [row(1 + 100 * i, length, min(start, length)) for i, (length, start) in enumerate(shapes)]
    batches = pack(rows, batch_rows=batch_rows, row_tokens=16)
    assert {batch.tokens.shape for batch in batches} == {(batch_rows, 16)}
    placed = np.concatenate([batch.tokens[batch.segment > 0] for batch in batches])
    assert sorted(placed.tolist()) == sorted(token for r in rows for token in r.tokens)
    for batch in batches:
        assert not batch.mask[batch.segment == 0].any()
        for name, factor in (("logprob", -1), ("advantage", 2), ("weight", 3), ("share", 4)):
            assert np.array_equal(getattr(batch, name), np.where(batch.mask, factor * batch.tokens, 0))
        starts = batch.position == 0
        assert np.array_equal(batch.tokens[starts & (batch.segment > 0)] % 100, np.ones((starts & (batch.segment > 0)).sum()))
    assert fill(batches) == len(placed) / sum(batch.tokens.size for batch in batches)


def test_types_are_those_of_the_device_and_a_batch_is_a_plain_tree() -> None:
    batch = Batch.empty(2, 4)
    types = {name: str(array.dtype) for name, array in batch.arrays().items()}
    assert types["tokens"] == types["segment"] == types["position"] == "int32"
    assert types["mask"] == "bool"
    assert {types[name] for name in ("logprob", "old_logprob", "advantage", "weight", "share")} == {"float32"}


def test_nothing_packed_is_no_batch_and_no_fill() -> None:
    assert pack([], batch_rows=2, row_tokens=4) == []
    assert fill([]) == 0.0


def test_a_row_whose_first_token_is_said_to_be_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="the first token of a trajectory cannot be sampled"):
        pack([row(1, 3, sampled_from=0)], batch_rows=1, row_tokens=4)


def test_recorded_experts_lie_beside_their_tokens_and_the_rest_is_left_to_the_router() -> None:
    rows = [row(0, 3), row(5, 2)]
    routing = np.arange(2 * 4).reshape(2, 2, 2).astype(np.int16)
    rows[0].routing = routing
    (batch,) = pack(rows, batch_rows=1, row_tokens=6)
    assert batch.routing is not None
    np.testing.assert_array_equal(batch.routing[0, :2], routing)
    assert (batch.routing[0, 2:] == -1).all()
    assert "routing" not in pack([row(0, 3)], batch_rows=1, row_tokens=6)[0].arrays()


@drawn
@given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 3))
def test_places_are_where_rows_are_packed(lengths: list[int], batch_rows: int) -> None:
    rows = [row(100 * (i + 1), length) for i, length in enumerate(lengths)]
    batches = pack(rows, batch_rows=batch_rows, row_tokens=12)
    for made, place in zip(rows, places(lengths, batch_rows=batch_rows, row_tokens=12), strict=True):
        assert batches[place.batch].tokens[place.m, place.span].tolist() == list(made.tokens)
    back = unpack(rows, [batch.tokens for batch in batches], batch_rows=batch_rows, row_tokens=12)
    assert [tokens.tolist() for tokens in back] == [list(made.tokens) for made in rows]


@drawn
@given(st.lists(st.lists(st.integers(1, 16), max_size=8), max_size=12))
def test_rows_that_come_group_by_group_are_packed_once_and_nearly_as_densely(groups: list[list[int]]) -> None:
    packer, batches, rows = Packer(batch_rows=2, row_tokens=16), [], []
    for lengths in groups:
        first = 1 + sum(len(row.tokens) for row in rows)
        added = [row(first + sum(lengths[:i]), length) for i, length in enumerate(lengths)]
        rows += added
        batches += packer.add(added)
    early = len(batches)
    batches += packer.rest()
    found = sorted(int(token) for batch in batches for token in batch.tokens[batch.segment > 0])
    assert found == sorted(token for one in rows for token in one.tokens)
    assert packer.rest() == []
    assert len(batches) - early <= 1 or not rows  # all but one were full before the last group was in
    assert len(batches) <= 1.25 * len(pack(rows, batch_rows=2, row_tokens=16)) + 1


def test_a_micro_batch_leaves_when_there_is_more_than_fills_one_the_fullest_rows_first() -> None:
    packer = Packer(batch_rows=1, row_tokens=10)
    assert packer.add([row(1, 6)]) == []
    (batch,) = packer.add([row(20, 9)])
    assert batch.tokens[0].tolist() == [*range(20, 29), 0]
    (batch,) = packer.rest()
    assert batch.tokens[0].tolist() == [*range(1, 7), 0, 0, 0, 0]
