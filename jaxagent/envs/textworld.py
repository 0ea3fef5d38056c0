"""`textworld`: generated text adventures of a wanted difficulty. Needs `jaxagent env install textworld`.

Two kinds. `coins`: a chain of rooms with a coin at its end; levels 1 to 100 have as many rooms as the level, 101 to 200 as
many dead ends beside them, 201 to 300 more. `quest`: level q is a quest of q commands through q/2 rooms among 3q/4 objects,
so that level 4 is what papers call w2-o3-q4 and level 8 w4-o6-q8. A game is compiled when it is first played, which takes
seconds, and kept.

The reward is the increment of the game's score, as a share of all that can be scored: a game that is won is worth 1.

A policy from scratch reads bytes, and a room of such a game is described in two hundred. Told in `brief` it is one line,
its name and the letters of what can be done there: e, n, s, w for the exits, t where the coin can be taken. Nothing else
is: where one came from and which ways are dead ends has to be remembered. Such a game is made in a tenth of a second.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Shown

KINDS = ("coins", "quest")
USES = {"train": "train", "demo": "demo", "valid": "held_out", "test": "held_out"}
BACK = {"e": "w", "w": "e", "n": "s", "s": "n"}
RULES = "You play a text adventure. Answer with one command, as in: go east; open chest; take key; unlock door with key."


class Slipping:
    """Follows a walkthrough told in letters, and goes another way now and then, from which it comes back."""

    def __init__(self, actions: list[str], rng: random.Random, slips: float, moves: int = 12):
        self.left, self.rng, self.slips, self.moves = actions[::-1], rng, slips, moves

    def __call__(self, text: str) -> str | None:
        self.moves -= 1
        if not self.left or self.moves < 0:
            return None
        letter = self.left.pop()
        others = [other for other in text.rpartition(" ")[2] if other not in (letter, "t")]
        if letter != "t" and others and self.rng.random() < self.slips:
            other = self.rng.choice(others)
            self.left += [letter, BACK[other]]
            return other
        return letter


def make_world(
    kind: str = "coins",
    levels: Sequence[int] | Mapping[str, Sequence[int]] = (1, 2, 3, 4, 5),
    games: int = 100,
    told: tuple[str, ...] = ("commands",),
    demo_slips: float = 0.0,
    rules: bool = True,
    workers: int = 0,
    timeout_s: float = 120.0,
) -> Shown:
    """The world.

    Args:
        kind: coins or quest.
        levels: of the games, in turn; a curriculum is a run with higher ones from the checkpoint of one with lower. Or by
            use: `train`, `demo` and `held_out`, of which the first also stands for what is left out.
        games: of the training split, and half as many of each of the others. More demonstrations than that show a game again.
        told: beside rooms and the goal: `commands`, all that are admissible, after every observation; `hints`, the
            whole way, at the start. Or `brief` alone, for coins: a room is a line, and a command a letter.
        demo_slips: told in brief, how often the demonstrator goes another way than its walkthrough's; it comes back, and
            gives up after twelve moves.
        rules: whether the first observation begins with the rules.
    """
    by_use = getattr(levels, "items", None)  # a ConfigDict is no Mapping
    given: dict[str, Any] = dict(by_use()) if by_use else {"train": levels}
    if "train" not in given or not set(given) <= {"train", "demo", "held_out"}:
        raise ValueError(f"env.options.levels must be levels, or those of train, demo and held_out; got {levels}")
    played = {split: tuple(given.get(use, given["train"])) for split, use in USES.items()}
    if kind not in KINDS:
        raise ValueError(f"env.options.kind must be one of {', '.join(KINDS)}; got {kind!r}")
    for of in played.values():
        if not of or not all(1 <= level <= (300 if kind == "coins" else 30) for level in of):
            raise ValueError(f"env.options.levels must be 1 to 300 for coins, 1 to 30 for quest; got {of}")
    if games < 2:
        raise ValueError(f"env.options.games must be at least 2, got {games}")

    told = tuple(told)
    if not set(told) <= {"commands", "hints"} and (told != ("brief",) or kind != "coins"):
        raise ValueError(f"env.options.told must be among commands and hints, or brief alone for coins; got {told} for {kind}")

    def describe(split: str, index: int) -> Task:
        level = played[split][index % len(played[split])]
        return {"level": level, "difficulty": f"level {level:03d}"}

    if not 0 <= demo_slips < 1 or (demo_slips and told != ("brief",)):
        raise ValueError(f"env.options.demo_slips must be within 0 and 1, above 0 only if told is brief; got {demo_slips}")

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxagent" / "games"
    how = {name: name in told for name in ("hints", "commands", "brief")}
    options = {"kind": kind, **how, "games": str(cache.absolute())}
    world = Shown("textworld", options, describe, rules=RULES * rules, workers=workers, timeout_s=timeout_s)
    if demo_slips:
        world.guide = partial(Slipping, slips=demo_slips)
    world.sizes = {split: games if split == "train" else games // 2 for split in ("train", "demo", "valid", "test")}
    return world
