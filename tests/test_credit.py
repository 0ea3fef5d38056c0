"""From groups to rows: every turn gets its advantage, and what has no gradient still counts in the denominator."""

from __future__ import annotations

import pytest

from jaxagent.algos.table import choose
from jaxagent.credit import assign, training_rows
from jaxagent.data.pack import Row
from jaxagent.types import Group, Sample, StopReason, Trajectory


def row(
    rollout: int, rewards: list[float], stop: StopReason = StopReason.ANSWERED, role: str = "agent", n: int = 2
) -> Trajectory:
    """A row of a turn for each reward; a turn is one fed and `n` sampled tokens."""
    made = Trajectory("t", 0, "g", rollout, role=role, stop=stop)
    for reward in rewards:
        fed, held = [1], len(made.tokens)
        made.feed(fed)
        made.sampled(Sample([2] * n, [-0.5] * n, [0] * n, True, held, fed), "", "").reward = reward
    return made


def group(key: str, *rows: Trajectory) -> Group:
    return Group(key, list(rows))


def advantages(rows: list[Trajectory]) -> list[list[float | None]]:
    return [[turn.advantage for turn in row.turns] for row in rows]


def test_every_turn_of_a_rollout_gets_its_advantage_within_its_group() -> None:
    first = group("a", row(0, [0.0, 1.0]), row(1, [0.0]))
    second = group("b", row(0, [4.0]), row(1, [2.0]), row(2, [0.0]))
    counted = assign([first, second], choose("dr_grpo"))
    assert counted == first.trajectories + second.trajectories
    assert advantages(counted) == [[0.5, 0.5], [-0.5], [2.0], [0.0], [-2.0]]


def test_roles_are_compared_with_their_own_kind_only() -> None:
    white = [row(i, [reward], role="white") for i, reward in enumerate([1.0, 0.0])]
    black = [row(i, [reward], role="black") for i, reward in enumerate([-5.0, -5.0])]
    assign([group("a", white[0], black[0], white[1], black[1])], choose("rloo"))
    assert advantages(white) == [[1.0], [-1.0]]
    assert advantages(black) == [[0.0], [0.0]]


def test_a_broken_rollout_has_no_advantage_and_no_part_in_those_of_others() -> None:
    broken = row(2, [9.0], StopReason.INFRA_FAILURE)
    empty = Trajectory("t", 0, "g", 3, stop=StopReason.MAX_TOKENS)  # its prompt was too long to sample anything
    counted = assign([group("a", row(0, [1.0]), row(1, [0.0]), broken, empty)], choose("dr_grpo"))
    assert advantages(counted) == [[0.5], [-0.5]]
    assert broken.turns[0].advantage is None


def test_nothing_is_no_rows() -> None:
    assert training_rows([], choose("grpo")) == ([], 0.0)
    assert training_rows([group("a", row(0, [1.0], StopReason.CANCELLED))], choose("grpo")) == ([], 0.0)


def test_a_training_row_has_its_advantage_on_sampled_tokens_only() -> None:
    rows, idle = training_rows([group("a", row(0, [0.0, 1.0]), row(1, [0.0]))], choose("dr_grpo", length=10.0))
    assert idle == 0
    assert rows[0].advantage == [0.0, 0.5, 0.5, 0.0, 0.5, 0.5]
    assert rows[1].advantage == [0.0, -0.5, -0.5]
    assert list(rows[0].mask) == [False, True, True, False, True, True]
    assert rows[0].logprob == [0.0, -0.5, -0.5, 0.0, -0.5, -0.5]
    assert rows[0].weight == [0.1] * 6
    assert rows[0].share == [0.25] * 6
    assert rows[1].share == [0.5] * 3


@pytest.mark.parametrize(
    ("aggregate", "idle"),
    [
        ("token_mean", 5.0),  # 2 + 3 sampled tokens
        ("sequence_mean", 2.0),  # two rollouts
        ("sequence_sum", 2.0),
        ("sequence_sum_norm", 2.0),
    ],
)
def test_rows_without_a_gradient_are_left_out_but_stay_in_the_denominator(aggregate: str, idle: float) -> None:
    alike = group("a", row(0, [1.0], n=2), row(1, [1.0], n=3))
    mixed = group("b", row(0, [1.0]), row(1, [0.0]))
    algorithm = choose("grpo", aggregate=aggregate)
    rows, left_out = training_rows([alike, mixed], algorithm)
    assert (len(rows), left_out) == (2, pytest.approx(idle))
    assert training_rows([mixed], algorithm)[0] == rows
    kept, none = training_rows([alike, mixed], algorithm, keep_idle=True)
    assert (len(kept), none) == (4, 0.0)
    assert kept[2:] == rows
    denominator = sum(s for r in kept for s, m in zip(r.share, r.mask, strict=True) if m)
    of_rest = sum(s for r in rows for s, m in zip(r.share, r.mask, strict=True) if m)
    assert denominator == pytest.approx(of_rest + left_out)


def test_a_worked_step_of_grpo() -> None:
    # two wins in five: 1.095443 and -0.730295; two sampled tokens each, so that a token weighs a half
    rows, idle = training_rows([group("a", *(row(i, [r]) for i, r in enumerate([1.0, 0, 0, 1.0, 0])))], choose("grpo"))
    assert [r.advantage[1] for r in rows] == pytest.approx([1.095443, -0.730295, -0.730295, 1.095443, -0.730295], abs=2e-6)
    assert {w for r in rows for w in (*r.weight, *r.share)} == {0.5}
    assert idle == 0


# ====================================================================== segments


def segmented(rollout: int, *rewards: list[float], n: int = 2) -> list[Trajectory]:
    """A rollout of one row for each list of rewards."""
    rows = [row(rollout, each, n=n) for each in rewards]
    for segment, made in enumerate(rows):
        made.segment = segment
        made.elsewhere = sum(sum(each) for each in rewards) - sum(rewards[segment])
    return rows


def test_the_segments_of_a_rollout_are_one_rollout_with_one_return_and_one_advantage() -> None:
    two, whole = segmented(0, [0.25], [0.75, 0.0]), row(1, [0.0])
    counted = assign([group("a", *two, whole)], choose("dr_grpo"))
    assert counted == [*two, whole]
    assert advantages(counted) == [[0.5], [0.5, 0.5], [-0.5]]


@pytest.mark.parametrize("name", ["grpo", "dapo", "reinforce", "dr_grpo"])
def test_a_rollout_in_segments_weighs_what_it_weighs_in_one_row(name: str) -> None:
    algorithm = choose(name, length=16.0) if name == "dr_grpo" else choose(name)
    others = [row(1, [0.0], n=3), row(2, [0.0], n=5)]
    cut, _ = training_rows([group("a", *segmented(0, [0.25], [0.75, 0.0]), *others)], algorithm)
    whole, _ = training_rows([group("a", row(0, [0.25, 0.75, 0.0]), *others)], algorithm)

    def totals(rows: list[Row]) -> list[float]:
        return [
            sum(values[t] for r in rows for t in range(len(r.tokens)) if r.mask[t] for values in (getattr(r, key),))
            for key in ("weight", "share", "advantage")
        ]

    assert totals(cut) == pytest.approx(totals(whole))
    assert len(cut) == len(whole) + (len(cut) > 1)


def test_a_segment_in_which_nothing_was_sampled_yet_changes_nothing() -> None:
    rows = segmented(0, [1.0], [])
    rows[1].feed([1, 1])
    trained, _ = training_rows([group("a", *rows, row(1, [0.0]))], choose("dr_grpo", length=4.0))
    assert [len(r.tokens) for r in trained] == [3, 3]
