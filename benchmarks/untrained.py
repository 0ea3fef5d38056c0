"""What players who learn nothing win on the held-out tasks of two worlds of text: `python benchmarks/untrained.py`.

The tasks and turns of `configs/textworld_coins.py` and `configs/frozen_lake.py`, two episodes of each task: by a player who
cannot read, one who reads a line and remembers nothing, and one who reads and remembers everything. To be read beside what
policies score there. Prints a table in Markdown. Needs `jaxagent env install textworld`.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from jaxagent import config as configs
from jaxagent.envs import env as envs
from jaxagent.envs.env import Task, World
from jaxagent.types import Message

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BACK = {"e": "w", "w": "e", "n": "s", "s": "n"}
Player = Callable[[str], str]  # what the world says to a letter
RNG = random.Random(0)


def main() -> None:
    """Plays and prints the table."""
    letters, ways = "enswt", "ldru"
    players = {
        "textworld_coins": {
            "any letter": lambda: lambda text: RNG.choice(letters),
            "any letter of the line": lambda: lambda text: RNG.choice(text.rsplit(" ", 1)[1]),
            "never back but from dead ends": lambda: Wanderer(remembers=False),
            "depth first": lambda: Wanderer(remembers=True),
        },
        "frozen_lake": {
            "any letter": lambda: lambda text: RNG.choice(ways),
            "down and right, blindly": lambda: iter_of(RNG.sample("dddrrr", 6)),
        },
    }
    print("| world | player | won |\n|---|---|---:|")
    for name, kinds in players.items():
        c, _ = configs.load(str(CONFIGS / f"{name}.py"))
        world = envs.find(c.env.name)(**c.env.options)
        try:
            for kind, make in kinds.items():
                won = defaultdict(list)
                for i in range(c.evaluate.final_tasks):
                    task = world.task("test", i)
                    won[task["difficulty"]] += [asyncio.run(play(world, task, make(), c.agent.max_turns)) for _ in range(2)]
                for difficulty, each in sorted(won.items()):
                    print(f"| {name}, {difficulty} | {kind} | {sum(each) / len(each):.3f} |")
        finally:
            envs.end(world)


class Wanderer:
    """Takes the coin where it lies, and goes on where there is a way on; one who remembers takes no exit twice."""

    def __init__(self, remembers: bool):
        self.remembers, self.tried, self.way = remembers, defaultdict[str, set[str]](set), list[str]()

    def __call__(self, text: str) -> str:
        room, letters = text.rsplit(" ", 1)
        if "t" in letters:
            return "t"
        back = BACK[self.way[-1]] if self.way else ""
        ahead = [letter for letter in letters if letter != back]
        if not self.remembers:
            self.way.append(RNG.choice(ahead or [back]))
            return self.way[-1]
        fresh = [letter for letter in ahead if letter not in self.tried[room]]
        if not fresh:
            self.way.pop()
            return back
        self.way.append(RNG.choice(fresh))
        self.tried[room].add(self.way[-1])
        return self.way[-1]


def iter_of(actions: list[str]) -> Player:
    left = iter(actions)
    return lambda text: next(left)


async def play(world: World, task: Task, player: Player, turns: int) -> float:
    """The reward of an episode."""
    env = world.episode("untrained", None)
    try:
        step, earned = await env.reset(task, task["seed"]), 0.0
        for _ in range(turns):
            step = await env.step(Message("assistant", player(step.messages[0].content)))
            earned += step.reward
            if step.terminated:
                break
        return earned
    finally:
        await env.close()


if __name__ == "__main__":
    main()
