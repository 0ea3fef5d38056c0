"""From groups to rows: every turn gets its advantage, and what has no gradient still counts in the denominator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.algos.table import TABLE, WORDS, choose
from jaxagent.credit import (
    Credit,
    assign,
    counted,
    credit_metrics,
    group_metrics,
    plain_rows,
    role_metrics,
    rows_of,
    sampling_metrics,
    training_rows,
)
from jaxagent.data.pack import Row
from jaxagent.types import Group, Sample, StopReason, Trajectory


def row(
    rollout: int,
    rewards: list[float],
    stop: StopReason = StopReason.ANSWERED,
    role: str = "agent",
    n: int = 2,
    states: str = "",
) -> Trajectory:
    """A row of a turn for each reward; a turn is one fed and `n` sampled tokens."""
    made = Trajectory("t", 0, "g", rollout, role=role, stop=stop)
    for k, reward in enumerate(rewards):
        fed, held = [1], len(made.tokens)
        made.feed(fed)
        sample = Sample([2] * n, [-0.5] * n, [0] * n, True, held, fed)
        made.sampled(sample, states[k] if states else "", "").reward = reward
    return made


def group(key: str, *rows: Trajectory) -> Group:
    return Group(key, list(rows))


def advantages(rows: list[Trajectory]) -> list[list[float | None]]:
    return [[turn.advantage for turn in row.turns] for row in rows]


def near(*values: list[float]) -> list[Any]:
    return [pytest.approx(row, abs=1e-6) for row in values]


def test_every_turn_of_a_rollout_gets_its_advantage_within_its_group() -> None:
    first = group("a", row(0, [0.0, 1.0]), row(1, [0.0]))
    second = group("b", row(0, [4.0]), row(1, [2.0]), row(2, [0.0]))
    credits = assign([first, second], choose("dr_grpo"))
    assert [[c.row for c in of_group] for of_group in credits] == [first.trajectories, second.trajectories]
    assert advantages(counted([first, second])) == near([0.5, 0.5], [-0.5], [2.0], [0.0], [-2.0])
    assert credits[0][0].advantage.tolist() == [0.0, 0.5, 0.5, 0.0, 0.5, 0.5]


def test_roles_are_compared_with_their_own_kind_only() -> None:
    white = [row(i, [reward], role="white") for i, reward in enumerate([1.0, 0.0])]
    black = [row(i, [reward], role="black") for i, reward in enumerate([-5.0, -5.0])]
    assign([group("a", white[0], black[0], white[1], black[1])], choose("rloo"))
    assert advantages(white) == [[1.0], [-1.0]]
    assert advantages(black) == [[0.0], [0.0]]


def test_a_broken_rollout_has_no_advantage_and_no_part_in_those_of_others() -> None:
    broken = row(2, [9.0], StopReason.INFRA_FAILURE)
    empty = Trajectory("t", 0, "g", 3, stop=StopReason.MAX_TOKENS)  # its prompt was too long to sample anything
    groups = [group("a", row(0, [1.0]), row(1, [0.0]), broken, empty)]
    assert len(assign(groups, choose("dr_grpo"))[0]) == 2
    assert advantages(counted(groups)) == [[0.5], [-0.5]]
    assert broken.turns[0].advantage is None


def test_nothing_is_no_rows() -> None:
    assert training_rows([], choose("grpo")) == ([], 0.0)
    assert training_rows([group("a", row(0, [1.0], StopReason.CANCELLED))], choose("grpo")) == ([], 0.0)
    assert assign([group("a"), group("b")], choose("ppo"), value={}) == [[], []]


def test_a_training_row_has_its_advantage_on_sampled_tokens_only() -> None:
    rows, idle = training_rows([group("a", row(0, [0.0, 1.0]), row(1, [0.0]))], choose("dr_grpo", length=10.0))
    assert idle == 0
    assert rows[0].advantage == [0.0, 0.5, 0.5, 0.0, 0.5, 0.5]
    assert rows[1].advantage == [0.0, -0.5, -0.5]
    assert list(rows[0].mask) == [False, True, True, False, True, True]
    assert rows[0].logprob == [0.0, -0.5, -0.5, 0.0, -0.5, -0.5]
    assert rows[0].weight == [0.0, 0.1, 0.1, 0.0, 0.1, 0.1]
    assert rows[0].share == [0.0, 0.25, 0.25, 0.0, 0.25, 0.25]
    assert rows[1].share == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("aggregate", "idle"),
    [
        ("token_mean", 5.0),  # 2 + 3 sampled tokens
        ("sequence_mean", 2.0),  # two rollouts
        ("sequence_sum", 2.0),
        ("sequence_sum_norm", 2.0),
        ("turn_mean", 2.0),
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
    assert {w for r in rows for w in (*r.weight[1:], *r.share[1:])} == {0.5}
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
    assign([group("a", *two, whole)], choose("dr_grpo"))
    assert advantages([*two, whole]) == [[0.5], [0.5, 0.5], [-0.5]]


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


# ====================================================================== what algorithms look at


def token_advantages(credits: list[list[Credit]]) -> list[list[float]]:
    """Of the sampled tokens, row by row."""
    return [c.advantage[np.asarray(c.row.mask)].tolist() for of_group in credits for c in of_group]


def test_gigpo_compares_turns_taken_in_the_same_state() -> None:
    rows = [row(0, [0, 0, 1], states="sag"), row(1, [0, 0, 0, 1], states="sbsa"), row(2, [0, 0], states="sb")]
    elsewhere = group("b", row(0, [5.0], states="s"), row(1, [5.0], states="s"))
    for played in elsewhere.trajectories:
        played.group = "h"
    credits = assign([group("a", *rows), elsewhere], choose("gigpo", gamma=0.9))
    e = 1 / 3
    assert advantages(rows) == near(
        [e + 0.20025, e - 0.05, e], [e + 0.11925, e + 0.405, e + 0.29025, e + 0.05], [-2 * e - 0.60975, -2 * e - 0.405]
    )
    metrics = credit_metrics([c for of_group in credits for c in of_group], choose("gigpo"))
    assert metrics["credit/state_group_size"] == pytest.approx(11 / 5)  # s 4, a 2, b 2, g 1; s 2 in the other group
    assert metrics["credit/state_singletons"] == pytest.approx(1 / 11)


def test_a_group_whose_world_names_no_states_has_the_same_credit_alone_and_in_its_step() -> None:
    made = [group("a", row(0, [1.0]), row(1, [0.0])), group("b", row(0, [1.0, 0], states="xy"), row(1, [0.0], states="x"))]
    whole = assign(made, choose("gigpo"))
    assert len(whole[0]) == 2
    for one, credits in zip(made, whole, strict=True):
        (alone,) = assign([one], choose("gigpo"))
        assert [c.advantage.tolist() for c in alone] == [c.advantage.tolist() for c in credits]


def test_turn_ppo_reads_the_value_where_the_turn_begins_and_judges_there() -> None:
    played = row(0, [0.0, 1.0])
    value = np.asarray([9, 0.2, 9, 9, 0.6, 9], np.float32)
    algorithm = choose("ppo_turn", gamma=1.0)
    for change, wanted in (({}, [0.78, 0.4]), ({"gamma": 0.95, "gae_lambda": 1.0}, [0.75, 0.4])):
        from_table = choose("ppo_turn", **{"gamma": 1.0, **change})
        ((credit,),) = assign([group("a", played)], unwhitened(from_table), value={id(played): value})
        assert credit.advantage.tolist() == near([0, wanted[0], wanted[0], 0, wanted[1], wanted[1]])[0]
    ((credit,),) = assign([group("a", played)], unwhitened(algorithm), value={id(played): value})
    assert credit.judged is not None
    assert credit.target is not None
    assert credit.judged.tolist() == [False, True, False, False, True, False]
    assert credit.target[credit.judged] == pytest.approx([0.98, 1.0])
    assert advantages([played]) == near([0.78, 0.4])


def unwhitened(algorithm: Any) -> Any:
    return replace(algorithm, whiten=False)


def test_token_ppo_goes_over_tool_tokens_and_judges_every_sampled_token() -> None:
    played = row(0, [0.0], n=2)
    played.feed([1, 1])
    played.sampled(Sample([2], [-0.5], [0], True, 5, [1, 1]), "", "").reward = 1.0
    value = np.asarray([0.7, 0.2, 0.4, 0.9, 0.9, 0.6], np.float32)
    algorithm = unwhitened(choose("ppo", gae_lambda=0.95))
    ((credit,),) = assign([group("a", played)], algorithm, value={id(played): value})
    assert credit.advantage.tolist() == near([0, 0.751, 0.58, 0, 0, 0.4])[0]
    assert credit.target is not None
    assert credit.target.tolist() == near([0, 0.951, 0.98, 0, 0, 1])[0]
    assert credit.judged is not None
    assert credit.judged.tolist() == played.mask
    assert advantages([played]) == near([(0.751 + 0.58) / 2, 0.4])


def test_reinforce_pp_subtracts_the_distance_from_the_reward_of_its_token_and_whitens_all_of_them() -> None:
    rows = [row(0, [1.0], n=2), row(1, [0.0], n=3)]
    penalty = {id(rows[0]): np.asarray([9, 0.01, 0.02]), id(rows[1]): np.asarray([9, -0.02, 0.03, 0.01])}
    credits = assign([group("a", *rows)], choose("reinforce_pp", kl_coef=0.1), penalty=penalty)
    assert token_advantages(credits) == near([1.086067, 1.104351], [-0.724044, -0.760612, -0.70576])


def test_the_baseline_form_of_reinforce_pp_whitens_over_all_groups() -> None:
    groups = [group("a", row(0, [1.0], n=1), row(1, [0.0], n=1)), group("b", row(0, [1.0], n=1), row(1, [1.0], n=1))]
    assert token_advantages(assign(groups, choose("reinforce_pp_baseline"))) == near([1.224745], [-1.224745], [0], [0])


def test_a_distance_in_the_reward_is_part_of_the_return_that_rollouts_are_compared_by() -> None:
    rows = [row(0, [1.0]), row(1, [1.0])]
    penalty = {id(rows[0]): np.asarray([0, 0.1, 0.3]), id(rows[1]): np.asarray([0, 0.0, 0.0])}
    assign([group("a", *rows)], choose("rloo", kl_coef=0.1), penalty=penalty)
    assert advantages(rows) == near([-0.4], [0.4])


def test_gdpo_normalises_every_part_of_the_reward_before_it_adds_them() -> None:
    rows = [row(0, [1.1]), row(1, [0.1]), row(2, [0.0]), row(3, [1.0])]
    for played, form in zip(rows, (0.1, 0.1, 0.0, 0.0), strict=True):
        played.turns[0].parts = {"form": form}
    added, apart = (unwhitened(choose(name)) for name in ("grpo", "gdpo"))
    assign([group("a", *rows)], added)
    assert advantages(rows)[1][0] == pytest.approx(-0.775553, abs=1e-5)  # the form is drowned by the outcome
    assign([group("a", *rows)], apart)
    h = 0.8660254  # each part is two of one kind, two of another
    assert advantages(rows) == [pytest.approx([x], abs=1e-4) for x in (2 * h, 0.0, -2 * h, 0.0)]
    whole = assign([group("a", *rows)], choose("gdpo"))[0]  # whitened besides: the unbiased deviation of 8 tokens is 1
    metrics = credit_metrics(whole, choose("gdpo"))
    assert metrics["credit/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["credit/advantage_max"] == pytest.approx((7 / 4) ** 0.5, abs=1e-4)


def test_spiral_compares_each_role_with_its_own_moving_mean() -> None:
    baselines: dict[str, float] = {}
    found = []
    for _ in range(3):
        rows = [row(0, [1.0], role="0"), row(0, [-1.0], role="1")]
        assign([group("a", *rows)], choose("spiral"), baselines=baselines)
        found.append([played.turns[0].advantage for played in rows])
    assert found == near([1, -1], [0.95, -0.95], [0.9025, -0.9025])
    assert baselines == pytest.approx({"0": 0.142625, "1": -0.142625})


def test_dropped_rollouts_leave_the_loss_and_the_denominator_but_not_their_group() -> None:
    rows = [row(0, [1.0]), row(1, [0.0]), row(2, [0.5], StopReason.MAX_TOKENS)]
    kept, idle = training_rows([group("a", *rows)], choose("dr_grpo", drop_overlong=True))
    assert ([r.advantage[1] for r in kept], idle) == (pytest.approx([0.5, -0.5]), 0.0)
    assert advantages(rows) == near([0.5], [-0.5], [0.0])
    alone = [row(0, [1.0]), row(1, [0.0], StopReason.MAX_TOKENS)]
    assert len(training_rows([group("a", *alone)], choose("dr_grpo", drop_overlong=True))[0]) == 1


def test_segments_continue_each_other_as_steps_of_a_decision_process() -> None:
    cut, whole = segmented(0, [0.25], [0.75, 0.5]), row(0, [0.25, 0.75, 0.5])
    for name in ("ppo", "ppo_turn", "reinforce_to_go", "reinforce_pp"):
        algorithm = unwhitened(choose(name))
        for played in ([whole], cut):
            value = {id(r): np.full(len(r.tokens), 0.3, np.float32) for r in played} if algorithm.critic else None
            assign([group("a", *played)], algorithm, value=value)
        assert [turn.advantage for r in cut for turn in r.turns] == near([t.advantage for t in whole.turns])[0]


@pytest.mark.parametrize("name", TABLE)
def test_the_order_of_groups_and_rollouts_changes_no_advantage(name: str) -> None:
    def groups() -> list[Group]:
        return [
            group("a", row(0, [0, 1.0], states="xy"), row(1, [0.5], states="x", n=3), row(2, [0.0], states="x")),
            group("b", row(0, [0.2], states="x"), row(1, [0, 0, 1], states="xyx")),
        ]

    plain, moved = groups(), groups()[::-1]
    moved = [Group(g.key, g.trajectories[::-1]) for g in moved]
    for made in (plain, moved):
        rows = counted(made)
        value = {id(r): np.linspace(0, 1, len(r.tokens)) for r in rows} if TABLE[name].critic else None
        assign(made, TABLE[name], value=value)
    again = [Group(g.key, g.trajectories[::-1]) for g in moved[::-1]]
    for g, h in zip(plain, again, strict=True):
        for a, b in zip(advantages(g.trajectories), advantages(h.trajectories), strict=True):
            assert a == pytest.approx(b, abs=1e-6)


@drawn
@given(
    st.lists(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from(WORDS["aggregate"]),
)
def test_all_weights_of_a_step_add_up_to_the_mean_of_ones(lengths: list[list[list[int]]], mode: str) -> None:
    """With a loss of 1 everywhere, every average is 1, or a mean length."""
    groups = []
    for g, rollouts in enumerate(lengths):
        made = []
        for i, turns in enumerate(rollouts):
            played = Trajectory("t", 0, f"g{g}", i, stop=StopReason.ANSWERED)
            for n in turns:
                played.feed([1])
                played.sampled(Sample([2] * n, [-0.5] * n, [0] * n, True, 0, [1]), "", "").reward = 1.0
            made.append(played)
        groups.append(group(f"g{g}", *made))
    rows, idle = training_rows(groups, choose("reinforce", aggregate=mode))
    found = sum(sum(r.weight) for r in rows) / (sum(sum(r.share) for r in rows) + idle)
    sizes = [sum(turns) for rollouts in lengths for turns in rollouts]
    wanted = {"sequence_sum": np.mean(sizes), "sequence_sum_norm": np.mean(sizes) / 100.0}.get(mode, 1.0)
    assert found == pytest.approx(wanted)


# ====================================================================== what is told of them


def test_the_metrics_of_groups_by_hand() -> None:
    solved, failed = group("a", row(0, [1.0]), row(1, [1.0])), group("b", row(0, [0.0]), row(1, [0.0]))
    mixed = group("c", row(0, [1.0]), row(1, [0.0]), row(2, [7.0], StopReason.INFRA_FAILURE))
    mixed.trajectories[0].task = "u"
    assert group_metrics([mixed], [solved, failed, mixed]) == pytest.approx(
        {
            "groups/all_solved": 1 / 3,
            "groups/none_solved": 1 / 3,
            "groups/std_mean": 0.5**0.5 / 3,
            "groups/kept": 1 / 3,
            "groups/repeated_tasks": 1 / 3,
        }
    )


def test_the_metrics_of_sampling_by_hand() -> None:
    played = row(0, [0.0, 0.0, 0.0, 0.0, 1.0], n=1)
    played.version = [-1 if not m else 3 for m in played.mask]
    played.logprob = [-float(t) if t >= 0 else 0.0 for t in played.turn]
    assert sampling_metrics([played], 5) == {
        "rollout/entropy_turn_0": 0.0,
        "rollout/entropy_turn_1": 1.0,
        "rollout/entropy_turn_2": 2.0,
        "rollout/entropy_turn_3_on": 3.5,
        "feed/staleness_mean": 2.0,
        "feed/staleness_max": 2.0,
    }
    assert credit_metrics([], choose("grpo")) == {}


def test_the_metrics_of_credit_by_hand() -> None:
    credits = assign([group("a", row(0, [3.0], n=1), row(1, [0.0], n=3), row(2, [0.0], n=1))], choose("dr_grpo"))[0]
    assert credit_metrics(credits, choose("dr_grpo")) == pytest.approx(
        {
            "credit/advantage_mean": -0.4,  # of 2, -1, -1, -1 and -1
            "credit/advantage_std": 1.2,
            "credit/advantage_min": -1.0,
            "credit/advantage_max": 2.0,
            "credit/positive_tokens": 0.2,
        }
    )


def test_rows_without_credit_are_their_tokens_only() -> None:
    (plain,) = plain_rows([row(0, [1.0])])
    assert (list(plain.tokens), plain.advantage, plain.weight) == ([1, 2, 2], [0.0] * 3, [0.0] * 3)
    assert rows_of([]) == ([], 0.0)


def test_the_metrics_of_several_roles_by_hand() -> None:
    assert role_metrics([group("a", row(0, [1.0]), row(1, [0.0]))]) == {}
    first, second, others = row(0, [1.0]), row(1, [-1.0]), row(0, [-1.0])
    first.role, second.role, others.role = "first", "second", "second"
    first.group = others.group = "a"
    second.group = "b"
    games = [Group("a", [first], others=[others]), Group("b", [second])]
    assert role_metrics(games) == {
        "reward/role_first": 1.0,
        "reward/role_second": -1.0,
        "reward/success_against_past": 1.0,
    }
