"""GEM: games that read an answer in a \\boxed{} of the policy's turn and draw from Python's and numpy's one generator."""

import random
from collections.abc import Callable
from typing import Any

import gem
import numpy
from gem.utils.constants import LanguageGameReward

_LONGEST = 4000  # letters of a turn that are read, its last ones: no number among them is too long for Python to read


class World:
    def __init__(self, game: str, strict: bool):
        self.kind, self.strict = game.partition("-")[0], strict
        self.luck: Any = None
        with Luck(self):
            self.game = gem.make(f"game:{game}")

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        with Luck(self):
            seen, info = self.game.reset(task["seed"] % 2**32)
        return self.told(seen, info)

    def step(self, action: str) -> dict[str, Any]:
        with Luck(self):
            seen, reward, ended, truncated, info = self.game.step(action[-_LONGEST:])
        unread = ended and reward == LanguageGameReward.format_error_reward
        won = ended and not truncated and seen.startswith("Congratulations")
        done = bool(truncated or (ended and (self.strict or not unread)))
        reason = "won" if won else "no answer in a box" if unread else "out of turns" if truncated else "lost" if done else ""
        parts = {"outcome": float(won), "game": float(reward) - won}
        return {**self.told(seen, info), "reward": float(reward), "parts": parts, "done": done, "reason": reason}

    def oracle(self) -> list[str]:
        return [f"\\boxed{{{answer}}}" for answer in ORACLES[self.kind](self.game)]

    def told(self, seen: str, info: dict[str, Any]) -> dict[str, Any]:
        """What the library says, and what its own loops put behind it: how things stand now."""
        text = "\n".join(filter(None, (seen.strip(), info.get("suffix", "").strip())))
        board = getattr(self.game, "board", None)
        return {"text": text} if board is None else {"text": text, "state": str(board)}

    def close(self) -> None:
        pass


class Luck:
    """Gives a game its own state of the generators back while it is called."""

    def __init__(self, world: World):
        self.world = world

    def __enter__(self) -> None:
        self.outside = random.getstate(), numpy.random.get_state()
        if self.world.luck is not None:
            put(self.world.luck)

    def __exit__(self, *fault: object) -> None:
        self.world.luck = random.getstate(), numpy.random.get_state()
        put(self.outside)


def put(states: Any) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def towers(game: Any) -> list[str]:
    """The moves that bring all disks from A to C."""

    def move(count: int, source: str, target: str, other: str) -> list[str]:
        if count == 0:
            return []
        return [*move(count - 1, source, other, target), f"{source} {target}", *move(count - 1, other, target, source)]

    return move(game.num_disks, "A", "C", "B")


def missing_numbers(game: Any) -> list[str]:
    rows = enumerate(zip(game.board, game.full_grid, strict=True), 1)
    return [f"{r} {c} {full[c - 1]}" for r, (cells, full) in rows for c, cell in enumerate(cells, 1) if cell == 0]


def found_words(game: Any) -> list[str]:
    """From the first letter of every hidden word to its last."""
    ways = {"across": (0, 1), "down": (1, 0)}
    spans = [(row, column, len(word) - 1, *ways[way]) for word, (row, column, way) in game.placed_words.items()]
    return [f"{row} {column} {row + last * down} {column + last * right}" for row, column, last, down, right in spans]


ORACLES: dict[str, Callable[[Any], list[str]]] = {
    "GuessTheNumber": lambda game: [str(game.game_number)],
    "Mastermind": lambda game: [" ".join(map(str, game.game_code))],
    "Sudoku": missing_numbers,
    "TowerofHanoi": towers,
    "WordSearch": found_words,
    "Wordle": lambda game: [game.secret_word],
    "Hangman": lambda game: [game.secret_word],
}


def make(**options: Any) -> World:
    return World(**options)
