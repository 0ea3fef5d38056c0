"""`frozen_lake`: cross a frozen lake without falling into a hole. Words: left, down, right, up.

The rules are those of gymnasium's FrozenLake-v1: one starts in the upper left corner, the goal is in the lower right one; a
cell is frozen with probability 0.8, otherwise a hole, and only maps with a way are kept. On slippery ice a step goes where it
was meant to with probability 1/3, and to either side of that with 1/3 each. The reward is 1 at the goal; a hole ends the
episode with 0. Every task draws its own map. A small lake has few, so every map belongs to one split, and
what is held out has never been seen.

    P__     P the agent, _ ice, O a hole, G the goal
    _O_
    __G
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from typing import Any

from jaxagent.envs.env import Env, Task
from jaxagent.envs.synchronous import SPLIT_SIZE, SPLITS, Here, Said, SynchronousEpisode, seed_of
from jaxagent.types import Message

WAYS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_NAMES = tuple(WAYS)
_FROZEN, _TRIES = 0.8, 1000
RULES = (
    "You stand on a frozen lake: P is you, _ is ice, O is a hole, G is the goal. Reach the goal without falling into a hole. "
    "Answer with one word: left, down, right or up."
)
SLIPPERY = " The ice is slippery: one step in three goes where you want, the others go to either side of it."


class Lake:
    """The lake and who is on it. `size` and `slippery` as in the world; a step is drawn from the episode's seed alone."""

    def __init__(self, size: int, slippery: bool):
        self.size, self.slippery = size, slippery

    def reset(self, task: Task, seed: int) -> Said:
        self.holes = holes_of(self.size, task["seed"])
        self.at, self.luck = (0, 0), random.Random(f"{seed}/ice")
        return {"text": self.picture()}

    def step(self, action: str) -> Said:
        way = way_of(action)
        if way is None:
            return {"text": f"what?\n{self.picture()}", "state": self.picture(), "invalid": True, "reason": "no way to go"}
        if self.slippery:  # to either side is the way before and the way after, in the order of WAYS
            way = _NAMES[(_NAMES.index(way) + self.luck.choice((-1, 0, 1))) % 4]
        self.at = moved(self.at, way, self.size)
        if self.at == (self.size - 1, self.size - 1):
            return {"text": self.picture(), "reward": 1.0, "reason": "reached the goal", "done": True}
        if self.at in self.holes:
            return {"text": self.picture(), "reason": "fell into a hole", "done": True}
        return {"text": self.picture()}

    def close(self) -> None:
        pass

    def picture(self) -> str:
        goal = (self.size - 1, self.size - 1)
        cells = [[(row, column) for column in range(self.size)] for row in range(self.size)]
        return "\n".join("".join(self._sign(cell, goal) for cell in row) for row in cells)

    def _sign(self, cell: tuple[int, int], goal: tuple[int, int]) -> str:
        if cell == self.at:
            return "P"
        return "G" if cell == goal else "O" if cell in self.holes else "_"

    def oracle(self) -> list[str]:
        """The shortest way from here, if no step slips."""
        return way_to_goal(self.at, self.holes, self.size) or []


def way_of(action: str) -> str | None:
    """The direction that a turn names, by its word or its first letter."""
    word = action.strip().strip(".!").lower()
    return next((way for way in WAYS if word in (way, way[0])), None)


def moved(at: tuple[int, int], way: str, size: int) -> tuple[int, int]:
    """The cell where a step leads; the shore stops it."""
    down, right = WAYS[way]
    return min(max(at[0] + down, 0), size - 1), min(max(at[1] + right, 0), size - 1)


def holes_of(size: int, seed: int) -> frozenset[tuple[int, int]]:
    """The holes of a map that can be crossed and belongs to the split of this seed."""
    rng = random.Random(f"{seed}/lake")
    ends = {(0, 0), (size - 1, size - 1)}
    cells = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(_TRIES):
        holes = frozenset(cell for cell in cells if rng.random() >= _FROZEN and cell not in ends)
        if split_of(holes) == seed // SPLIT_SIZE and way_to_goal((0, 0), holes, size) is not None:
            return holes
    raise ValueError(f"env.options.size={size}: no lake that can be crossed in {_TRIES} tries; make it smaller")


def split_of(holes: frozenset[tuple[int, int]]) -> int:
    """The number of the split that alone has this map, the same in every process."""
    return zlib.crc32(repr(sorted(holes)).encode()) % len(SPLITS)


def way_to_goal(at: tuple[int, int], holes: frozenset[tuple[int, int]], size: int) -> list[str] | None:
    """A shortest way round the holes, breadth first; None where there is none."""
    before: dict[tuple[int, int], tuple[tuple[int, int], str]] = {}
    ahead, seen = deque([at]), {at}
    while ahead:
        cell = ahead.popleft()
        if cell == (size - 1, size - 1):
            way: list[str] = []
            while cell != at:
                cell, name = before[cell]
                way.append(name)
            return way[::-1]
        for name in WAYS:
            there = moved(cell, name, size)
            if there not in seen and there not in holes:
                seen.add(there)
                before[there] = cell, name
                ahead.append(there)
    return None


class FrozenLake:
    """The world.

    Args:
        size: of a side, 3 to 12.
        slippery: whether steps slip, as they do in gymnasium by default.
        rules: whether the first observation begins with the rules; a policy from scratch has no use for them.
        letters: the demonstrator writes the first letter of a way instead of its word.
        demo_slips: how often the demonstrator goes anywhere instead of on its shortest way.
        demo_moves: after which it gives up.
    """

    functions = ""
    tools = ()
    forks = True

    def __init__(
        self,
        size: int = 4,
        slippery: bool = True,
        rules: bool = True,
        letters: bool = False,
        demo_slips: float = 0.3,
        demo_moves: int = 12,
    ):
        if not 3 <= size <= 12:
            raise ValueError(f"env.options.size must be 3 to 12, got {size}")
        if not 0 <= demo_slips <= 1:
            raise ValueError(f"env.options.demo_slips must be within 0 and 1, got {demo_slips}")
        self.size, self.slippery, self.letters = size, slippery, letters
        self.rules = (RULES + SLIPPERY * slippery) if rules else ""
        self.demo_slips, self.demo_moves = demo_slips, demo_moves

    def task(self, split: str, index: int) -> Task:
        seed = seed_of(split, index)
        steps = len(way_to_goal((0, 0), holes_of(self.size, seed), self.size) or ())
        return {"id": f"frozen_lake/{split}/{index}", "seed": seed, "difficulty": f"{steps} steps"}

    def episode(self, name: str, sandbox: Any) -> Env:
        return SynchronousEpisode(Here(Lake(self.size, self.slippery)), rules=self.rules)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Walks towards the goal and strays now and then, also into holes."""
        lake = Lake(self.size, self.slippery)
        text = lake.reset(task, rng.randrange(1 << 30))["text"]
        messages = [Message("user", f"{self.rules}\n\n{text}" if self.rules else text)]
        for _ in range(self.demo_moves):
            way = rng.choice(_NAMES) if rng.random() < self.demo_slips else lake.oracle()[0]
            messages.append(Message("assistant", way[0] if self.letters else way))
            said = lake.step(way)
            if said.get("done"):
                break
            messages.append(Message("user", said["text"]))
        return messages if messages[-1].role == "assistant" else messages[:-1]


make_world = FrozenLake
