"""`gem`: the games of GEM, a suite of environments for agents that learn. Needs `jaxagent env install gem`.

An answer stands in a \\boxed{} of the policy's turn. The reward is the library's own: parts of 1 for progress, 1 in all for a
game that is won, a share for how near the last turn came where turns run out. What has no answer in a box costs 0.1; by the
library's rule it also ends the episode, which is `strict`, and here it may be said again unless that is asked for.

Wordle, Hangman and WordSearch read NLTK's list of words, which must have been fetched to where NLTK_DATA says. Crosswords want
more than the library installs, its sets of mathematics, code and questions come from a hub, and its copy of Reasoning Gym runs
some answers as programs: none of these is played here.
"""

from __future__ import annotations

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served, Shown

# By game, what the library calls its levels: easy, hard, random and for one of them extreme-hard.
SHOWN = ("GuessTheNumber", "Mastermind", "Sudoku", "TowerofHanoi", "WordSearch", "Wordle", "Hangman")
PLAYED = ("Minesweeper", "FifteenPuzzle", "Game2048", "Sokoban")  # nobody here knows how these are won
LEVELS = ("easy", "hard", "random", "extreme-hard")
BROKEN = ("FifteenPuzzle-v0-random",)  # it cannot be made, in this version of the library
_EXAMPLES = {
    "GuessTheNumber": ("1", "2", "3", "5", "8"),
    "Mastermind": ("1 2", "2 1", "3 4", "5 6"),
    "Sudoku": ("1 1 1", "1 2 2", "2 1 3"),
    "TowerofHanoi": ("A B", "A C", "B C", "C A"),
    "Minesweeper": ("reveal 0 0", "reveal 2 2", "flag 1 1", "reveal 4 4"),
    "WordSearch": ("0 0 0 3", "1 0 1 4"),
    "Wordle": ("ACT", "TEA"),
    "Hangman": ("A", "E", "T"),
}
_WAYS = ("up", "down", "left", "right")


def make_world(
    game: str = "GuessTheNumber-v0-easy",
    strict: bool = False,
    rules: str = "",
    workers: int = 0,
    timeout_s: float = 60.0,
) -> Served:
    """The world.

    Args:
        game: the library's name of it, without the `game:` before it, as in Sudoku-v0-easy.
        strict: whether a turn without an answer in a box ends the episode, as in the library's own runs.
        rules: said before the first observation, beside what the game says itself.
    """
    kind, _, rest = game.partition("-v0-")
    if kind not in (*SHOWN, *PLAYED) or rest not in LEVELS or game in BROKEN:
        raise ValueError(
            f"env.options.game must be one of {', '.join((*SHOWN, *PLAYED))} with -v0- and one of {', '.join(LEVELS)} behind "
            f"it, got {game!r}"
        )

    def describe(split: str, index: int) -> Task:
        return {"difficulty": game}

    made = Shown if kind in SHOWN else Served
    world = made("gem", {"game": game, "strict": strict}, describe, rules=rules, workers=workers, timeout_s=timeout_s)
    world.examples = tuple(f"\\boxed{{{answer}}}" for answer in _EXAMPLES.get(kind, _WAYS))
    return world
