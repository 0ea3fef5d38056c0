"""Evaluation: intervals and pass@k by hand, and broken episodes that are nobody's failure."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler
from toys import Parity

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.config import load
from jaxagent.evaluate import (
    Asked,
    HeldOut,
    evaluate,
    held_out,
    interval,
    pass_at,
    pass_hat,
    settings_of,
    summarise,
)
from jaxagent.metrics import want_alike
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, Trajectory, Turn

PLAIN = PlainTemplate()
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.py"
BROKEN = StopReason.INFRA_FAILURE


def row(reward: float, stop: StopReason = StopReason.ANSWERED, difficulty: str = "easy", turns: int = 1) -> Trajectory:
    played = [Turn(0, 0, 1, "", reward=reward if i == turns - 1 else 0.0) for i in range(turns)]
    return Trajectory("t", 0, "g", 0, turns=played, stop=stop, difficulty=difficulty)


# ====================================================================== intervals


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [  # Wilson 1927 with z = 1.96, worked out by hand
        (0, 10, 0.0, 0.277540),
        (5, 10, 0.236590, 0.763410),
        (10, 10, 0.722460, 1.0),
        (9, 12, 0.467686, 0.911055),
        (1, 1, 0.206543, 1.0),
    ],
)
def test_the_interval_of_tasks_that_are_won_or_not_is_wilsons(wins: int, n: int, low: float, high: float) -> None:
    for most in (1, 4):
        assert interval(won(wins, n), most) == pytest.approx((low, high), abs=1e-5)


def won(wins: int, n: int) -> list[float]:
    return [1.0] * wins + [0.0] * (n - wins)


def test_the_interval_of_nothing_is_everything() -> None:
    assert interval([]) == [0.0, 1.0]


def test_shares_between_count_for_more_tasks_and_for_no_more_than_were_drawn() -> None:
    # With two of 0 and two of 1: mean 1/2, variance (4 / 16 + 4 / 4) / 8 = 0.15625 where zeros and ones have 0.25.
    shares = [0.25, 0.25, 0.75, 0.75]
    half = 1.96 * math.sqrt(0.25 / 6.4 + 1.96**2 / (4 * 6.4**2)) / (1 + 1.96**2 / 6.4)
    assert interval(shares, 4) == pytest.approx((0.5 - half, 0.5 + half))
    assert interval(shares, 1) == pytest.approx(interval(won(2, 4)))
    assert interval([0.5] * 50, 2) == pytest.approx(interval(won(50, 100)))


@pytest.mark.parametrize(("tasks", "k"), [(8, 1), (8, 16), (32, 4), (64, 8)])
@pytest.mark.parametrize("spread", [(0.05, 5), (0.5, 4.5), (2, 2), (50, 50), (0.1, 0.1)])
def test_the_interval_holds_the_truth_as_often_as_it_says(tasks: int, k: int, spread: tuple[float, float]) -> None:
    """Tasks of all kinds: nearly all hopeless, alike, or each won always or never. 95 % to within the noise of 300 draws."""
    draw, truth = random.Random(1), spread[0] / sum(spread)
    held = 0
    for _ in range(300):
        chances = [draw.betavariate(*spread) for _ in range(tasks)]
        low, high = interval([sum(draw.random() < chance for _ in range(k)) / k for chance in chances], k)
        held += low <= truth <= high
    assert held / 300 >= 0.91


# ====================================================================== pass@k


def test_pass_at_k_by_hand() -> None:
    assert pass_at(10, 3, 1) == pytest.approx(0.3)
    assert pass_at(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert pass_at(4, 0, 2) == 0.0
    assert pass_at(4, 3, 2) == 1.0


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_of_k_that_hold_a_win(n: int) -> None:
    for wins, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * wins + [0] * (n - wins), k))
        assert pass_at(n, wins, k) == pytest.approx(statistics.mean(any(draw) for draw in draws))


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_hat_k_is_the_share_of_draws_of_k_that_are_all_wins(n: int) -> None:
    for wins, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * wins + [0] * (n - wins), k))
        assert pass_hat(n, wins, k) == pytest.approx(statistics.mean(all(draw) for draw in draws))


def test_a_task_that_lost_episodes_to_the_infrastructure_has_no_say_in_pass_at_k() -> None:
    lost = [row(1.0), row(0.0, BROKEN)]
    assert summarise([[row(1.0), row(1.0)], lost], k=2)["pass_at_k"] == {"1": 1.0, "2": 1.0}
    halves = summarise([[row(1.0), row(1.0)], [row(1.0), row(0.0)], lost], k=2)
    assert (halves["pass_at_k"]["2"], halves["pass_hat_k"]) == (1.0, {"1": pytest.approx(2.5 / 3), "2": 0.5})
    assert halves["ci95_hat_k"]["2"] == pytest.approx(interval(won(1, 2)))
    assert math.isnan(summarise([lost], k=2)["pass_at_k"]["2"])


def test_powers_of_two_lead_up_to_k() -> None:
    table = summarise([[row(1.0)] * 3 + [row(0.0)] * 3], k=6)
    assert list(table["pass_at_k"]) == ["1", "2", "4", "6"] == list(table["ci95_at_k"])
    assert table["pass_hat_k"]["2"] == pytest.approx(3 / 15) and table["pass_hat_k"]["4"] == 0.0


# ====================================================================== the table


def test_the_table_of_one_episode_per_task() -> None:
    rows = [[row(1.0)], [row(0.5, difficulty="hard", turns=3)], [row(0.0, difficulty="hard")], [row(1.0, turns=3)]]
    table = summarise(rows, k=1)
    assert table == {
        "success": 0.5,
        "ci95": pytest.approx(interval(won(2, 4))),
        "n": 4,
        "k": 1,
        "reward": 0.625,
        "turns": 2.0,
        "pass_at_k": {"1": 0.5},
        "ci95_at_k": {"1": pytest.approx(interval(won(2, 4)))},
        "pass_hat_k": {"1": 0.5},
        "ci95_hat_k": {"1": pytest.approx(interval(won(2, 4)))},
        "by_difficulty": {"easy": 1.0, "hard": 0.0},
        "ci95_by_difficulty": {"easy": pytest.approx(interval(won(2, 2))), "hard": pytest.approx(interval(won(0, 2)))},
        "solved_by_turn": {"1": 0.25, "3": 0.5},
        "broken": 0,
    }


def test_the_table_of_several_episodes_per_task() -> None:
    table = summarise([[row(1.0), row(0.0)], [row(0.0), row(0.0)]], k=2)
    assert (table["success"], table["n"], table["k"]) == (0.25, 2, 2)
    assert table["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert table["pass_hat_k"] == {"1": 0.25, "2": 0.0}
    assert table["ci95"] == interval([0.5, 0.0], 2) == table["ci95_at_k"]["1"]
    assert table["ci95_by_difficulty"] == {row(0.0).difficulty: table["ci95"]}  # episodes of one task are not independent


@pytest.mark.parametrize("stop", [StopReason.INFRA_FAILURE, StopReason.ENV_TRUNCATED, StopReason.CANCELLED])
def test_broken_episodes_are_counted_apart_and_never_as_failures(stop: StopReason) -> None:
    whole = summarise([[row(1.0), row(1.0)], [row(1.0), row(0.0)]], k=2)
    hurt = summarise([[row(1.0), row(1.0)], [row(1.0), row(0.0)], [row(0.0, stop), row(0.0, stop)]], k=2)
    assert hurt == {**whole, "broken": 2}
    half = summarise([[row(1.0), row(1.0)], [row(0.0, stop), row(1.0)]], k=2)
    assert (half["success"], half["pass_at_k"], half["broken"]) == (1.0, {"1": 1.0, "2": 1.0}, 1)


def test_a_missed_deadline_of_the_policys_own_is_a_failure() -> None:
    assert summarise([[row(1.0)], [row(0.0, StopReason.POLICY_TIMEOUT)]], k=1)["success"] == 0.5


def test_nothing_played_is_no_number() -> None:
    table = summarise([[row(0.0, BROKEN)]], k=1)
    assert math.isnan(table["success"])
    assert (table["n"], table["broken"], table["ci95"]) == (0, 1, [0.0, 1.0])


def test_an_evaluation_plays_the_first_tasks_of_its_split_the_same_every_time() -> None:
    def write(text: str, request: SampleRequest) -> Sequence[int]:
        return PLAIN.turn(Message("assistant", str(request.key[0] % 2)))

    agent = Agent(PLAIN, (), ScriptedSampler(PLAIN, write), Limits(2, 100))
    rollouts = Rollouts(Parity(), agent, lambda: None, seed=5, options=RolloutOptions(attempts=1))
    try:
        tables = [evaluate(rollouts, HeldOut(max_tokens=4), split="valid", tasks=8, k=3) for _ in range(2)]
    finally:
        rollouts.close()
    (table, rows), (again, _) = tables
    assert table == again
    assert [(r.task, r.rollout) for r in rows] == [(f"parity/valid/{i}", g) for i in range(8) for g in range(3)]
    assert (table["n"], table["broken"]) == (7, 3)
    assert 0 < table["success"] < 1


def test_the_segments_of_a_rollout_are_counted_once_with_all_their_turns() -> None:
    first, second = row(0.5, turns=2), row(0.5)
    first.elsewhere, second.elsewhere, second.segment = 0.5, 0.5, 1
    other = row(0.0)
    other.rollout = 1
    table = summarise([[first, second, other]], 2)
    assert (table["success"], table["turns"], table["reward"], table["n"], table["broken"]) == (0.5, 2.0, 0.5, 1, 0)
    for segment in (first, second):
        segment.stop = BROKEN
    assert summarise([[first, second, other]], 2)["broken"] == 1


def test_several_roles_are_told_apart() -> None:
    rows = [row(1.0), row(-1.0), row(1.0), row(2.0)]
    for played, role in zip(rows, ("first", "second", "first", "second"), strict=True):
        played.role = role
    table = summarise([rows[:2], rows[2:]], k=1)
    assert table["by_role"] == {
        "first": {"success": 1.0, "reward": 1.0, "n": 2},
        "second": {"success": 0.5, "reward": 0.5, "n": 2},
    }


def test_an_evaluation_samples_by_its_own_settings_and_the_table_says_which() -> None:
    config = load(str(QUICKSTART), ["sampling.temperature=1.3", "evaluate.temperature=0.5"])[0]
    assert Asked().sampling(config).temperature == 0.5
    asked = Asked(temperature=0.0, top_p=0.9, max_tokens=3).sampling(config)
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.0, 0.9, 3)


def test_nothing_that_training_draws_with_reaches_an_evaluation() -> None:
    drawn = ["sampling.temperature=1.3", "sampling.top_k=5", "sampling.top_p=0.5", "evaluate.temperature=0.5"]
    config = load(str(QUICKSTART), drawn)[0]
    assert held_out(config) == HeldOut(temperature=0.5, max_tokens=config.sampling.max_tokens)
    agent = Agent(PLAIN, (), ScriptedSampler(PLAIN, lambda text, request: [0]), Limits(2, 100))
    rollouts = Rollouts(Parity(), agent, lambda: None, seed=5, options=RolloutOptions())
    try:
        with pytest.raises(TypeError, match="not as training does: got Sampling"):
            evaluate(rollouts, Sampling(**config.sampling), split="valid", tasks=1)  # type: ignore[arg-type]
    finally:
        rollouts.close()


def test_tables_of_other_settings_are_not_compared() -> None:
    config = load(str(QUICKSTART))[0]
    size: dict[str, Any] = {"split": "test", "tasks": 4, "k": 1}
    before = {"settings": {"policy": {"step": 0}, **settings_of(config, held_out(config), **size)}}
    after = {"settings": {"policy": {"step": 9}, **settings_of(config, held_out(config), **size)}}
    warm = {"settings": settings_of(config, held_out(config, temperature=0.3), **size)}
    blind = {"settings": settings_of(config, held_out(config), ablated=True, **size)}
    want_alike({"before": before, "after": after, "old": {}})
    want_alike({"before": before, "ablated": blind}, but=("policy", "ablated"))
    for other, named in (
        (warm, "sampling is .*'temperature': 1.0.* and .*'temperature': 0.3"),
        (blind, "ablated is False .* True"),
    ):
        with pytest.raises(ValueError, match=f"before and other cannot be compared: {named}"):
            want_alike({"before": before, "other": other})
