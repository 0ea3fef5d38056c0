"""`maze`: walk through doors to a goal room; one sparse reward on arrival. Every task draws its own map.

The rooms a, b, c, ... stand in a ring. Each has three doors: one leads on, one back, and one is a trap that throws the agent
back to where it started; which is which differs from room to room and from map to map. Entering a room shows its letter and
the signs on its doors, as in `fge!`: in room f, door A leads to g, B to e, and C is the trap. The task is `k` + `fge!`: find
room k. Held-out tasks are maps that were never seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, ToolCall, ToolRecord, ToolSpec

_SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
_SPLIT_SIZE = 10**9
DOORS = "ABC"
TRAP = -1


class Map:
    """The maze of one task and where the agent stands in it."""

    def __init__(self, rooms: int, distance: tuple[int, int], seed: int):
        rng = random.Random(f"{seed}/map")
        self.doors = []
        for room in range(rooms):
            ways = [(room + 1) % rooms, (room - 1) % rooms, TRAP]
            rng.shuffle(ways)
            self.doors.append(ways)
        self.start = self.room = rng.randrange(rooms)
        self.far = rng.randint(*distance)
        self.goal = (self.start + rng.choice((self.far, -self.far))) % rooms

    def move(self, door: str) -> None:
        to = self.doors[self.room][DOORS.index(door)]
        self.room = self.start if to == TRAP else to

    def signs(self) -> str:
        return letter(self.room) + "".join("!" if to == TRAP else letter(to) for to in self.doors[self.room])


def letter(room: int) -> str:
    return chr(ord("a") + room)


def session_functions(options: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """The doors of one episode, to be run by the sandbox server, which remembers where the agent stands."""
    maze = Map(options["rooms"], tuple(options["distance"]), options["seed"])

    def open_door(door: str) -> Callable[[], str]:
        def call() -> str:
            maze.move(door)
            return maze.signs()

        return call

    return {door: open_door(door) for door in DOORS}


class Maze:
    """The world. Options: how many rooms (at most 26), and how far the goal is at least and at most."""

    functions = __name__
    tools = tuple(ToolSpec(door, f"Goes through door {door}.") for door in DOORS)

    def __init__(
        self,
        rooms: int = 16,
        distance: tuple[int, int] = (5, 8),
        demo_right: float = 0.5,
        demo_moves: int = 16,
        tool_timeout_s: float = 10.0,
    ):
        if not 3 <= rooms <= 26:
            raise ValueError(f"env.options.rooms must be 3 to 26, got {rooms}")
        if not 1 <= distance[0] <= distance[1] <= rooms // 2:
            raise ValueError(f"env.options.distance must be within 1 and rooms // 2 = {rooms // 2}, got {distance}")
        self.rooms, self.distance = rooms, (distance[0], distance[1])
        self.demo_right, self.demo_moves, self.tool_timeout_s = demo_right, demo_moves, tool_timeout_s

    def task(self, split: str, index: int) -> Task:
        seed = _SPLITS[split] * _SPLIT_SIZE + index
        return {"id": f"maze/{split}/{index}", "seed": seed, "difficulty": f"{self.map(seed).far} rooms away"}

    def map(self, seed: int) -> Map:
        return Map(self.rooms, self.distance, seed)

    def episode(self, name: str, sandbox: Any) -> Env:
        return MazeEpisode(self, name, sandbox)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A sloppy walker: the nearest way with probability `demo_right`, else one of the other two doors."""
        maze = self.map(task["seed"])
        messages = [Message("user", letter(maze.goal) + maze.signs())]
        for _ in range(self.demo_moves):
            door = self._choose(maze, rng)
            messages.append(Message("assistant", calls=(ToolCall(door),)))
            maze.move(door)
            if maze.room == maze.goal:
                break
            messages.append(Message("tool", maze.signs(), name=door))
        return messages

    def _choose(self, maze: Map, rng: random.Random) -> str:
        ways = maze.doors[maze.room]

        def far(to: int) -> int:
            around = (to - maze.goal) % self.rooms
            return self.rooms if to == TRAP else min(around, self.rooms - around)

        best = min(range(len(ways)), key=lambda i: far(ways[i]))
        others = [i for i in range(len(ways)) if i != best]
        return DOORS[best if rng.random() < self.demo_right else rng.choice(others)]


class MazeEpisode:
    """One episode. The doors are opened in the sandbox; whether the agent has arrived is decided here."""

    def __init__(self, world: Maze, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox
        self.session: Any = None

    async def reset(self, task: Task, seed: int) -> Step:
        self.maze = self.world.map(task["seed"])
        self.options = {"rooms": self.world.rooms, "distance": self.world.distance, "seed": task["seed"]}
        return Step([Message("user", letter(self.maze.goal) + self.maze.signs())], state=letter(self.maze.room))

    async def step(self, action: Message) -> Step:
        if action.error:
            record = ToolRecord("", {}, "bad_arguments", "?")
            return Step([Message("tool", "?")], state=letter(self.maze.room), tools=[record])
        if not action.calls:
            return Step(reason="stopped walking", terminated=True, answered=True)
        if self.session is None:
            self.session = await self.sandbox.open_session(self.name, self.world.functions, self.options)
        door = action.calls[0].name
        reply = await self.session.call(door, {}, timeout_s=self.world.tool_timeout_s)
        self.maze.move(door)
        record = ToolRecord(door, {}, str(reply.outcome), str(reply.value), reply.elapsed_s, len(str(reply.value)))
        if self.maze.room == self.maze.goal:
            return Step(reward=1.0, reason="arrived", terminated=True, tools=[record])
        return Step([Message("tool", str(reply.value), name=door)], state=letter(self.maze.room), tools=[record])

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


make_world = Maze
