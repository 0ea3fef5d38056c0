"""Crafter in text: what stands around, what one has, and what was achieved for the first time."""

from typing import Any

import crafter
import numpy as np
from crafter import constants

ACTIONS = tuple(constants.actions)
_SIGHT = (4, 3)  # cells to either side, as many as the picture shows
_FACING = {(0, 1): "south", (0, -1): "north", (1, 0): "east", (-1, 0): "west"}


class Game(crafter.Env):
    """Without pictures, and the same in every process: creatures are kept in sets, whose order is that of their addresses."""

    def _obs(self) -> None:
        return None

    def _balance_object(self, chunk: Any, objs: Any, *rest: Any) -> None:
        super()._balance_object(chunk, sorted(objs, key=lambda obj: tuple(int(x) for x in obj.pos)), *rest)


class World:
    def __init__(self, steps: int):
        self.steps = steps

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self.game = Game(length=self.steps, seed=task["seed"] % 2**31)
        self.game.reset()
        self.done: set[str] = set()
        return {"text": self.picture()}

    def step(self, action: str) -> dict[str, Any]:
        word = action.strip().strip(".!").lower().replace(" ", "_")
        if word not in ACTIONS:
            return {"text": f"what?\n{self.picture()}", "state": self.picture(), "invalid": True, "reason": "no such action"}
        _, reward, done, info = self.game.step(ACTIONS.index(word))
        fresh = {name for name, count in info["achievements"].items() if count} - self.done
        self.done |= fresh
        over = "died" if not info["discount"] else "time is up" if done else ""
        reason = "; ".join([*(f"achieved {name}" for name in sorted(fresh)), *([over] if over else [])])
        return {
            "text": self.picture(),
            "reward": float(reward) / len(info["achievements"]),
            "done": bool(done),
            "reason": reason,
        }

    def picture(self) -> str:
        game: Any = self.game
        names = {number: name or "nothing" for name, number in game._world._mat_ids.items()}
        names |= {number: kind.__name__.lower() for kind, number in game._sem_view._obj_ids.items()}
        x, y = game._player.pos
        rows = []
        seen = game._sem_view()
        for dy in range(-_SIGHT[1], _SIGHT[1] + 1):
            line = []
            for dx in range(-_SIGHT[0], _SIGHT[0] + 1):
                inside = 0 <= x + dx < seen.shape[0] and 0 <= y + dy < seen.shape[1]
                line.append("you" if not (dx or dy) else names[int(seen[x + dx, y + dy])] if inside else "nothing")
            rows.append(" ".join(line))
        right, down = (int(v) for v in np.asarray(game._player.facing))
        front = (x + right, y + down)
        inside = 0 <= front[0] < seen.shape[0] and 0 <= front[1] < seen.shape[1]
        has = ", ".join(f"{name} {count}" for name, count in game._player.inventory.items() if count)
        sight = names[int(seen[front])] if inside else "nothing"
        asleep = " You sleep." if game._player.sleeping else ""
        return "\n".join(rows) + f"\nYou face {_FACING.get((right, down), 'nowhere')}: {sight}.{asleep} You have {has}."

    def close(self) -> None:
        pass


def make(**options: Any) -> World:
    return World(**options)
