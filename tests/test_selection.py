"""What is chosen from a group: the best, what reaches a threshold, the best and the worst; and what is never chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jaxagent.selection import FinetuneOptions, Pair, best, differ, imitated, pairs_of, reaching, rows_of
from jaxagent.types import Group, Sample, StopReason, Trajectory


def rollout(number: int, reward: float, stop: StopReason = StopReason.ANSWERED, **changes: Any) -> Trajectory:
    row = Trajectory("t", 0, "g", number, stop=stop, **changes)
    row.feed([1, 2])
    row.sampled(Sample([10 + number, 3], [-0.5, -0.5], [0, 0], True, 0, [1, 2]), "", "").reward = reward
    return row


def group(*rewards: float) -> Group:
    return Group("g", [rollout(i, reward) for i, reward in enumerate(rewards)])


def who(rows: Sequence[Any]) -> list[int]:
    return [row.tokens[2] - 10 for row in rows]


def test_the_best_of_a_group_is_the_first_with_the_highest_reward() -> None:
    assert who(best(group(0.0, 1.0, 1.0, 0.5))) == [1]


@pytest.mark.parametrize("reward", [0.0, 1.0, -2.0])
def test_a_group_whose_rewards_are_equal_has_no_best_and_no_pair(reward: float) -> None:
    assert best(group(reward, reward, reward + 1e-9)) == []
    assert pairs_of(group(reward, reward, reward)) == []


def test_what_reaches_the_threshold_is_kept_also_where_all_do() -> None:
    assert who(reaching(group(0.0, 0.5, 1.0), 0.5)) == [1, 2]
    assert who(reaching(group(1.0, 1.0), 1.0)) == [0, 1]
    assert reaching(group(0.0, 0.0), 0.5) == []
    assert who(reaching(group(1 / 3, 0.3), 1 / 3)) == [0]


def test_a_pair_is_the_best_and_the_worst() -> None:
    (pair,) = pairs_of(group(0.5, 1.0, 0.0, 0.0))
    assert (who(pair.chosen), who(pair.rejected)) == ([1], [2])


def test_two_rollouts_that_wrote_the_same_are_no_pair() -> None:
    same = Group("g", [rollout(0, 0.0), rollout(0, 1.0)])
    assert pairs_of(same) == []
    assert who(best(same)) == [0]


def test_an_episode_that_the_infrastructure_broke_is_never_chosen() -> None:
    broken = rollout(0, 5.0, StopReason.INFRA_FAILURE)
    mixed = Group("g", [broken, rollout(1, 1.0), rollout(2, 0.0)])
    assert who(best(mixed)) == who(reaching(mixed, 0.5)) == who(pairs_of(mixed)[0].chosen) == [1]
    assert best(Group("g", [broken, rollout(1, 0.0)])) == []


def test_roles_are_not_compared_with_each_other() -> None:
    seats = Group("g", [rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.0, role="other"), rollout(3, 0.5, role="other")])
    assert who(best(seats)) == [0, 3]
    assert [who(pair.rejected) for pair in pairs_of(seats)] == [[1], [2]]


def test_all_segments_of_the_best_rollout_are_kept() -> None:
    first, second = rollout(1, 0.5), rollout(1, 0.5, segment=1)
    first.elsewhere = second.elsewhere = 0.5
    assert who(best(Group("g", [rollout(0, 0.0), first, second]))) == [1, 1]


def test_a_row_counts_what_was_sampled_once_and_nothing_else() -> None:
    (row,) = rows_of([rollout(4, 0.0)])
    assert (row.tokens, row.mask) == ([1, 2, 14, 3], [False, False, True, True])
    assert row.advantage == row.weight == row.share == [1.0] * 4


def test_answers_differ_in_what_was_sampled_only() -> None:
    def made(tokens: list[int]) -> list[Any]:
        return [imitated(tokens, [False, True, False, True])]

    assert not differ(Pair(made([1, 2, 3, 4]), made([1, 2, 9, 4])))
    assert differ(Pair(made([1, 2, 3, 4]), made([1, 2, 3, 5])))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"mode": "rl"}, "finetune.mode must be one of sft, raft, rest_em, search, rest_mcts, dpo"),
        ({"mode": "sft"}, "finetune.path must name the file"),
        ({"mode": "search", "path": "x"}, "finetune.path must be empty where finetune.mode is search, which samples; got 'x'"),
        ({"mode": "raft", "rounds": 0}, "finetune.rounds must be at least 1, got 0"),
        ({"mode": "dpo", "path": "x", "rounds": 2}, "finetune.rounds must be 1 where finetune.path"),
        ({"mode": "rest_mcts"}, "finetune.rounds must be at least 2 where finetune.mode is rest_mcts: the first .*; got 1"),
        ({"mode": "raft", "threshold": (0.9, 0.5)}, r"finetune.threshold must not fall, got \(0.9, 0.5\)"),
        ({"mode": "dpo", "beta": 0.0}, "finetune.beta must be positive"),
        ({"batch": 0}, "finetune.batch must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FinetuneOptions(**options)
