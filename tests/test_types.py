"""Stop reasons, draws, and the row that a trajectory keeps of an episode."""

from __future__ import annotations

import json

import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.types import Sample, StopReason, ToolRecord, ToolSpec, Trajectory, Turn, sampling_key


@pytest.mark.parametrize(
    ("stop", "counts"),
    [
        ("answered", True),
        ("env_terminated", True),
        ("max_turns", True),
        ("max_tokens", True),
        ("policy_timeout", True),
        ("env_truncated", False),
        ("infra_failure", False),
        ("straggler", False),
        ("cancelled", False),
    ],
)
def test_only_the_infrastructures_faults_do_not_count(stop: str, counts: bool) -> None:
    assert StopReason(stop).counts is counts


def test_every_stop_reason_is_either_counted_or_not_above() -> None:
    assert len(StopReason) == 9


def test_sampling_keys_are_the_same_on_every_machine() -> None:
    assert sampling_key(0, "train/0", 0) == (3342965430, 2448197215)
    assert sampling_key(17, "test/41", 3) == (718167574, 2571358869)


def test_sampling_keys_differ_when_seed_group_or_rollout_does() -> None:
    keys = {
        sampling_key(seed, group, rollout)
        for seed in range(10)
        for group in ("train/1", "train/11", "test/1", "1/1")
        for rollout in range(20)
    }
    assert len(keys) == 10 * 4 * 20
    assert all(0 <= half < 2**32 for key in keys for half in key)


def played() -> Trajectory:
    row = Trajectory("world/1", 5, "train/0", 2, difficulty="2 hops")
    row.feed([1, 2, 3])
    row.sampled(Sample([4, 5], [-0.5, -1.0], [3, 3], True, 0, [1, 2, 3]), "start", "ab").reward = 0.25
    row.feed([6])
    turn = row.sampled(Sample([7], [-2.0], [4], True, 5, [6]), "room", "c")
    turn.reward, turn.reason = 0.5, "arrived"
    turn.tools = [ToolRecord("look", {"key": "37"}, "ok", "52", 0.01, 2)]
    row.stop = StopReason.ANSWERED
    return row


def test_a_row_says_of_every_token_who_wrote_it_and_in_which_turn() -> None:
    row = played()
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert row.mask == [False, False, False, True, True, False, True]
    assert row.logprob == [0.0, 0.0, 0.0, -0.5, -1.0, 0.0, -2.0]
    assert row.version == [-1, -1, -1, 3, 3, -1, 4]
    assert row.turn == [-1, -1, -1, 0, 0, -1, 1]
    assert [(turn.fed_start, turn.start, turn.end) for turn in row.turns] == [(0, 3, 5), (5, 6, 7)]


def test_the_return_is_the_sum_of_the_turns_rewards() -> None:
    assert played().reward == 0.75
    assert Trajectory("t", 0, "g", 0).reward == 0


def test_success_is_measured_by_the_outcome_and_not_by_what_shaping_adds() -> None:
    row = played()
    row.turns[1].reward, row.turns[1].outcome, row.turns[1].parts = 1.25, 0.25, {"outcome": 0.25, "bonus": 1.0}
    assert row.turns[0].outcome is None
    assert row.outcome == row.turns[0].reward + 0.25
    assert row.reward >= 1
    assert not row.solved
    row.turns[1].earn(1.0)
    assert (row.turns[1].reward, row.turns[1].parts) == (2.25, {"outcome": 1.25, "bonus": 1.0})
    assert row.solved


def test_rewards_that_sum_to_success_up_to_rounding_are_success() -> None:
    row = played()
    row.turns[0].reward, row.turns[1].reward = 0.8999999999999999, 0.1  # nine times 0.1, and once more
    assert row.outcome < 1
    assert row.solved
    row.turns[1].reward = 0.099
    assert not row.solved


def test_the_other_segments_of_a_rollout_have_their_part_in_its_outcome() -> None:
    row = played()
    row.elsewhere = 1.0
    assert row.outcome == row.reward == 1.75
    row.outcome_elsewhere = 0.5
    assert (row.outcome, row.reward) == (1.25, 1.75)


def test_a_row_keeps_its_own_copy_of_what_the_sampler_was_fed() -> None:
    fed = [1]
    row = Trajectory("t", 0, "g", 0)
    row.feed(fed)
    row.sampled(Sample([2], [0.0], [0], True, 0, fed), "", "")
    fed.append(9)
    assert row.tokens == [1, 2]
    assert row.turns[0].fed == [1]


texts = st.text(max_size=20)
numbers = st.floats(allow_nan=False)
records = st.builds(
    ToolRecord,
    texts,
    st.dictionaries(texts, texts | st.integers() | st.none(), max_size=3),
    texts,
    texts,
    numbers,
    st.integers(),
)
turns = st.builds(
    Turn,
    *(st.integers(0, 99) for _ in range(3)),
    texts,
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    texts,
    numbers,
    texts,
    st.none() | numbers,
    texts,
    st.lists(records, max_size=2),
    st.none() | numbers,
    st.dictionaries(texts, numbers, max_size=2),
    st.dictionaries(texts, numbers, max_size=2),
)
trajectories = st.builds(
    Trajectory,
    texts,
    st.integers(),
    texts,
    st.integers(0, 99),
    role=texts,
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    mask=st.lists(st.booleans(), max_size=5),
    logprob=st.lists(numbers, max_size=5),
    turns=st.lists(turns, max_size=3),
    stop=st.sampled_from(StopReason),
    error=texts,
    seconds=numbers,
)


@drawn
@given(trajectories)
def test_a_trajectory_is_the_same_after_json(row: Trajectory) -> None:
    again = Trajectory.from_json(json.loads(json.dumps(row.to_json())))
    assert again == row
    assert isinstance(again.stop, StopReason)


def test_a_tool_without_a_schema_has_no_parameters() -> None:
    assert ToolSpec("door").parameter_names == ()
    assert ToolSpec("look", "", {"type": "object", "properties": {"b": {}, "a": {}}}).parameter_names == ("b", "a")
