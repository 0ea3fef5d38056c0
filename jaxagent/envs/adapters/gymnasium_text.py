"""Gymnasium's small worlds of numbered actions, in words."""

import re
from typing import Any

import gymnasium

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WAYS = ("left", "down", "right", "up")
ACTIONS = {
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": _WAYS,
}


class World:
    def __init__(self, game: str):
        self.kind = game.partition("-")[0]
        plain = gymnasium.make(game)
        ansi = "ansi" in plain.metadata.get("render_modes", ())
        self.game = gymnasium.make(game, render_mode="ansi") if ansi else plain
        count = getattr(self.game.action_space, "n", None)
        if count is None:
            raise ValueError(f"env.options.game={game}: its actions are no finite set")
        self.names = ACTIONS.get(self.kind) or tuple(str(i) for i in range(int(count)))
        self.ansi = ansi

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self.seen, _ = self.game.reset(seed=seed % 2**32)
        return self.told()

    def step(self, action: str) -> dict[str, Any]:
        word = action.strip().strip(".!").lower().replace("_", " ")
        number = self.names.index(word) if word in self.names else int(word) if word.isascii() and word.isdecimal() else -1
        if not 0 <= number < len(self.names):
            told = self.told()
            return {**told, "text": f"what?\n{told['text']}", "invalid": True, "reason": "no such action"}
        self.seen, reward, terminated, truncated, _ = self.game.step(number)
        won = self.won(float(reward), terminated)
        parts = {"outcome": float(won), "game": float(reward) - won}
        said = {"reward": float(reward), "parts": parts, "done": bool(terminated or truncated)}
        return {**self.told(), **said, "reason": "won" if won else "over" if said["done"] else ""}

    def won(self, reward: float, terminated: bool) -> bool:
        """Whether the game was won with this action: its own sum of rewards does not say so."""
        if self.kind == "Taxi":
            return terminated and reward > 0
        return terminated if self.kind == "CliffWalking" else terminated and reward > 0

    def told(self) -> dict[str, Any]:
        return {"text": f"{self.picture()}\nActions: {', '.join(self.names)}", "state": str(self.seen)}

    def picture(self) -> str:
        if self.kind == "Taxi":
            return self.taxi()
        if self.kind == "Blackjack":
            mine, dealer, ace = self.seen
            return f"Your sum is {mine}{', with an ace that counts 11' if ace else ''}. The dealer shows {dealer}."
        if self.kind == "CliffWalking":
            row, column = divmod(int(self.seen), 12)
            cliff = "the cliff is the lowest row between its corners, the goal its right corner"
            return f"You are in row {row + 1} of 4, column {column + 1} of 12; {cliff}."
        return _COLOURS.sub("", str(self.game.render())).strip() if self.ansi else str(self.seen)

    def taxi(self) -> str:
        """Where everything is: the library shows it by colours."""
        game: Any = self.game.unwrapped
        row, column, passenger, destination = game.decode(int(self.seen))
        at = [f"({r + 1}, {c + 1})" for r, c in game.locs]
        where = f"waits at {at[passenger]}" if passenger < len(at) else "is in the taxi"
        walls = "\n".join(line.decode() if isinstance(line, bytes) else str(line) for line in (b"".join(r) for r in game.desc))
        return (
            f"{walls}\nThe taxi is at ({row + 1}, {column + 1}), row and column of 5; the passenger {where} and wants to go to "
            f"{at[destination]}."
        )

    def close(self) -> None:
        self.game.close()


def make(**options: Any) -> World:
    return World(**options)
