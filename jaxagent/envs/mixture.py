"""`mixture`: tasks of several worlds in one run, by weights.

    c.env.name = "mixture"
    c.env.options.worlds = ConfigDict({
        "look": {"name": "chain", "weight": 3.0},
        "sums": {"name": "questions", "options": {"path": "sums.jsonl"}},
    })

The policy is told the tools of all; a call of one that its task's world does not have is answered with what there is.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from jaxagent.envs.env import ENDLESS, Env, Step, Task, World, end, find, past_of, seats_of, size_of
from jaxagent.types import Message, ToolSpec

BLOCK = 100  # tasks, of which every world has a whole number
_KEYS = ("name", "weight", "options")


class Mixture:
    """The world.

    In every BLOCK of tasks a world has its share, rounded so that all sum up, in an order of the block's own; its tasks come
    one after another from block to block, and from the first again after its last. Where every world has a fixed number of
    tasks, an epoch ends when the slowest has had them all; where one has no end, there is none.

    Args:
        worlds: label -> `name` of the world, `weight` (1 by default) and `options`.
    """

    def __init__(self, worlds: Mapping[str, Mapping[str, Any]]):
        given = {label: dict(entry.items()) for label, entry in worlds.items()}
        for label, entry in given.items():
            if strange := [key for key in entry if key not in _KEYS] or ([] if entry.get("name") else ["no name"]):
                raise ValueError(f"env.options.worlds.{label} must have name, weight and options; got {strange[0]!r}")
        weights = {label: float(entry.get("weight", 1.0)) for label, entry in given.items()}
        if not weights or min(weights.values()) <= 0:
            raise ValueError(f"env.options.worlds must have weights above 0, got {weights}")
        self.worlds: dict[str, World] = {}
        for label, entry in given.items():
            options = entry.get("options") or {}
            try:
                self.worlds[label] = find(entry["name"])(**dict(options.items()))
            except (ValueError, TypeError) as error:
                raise ValueError(f"env.options.worlds.{label}: {error}") from None
            if kind := _unmixable(self.worlds[label]):
                raise ValueError(f"env.options.worlds.{label}: {kind}: it is trained on alone, as env.name={entry['name']}")
        self.counts = shares(weights, BLOCK)
        if starved := [label for label, count in self.counts.items() if not count]:
            raise ValueError(f"env.options.worlds.{starved[0]}.weight={weights[starved[0]]:g} is below 1 of {BLOCK} tasks")
        self.tools = tuple(_united(self.worlds))
        self.functions = ",".join(dict.fromkeys(world.functions for world in self.worlds.values() if world.functions))
        self.seats = max(seats_of(world) for world in self.worlds.values())
        self.runs_code = any(getattr(world, "runs_code", False) for world in self.worlds.values())
        self.sizes = {split: self._size(split) for split in ("train", "valid", "test")}
        if all(hasattr(world, "demonstrate") for world in self.worlds.values()):
            self.demonstrate = self._demonstrate

    def _size(self, split: str) -> int:
        """Blocks until every task has come, to train on; and to evaluate, as many as no task comes twice in."""
        sizes = {label: size_of(world, split) for label, world in self.worlds.items()}
        finite = {label: size for label, size in sizes.items() if size < ENDLESS}
        if split == "train":
            return BLOCK * max(-(-size // self.counts[label]) for label, size in sizes.items()) if finite == sizes else ENDLESS
        blocks = min((size // self.counts[label] for label, size in finite.items()), default=ENDLESS)
        return min(ENDLESS, BLOCK * max(1, blocks))

    def task(self, split: str, index: int) -> Task:
        block, slot = divmod(index, BLOCK)
        order = [label for label, count in self.counts.items() for _ in range(count)]
        random.Random(f"{split}/{block}/mixture").shuffle(order)
        label = order[slot]
        number = block * self.counts[label] + order[:slot].count(label)
        world = self.worlds[label]
        inner = world.task(split, number % size_of(world, split))
        return {**inner, "id": f"{label}/{inner['id']}", "world": label, "difficulty": f"{label}: {inner['difficulty']}"}

    def episode(self, name: str, sandbox: Any) -> Env:
        return MixedEpisode(self, name, sandbox)

    def close(self) -> None:
        for world in self.worlds.values():
            end(world)

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.worlds[task["world"]].demonstrate(own(task), rng)


def _unmixable(world: World) -> str:
    """What a world asks of the whole run, which its episodes in a mixture would not get; empty for nothing."""
    if past_of(world):
        return "earlier versions of the policy play in this world"
    return "the episodes of this world are runs of a program" if getattr(world, "runs_program", False) else ""


def shares(weights: Mapping[str, float], whole: int) -> dict[str, int]:
    """`whole` cut in proportion to the weights, by largest remainders."""
    total = sum(weights.values())
    exact = {label: whole * weight / total for label, weight in weights.items()}
    counts = {label: int(share) for label, share in exact.items()}
    most_missing = sorted(exact, key=lambda label: counts[label] - exact[label])
    for label in most_missing[: whole - sum(counts.values())]:
        counts[label] += 1
    return counts


def own(task: Task) -> Task:
    """A task as its world gave it, but for the words of its difficulty."""
    return {**task, "id": task["id"].removeprefix(f"{task['world']}/")}


def _united(worlds: Mapping[str, World]) -> list[ToolSpec]:
    found: dict[str, tuple[str, ToolSpec]] = {}
    for label, world in worlds.items():
        for spec in world.tools:
            other, known = found.setdefault(spec.name, (label, spec))
            if known != spec:
                raise ValueError(
                    f"env.options.worlds: {other} and {label} each have a tool {spec.name!r}, and they differ: "
                    "a policy could not tell them apart"
                )
    return [spec for _, spec in found.values()]


class MixedEpisode:
    """One episode, of the world that its task is of."""

    def __init__(self, mixture: Mixture, name: str, sandbox: Any):
        self.mixture, self.name, self.sandbox = mixture, name, sandbox
        self.env: Env | None = None

    async def reset(self, task: Task, seed: int) -> Step:
        self.names = [spec.name for spec in self.mixture.worlds[task["world"]].tools]
        self.env = self.mixture.worlds[task["world"]].episode(self.name, self.sandbox)
        return await self.env.reset(own(task), seed)

    async def step(self, action: Message) -> Step:
        assert self.env
        strange = [call.name for call in action.calls if call.name not in self.names]
        if strange and not action.error:
            fault = f"no tool {strange[0]!r} here; there are {', '.join(self.names) or 'none'}"
            action = dataclasses.replace(action, calls=(), error=fault)
        return await self.env.step(action)

    async def close(self) -> None:
        if self.env:
            await self.env.close()


make_world = Mixture
