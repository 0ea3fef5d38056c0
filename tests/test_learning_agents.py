"""Toys: self-play, process rewards, progressive shaping and search do what they are for, and nothing where they must not help.

A table of logits learns through the real agent, worlds and credit. What is random has a seed; lines have a wide margin.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from tabular import PLAIN, SAMPLING, Table, play, rows_of, success
from toys import Climb, Lone, Stairs, climbing

from jaxagent.agent import Agent, Limits
from jaxagent.algos.table import TABLE
from jaxagent.chat.plain import CALL, EOS
from jaxagent.credit import assign
from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.kuhn import CARDS, OVER, Kuhn, equilibrium, payoff
from jaxagent.process import Labels, Process, places_of
from jaxagent.rewards.shaping import Shaping
from jaxagent.rollout import RolloutOptions, Rollouts, wait
from jaxagent.search import Asked, search, turn_labels
from jaxagent.types import Message, Sample, SampleRequest, Trajectory

pytestmark = pytest.mark.learning

# ====================================================================== self-play

Player = Callable[[str, Sequence[str]], float]  # how likely it bets


def at_random(card: str, moves: Sequence[str]) -> float:
    return 0.5


def player_of(policy: Table) -> Player:
    def bets(card: str, moves: Sequence[str]) -> float:
        text = f"<user>{' '.join([card, *moves])}<turn>"
        if len(moves) == 2:
            text = f"<user>{card}<turn>{moves[0]}<eos><user>{moves[1]}<turn>"
        return float(policy.odds(text)[0])

    return bets


def chips(first: Player, second: Player) -> float:
    """What the first player wins on average: all games are gone through."""

    def value(cards: Sequence[str], moves: tuple[str, ...]) -> float:
        if moves in OVER:
            return payoff(cards, moves)
        bets = (first, second)[len(moves) % 2](cards[len(moves) % 2], moves)
        return bets * value(cards, (*moves, "bet")) + (1 - bets) * value(cards, (*moves, "pass"))

    return sum(value(deal, ()) for deal in itertools.permutations(CARDS, 2)) / 6


def against(player: Player, other: Player) -> float:
    """Chips a game with the seats in turns."""
    return (chips(player, other) - chips(other, player)) / 2


def exploitability(player: Player) -> float:
    """What the best reply wins from it, with the seats in turns; 0 of an equilibrium."""
    total = 0.0
    for seat, faced in ((0, ((), ("pass", "bet"))), (1, (("pass",), ("bet",)))):
        states = list(itertools.product(CARDS, faced))
        replies = [dict(zip(states, bits, strict=True)) for bits in itertools.product((0.0, 1.0), repeat=len(states))]
        found = [(lambda card, moves, r=reply: r[card, tuple(moves)]) for reply in replies]
        total += max(chips(reply, player) if seat == 0 else -chips(player, reply) for reply in found)
    return total / 2


def trained_player(seed: int, *, past: float, moving: bool, steps: int = 90, games: int = 64) -> Player:
    """A player after SPIRAL. `moving` seats earlier versions from all of the run, else the first one for ever."""
    world = Kuhn(past=past, rules=False)
    policy, baselines = Table(["bet", "pass"], lambda text: text, seed), {}
    ring, rng = [policy.copy()], np.random.default_rng(seed)
    for step in range(steps):
        tasks = range(step * games, (step + 1) * games)
        groups = play(world, policy, tasks, 1, past=ring[rng.integers(len(ring))], step=step)
        assign(groups, TABLE["spiral"], baselines=baselines)
        policy.learn(rows_of(groups), 2.0)
        if moving and step % 5 == 4:
            ring = [*ring, policy.copy()][-10:]
    return player_of(policy)


def test_self_play_beats_a_player_at_random_and_loses_little_to_an_equilibrium() -> None:
    assert exploitability(equilibrium) == pytest.approx(0.0, abs=1e-12)
    assert exploitability(at_random) == pytest.approx(0.4583, abs=1e-4)  # where all begin
    players = [trained_player(seed, past=0.5, moving=True) for seed in range(3)]
    assert min(against(player, at_random) for player in players) > 0.04
    assert all(-0.08 < against(player, equilibrium) <= 1e-9 for player in players)  # before -1/9; nobody wins from it
    assert np.mean([exploitability(player) for player in players]) < 0.22


def test_who_only_ever_plays_one_fixed_player_beats_that_one_and_can_be_beaten() -> None:
    fixed = trained_player(0, past=1.0, moving=False)
    own = trained_player(0, past=0.5, moving=True)
    assert against(fixed, at_random) > against(own, at_random) > 0
    assert exploitability(fixed) > exploitability(own) + 0.05


# ====================================================================== process rewards


class Lock(Lone):
    """Eight words, of which three must be right; only the last one tells whether they were."""

    def episode(self, name: str, sandbox: object) -> Env:
        return Lock()

    async def reset(self, task: Task, seed: int) -> Step:
        self.said: list[str] = []
        return Step([Message("user", "q")], state="0 0")

    async def step(self, action: Message) -> Step:
        self.said.append(action.content)
        right = sum(self.said[k] == "b" for k in (1, 3, 5) if k < len(self.said))
        if len(self.said) == 8:
            return Step(terminated=True, answered=True, reward=float(right == 3))
        return Step([Message("user", "go")], state=f"{len(self.said)} {right}")


def opened(seed: int, model: str, gae_lambda: float = 1.0, steps: int = 25) -> tuple[float, float]:
    """(mean success while learning, at the end) with a process reward model that is learnt, random, or says nothing."""
    policy = Table(["a", "b"], lambda text: str(text.count("<eos>")), seed)
    process, rng, drawn = Process(seed), np.random.default_rng(seed + 100), dict[str, float]()
    algorithm, curve = replace(TABLE["agent_prm"], gae_lambda=gae_lambda), []
    for step in range(steps):
        groups = play(Lock(), policy, [0], 16, step=step)
        curve.append(success(groups))
        logits = {}
        for row in rows_of(groups):
            logits[id(row)] = np.zeros(len(row.tokens))
            for place in places_of([row], 1.0):
                if model == "random":
                    logits[id(row)][place.at] = drawn.setdefault(place.key, rng.normal(0, 3))
                elif model == "learnt" and place.key in process.labels.known:
                    q = np.clip(process.labels.value(place.key), 0.02, 0.98)
                    logits[id(row)][place.at] = np.log(q / (1 - q))
        process.pay(groups, logits, 1.0)
        assign(groups, algorithm)
        process.learn(groups, 1.0)
        policy.learn(rows_of(groups), 0.5)
    return float(np.mean(curve)), float(np.mean(curve[-5:]))


def test_a_learnt_process_reward_opens_the_lock_sooner_and_a_random_one_does_not_keep_it_shut() -> None:
    seeds = range(4)
    nothing = np.mean([opened(seed, "nothing") for seed in seeds], 0)
    baseline = np.mean([opened(seed, "learnt") for seed in seeds], 0)
    trusted = np.mean([opened(seed, "learnt", 0.5) for seed in seeds], 0)
    assert trusted[0] > baseline[0] > nothing[0] + 0.01
    assert trusted[0] > nothing[0] + 0.08
    wrong = np.mean([opened(seed, "random", steps=50) for seed in seeds], 0)
    assert wrong[1] > 0.85  # full returns: however wrong, what is best stays best


def test_a_random_process_reward_that_is_trusted_more_than_returns_does_keep_it_shut() -> None:
    assert np.mean([opened(seed, "random", 0.0, steps=50)[1] for seed in range(4)]) < 0.5


# ====================================================================== progressive shaping

BROKEN = (CALL, 65, EOS)  # a turn that cannot be read


class Errand(Lone):
    """Six turns that must all be readable, and a right word at the end."""

    def episode(self, name: str, sandbox: object) -> Env:
        return Errand()

    async def reset(self, task: Task, seed: int) -> Step:
        self.turns, self.fit = 0, True
        return Step([Message("user", "q")])

    async def step(self, action: Message) -> Step:
        self.turns += 1
        self.fit = self.fit and not action.error
        if self.turns == 6:
            return Step(terminated=True, answered=True, reward=float(self.fit and action.content == "b"))
        return Step([Message("user", "go")])


def errands(seed: int, turns: Sequence[str | Sequence[int]], *, shaped: bool, steps: int = 60) -> tuple[list[float], Table]:
    policy = Table(turns, lambda text: str(text.count("<eos>")), seed)
    shaping = Shaping(progressive=(0.3, 0.7, 1.0))
    curve = []
    for step in range(steps):
        groups = play(Errand(), policy, [0], 8, step=step)
        curve.append(sum(row.outcome for row in rows_of(groups)) / 8)
        for group in groups if shaped else ():
            shaping.apply(group, step / steps)
        assign(groups, TABLE["grpo"])
        policy.learn(rows_of(groups), 0.5)
    return curve, policy


def test_progressive_shaping_finds_an_outcome_that_is_too_rare_to_be_met_by_chance() -> None:
    """Two readable turns of four: six in a row and the right word have a chance of 1/128."""
    turns = ["a", "b", BROKEN, (*BROKEN[:2], 66, EOS)]
    plain = np.mean([np.mean(errands(seed, turns, shaped=False)[0][-10:]) for seed in range(4)])
    shaped = np.mean([np.mean(errands(seed, turns, shaped=True)[0][-10:]) for seed in range(4)])
    assert shaped > 0.6
    assert shaped > plain + 0.2


def test_where_every_turn_is_in_form_progressive_shaping_changes_nothing() -> None:
    """R = alpha outcome + (1 - alpha): what is compared within a group and divided by its deviation is the same."""
    (plain, table), (shaped, other) = (errands(0, ["a", "b"], shaped=shaped) for shaped in (False, True))
    assert plain == shaped
    assert table.logits.keys() == other.logits.keys()
    for state, z in table.logits.items():
        np.testing.assert_allclose(other.logits[state], z, atol=1e-3)


# ====================================================================== search over turns


class Flights(Stairs):
    """Stairs of six tasks that call their moves by different names: what is learnt in one says nothing of the others."""

    NAMES = tuple(itertools.permutations("UDF"))

    def task(self, split: str, index: int) -> Task:
        return {"id": f"flights/{index % 6}", "seed": index % 6, "difficulty": ""}

    def episode(self, name: str, sandbox: object) -> Climb:
        return Flight(self, 0)


class Flight(Climb):
    async def reset(self, task: Task, seed: int) -> Step:
        self.flight = task["seed"]
        return self.shown(await super().reset(task, seed))

    async def step(self, action: Message) -> Step:
        meant = Flights.NAMES[self.flight]["UDF".index(action.calls[0].name)]
        return self.shown(await super().step(climbing(meant)[0]))

    def shown(self, step: Step) -> Step:
        step.messages = [replace(message, content=f"{self.flight}/{message.content}") for message in step.messages]
        return step

    async def fork(self, name: str) -> Flight:
        made = Flight(self.world, self.mood, self.at)
        made.flight = self.flight
        return made


class Drawn(Table):
    """The same, with draws like the engine's: from the request's key and the place in the row, whoever else is playing."""

    async def generate(self, request: SampleRequest) -> Sample:
        self.rng = np.random.default_rng([*request.key, request.start + len(request.tokens)])
        return await super().generate(request)


PLACE = re.compile(r"(\d)/(\d)<turn>")


def arrival(policy: Table, top: int, turns: int) -> float:
    """How likely it arrives, on average over the flights: all that can happen is gone through."""
    found = 0.0
    for flight, names in enumerate(Flights.NAMES):
        at = np.eye(top + 1)[0]
        for _ in range(turns):
            after = np.eye(top + 1)[top] * at[top]
            for k in range(top):
                for name, odds in zip(names, policy.odds(f"{flight}/{k}"), strict=True):
                    after[{"U": k + 1, "D": max(0, k - 1), "F": 0}[name]] += at[k] * odds
            at = after
        found += at[top] / len(Flights.NAMES)
    return found


def best_until(rows: Sequence[Trajectory], budget: int) -> list[Trajectory]:
    """Episodes of their own, as many as a budget of sampled tokens lasts for."""
    spent = np.cumsum([0, *(sum(row.mask) for row in rows)])
    assert spent[-1] >= budget
    return [row for row, before in zip(rows, spent, strict=False) if before < budget]


def climbed(
    seed: int, budgets: Sequence[Sequence[int]] = (), *, top: int = 4, turns: int = 7, rounds: int = 6
) -> tuple[float, list[list[int]]]:
    """(mean chance to arrive over the rounds, tokens sampled by round and task) of a policy that imitates the best it found.

    It is found by a search, guided from the second round on by the values that earlier rounds have left, pooled over all
    flights by height; or by episodes of their own with these budgets of tokens.
    """
    world, labels, curve, spent = Flights(top), Labels(), [], []
    policy = Drawn([PLAIN.turn(move) for move in climbing("U", "D", "F")], lambda text: "/".join(PLACE.findall(text)[-1]), seed)
    many = Rollouts(
        world, Agent(PLAIN, world.tools, policy, Limits(turns, 400)), lambda: None, seed, RolloutOptions(attempts=1)
    )

    def value(asked: Sequence[Asked]) -> list[list[float]]:
        heights = [[PLACE.findall(PLAIN.text(tokens[: at + 1]))[-1][1] for at in places] for tokens, places in asked]
        return [[labels.value(key) if key in labels.known else 0.0 for key in keys] for keys in heights]

    try:
        for number in range(rounds):
            tasks = [(f"{number}/{i}", world.task("train", i)) for i in range(len(Flights.NAMES))]
            if budgets:
                played = many.play(tasks, max(budgets[number]) // 3 // min(turns, top) + 1, SAMPLING)
                found = [best_until(wait(each), budget) for each, budget in zip(played, budgets[number], strict=True)]
            else:
                trees = search(many, tasks, SAMPLING, 8, value=value if number else None)
                found, spent = [tree.episodes for tree in trees], [*spent, [tree.sampled for tree in trees]]
                for row, turn, q, _ in (label for tree in trees for label in turn_labels(tree)):
                    labels.tell(row.turns[turn].state, q)
            kept = [max(rows, key=lambda row: row.reward) for rows in found if len({row.reward for row in rows}) > 1]
            for turn in (turn for row in kept for turn in row.turns):
                turn.advantage = 1.0
            for _ in range(3 if kept else 0):
                policy.learn(kept, 1.0)
            curve.append(arrival(policy, top, turns))
    finally:
        many.close()
    return float(np.mean(curve)), spent


def test_search_teaches_more_than_episodes_of_their_own_with_as_many_sampled_tokens() -> None:
    """Four steps up within seven turns, from a policy at random: few episodes arrive, and each flight is learnt alone."""
    found = [(guided, climbed(seed, spent)[0]) for seed in range(4) for guided, spent in [climbed(seed)]]
    guided, alone = np.mean(found, 0)
    assert guided > alone + 0.02
    assert alone > 0.15  # both learn


def test_where_an_episode_is_one_turn_search_teaches_what_episodes_of_their_own_do() -> None:
    for seed in range(3):
        guided, spent = climbed(seed, top=1, turns=1, rounds=3)
        assert climbed(seed, spent, top=1, turns=1, rounds=3)[0] == pytest.approx(guided, abs=0.02)
