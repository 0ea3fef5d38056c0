"""`textarena`: games against oneself or alone, from a collection of about a hundred. Needs `jaxagent env install textarena`.

Every player is a seat with a row of its own, and all are played by the policy. Rewards come at the end, +1 and -1 in games of
two: who moved last gets its own with that move, the others get theirs for their last. An illegal move is told and may be
repeated; who makes too many in a row loses. For a shared policy without a critic, `algo.name=spiral` has a baseline for each
role.
"""

from __future__ import annotations

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served


def make_world(
    game: str = "TicTacToe-v0",
    players: int = 2,
    errors: int = 2,
    rules: str = "",
    workers: int = 0,
    timeout_s: float = 60.0,
) -> Served:
    """The world.

    Args:
        game: the library's name of it, without an ending as -raw or -train. Some read word lists that must be fetched first.
        players: that it takes.
        errors: illegal moves in a row that are forgiven.
        rules: said before the first observation, beside what the game says itself.
    """
    if game.endswith(("-raw", "-train")):
        raise ValueError(f"env.options.game must be a name without its ending, got {game!r}")
    if players < 1:
        raise ValueError(f"env.options.players must be at least 1, got {players}")

    def describe(split: str, index: int) -> Task:
        return {"difficulty": game}

    options = {"game": game, "players": players, "errors": errors}
    world = Served("textarena", options, describe, rules=rules, workers=workers, timeout_s=timeout_s)
    world.examples = tuple(f"[{i}]" for i in range(9))
    return world
