"""Kuhn's poker: every line of play is paid, illegal moves cost, seats change, and earlier selves sit where they should."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from scripted import ScriptedSampler, episode

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.kuhn import CARDS, ILLEGAL, OVER, Kuhn, equilibrium, payoff
from jaxagent.types import Group, Message, SampleRequest, Sampling, StopReason, Trajectory

PLAIN = PlainTemplate()
WORLD = Kuhn(rules=False)


def seat_of(request: SampleRequest) -> str:
    return request.trajectory.rpartition("/")[2]


def saying(said: Callable[[str, str], str]) -> ScriptedSampler:
    """A policy of both seats; `said` gets the seat and what it has read."""
    return ScriptedSampler(PLAIN, lambda text, request: PLAIN.turn(Message("assistant", said(seat_of(request), text))))


def play(sampler: ScriptedSampler, index: int, world: Kuhn = WORLD, split: str = "train") -> list[Trajectory]:
    return asyncio.run(episode(world, world.task(split, index), sampler))


def following(moves: Sequence[str]) -> ScriptedSampler:
    left = iter(moves)
    return saying(lambda seat, text: next(left))


@pytest.mark.parametrize(
    ("moves", "low_first", "high_first"),
    [  # what the first wins with the lower and with the higher card
        (("pass", "pass"), -1.0, 1.0),
        (("pass", "bet", "pass"), -1.0, -1.0),
        (("pass", "bet", "bet"), -2.0, 2.0),
        (("bet", "pass"), 1.0, 1.0),
        (("bet", "bet"), -2.0, 2.0),
    ],
)
def test_every_line_of_play_pays_both_and_they_sum_to_nothing(
    moves: tuple[str, ...], low_first: float, high_first: float
) -> None:
    for index in range(6):
        rows = play(following(moves), index)
        cards = WORLD.deal(WORLD.task("train", index))
        wins = high_first if CARDS.index(cards[0]) > CARDS.index(cards[1]) else low_first
        assert [(row.role, row.seat, row.reward) for row in rows] == [("first", 0, wins), ("second", 1, -wins)]
        assert [row.solved for row in rows] == [wins > 0, wins < 0]
        assert {row.stop for row in rows} == {StopReason.ENV_TERMINATED}
        assert [len(row.turns) for row in rows] == [len(moves[::2]), len(moves[1::2])]


def test_each_player_reads_its_own_card_and_what_the_other_did_and_nothing_else() -> None:
    rows = play(following(("p", "raise", "call")), 0)
    own, others = WORLD.deal(WORLD.task("train", 0))
    assert PLAIN.text(rows[0].tokens) == f"<user>{own}<turn>p<eos><user>bet<turn>call<eos>"
    assert PLAIN.text(rows[1].tokens) == f"<user>{others} pass<turn>raise<eos>"
    assert [turn.state for turn in rows[0].turns] == [own, f"{own} pass bet"]
    told = play(following(("p", "p")), 0, Kuhn())
    assert all("Kuhn poker" in PLAIN.text(row.tokens) for row in told)


def test_an_illegal_word_is_told_once_and_then_costs_as_much_as_a_lost_call() -> None:
    rows = play(following(("all in", "pass", "pass")), 0)
    assert ILLEGAL in PLAIN.text(rows[0].tokens)
    assert abs(rows[0].reward) == 1.0
    rows = play(following(("pass", "what", "again")), 0)
    assert [row.reward for row in rows] == [2.0, -2.0]
    assert rows[1].turns[-1].reason.endswith("second forfeited")
    rows = play(ScriptedSampler(PLAIN, lambda text, request: [65]), 0)  # a turn that does not end
    assert [(row.role, row.reward) for row in rows] == [("first", -2.0)]


def test_both_cards_are_dealt_alike_and_the_group_has_one_deal() -> None:
    deals = [tuple(WORLD.deal(WORLD.task("train", i))) for i in range(600)]
    counts = [deals.count(deal) for deal in set(deals)]
    assert len(counts) == 6
    assert min(counts) > 70
    assert WORLD.deal(WORLD.task("train", 5)) == WORLD.deal(WORLD.task("train", 5))


def expected(first: Callable[[str, Sequence[str]], float], second: Callable[[str, Sequence[str]], float]) -> Fraction:
    """What the first player wins on average, by going through all games."""

    def value(cards: Sequence[str], moves: tuple[str, ...]) -> Fraction:
        if moves in OVER:
            return Fraction(payoff(cards, moves))
        player = len(moves) % 2
        bets = Fraction((first, second)[player](cards[player], moves)).limit_denominator(100)
        return bets * value(cards, (*moves, "bet")) + (1 - bets) * value(cards, (*moves, "pass"))

    deals = [(a, b) for a in CARDS for b in CARDS if a != b]
    return sum((value(deal, ()) for deal in deals), Fraction(0)) / len(deals)


def test_the_equilibrium_wins_what_it_must_and_nobody_does_better_against_it() -> None:
    assert expected(equilibrium, equilibrium) == Fraction(-1, 18)
    for seed in range(40):
        rng = random.Random(seed)
        pure = {(card, faced): float(rng.random() < 0.5) for card in CARDS for faced in ("", "pass", "bet", "passbet")}

        def player(card: str, moves: Sequence[str], pure: dict[tuple[str, str], float] = pure) -> float:
            return pure[card, "".join(moves)]

        assert expected(player, equilibrium) <= Fraction(-1, 18)
        assert expected(equilibrium, player) >= Fraction(-1, 18)
    assert expected(lambda card, moves: 0.5, equilibrium) < Fraction(-1, 18)


def test_held_out_games_are_against_fixed_players_with_the_seats_in_turns() -> None:
    tasks = [WORLD.task("valid", i) for i in range(400)]
    assert [(task["difficulty"], task["seat"]) for task in tasks[:4]] == [
        ("random", 0),
        ("random", 1),
        ("equilibrium", 0),
        ("equilibrium", 1),
    ]
    by_card = saying(lambda seat, text: "bet" if "K" in text.split("<turn>")[0] else "pass")
    rows = [row for i in range(400) for row in play(by_card, i, split="valid")]
    assert len(rows) == 400  # the fixed player has no row
    reward = {name: [row.reward for row in rows if row.difficulty == name] for name in ("random", "equilibrium")}
    assert sum(reward["random"]) / 200 > -0.2
    assert [play(by_card, i, split="valid")[0].reward for i in range(20)] == [row.reward for row in rows[:20]]


def test_an_earlier_self_has_the_other_seat_and_its_row_is_set_aside() -> None:
    world = Kuhn(past=1.0, past_every=2, past_keep=3, rules=False)
    assert (world.past.every, world.past.keep) == (2, 3)
    now, before = saying(lambda seat, text: "bet"), saying(lambda seat, text: "pass")
    for index in range(4):
        task = world.task("train", index)
        assert task["difficulty"] == "past"
        agent = Agent(PLAIN, (), now, Limits(4, 100), past=before)
        rows = [Trajectory(task["id"], task["seed"], "g", 0)]
        asyncio.run(agent.play(world.episode("e", None), task, rows, (1, 2), Sampling(max_tokens=8)))
        ours = ("first", "second")[index % 2]
        assert {row.role: row.past for row in rows} == {ours: False, "second" if index % 2 == 0 else "first": True}
        group = Group.of("g", rows)
        assert [row.role for row in group.trajectories] == [ours]
        assert group.trajectories[0].reward == 1.0  # the earlier self folds
        assert [row.reward for row in group.others] == [-1.0]
        assert Trajectory.from_json(group.others[0].to_json()).past
    assert now.rows == before.rows == {}
    assert {seat_of(request) for request in now.requests} == {"first", "second"}


def test_without_an_earlier_self_to_ask_the_episode_says_so() -> None:
    world = Kuhn(past=1.0)
    with pytest.raises(ValueError, match="first is to be an earlier version of the policy, but none is kept"):
        play(following(("pass",)), 1, world)


def test_what_broke_is_never_set_aside() -> None:
    broken = Trajectory("t", 0, "g", 0, past=True, stop=StopReason.INFRA_FAILURE)
    assert Group.of("g", [broken]).trajectories == [broken]


def test_demonstrations_are_legal_games_of_one_seat() -> None:
    for index in range(40):
        dialogue = WORLD.demonstrate(WORLD.task("demo", index), random.Random(index))
        said = [message.content for message in dialogue if message.role == "assistant"]
        assert said
        assert set(said) <= {"bet", "pass"}
        assert [message.role for message in dialogue] == ["user", "assistant"] * len(said)


@pytest.mark.parametrize("options", [{"past": 1.5}, {"past": 0.5, "past_every": 0}, {"past": 0.5, "past_keep": 0}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"env\.options\.{[*options][-1]} must be"):
        Kuhn(**options)  # type: ignore[arg-type]
