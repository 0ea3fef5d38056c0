"""`sokoban`: push every box onto a goal. Boxes cannot be pulled: a wrong push may be the end. Words: left, down, right, up.

A room is drawn at random and solved breadth first over all states; only rooms whose shortest solution has a wanted number of
moves are kept. The reward is 1 when all boxes stand on goals. Signs are those of the usual level format, with _ for the floor:

    #####     # wall     @ the agent, + on a goal
    #@__#     $ a box,   * on a goal
    #_$.#     . a goal
    #####
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from jaxagent.envs.env import Env, Task
from jaxagent.envs.synchronous import Here, Said, SynchronousEpisode, seed_of
from jaxagent.types import Message

WAYS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_NAMES = tuple(WAYS)
_TRIES, _STATES = 2000, 50_000
RULES = (
    "Push every box onto a goal. # is a wall, _ the floor, @ is you, $ a box, . a goal, * a box on a goal, + you on a goal. "
    "A box moves when you walk into it and the cell behind it is free. Answer with one word: left, down, right or up."
)

Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell]]  # where the agent and the boxes are


@dataclass(frozen=True)
class Room:
    """What does not move, and where everything starts."""

    floor: frozenset[Cell]
    goals: frozenset[Cell]
    start: State

    def push(self, state: State, way: str) -> State:
        """The state after a move; walls, and boxes that cannot be pushed, stop it."""
        at, boxes = state
        down, right = WAYS[way]
        there = at[0] + down, at[1] + right
        if there not in self.floor:
            return state
        if there not in boxes:
            return there, boxes
        behind = there[0] + down, there[1] + right
        if behind not in self.floor or behind in boxes:
            return state
        return there, boxes - {there} | {behind}

    def solve(self, start: State) -> list[str] | None:
        """A shortest solution; None where there is none, or none among the first states that are looked at."""
        before: dict[State, tuple[State, str]] = {}
        ahead, seen = deque([start]), {start}
        while ahead and len(seen) < _STATES:
            state = ahead.popleft()
            if state[1] == self.goals:
                way: list[str] = []
                while state != start:
                    state, name = before[state]
                    way.append(name)
                return way[::-1]
            for name in WAYS:
                then = self.push(state, name)
                if then not in seen:
                    seen.add(then)
                    before[then] = state, name
                    ahead.append(then)
        return None

    def picture(self, state: State, size: int) -> str:
        return "\n".join("".join(self._sign((row, column), state) for column in range(size)) for row in range(size))

    def _sign(self, cell: Cell, state: State) -> str:
        at, boxes = state
        goal = cell in self.goals
        if cell not in self.floor:
            return "#"
        if cell == at:
            return "+" if goal else "@"
        if cell in boxes:
            return "*" if goal else "$"
        return "." if goal else "_"


def room_of(size: int, boxes: int, moves: tuple[int, int], seed: int) -> tuple[Room, list[str]]:
    """A room and a shortest solution of it. Raises ValueError where none with so many moves was found."""
    rng = random.Random(f"{seed}/room")
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    for _ in range(_TRIES):
        walls = set(rng.sample(inner, rng.randint(0, len(inner) // 4)))
        floor = [cell for cell in inner if cell not in walls]
        if len(floor) < 2 * boxes + 1:
            continue
        drawn = rng.sample(floor, 2 * boxes + 1)
        room = Room(frozenset(floor), frozenset(drawn[:boxes]), (drawn[-1], frozenset(drawn[boxes:-1])))
        solution = room.solve(room.start)
        if solution is not None and moves[0] <= len(solution) <= moves[1]:
            return room, solution
    raise ValueError(
        f"env.options: no room of size {size} with {boxes} boxes and a solution of {moves[0]} to {moves[1]} moves in {_TRIES} "
        "tries; take a larger room, fewer boxes or a wider range of moves"
    )


class Game:
    """A room that is played in."""

    def __init__(self, size: int, boxes: int, moves: tuple[int, int], box_reward: float):
        self.size, self.boxes, self.moves, self.box_reward = size, boxes, moves, box_reward

    def reset(self, task: Task, seed: int) -> Said:
        self.room, _ = room_of(self.size, self.boxes, self.moves, task["seed"])
        self.state = self.room.start
        return {"text": self.picture()}

    def step(self, action: str) -> Said:
        word = action.strip().strip(".!").lower()
        way = next((way for way in WAYS if word in (way, way[0])), None)
        if way is None:
            return {"text": f"what?\n{self.picture()}", "state": self.picture(), "invalid": True, "reason": "no way to go"}
        home = len(self.state[1] & self.room.goals)
        self.state = self.room.push(self.state, way)
        gained = self.box_reward * (len(self.state[1] & self.room.goals) - home)
        done = self.state[1] == self.room.goals
        parts = {"outcome": float(done), "boxes": gained} if self.box_reward else {}
        reason = "all boxes are home" if done else "a box came home" if gained > 0 else "a box left home" if gained < 0 else ""
        return {"text": self.picture(), "reward": done + gained, "parts": parts, "done": done, "reason": reason}

    def close(self) -> None:
        pass

    def picture(self) -> str:
        return self.room.picture(self.state, self.size)

    def oracle(self) -> list[str]:
        """A shortest solution from here; nothing where a box is stuck."""
        return self.room.solve(self.state) or []


class Sokoban:
    """The world.

    Args:
        size: of the room with its walls, 4 to 10.
        boxes: 1 to 4.
        moves: of the shortest solution, at least and at most.
        box_reward: for every box that comes onto a goal, and the same cost when it leaves one; below 1 / boxes in all.
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
        size: int = 6,
        boxes: int = 1,
        moves: tuple[int, int] = (2, 12),
        box_reward: float = 0.0,
        rules: bool = True,
        letters: bool = False,
        demo_slips: float = 0.3,
        demo_moves: int = 16,
    ):
        if not 4 <= size <= 10:
            raise ValueError(f"env.options.size must be 4 to 10, got {size}")
        if not 1 <= boxes <= 4:
            raise ValueError(f"env.options.boxes must be 1 to 4, got {boxes}")
        if not 1 <= moves[0] <= moves[1]:
            raise ValueError(f"env.options.moves must be (least, most) and at least 1, got {moves}")
        if not 0 <= box_reward * boxes < 1:
            raise ValueError(f"env.options.box_reward times boxes must be in [0, 1), got {box_reward} x {boxes}")
        if not 0 <= demo_slips <= 1:
            raise ValueError(f"env.options.demo_slips must be within 0 and 1, got {demo_slips}")
        self.size, self.boxes, self.moves, self.box_reward = size, boxes, (moves[0], moves[1]), box_reward
        self.rules, self.letters = RULES * rules, letters
        self.demo_slips, self.demo_moves = demo_slips, demo_moves

    def game(self) -> Game:
        return Game(self.size, self.boxes, self.moves, self.box_reward)

    def task(self, split: str, index: int) -> Task:
        seed = seed_of(split, index)
        _, solution = room_of(self.size, self.boxes, self.moves, seed)
        return {"id": f"sokoban/{split}/{index}", "seed": seed, "difficulty": f"{len(solution):02d} moves"}

    def episode(self, name: str, sandbox: Any) -> Env:
        return SynchronousEpisode(Here(self.game()), rules=self.rules)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Plays towards the solution and strays now and then, also into corners, where it gives up."""
        game = self.game()
        text = game.reset(task, task["seed"])["text"]
        messages = [Message("user", f"{self.rules}\n\n{text}" if self.rules else text)]
        for _ in range(self.demo_moves):
            planned = game.oracle()
            way = rng.choice(_NAMES) if rng.random() < self.demo_slips or not planned else planned[0]
            messages.append(Message("assistant", way[0] if self.letters else way))
            said = game.step(way)
            if said.get("done"):
                break
            messages.append(Message("user", said["text"]))
        return messages if messages[-1].role == "assistant" else messages[:-1]


make_world = Sokoban
