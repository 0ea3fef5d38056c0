"""`gymnasium_text`: gymnasium's small worlds of numbered actions, in words. Needs `jaxagent env install gymnasium_text`.

Taxi-v3, Blackjack-v1, CliffWalking-v1 and FrozenLake-v1 have words for their actions; any other world with a finite set of
actions is played by number, and seen as it prints itself. The reward is the game's own; whether it was won is the part
`outcome`.
"""

from __future__ import annotations

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served

RULES = {
    "Taxi": "Drive the taxi to the passenger, pick up, drive to the destination, drop off. | is a wall, : is open. ",
    "Blackjack": "Come closer to 21 than the dealer, and not above it. ",
    "CliffWalking": "Walk from the lower left corner to the lower right one, and not over the cliff. ",
    "FrozenLake": "Reach G from S over the frozen cells F, and fall into no hole H. ",
}


def make_world(game: str = "Taxi-v3", rules: bool = True, workers: int = 0, timeout_s: float = 60.0) -> Served:
    """The world.

    Args:
        game: its registered name.
        rules: whether the first observation begins with what is to be done.
    """

    def describe(split: str, index: int) -> Task:
        return {"difficulty": game}

    said = f"{RULES.get(game.partition('-')[0], '')}Answer with the name of one action." if rules else ""
    world = Served("gymnasium_text", {"game": game}, describe, rules=said, workers=workers, timeout_s=timeout_s)
    world.examples = tuple(str(i) for i in range(6))
    return world
