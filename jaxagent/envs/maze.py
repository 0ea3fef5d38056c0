"""`maze`: explore until the way out is found; one sparse reward on arrival. Every task draws its own map.

The rooms stand in a ring. Each has three doors: two lead to its neighbours, and one is a trap that throws the agent back to
where it started. Entering a room shows its letter and what is seen on its doors: `f-o!` is room f, where door A is the one
through which the agent came, B is open and C is the trap. One room is the way out, and nothing tells which. A search finds it
in time if it avoids the traps and does not turn round. Held-out tasks are maps that were never seen.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, ToolCall, ToolRecord, ToolSpec

_SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
_SPLIT_SIZE = 10**9
DOORS = "ABC"
SIGNS = "o-!"  # on a door: open, the one that the agent came through, a trap
TRAP = -1


class Map:
    """The maze of one task, where the agent stands in it, and through which door it came (-1: through none)."""

    def __init__(self, rooms: int, distance: tuple[int, int], seed: int):
        rng = random.Random(f"{seed}/map")
        self.letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rooms)
        self.doors = []
        for room in range(rooms):
            ways = [(room + 1) % rooms, (room - 1) % rooms, TRAP]
            rng.shuffle(ways)
            self.doors.append(ways)
        self.start = self.room = rng.randrange(rooms)
        self.came = -1
        self.far = rng.randint(*distance)
        self.goal = (self.start + rng.choice((self.far, -self.far))) % rooms

    def move(self, door: str) -> None:
        left, to = self.room, self.doors[self.room][DOORS.index(door)]
        self.room = self.start if to == TRAP else to
        self.came = -1 if to == TRAP else self.doors[to].index(left)

    def signs(self) -> str:
        doors = self.doors[self.room]
        return self.letters[self.room] + "".join(
            "!" if to == TRAP else "-" if i == self.came else "o" for i, to in enumerate(doors)
        )


def session_functions(options: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """The doors of one episode, to be run by the sandbox server, which remembers where the agent stands.

    `at` are the room and the door where a copy of another episode goes on.
    """
    maze = Map(options["rooms"], tuple(options["distance"]), options["seed"])
    maze.room, maze.came = options.get("at", (maze.room, maze.came))

    def open_door(door: str) -> Callable[[], str]:
        def call() -> str:
            maze.move(door)
            return maze.signs()

        return call

    return {door: open_door(door) for door in DOORS}


class Maze:
    """The world.

    Args:
        rooms: of the ring, 3 to 26.
        distance: how far the way out is from the start, at least and at most, along the shorter arc.
        demo_odds: how readily the demonstrator takes a door that leads on, the one back, and the trap.
        demo_moves: after which it gives up.
    """

    functions = __name__
    forks = True
    tools = tuple(ToolSpec(door, f"Goes through door {door}.") for door in DOORS)

    def __init__(
        self,
        rooms: int = 18,
        distance: tuple[int, int] = (8, 9),
        demo_odds: tuple[float, float, float] = (0.64, 0.31, 0.05),
        demo_moves: int = 16,
        tool_timeout_s: float = 10.0,
    ):
        if not 3 <= rooms <= 26:
            raise ValueError(f"env.options.rooms must be 3 to 26, got {rooms}")
        if not 1 <= distance[0] <= distance[1] <= rooms // 2:
            raise ValueError(f"env.options.distance must be within 1 and rooms // 2 = {rooms // 2}, got {distance}")
        self.rooms, self.distance = rooms, (distance[0], distance[1])
        self.demo_odds, self.demo_moves, self.tool_timeout_s = tuple(demo_odds), demo_moves, tool_timeout_s

    def task(self, split: str, index: int) -> Task:
        seed = _SPLITS[split] * _SPLIT_SIZE + index
        return {"id": f"maze/{split}/{index}", "seed": seed, "difficulty": f"{self.map(seed).far} rooms away"}

    def map(self, seed: int) -> Map:
        return Map(self.rooms, self.distance, seed)

    def episode(self, name: str, sandbox: Any) -> Env:
        return MazeEpisode(self, name, sandbox)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A restless walker: it reads the signs and shuns the trap, but turns round so often that it rarely arrives.

        A walker that chooses its doors almost evenly would be worse as a teacher: nobody learns to read from it.
        """
        maze = self.map(task["seed"])
        messages = [Message("user", maze.signs())]
        for _ in range(self.demo_moves):
            odds = [self.demo_odds[SIGNS.index(sign)] for sign in maze.signs()[1:]]
            (door,) = rng.choices(DOORS, odds)
            messages.append(Message("assistant", calls=(ToolCall(door),)))
            maze.move(door)
            if maze.room == maze.goal:
                break
            messages.append(Message("tool", maze.signs(), name=door))
        return messages


class MazeEpisode:
    """One episode. The doors are opened in the sandbox; whether the agent has arrived is decided here."""

    def __init__(self, world: Maze, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox
        self.session: Any = None

    async def reset(self, task: Task, seed: int) -> Step:
        self.maze = self.world.map(task["seed"])
        self.options = {"rooms": self.world.rooms, "distance": self.world.distance, "seed": task["seed"]}
        return Step([Message("user", self.maze.signs())], state=self.maze.signs())

    async def step(self, action: Message) -> Step:
        if action.error:
            record = ToolRecord("", {}, "bad_arguments", "?")
            return Step([Message("tool", "?")], state=self.maze.signs(), tools=[record])
        if not action.calls:
            return Step(reason="stopped walking", terminated=True, answered=True)
        if self.session is None:
            self.session = await self.sandbox.open_session(self.name, self.world.functions, self.options)
        door = action.calls[0].name
        reply = await self.session.call(door, {}, timeout_s=self.world.tool_timeout_s)
        result = str(reply.value) if reply.outcome == "ok" else "?"
        record = ToolRecord(door, {}, str(reply.outcome), result, reply.elapsed_s, len(result))
        if reply.outcome == "ok":
            self.maze.move(door)
        if self.maze.room == self.maze.goal:
            return Step(reward=1.0, reason="found the way out", terminated=True, tools=[record])
        return Step([Message("tool", result, name=door)], state=self.maze.signs(), tools=[record])

    async def fork(self, name: str) -> MazeEpisode:
        """A copy that goes on from here, in a session of its own."""
        made = MazeEpisode(self.world, name, self.sandbox)
        made.maze = copy.copy(self.maze)  # whose walls stay as they are
        made.options = {**self.options, "at": (self.maze.room, self.maze.came)}
        return made

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


make_world = Maze
