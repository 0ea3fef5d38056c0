"""Values from the visits of others, worked out by hand; and that the gradient they give is the exact one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxagent.algos.advantages import gae
from jaxagent.algos.values import OWN, Paths, anchored, branch_scores, chosen_turns, path_weights, visits


def paths(
    rewards: list[list[float]],
    states: list[str],
    group: list[int],
    trunk: list[int] | None = None,
    leave: list[int] | None = None,
) -> Paths:
    """Paths whose turns are taken in states of one letter each."""
    shape = len(rewards), max(map(len, rewards))
    reward, mask, state = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, int)
    for i, (row, letters) in enumerate(zip(rewards, states, strict=True)):
        reward[i, : len(row)], mask[i, : len(row)], state[i, : len(row)] = row, True, [ord(letter) for letter in letters]
    alone = [-1] * len(rewards)
    return Paths(reward, mask, state, np.asarray(group), np.asarray(trunk or alone), np.asarray(leave or [0] * len(rewards)))


# s-a-g wins; s-b-s-a wins; s-b fails; another group stands in the same states
WALKS = paths([[0, 0, 1], [0, 0, 0, 1], [0, 0], [5, 5]], ["sag", "sbsa", "sb", "sb"], [0, 0, 0, 1])
# the trunk s-a-b fails, a branch of turn 1 goes a-g and wins, another trunk s-b fails
TREE = paths([[0, 0, 0], [0, 1], [0, 0]], ["sab", "ag", "sb"], [0, 0, 0], [-1, 0, -1], [0, 1, 0])


def test_a_value_is_the_mean_return_of_the_first_visits_of_the_others() -> None:
    found = visits(WALKS, 0.9)
    # from s: .81 and .729 and 0, each without one's own; a: 1 after the last of sbsa, .9 of sag; b: 0, .81
    assert found.value_BU[0] == pytest.approx([0.729 / 2, 1.0, 0.0, 0.0], abs=1e-6)
    assert found.value_BU[1] == pytest.approx([0.81 / 2, 0.0, 0.81 / 2, 0.9], abs=1e-6)
    assert found.value_BU[2] == pytest.approx([(0.81 + 0.729) / 2, 0.81, 0.0, 0.0], abs=1e-6)
    assert found.count_BU.tolist() == [[2, 1, 0, 0], [2, 1, 2, 1], [2, 1, 0, 0], [0, 0, 0, 0]]
    assert found.square_BU[2, 0] == pytest.approx((0.81**2 + 0.729**2) / 2, abs=1e-6)


def test_a_branch_speaks_of_the_state_that_it_leaves_in_and_of_no_action_before_that() -> None:
    found = visits(TREE, 1.0)
    assert found.count_BU.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert found.value_BU[0].tolist() == [0.0, 1.0, 0.0]  # in s the other trunk alone; in a the branch; in b the other trunk
    assert found.value_BU[1].tolist() == [0.0, 0.0, 0.0]  # in a its trunk, which failed


def test_advantages_by_hand() -> None:
    kept = OWN / (1 + OWN)
    advantage = anchored(TREE, 1.0)
    # The trunk: in b it is as good as the other; from a the branch won, so what was done there cost its value.
    assert advantage[0].tolist() == pytest.approx([1.0 - kept, -1.0, 0.0])
    # The branch: the win from g, which nobody else saw, is all its own.
    assert advantage[1].tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert advantage[2].tolist() == pytest.approx([0.0, 0.0, 0.0])
    assert anchored(WALKS, 0.9)[3].tolist() == pytest.approx([5 + 0.9 * 5, 5, 0, 0])  # alone: returns to go


def test_where_nobody_else_was_the_baseline_is_the_last_one_and_earlier_turns_see_the_return() -> None:
    lone = paths([[0, 0, 1], [1]], ["sxy", "s"], [0, 0])
    # in s the other one earned 1; in x and y nobody was: A = 1 - 1 everywhere
    assert anchored(lone, 1.0)[0].tolist() == [0.0, 0.0, 0.0]
    assert anchored(lone, 1.0)[1].tolist() == [0.0, 0.0, 0.0]
    assert anchored(lone, 0.5)[0].tolist() == pytest.approx([0.25 - 1, 0.5 - 1, 0.0])


def test_padding_order_and_other_groups_change_nothing() -> None:
    order = np.asarray([2, 0, 1])
    back = np.argsort(order)
    moved = Paths(*(x[order] for x in TREE[:4]), np.where(TREE.trunk_B < 0, -1, back[TREE.trunk_B])[order], TREE.leave_B[order])
    assert anchored(moved, 0.9)[back].tolist() == anchored(TREE, 0.9).tolist()
    assert path_weights(moved)[back].tolist() == path_weights(TREE).tolist()
    wide = Paths(*(np.pad(x, ((0, 0), (0, 2))) for x in TREE[:3]), *TREE[3:])
    assert anchored(wide, 0.9)[:, :3].tolist() == anchored(TREE, 0.9).tolist()


def test_a_future_that_was_sampled_several_times_counts_once() -> None:
    forked = paths([[0] * 4, [0] * 3, [0] * 3, [0] * 1], ["abcd", "bcd", "bcd", "d"], [0] * 4, [-1, 0, 0, 0], [0, 1, 1, 3])
    assert path_weights(forked).tolist() == [
        pytest.approx(row) for row in ([1, 1 / 3, 1 / 3, 1 / 6], [1 / 3] * 3 + [0], [1 / 3] * 3 + [0], [1 / 6, 0, 0, 0])
    ]
    assert path_weights(WALKS).tolist() == WALKS.mask_BU.astype(float).tolist()


def test_turns_are_branched_where_the_returns_of_others_differ_and_visits_are_few() -> None:
    scores = branch_scores(WALKS)
    of_group = 0.25  # of the totals 1 and 0, for the first two; the third sees two wins
    assert scores[0, :3] == pytest.approx([np.sqrt((2 * 0.25 + of_group) / 9), np.sqrt(of_group / 4), np.sqrt(of_group)])
    assert not scores[2:].any()
    assert branch_scores(TREE).any(1).tolist() == [False, False, False]  # both trunks failed
    drawn = chosen_turns(scores, 500, np.random.default_rng(0))
    assert {row for row, _ in drawn} == {0, 1}
    assert (0, 3) not in drawn
    assert np.mean([place == (0, 2) for place in drawn]) == pytest.approx(scores[0, 2] / scores.sum(), abs=0.06)
    assert chosen_turns(np.zeros((2, 2)), 3, np.random.default_rng(0)) == []


def test_a_lambda_of_every_state_is_that_of_gae_where_they_are_equal() -> None:
    rng = np.random.default_rng(0)
    reward, value, mask = rng.random((3, 5)), rng.random((3, 5)), rng.random((3, 5)) < 0.7
    one, each = (gae(reward, value, mask, 0.9, lam)[0] for lam in (0.8, np.full((3, 5), 0.8)))
    assert one.tolist() == each.tolist()
    ends = gae(reward[:1], value[:1], np.ones((1, 5), bool), 0.9, np.asarray([[1, 1, 0, 1, 1.0]]))[0][0]
    # lambda 0 in the state of turn 2: turn 1 sees its value and nothing behind it
    assert ends[1] == pytest.approx(reward[0, 1] + 0.9 * value[0, 2] - value[0, 1])
    assert ends[3] == pytest.approx(reward[0, 3] + 0.9 * reward[0, 4] - value[0, 3])


# ---------------------------------------------------------------------- unbiased

TURNS, TRUNKS, BRANCHES, GROUPS = 3, 3, 3, 1200


def walk(policy: np.ndarray, at: np.ndarray, turn: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """A walk on -1, 0, 1 with a door that leads out: rewards depend on where, when and what; (state, action, reward, mask)."""
    shape = len(at), TURNS
    state, action = np.zeros(shape, int), np.zeros(shape, int)
    reward, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    alive, at = np.ones(len(at), bool), at.copy()
    for u in range(TURNS):
        alive = alive & (turn + u < TURNS)
        now = np.minimum(turn + u, TURNS - 1)
        chosen = (rng.random(len(at)) < policy[now, at]).astype(int)
        state[:, u], action[:, u], mask[:, u] = now * 3 + at, chosen, alive
        at = np.where(rng.random(len(at)) < 0.8, (at + chosen + 1) % 3, at)  # actions fail sometimes
        reward[:, u] = np.where(alive, (at == 2) * (1.0 + (now == 2)), 0.0)
        alive = alive & ~((at == 2) & (chosen == 0))
    return state, action, reward, mask


def exact_gradient(policy: np.ndarray) -> np.ndarray:
    """d J / d logit of every (turn, place), by dynamic programming forwards and backwards."""
    value, q = np.zeros((TURNS + 1, 3)), np.zeros((TURNS, 3, 2))
    for t in reversed(range(TURNS)):
        for at in range(3):
            for action in range(2):
                for odds, to in ((0.8, (at + action + 1) % 3), (0.2, at)):
                    ended = to == 2 and action == 0
                    q[t, at, action] += odds * ((to == 2) * (1.0 + (t == 2)) + (0.0 if ended else value[t + 1, to]))
        value[t] = (1 - policy[t]) * q[t, :, 0] + policy[t] * q[t, :, 1]
    reached = np.zeros((TURNS + 1, 3))
    reached[0, 0] = 1.0
    for t in range(TURNS):
        for at in range(3):
            for action, chosen in ((0, 1 - policy[t, at]), (1, policy[t, at])):
                for odds, to in ((0.8, (at + action + 1) % 3), (0.2, at)):
                    if not (to == 2 and action == 0):
                        reached[t + 1, to] += reached[t, at] * chosen * odds
    return reached[:TURNS] * policy * (1 - policy) * (q[..., 1] - q[..., 0])


@pytest.mark.parametrize("branches", [0, BRANCHES])
def test_the_mean_gradient_is_the_exact_one_with_branches_where_others_differ(branches: int) -> None:
    rng = np.random.default_rng(1)
    policy = rng.uniform(0.2, 0.8, (TURNS, 3))  # of the second action, by turn and place
    rows = GROUPS * TRUNKS
    group = np.repeat(np.arange(GROUPS), TRUNKS)
    state, action, reward, mask = walk(policy, np.zeros(rows, int), np.zeros(rows, int), rng)
    alone = Paths(reward, mask, state, group, np.full(rows, -1), np.zeros(rows, int))
    found = alone
    if branches:
        scores = branch_scores(alone).reshape(GROUPS, TRUNKS, TURNS)
        drawn = [(g * TRUNKS + i, u) for g in range(GROUPS) for i, u in chosen_turns(scores[g], branches, rng)]
        trunk, leave = np.asarray(drawn).T
        more = walk(policy, state[trunk, leave] % 3, leave, rng)
        assert len(trunk) > GROUPS
        assert (more[0][:, 0] == state[trunk, leave]).all()
        state, action, reward, mask = (np.concatenate(pair) for pair in zip((state, action, reward, mask), more, strict=True))
        trunks = np.concatenate([alone.trunk_B, trunk]), np.concatenate([alone.leave_B, leave])
        found = Paths(reward, mask, state, np.concatenate([group, group[trunk]]), *trunks)
    score = np.where(mask, action - policy.reshape(-1)[state], 0.0)  # d log pi / d logit
    unweighted = score * anchored(found, 1.0)
    by_group, plainly = np.zeros((2, GROUPS, TURNS * 3))
    place = np.broadcast_to(found.group_B[:, None], state.shape), state
    np.add.at(by_group, place, unweighted * path_weights(found))
    np.add.at(plainly, place, unweighted)
    mean, error = by_group.mean(0) / TRUNKS, by_group.std(0) / GROUPS**0.5 / TRUNKS
    wanted = exact_gradient(policy).reshape(-1)
    assert np.abs(wanted).max() > 0.05
    assert (np.abs(mean - wanted) < 3.5 * error + 1e-4).all()
    if branches:  # without its weights the same estimate counts what was branched twice, and is not the gradient
        assert (np.abs(plainly.mean(0) / TRUNKS - wanted) > 6 * error).any()
