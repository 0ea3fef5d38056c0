"""Advantages of rollouts, turns and tokens, worked out by hand; and what no group may get."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.algos import advantages
from jaxagent.algos.advantages import (
    COMPARE,
    Compare,
    Turns,
    gae,
    moving_baseline,
    of_rollouts_and_turns,
    returns_to_go,
    whitened,
)

BASELINED = [advantages.centred, advantages.normalised, advantages.leave_one_out]


def of(advantage: Compare, rewards: list[list[float]], valid: list[list[int]] | None = None) -> np.ndarray:
    """The advantages of groups, a row each."""
    reward_PG = np.asarray(rewards, np.float32)
    valid_PG = np.ones(reward_PG.shape, bool) if valid is None else np.asarray(valid, bool)
    return advantage(reward_PG, np.broadcast_to(np.arange(len(rewards))[:, None], reward_PG.shape), valid_PG)


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        (advantages.plain, [1, 0, 0, 1, 0]),
        (advantages.centred, [0.6, -0.4, -0.4, 0.6, -0.4]),
        (advantages.leave_one_out, [0.75, -0.5, -0.5, 0.75, -0.5]),
        # the unbiased deviation is sqrt(0.3) = 0.547723; the biased one would give 1.224742
        (advantages.normalised, [1.095443, -0.730295, -0.730295, 1.095443, -0.730295]),
    ],
)
def test_two_wins_in_five(advantage: Compare, wanted: list[float]) -> None:
    assert of(advantage, [[1, 0, 0, 1, 0]])[0] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        (advantages.plain, [2, -1, 0.5, 0]),
        (advantages.centred, [1.625, -1.375, 0.125, -0.375]),
        (advantages.leave_one_out, [2.166667, -1.833333, 0.166667, -0.5]),  # 2 - (-1 + 0.5 + 0) / 3, ...
        (advantages.normalised, [1.299998, -1.099998, 0.1, -0.3]),  # the deviation is 1.25
    ],
)
def test_rewards_of_any_size_and_sign(advantage: Compare, wanted: list[float]) -> None:
    assert of(advantage, [[2, -1, 0.5, 0]])[0] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        (advantages.plain, [1, 0, 0, 1]),
        (advantages.centred, [1 / 3, -2 / 3, 0, 1 / 3]),
        (advantages.leave_one_out, [0.5, -1, 0, 0.5]),
        (advantages.normalised, [0.577349, -1.154699, 0, 0.577349]),  # the deviation of 1, 0, 1 is 0.577350
    ],
)
def test_a_broken_rollout_leaves_the_mean_the_deviation_and_the_loss(advantage: Compare, wanted: list[float]) -> None:
    for lost in (0.0, 9.0, -1e6):
        assert of(advantage, [[1, 0, lost, 1]], [[1, 1, 0, 1]])[0] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("advantage", BASELINED)
@pytest.mark.parametrize("valid", [[1, 0, 0], [0, 0, 0]])
def test_a_rollout_without_company_teaches_nothing(advantage: Compare, valid: list[int]) -> None:
    assert of(advantage, [[1, 0, 5]], [valid])[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("advantage", COMPARE.values(), ids=COMPARE)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_of_nobody_there_are_no_advantages(advantage: Compare, shape: tuple[int, ...]) -> None:
    found = advantage(np.zeros(shape, np.float32), np.zeros(shape, int), np.zeros(shape, bool))
    assert (found.shape, found.dtype) == (shape, np.float32)


def test_groups_do_not_see_each_other() -> None:
    for advantage in BASELINED:
        both = of(advantage, [[1, 0, 0], [7, 7, 4]])
        assert both[0].tolist() == of(advantage, [[1, 0, 0]])[0].tolist()
        assert both[1].tolist() == of(advantage, [[7, 7, 4]])[0].tolist()


@drawn
@given(st.floats(-1e6, 1e6, width=32), st.sampled_from([2, 7, 16]))
def test_equal_rewards_teach_nothing_however_large_they_are(reward: float, rollouts: int) -> None:
    assert of(advantages.normalised, [[reward] * rollouts])[0].tolist() == [0.0] * rollouts


def test_rewards_that_differ_by_float_noise_teach_nothing() -> None:
    assert of(advantages.normalised, [[0.1, 0.1 + 1e-8, 0.1, 0.1 - 3e-8]])[0].tolist() == [0.0] * 4


def test_rewards_that_differ_a_little_teach_as_much_as_others() -> None:
    assert of(advantages.normalised, [[1e-3, 0, 0, 1e-3, 0]])[0] == pytest.approx(
        [1.0935, -0.7290, -0.7290, 1.0935, -0.7290], abs=2e-4
    )


groups = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=5, max_size=5), min_size=1, max_size=3)


@drawn
@given(groups, st.lists(st.booleans(), min_size=5, max_size=5))
def test_baselined_advantages_of_a_group_add_up_to_nothing(rewards: list[list[float]], valid: list[bool]) -> None:
    for advantage in BASELINED:
        sums = of(advantage, rewards, [[int(v) for v in valid]] * len(rewards)).sum(1)
        assert np.abs(sums).max() < 1e-4


@drawn
@given(groups)
def test_leave_one_out_is_the_centred_advantage_times_g_over_g_minus_1(rewards: list[list[float]]) -> None:
    assert of(advantages.leave_one_out, rewards) == pytest.approx(of(advantages.centred, rewards) * 5 / 4, abs=1e-5)


@drawn
@given(groups)
def test_a_leave_one_out_baseline_is_the_mean_of_the_others(rewards: list[list[float]]) -> None:
    for group, found in zip(rewards, of(advantages.leave_one_out, rewards), strict=True):
        wanted = [r - (sum(group) - r) / 4 for r in group]
        assert found == pytest.approx(wanted, abs=1e-4)


def test_ids_and_not_places_make_a_group() -> None:
    reward, group = np.asarray([1, 5, 0, 7, 0], np.float32), np.asarray([3, -8, 3, -8, 3])
    found = advantages.centred(reward, group, np.ones(5, bool))
    assert found == pytest.approx([2 / 3, -1, -1 / 3, 1, -1 / 3])


@drawn
@given(st.permutations(range(6)), st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6))
def test_the_order_of_rollouts_changes_nothing(order: list[int], rewards: list[float]) -> None:
    reward, group, valid = np.asarray(rewards, np.float32), np.asarray([0, 0, 0, 0, 1, 1]), np.asarray([1, 1, 0, 1, 1, 1], bool)
    for compare in COMPARE.values():
        moved = compare(reward[order], group[order], valid[order])
        assert moved == pytest.approx(compare(reward, group, valid)[order], abs=1e-5)


@pytest.mark.parametrize(("p", "wanted"), [(0.2, 0.167775), (0.5, 0.007812), (0.95, 0.66342)])
def test_the_chance_that_a_group_of_eight_teaches_nothing(p: float, wanted: float) -> None:
    every = np.asarray(list(product([0, 1], repeat=8)), np.float32)
    silent = ~of(advantages.normalised, every).any(1)
    chance = (p ** every.sum(1) * (1 - p) ** (8 - every.sum(1)))[silent].sum()
    assert chance == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("compare", [advantages.plain, advantages.leave_one_out])
@pytest.mark.parametrize("rollouts", [2, 4])
def test_the_gradient_of_a_two_armed_bandit_is_unbiased(compare: Compare, rollouts: int) -> None:
    """Over all that can happen: E[mean_i A_i d log p(a_i)] is dJ = p (1 - p) (r_1 - r_0), for the logit of arm one."""
    p, pay = 0.3, np.asarray([0.25, 1.0])
    arms = np.asarray(list(product([0, 1], repeat=rollouts)))
    chance = np.prod(np.where(arms == 1, p, 1 - p), axis=1)
    gradient = (of(compare, pay[arms]) * (arms - p)).mean(1)
    assert (chance * gradient).sum() == pytest.approx(p * (1 - p) * 0.75, abs=1e-6)


def test_a_baseline_with_its_own_sample_in_it_shrinks_the_gradient_by_one_in_g() -> None:
    p, rollouts = 0.3, 4
    arms = np.asarray(list(product([0, 1], repeat=rollouts)))
    chance = np.prod(np.where(arms == 1, p, 1 - p), axis=1)
    gradient = (of(advantages.centred, arms) * (arms - p)).mean(1)
    assert (chance * gradient).sum() == pytest.approx((1 - 1 / rollouts) * p * (1 - p), abs=1e-6)


# ====================================================================== steps of a decision process


def test_token_gae_carries_value_and_advantage_over_a_tool_span() -> None:
    reward, value = np.asarray([0, 0, 7, 7, 1.0]), np.asarray([0.2, 0.4, 0.9, 0.9, 0.6])
    mask = np.asarray([1, 1, 0, 0, 1], bool)
    advantage, target = gae(reward, value, mask, 1.0, 0.95)
    assert advantage == pytest.approx([0.751, 0.58, 0, 0, 0.4])
    assert target == pytest.approx([0.951, 0.98, 0, 0, 1])
    assert gae(reward, value, mask, 0.99, 0.95)[0] == pytest.approx([0.732273, 0.5702, 0, 0, 0.4], abs=1e-6)
    # as if tool tokens were steps
    wrong = gae(np.asarray([0, 0, 0, 0, 1.0]), value, np.ones(5, bool), 1.0, 0.95)[0]
    assert wrong[[0, 1, 4]] == pytest.approx([0.74359, 0.5722, 0.4], abs=1e-5)


@pytest.mark.parametrize(("gamma", "lam", "wanted"), [(1.0, 0.95, [0.78, 0.4]), (0.95, 1.0, [0.75, 0.4])])
def test_turn_gae_by_hand(gamma: float, lam: float, wanted: list[float]) -> None:
    assert gae(np.asarray([0, 1.0]), np.asarray([0.2, 0.6]), np.ones(2, bool), gamma, lam)[0] == pytest.approx(wanted)


steps = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=8)


@drawn
@given(steps, st.floats(0, 1), st.floats(0, 1))
def test_gae_with_a_tool_span_is_gae_with_the_span_cut_out(
    row: list[tuple[float, float, bool]], gamma: float, lam: float
) -> None:
    reward, value, mask = (np.asarray(column) for column in zip(*row, strict=True))
    for whole, cut in zip(
        gae(reward, value, mask, gamma, lam), gae(reward[mask], value[mask], mask[mask], gamma, lam), strict=True
    ):
        assert whole[mask] == pytest.approx(cut)
        assert not whole[~mask].any()


@drawn
@given(steps, st.floats(0, 1))
def test_with_lambda_one_the_target_of_the_critic_is_the_return_and_the_advantage_the_return_less_the_value(
    row: list[tuple[float, float, bool]], gamma: float
) -> None:
    reward, value, mask = (np.asarray(column) for column in zip(*row, strict=True))
    advantage, target = gae(reward, value, mask, gamma, 1.0)
    returns = returns_to_go(reward, mask, gamma)
    assert target == pytest.approx(returns, abs=1e-5)
    assert advantage == pytest.approx(np.where(mask, returns - value, 0), abs=1e-5)


def test_returns_to_go_by_hand_and_padding_does_not_change_them() -> None:
    reward = np.asarray([[0.2, 1], [0, 1]])
    assert returns_to_go(reward, np.ones((2, 2), bool), 1.0) == pytest.approx(np.asarray([[1.2, 1], [1, 1]]))
    wide, mask = np.pad(reward, ((0, 0), (0, 3)), constant_values=9.0), np.arange(5)[None].repeat(2, 0) < 2
    assert returns_to_go(wide, mask, 1.0)[:, :2] == pytest.approx(np.asarray([[1.2, 1], [1, 1]]))


def test_a_potential_moves_the_returns_by_itself_and_adds_nothing_to_a_rollout() -> None:
    potential = np.asarray([0, 0.5, 0.5, 0])  # of the four states on the way; the last is the end
    extra = potential[1:] - potential[:-1]
    assert extra == pytest.approx([0.5, 0, -0.5])
    reward, mask = np.asarray([0.0, 0, 1]), np.ones(3, bool)
    moved = returns_to_go(reward + extra, mask, 1.0) - returns_to_go(reward, mask, 1.0)
    assert moved == pytest.approx(-potential[:-1])
    assert extra.sum() == 0


# ====================================================================== whitening


def test_reinforce_pp_whitens_the_returns_of_all_tokens_together() -> None:
    reward = np.asarray([[-0.01, 0.98, 5], [0.02, -0.03, -0.01]])
    mask = np.asarray([[1, 1, 0], [1, 1, 1]], bool)
    returns = returns_to_go(reward, mask, 1.0)
    assert returns[mask] == pytest.approx([0.97, 0.98, -0.02, -0.04, -0.01])
    found = whitened(returns, mask)
    assert found[mask] == pytest.approx([1.086067, 1.104351, -0.724044, -0.760612, -0.70576], abs=2e-6)
    assert found[0, 2] == 0


def test_the_baseline_form_whitens_what_is_left_of_the_groups_mean() -> None:
    rewards = of(advantages.centred, [[1, 0], [1, 1]])
    assert whitened(rewards.reshape(-1), np.ones(4, bool)) == pytest.approx([1.224745, -1.224745, 0, 0], abs=2e-6)


@pytest.mark.parametrize("values", [[0.3, 0.3, 0.3], [0.7], [1e6, 1e6 + 1e-3]])
def test_advantages_that_are_all_equal_become_nothing(values: list[float]) -> None:
    assert not whitened(np.asarray(values), np.ones(len(values), bool)).any()


@drawn
@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=12, unique=True))
def test_whitened_advantages_have_mean_zero_and_deviation_one(values: list[float]) -> None:
    if max(values) - min(values) < 1:
        return
    found = whitened(np.asarray(values), np.ones(len(values), bool))
    assert (found.mean(), found.std(ddof=1)) == pytest.approx((0, 1), abs=1e-4)


# ====================================================================== rollouts and turns

S, A, B, G = range(4)  # the states of the worked example of GiGPO: s, a, b, g


def gigpo(rewards: list[list[float]], states: list[list[int]], groups: list[int]) -> Turns:
    width = max(len(row) for row in rewards)
    pad = [[*row, *[0.0] * (width - len(row))] for row in rewards]
    pad_states = [[*row, *[S] * (width - len(row))] for row in states]
    mask = np.asarray([[k < len(row) for k in range(width)] for row in rewards])
    return Turns(np.asarray(pad), mask, np.asarray(pad_states), np.asarray(groups), np.ones(len(rewards), bool))


def credit(turns: Turns, scope: str, gamma: float = 1.0, compare: str = "centred", weights: tuple = (1.0, 1.0)) -> np.ndarray:
    return of_rollouts_and_turns(turns, COMPARE[compare], scope, gamma, *weights)


WORKED = gigpo([[0, 0, 1], [0, 0, 0, 1], [0, 0]], [[S, A, G], [S, B, S, A], [S, B]], [0, 0, 0])


def test_gigpo_by_hand() -> None:
    returns = returns_to_go(WORKED.reward_BU, WORKED.mask_BU, 0.9)
    assert returns[WORKED.mask_BU] == pytest.approx([0.81, 0.9, 1, 0.729, 0.81, 0.9, 1, 0, 0])
    assert credit(WORKED, "none", 0.9)[:, 0] == pytest.approx([0.333333, 0.333333, -0.666667], abs=1e-6)
    of_states = credit(WORKED, "state", 0.9, weights=(0.0, 1.0))
    at = {state: [float(x) for x in of_states[WORKED.mask_BU & (WORKED.state_BU == state)]] for state in (S, A, B, G)}
    assert at[S] == pytest.approx([0.20025, 0.11925, 0.29025, -0.60975])
    assert at[A] == pytest.approx([-0.05, 0.05])
    assert at[B] == pytest.approx([0.405, -0.405])
    assert at[G] == [0.0]
    both = credit(WORKED, "state", 0.9)
    assert both[0] == pytest.approx([0.333333 + 0.20025, 0.333333 - 0.05, 0.333333, 0], abs=1e-6)


def test_gigpo_with_the_deviation_blows_up_small_differences_in_small_groups() -> None:
    found = credit(WORKED, "state", 0.9, "normalised", (0.0, 1.0))
    assert found[0, 1] == pytest.approx(-(0.5**0.5), abs=1e-4)  # 0.05 below the mean of two


def test_the_same_state_in_another_group_is_another_state() -> None:
    two = gigpo([[1], [0], [0], [0]], [[S], [S], [S], [S]], [0, 0, 1, 1])
    assert credit(two, "state", weights=(0.0, 1.0))[:, 0] == pytest.approx([0.5, -0.5, 0, 0])


def test_scopes_compare_with_turns_of_the_same_number_or_with_all() -> None:
    turns = gigpo([[0.2, 1], [0, 1], [0]], [[S, A], [S, A], [S]], [0, 0, 0])
    by_index = credit(turns, "index", weights=(0.0, 1.0))
    assert by_index[:, 0] == pytest.approx([1.2 - 2.2 / 3, 1 - 2.2 / 3, -2.2 / 3])
    assert by_index[:, 1] == pytest.approx([0, 0, 0])
    whole = credit(turns, "all", weights=(0.0, 1.0))
    assert whole[turns.mask_BU] == pytest.approx([1.2 - 0.84, 1 - 0.84, 1 - 0.84, 1 - 0.84, -0.84])


def test_the_two_comparisons_are_mixed_by_their_weights_and_gamma_zero_compares_the_turns_own_reward() -> None:
    turns = gigpo([[0.2, 1], [0, 1]], [[S, A], [S, A]], [0, 0])
    outcome = np.asarray([[0.1, 0.1], [-0.1, -0.1]])
    own = np.asarray([[0.1, 0], [-0.1, 0]])
    assert credit(turns, "index", 0.0, weights=(2.0, 0.5)) == pytest.approx(2 * outcome + 0.5 * own)
    to_go = np.asarray([[0.1, 0], [-0.1, 0]])  # of 1.2 and 1, then 1 and 1
    assert credit(turns, "index", 1.0) == pytest.approx(outcome + to_go)


def test_a_rollout_that_does_not_count_is_in_no_comparison() -> None:
    turns = gigpo([[1], [0], [9]], [[S], [S], [S]], [0, 0, 0])._replace(valid_B=np.asarray([1, 1, 0], bool))
    assert credit(turns, "state")[:, 0] == pytest.approx([1, -1, 0])


@drawn
@given(st.permutations(range(4)), st.sampled_from(["none", "index", "state", "all"]), st.integers(0, 3))
def test_the_order_of_rollouts_and_more_padding_change_no_turn(order: list[int], scope: str, more: int) -> None:
    rng = np.random.default_rng(7)
    turns = Turns(
        rng.normal(size=(4, 3)),
        np.arange(3)[None] < rng.integers(1, 4, 4)[:, None],
        rng.integers(0, 2, (4, 3)),
        np.asarray([0, 1, 0, 0]),
        np.ones(4, bool),
    )
    moved = Turns(*(np.pad(x[order], ((0, 0), (0, more))) if x.ndim == 2 else x[order] for x in turns))
    assert credit(moved, scope, 0.9)[:, :3] == pytest.approx(credit(turns, scope, 0.9)[order], abs=1e-6)


# ====================================================================== roles


def test_the_moving_baseline_of_spiral_is_the_one_from_before_the_game() -> None:
    baselines, found = [0.0, 0.0], []
    for _ in range(3):  # player 0 wins three times
        pair = []
        for role, reward in enumerate((1.0, -1.0)):
            (advantage,), baselines[role] = moving_baseline(np.asarray([reward], np.float32), baselines[role], 0.95)
            pair.append(float(advantage))
        found.append(pair)
    assert np.asarray(found) == pytest.approx(np.asarray([[1, -1], [0.95, -0.95], [0.9025, -0.9025]]))


def test_the_games_of_a_step_share_their_baseline_and_move_it_as_often_as_they_are() -> None:
    advantage, after = moving_baseline(np.asarray([1, 0, 1, 0], np.float32), 0.2, 0.5)
    assert advantage == pytest.approx([0.8, -0.2, 0.8, -0.2])
    assert after == pytest.approx(0.2 / 16 + 0.5 * 15 / 16)
    assert moving_baseline(np.zeros(0), 0.2, 0.5)[1] == 0.2
