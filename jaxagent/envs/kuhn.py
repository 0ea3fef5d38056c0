"""`kuhn`: Kuhn's poker (1950), the smallest game with something to hide. The policy plays both seats, or one of them.

Two players put one chip each into the pot and get one of three cards, J below Q below K. The first may pass or bet a chip;
after a pass the second may pass or bet; after a bet the other may pass, which folds, or bet, which calls. A fold gives the pot
away, else the higher card wins it. The reward is the chips won: two after a call, one otherwise, and the other loses as many.

A turn is one word, `bet` or `pass` (or its first letter, or `call`, `raise`, `check`, `fold`). Anything else is told to be
illegal, and costs as much as a lost call when it happens again: no legal play loses more. The sum of both rewards is always 0.

In training the policy plays against itself or, in a share of the games, against an earlier version, with the seats in turns.
Held-out games are against a player at random, one that plays an equilibrium, and an earlier version: whom, is the task's
difficulty. Between good players the second wins 1/18 chip a game; nobody wins from an equilibrium when the seats change.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from jaxagent.envs.env import Env, Past, Step, Task
from jaxagent.types import Message, ToolSpec

_SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
_SPLIT_SIZE = 10**9
CARDS = "JQK"
ROLES = ("first", "second")
PASS, BET = "pass", "bet"
WORDS = {"p": PASS, "pass": PASS, "check": PASS, "fold": PASS, "b": BET, "bet": BET, "call": BET, "raise": BET}
OVER = {("pass", "pass"), ("pass", "bet", "pass"), ("pass", "bet", "bet"), ("bet", "pass"), ("bet", "bet")}
FORFEIT = 2.0  # the most that a game can cost
ILLEGAL = "illegal: say bet or pass"
RULES = (
    "Kuhn poker. Each of two players has put one chip into the pot and holds one card: J, Q or K, the highest wins. Say `bet` "
    "or `pass`. A bet adds one chip; answering a bet with `bet` calls it, with `pass` folds. Answer with that one word."
)


def payoff(cards: Sequence[str], moves: Sequence[str]) -> float:
    """The chips that the first player wins with these two cards and the moves of a game that is over."""
    higher = 1.0 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1.0
    if moves[-1] == PASS and BET in moves:
        return 1.0 if len(moves) == 2 else -1.0  # a fold, of the second or of the first
    return (2.0 if BET in moves else 1.0) * higher


def equilibrium(card: str, moves: Sequence[str]) -> float:
    """How likely an equilibrium bets or calls here. Of those there are, the one in which the first never bluffs."""
    faced = bool(moves) and moves[-1] == BET
    if card == "K":
        return 1.0 if moves else 0.0
    if card == "Q":
        return 1 / 3 if faced else 0.0
    return 1 / 3 if moves and not faced else 0.0


class Kuhn:
    """The world.

    Args:
        past: share of the training games in which an earlier version has the other seat; 0 keeps none.
        past_every: training steps between the versions that are kept.
        past_keep: how many are kept, the last ones.
        rules: whether a system message tells the rules; small policies from scratch learn them from demonstrations.
    """

    functions = ""
    tools: Sequence[ToolSpec] = ()
    seats = 2

    def __init__(self, past: float = 0.0, past_every: int = 10, past_keep: int = 8, rules: bool = True):
        if not 0 <= past <= 1:
            raise ValueError(f"env.options.past must be a share in [0, 1], got {past}")
        self.share, self.rules = past, rules
        self.past = Past(past_every, past_keep) if past else None
        self.opponents = ("random", "equilibrium", *(("past",) if past else ()))

    def task(self, split: str, index: int) -> Task:
        seed = _SPLITS[split] * _SPLIT_SIZE + index
        opponent = self.opponents[index // 2 % len(self.opponents)]
        if split in ("train", "demo"):
            drawn = random.Random(f"{seed}/opponent").random()
            opponent = "past" if split == "train" and drawn < self.share else "self"
        return {"id": f"kuhn/{split}/{index}", "seed": seed, "difficulty": opponent, "seat": index % 2}

    def deal(self, task: Task) -> list[str]:
        return random.Random(f"{task['seed']}/deal").sample(CARDS, 2)

    def episode(self, name: str, sandbox: Any) -> Env:
        return KuhnGame(self)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """One seat of a game in which both toss a coin: the form is right, and what is best is left to be found."""
        cards, seat = self.deal(task), task["seat"]
        moves: list[str] = []
        messages: list[Message] = []
        while tuple(moves) not in OVER:
            move = rng.choice((PASS, BET))
            if len(moves) % 2 == seat:
                messages += [*self.told(cards[seat], moves, begun=bool(messages)), Message("assistant", move)]
            moves.append(move)
        return messages

    def told(self, card: str, moves: Sequence[str], *, begun: bool) -> list[Message]:
        """What a player reads before its move: its card at first, and what the other did."""
        if begun:
            return [Message("user", moves[-1])]
        system = [Message("system", RULES)] if self.rules else []
        return [*system, Message("user", " ".join([card, *moves]))]


class KuhnGame:
    """One game. The rewards are computed here, from the seed; nothing runs in a sandbox."""

    def __init__(self, world: Kuhn):
        self.world = world

    async def reset(self, task: Task, seed: int) -> Step:
        self.cards = self.world.deal(task)
        self.moves: list[str] = []
        self.begun = [False, False]
        self.warned = [False, False]
        self.seat, self.opponent = task["seat"], task["difficulty"]
        self.luck = random.Random(f"{task['seed']}/luck")
        return self._next()

    @property
    def turn(self) -> int:
        """The seat whose move it is."""
        return len(self.moves) % 2

    def _next(self) -> Step:
        """Asks the next player that is a policy; the others move here."""
        while self.turn != self.seat and self.opponent in ("random", "equilibrium"):
            bets = 0.5 if self.opponent == "random" else equilibrium(self.cards[self.turn], self.moves)
            self.moves.append(BET if self.luck.random() < bets else PASS)
            if tuple(self.moves) in OVER:
                return self._over()
        messages = self.world.told(self.cards[self.turn], self.moves, begun=self.begun[self.turn])
        self.begun[self.turn] = True
        return self._ask(messages)

    def _ask(self, messages: Sequence[Message]) -> Step:
        state = " ".join([self.cards[self.turn], *self.moves, *["warned"] * self.warned[self.turn]])
        past = self.opponent == "past" and self.turn != self.seat
        return Step(messages, state=state, agent=ROLES[self.turn], past=past)

    def _over(self, loser: int | None = None) -> Step:
        """Pays both; `loser` has forfeited. The policy that acted last is paid by the step, the other by `rewards`."""
        wins = payoff(self.cards, self.moves) if loser is None else FORFEIT * (1 if loser else -1)
        chips = {ROLES[0]: wins, ROLES[1]: -wins}
        reason = f"cards {self.cards[0]} and {self.cards[1]}, {' '.join(self.moves) or 'no move'}"
        mine = chips.pop(ROLES[self.last])
        reason += f"; {ROLES[loser]} forfeited" if loser is not None else ""
        return Step(reward=mine, reason=reason, terminated=True, rewards=chips)

    async def step(self, action: Message) -> Step:
        self.last = self.turn
        move = None if action.error or action.calls else WORDS.get(action.content.strip().lower())
        if move is None:
            if self.warned[self.turn]:
                return self._over(loser=self.turn)
            self.warned[self.turn] = True
            return self._ask([Message("user", ILLEGAL)])
        self.moves.append(move)
        return self._over() if tuple(self.moves) in OVER else self._next()

    async def close(self) -> None:
        pass


make_world = Kuhn
