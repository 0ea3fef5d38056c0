"""`alfworld`: household chores in text, by ALFWorld's engine. Needs `jaxagent env install alfworld`, which builds its planner.

Six kinds of chores, in the words that the library takes: go to X, open X, take A from X, move A to X (or put A in/on X),
clean A with X, heat A with X, cool A with X, use A. The library's own games lie on a server. These are made here, of its 120
rooms, with the receptacles and the types of objects that each has, and of its domain, its goals and its grammar: the rules
are ALFWorld's and the games are not. Scores of this world compare with each other; those of papers are another row. Rooms of
the split `test` are those that the library keeps for tests, rooms of all other splits are those that it trains in.

The reward is 1 when the chore is done, and nothing before. The share of the goal's conditions that are met is the check
`goal_conditions`, which nothing is trained on. The oracle is the library's planner, which knows where everything is.
"""

from __future__ import annotations

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Shown

CHORES = ("place", "look", "clean", "heat", "cool", "two")
RULES = (
    "You do chores in a household. Answer with one command, as in: go to cabinet 1; open cabinet 1; take mug 1 from cabinet 1; "
    "move mug 1 to shelf 1; clean mug 1 with sinkbasin 1; heat mug 1 with microwave 1; cool mug 1 with fridge 1; "
    "use desklamp 1; examine mug 1; inventory; look."
)


def make_world(
    chores: tuple[str, ...] = CHORES,
    objects: int = 12,
    receptacles: int = 6,
    commands: bool = True,
    rules: bool = True,
    workers: int = 0,
    timeout_s: float = 120.0,
) -> Shown:
    """The world.

    Args:
        chores: in turn: place, look (at something under a lamp), clean, heat, cool, two.
        objects: in the room, beside those of the kind that the chore is about.
        receptacles: of one type at most, of those that the room has; there are kitchens with 27 drawers.
        commands: whether all admissible commands are listed after every observation.
        rules: whether the first observation begins with what can be said.
    """
    chores = tuple(chores)
    if not chores or not set(chores) <= set(CHORES):
        raise ValueError(f"env.options.chores must be among {', '.join(CHORES)}; got {chores}")
    if objects < 0:
        raise ValueError(f"env.options.objects must be 0 or more, got {objects}")
    if receptacles < 1:
        raise ValueError(f"env.options.receptacles must be at least 1, got {receptacles}")

    def describe(split: str, index: int) -> Task:
        chore = chores[index % len(chores)]
        return {"chore": chore, "unseen": split == "test", "difficulty": chore}

    options = {"objects": objects, "most": receptacles, "commands": commands}
    # Every game has the planner's library for itself.
    return Shown("alfworld", options, describe, rules=RULES * rules, workers=workers, slots=16, timeout_s=timeout_s)
