"""`chain`: dependent look-ups through hidden tables, with a tool that sometimes fails.

The task `37ABA` asks for A[B[A[37]]]. Tools A and B turn a two-digit key into a two-digit value; the tables are drawn anew
for every task, so nothing can be memorised and a blind guess is right once in a hundred. A call fails with `flaky`
probability and says `!!`; the agent has to notice and repeat it. The answer is the final value. `looked_up`,
which is never trained on, is 1 where a right answer was read from a tool and 0 where it was guessed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, ToolCall, ToolRecord, ToolSpec

_SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
_SPLIT_SIZE = 10**9


def session_functions(options: dict[str, Any]) -> dict[str, Callable[..., str]]:
    """The tools of one episode, to be run by the sandbox server. The n-th call fails or not by (seed, n) alone.

    `drawn` are the calls of an episode that this one goes on from.
    """
    names, seed, flaky = options["tools"], options["seed"], options["flaky"]
    tables = tables_of(names, seed)
    luck = random.Random(f"{seed}/luck")
    for _ in range(options.get("drawn", 0)):
        luck.random()

    def look_up(name: str) -> Callable[[str], str]:
        def call(key: str) -> str:
            if not (len(key) == 2 and key.isascii() and key.isdigit()):
                return "??"
            return "!!" if luck.random() < flaky else tables[name][int(key)]

        return call

    return {name: look_up(name) for name in names}


def tables_of(names: str, seed: int) -> dict[str, list[str]]:
    rng = random.Random(f"{seed}/tables")
    return {name: [f"{rng.randrange(100):02d}" for _ in range(100)] for name in names}


class Chain:
    """The world. Options: how many hops, which tools, how often they fail, and how sloppy the demonstrator is."""

    functions = __name__
    forks = True

    def __init__(
        self,
        hops: tuple[int, ...] = (1, 2, 3),
        tools: str = "AB",
        flaky: float = 0.15,
        demo_right_tool: float = 0.75,
        demo_last_value: float = 0.35,
        demo_retry: float = 0.8,
        tool_timeout_s: float = 10.0,
    ):
        if not 0 <= flaky < 1:
            raise ValueError(f"env.options.flaky must be in [0, 1), got {flaky}")
        self.hops, self.names, self.flaky, self.tool_timeout_s = tuple(hops), tools, flaky, tool_timeout_s
        self.demo_right_tool, self.demo_last_value = demo_right_tool, demo_last_value
        self.demo_retry = demo_retry
        key = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
        self.tools = tuple(ToolSpec(name, f"Looks up a two-digit key in table {name}.", key) for name in tools)

    def task(self, split: str, index: int) -> Task:
        seed = _SPLITS[split] * _SPLIT_SIZE + index
        rng = random.Random(f"{seed}/plan")
        path = "".join(rng.choice(self.names) for _ in range(rng.choice(self.hops)))
        start = f"{rng.randrange(100):02d}"
        return {
            "id": f"chain/{split}/{index}",
            "seed": seed,
            "difficulty": f"{len(path)} hops",
            "question": start + path,
        }

    def gold(self, task: Task) -> str:
        value, tables = task["question"][:2], tables_of(self.names, task["seed"])
        for name in task["question"][2:]:
            value = tables[name][int(value)]
        return value

    def options(self, task: Task) -> dict[str, Any]:
        return {"tools": self.names, "seed": task["seed"], "flaky": self.flaky}

    def episode(self, name: str, sandbox: Any) -> Env:
        return ChainEpisode(self, name, sandbox)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A sloppy agent: legal calls, one per hop, but often the wrong tool, an old key, or an old value as answer.

        The number of turns is right and the content wrong, which is what reinforcement can repair. Demonstrations with a
        random number of turns make it collapse onto the shortest solvable behaviour.
        """
        functions = session_functions(self.options(task))
        plan, seen = task["question"][2:], [task["question"][:2]]
        messages, left = [Message("user", task["question"])], len(plan)

        def pick() -> str:
            return seen[-1] if rng.random() < self.demo_last_value or len(seen) == 1 else rng.choice(seen[:-1])

        for _ in range(6):
            name = plan[-left] if rng.random() < self.demo_right_tool else rng.choice(self.names)
            key = pick()
            result = functions[name](key)
            messages += [
                Message("assistant", calls=(ToolCall(name, {"key": key}),)),
                Message("tool", result, name=name),
            ]
            if result != "!!":
                seen.append(result)
            left -= result != "!!" or rng.random() >= self.demo_retry
            if not left:
                break
        return [*messages, Message("assistant", pick())]


class ChainEpisode:
    """One episode, with its sandbox session. The reward is computed here, from the seed, never in the sandbox."""

    def __init__(self, world: Chain, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox
        self.session: Any = None
        self.history: list[str] = []
        self.drawn = 0  # calls that could fail

    async def reset(self, task: Task, seed: int) -> Step:
        self.gold, self.options = self.world.gold(task), self.world.options(task)
        return Step([Message("user", task["question"])])

    async def step(self, action: Message) -> Step:
        if action.error:
            return self._observe([ToolRecord("", {}, "bad_arguments", "??")])
        if not action.calls:
            right = action.content == self.gold
            reason = "right answer" if right else f"answered {action.content!r}, right was {self.gold!r}"
            looked_up = float(right and any(entry.endswith(f"={self.gold}") for entry in self.history))
            checks = {"looked_up": looked_up}
            return Step(reward=float(right), reason=reason, terminated=True, answered=True, checks=checks)
        if self.session is None:
            self.session = await self.sandbox.open_session(self.name, self.world.functions, self.options)
        return self._observe([await self._look_up(call) for call in action.calls])

    async def _look_up(self, call: ToolCall) -> ToolRecord:
        key = str(call.arguments.get("key", ""))
        reply = await self.session.call(call.name, {"key": key}, timeout_s=self.world.tool_timeout_s)
        result = str(reply.value) if reply.outcome == "ok" else "??"
        self.drawn += result != "??"
        return ToolRecord(call.name, {"key": key}, str(reply.outcome), result, reply.elapsed_s, len(result))

    def _observe(self, records: list[ToolRecord]) -> Step:
        self.history += [f"{record.name}{record.arguments.get('key', '')}={record.result}" for record in records]
        messages = [Message("tool", record.result, name=record.name) for record in records]
        return Step(messages, state=" ".join(self.history), tools=records)

    async def fork(self, name: str) -> ChainEpisode:
        """A copy that goes on from here, in a session of its own."""
        made = ChainEpisode(self.world, name, self.sandbox)
        made.gold, made.options = self.gold, {**self.options, "drawn": self.drawn}
        made.history, made.drawn = list(self.history), self.drawn
        return made

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


make_world = Chain
