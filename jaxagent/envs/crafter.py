"""`crafter`: survive and make tools in an open world of 22 achievements, in text. Needs `jaxagent env install crafter`.

The policy reads the 9 x 7 cells around it, what it faces and what it has, and names one of 17 actions. The reward is the
game's own, +1 for every first achievement and 0.1 for each point of health, divided by 22: all achievements are worth 1. A
new world takes seconds.
"""

from __future__ import annotations

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served

RULES = (
    "You live in an open world, seen from above; north is up. Survive, and achieve as much as you can: collect wood, place a "
    "table, make tools. Answer with one action: noop, move_left, move_right, move_up, move_down, do, sleep, place_stone, "
    "place_table, place_furnace, place_plant, make_wood_pickaxe, make_stone_pickaxe, make_iron_pickaxe, make_wood_sword, "
    "make_stone_sword, make_iron_sword."
)


def make_world(steps: int = 10_000, rules: bool = True, workers: int = 0, timeout_s: float = 60.0) -> Served:
    """The world.

    Args:
        steps: after which an episode ends; 10,000 is the game's own limit, and most policies die long before.
        rules: whether the first observation begins with what can be done.
    """
    if steps < 1:
        raise ValueError(f"env.options.steps must be at least 1, got {steps}")

    def describe(split: str, index: int) -> Task:
        return {"difficulty": "open world"}

    world = Served("crafter", {"steps": steps}, describe, rules=RULES * rules, workers=workers, timeout_s=timeout_s)
    world.examples = ("move_left", "move_right", "move_up", "move_down", "do", "sleep")
    return world
