"""TextArena: games of one or several players, who act in turn. The result is known at the end, and belongs to every player."""

import random
from typing import Any

import textarena


class World:
    def __init__(self, game: str, players: int, errors: int):
        self.name, self.players, self.errors = game, players, errors
        self.game = textarena.make(f"{game}-raw")
        self.luck: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        with Luck(self):
            self.game.reset(num_players=self.players, seed=task["seed"])
            if hasattr(self.game.state, "error_allowance"):
                self.game.state.error_allowance = self.errors
            return self.told()

    def step(self, action: str) -> dict[str, Any]:
        mover, errors = self.mover, self.error_count
        with Luck(self):
            done, _ = self.game.step(action)
            if not done:
                said = self.told()
                return {**said, "invalid": True, "reason": "no legal move"} if self.error_count > errors else said
            rewards, info = self.game.close()
        rewards = rewards or {}
        others = {self.agent(player): float(reward) for player, reward in rewards.items() if player != mover}
        reason = str(info.get(mover, {}).get("reason", "")) if isinstance(info, dict) else ""
        said = {"agent": self.agent(mover), "reward": float(rewards.get(mover, 0.0)), "done": True, "reason": reason}
        return {**said, "rewards": others}

    def told(self) -> dict[str, Any]:
        """What the next player has not heard yet, without its own words."""
        self.mover, heard = self.game.get_observation()
        names = self.game.state.role_mapping
        lines = [
            f"{names.get(source, f'Player {source}')}: {text}" if source >= 0 else text
            for source, text, _ in heard
            if source != self.mover
        ]
        return {"text": "\n".join(line.strip() for line in lines), "agent": self.agent(self.mover)}

    def agent(self, player: int) -> str:
        return f"player {player}" if self.players > 1 else "agent"

    @property
    def error_count(self) -> int:
        return int(getattr(self.game.state, "error_count", 0))

    def close(self) -> None:
        pass


class Luck:
    """The games draw from the one generator of Python's `random`: each gets its own state back while it is called."""

    def __init__(self, world: World):
        self.world = world

    def __enter__(self) -> None:
        self.outside = random.getstate()
        if self.world.luck is not None:
            random.setstate(self.world.luck)

    def __exit__(self, *fault: object) -> None:
        self.world.luck = random.getstate()
        random.setstate(self.outside)


def make(**options: Any) -> World:
    return World(**options)
