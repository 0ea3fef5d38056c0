"""Whether a world keeps the contract of envs/env.py: what can be tried without a policy and without an accelerator.

A world that fails here teaches a policy the wrong thing, or holds up a run. Nothing here imports JAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jaxagent.envs.env import Env, Step, Task, World, end, find, size_of
from jaxagent.envs.synchronous import SPLITS, Shown
from jaxagent.types import Message
from sandbox_client import EmbeddedServer, SandboxClient

TASKS, PLAYED, TURNS = 20, 3, 20  # of a split whose keys are compared; whose episodes are played; of an episode
T = TypeVar("T")
NONSENSE = "\u2603 xyzzy \x00 )]}"
_LEFT_S = 10.0  # for processes to end
CALL_S = 300.0  # for a reset, a step or a close: a library may have to start, and a game to be compiled


@dataclass
class Finding:
    """One question to a world: `ok` is None where it does not apply."""

    question: str
    ok: bool | None
    said: str


@dataclass
class Play:
    """What an episode showed: every observation with its reward, how it ended."""

    steps: list[Step] = field(default_factory=list)
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list)

    @property
    def seen(self) -> list[Any]:
        return [([(m.role, m.content) for m in step.messages], step.reward, step.terminated) for step in self.steps]

    @property
    def earned(self) -> float:
        return sum(step.reward + sum(step.rewards.values()) for step in self.steps)

    @property
    def ended(self) -> bool:
        return self.steps[-1].terminated


class Checker:
    """Asks one world all questions."""

    def __init__(self, world: World, seed: int = 0):
        self.world, self.seed = world, seed
        self.findings: list[Finding] = []
        self.plays: list[Play] = []
        self.tasks = [world.task("train", i) for i in range(min(PLAYED, size_of(world, "train")))]
        self.shown: list[tuple[Task, list[Message]]] = []
        self.number = 0

    async def ask_all(self, sandbox: Any) -> list[Finding]:
        questions: list[tuple[str, Callable[[Any], Awaitable[tuple[bool | None, str]]]]] = [
            ("tasks have keys, and splits share none", self.keys),
            ("demonstrations are made", self.demonstrations),
            ("the same task and seed begin alike", self.beginnings),
            ("the same actions have the same results", self.repeated),
            ("an unreadable turn is answered", self.unreadable),
            ("a nonsense action is answered", self.nonsense),
            ("closing twice does no harm", self.closed_twice),
            ("a random agent plays", self.random_agent),
            ("what is demonstrated can be played", self.oracle),
            ("rewards are finite numbers", self.finite),
        ]
        for question, asked in questions:
            try:
                ok, said = await asked(sandbox)
            except Exception as error:  # whatever a world raises is what is looked for
                ok, said = False, f"{type(error).__name__}: {error}"
            self.findings.append(Finding(question, ok, said))
        return self.findings

    async def keys(self, sandbox: Any) -> tuple[bool, str]:
        drawn = [(split, i) for split in self.splits() for i in range(min(TASKS, size_of(self.world, split)))]
        tasks = [self.world.task(split, i) for split, i in drawn]
        if missing := [key for task in tasks for key in ("id", "seed", "difficulty") if key not in task]:
            return False, f"a task has no {missing[0]!r}"
        if tasks != [self.world.task(split, i) for split, i in drawn]:
            return False, "the same split and index gave another task the second time"
        first: dict[str, str] = {}  # by what a task is beside its name
        for task in tasks:
            other = first.setdefault(str(sorted((key, value) for key, value in task.items() if key != "id")), task["id"])
            if other != task["id"]:
                return False, f"{other} and {task['id']} are the same task"
        ids = [task["id"] for task in tasks]
        if len(set(ids)) < len(ids):
            return False, f"two tasks have the id {max(ids, key=ids.count)!r}"
        return True, f"{len(tasks)} tasks of {', '.join(self.splits())}"

    def splits(self) -> list[str]:
        """Those with tasks: a world with a fixed number of them may have none to demonstrate."""
        return list(getattr(self.world, "sizes", {}) or SPLITS)

    async def demonstrations(self, sandbox: Any) -> tuple[bool | None, str]:
        if not hasattr(self.world, "demonstrate"):
            return None, "this world has none"
        rng = random.Random(self.seed)
        for i in range(min(PLAYED, size_of(self.world, "demo"))):
            task = self.world.task("demo", i)
            self.shown.append((task, await asyncio.to_thread(self.world.demonstrate, task, rng)))
        dull = [task["id"] for task, shown in self.shown if "assistant" not in {message.role for message in shown}]
        return not dull, f"{dull[0]}: it has no turn of the assistant" if dull else f"{len(self.shown)} dialogues"

    async def beginnings(self, sandbox: Any) -> tuple[bool, str]:
        for task in self.tasks:
            first, second = [(await self.play(sandbox, task, ())).seen for _ in range(2)]
            if first != second:
                return False, f"{task['id']}: {_difference(first, second)}"
        return True, f"{len(self.tasks)} tasks, twice each"

    async def repeated(self, sandbox: Any) -> tuple[bool, str]:
        task, turns = self.tasks[0], self.turns(random.Random(self.seed), 5)
        first, second = [(await self.play(sandbox, task, turns)).seen for _ in range(2)]
        return first == second, _difference(first, second) if first != second else f"{len(first) - 1} actions, twice"

    async def unreadable(self, sandbox: Any) -> tuple[bool, str]:
        play = await self.play(sandbox, self.tasks[0], [Message("assistant", "", error="the turn did not end")] * 2)
        if play.ended:
            return False, "it ended the episode"
        told = [m.content for step in play.steps[1:] for m in step.messages]
        return bool(told) and not any(
            step.reward > 0 for step in play.steps
        ), f"told {told[0][:60]!r}" if told else "told nothing"

    async def nonsense(self, sandbox: Any) -> tuple[bool, str]:
        play = await self.play(sandbox, self.tasks[0], [Message("assistant", NONSENSE)])
        step = play.steps[-1]
        if step.reward > 0:
            return False, f"it earned {step.reward:g}"
        if play.ended:
            return step.answered, "it was taken as the answer" if step.answered else "it ended the episode"
        return True, f"told {step.messages[-1].content[:60]!r}" if step.messages else "told nothing"

    async def closed_twice(self, sandbox: Any) -> tuple[bool, str]:
        for begun in (False, True):
            env = self.episode(sandbox)
            if begun:
                await in_time("reset", env.reset(self.tasks[0], self.seed))
            await in_time("close", env.close())
            await in_time("close", env.close())
        return True, "before and after a reset"

    async def random_agent(self, sandbox: Any) -> tuple[bool, str]:
        rng = random.Random(self.seed)
        plays = [await self.play(sandbox, task, self.turns(rng, TURNS)) for task in self.tasks]
        ended = sum(play.ended for play in plays)
        return True, f"{len(plays)} episodes, {ended} ended by themselves, rewards {_list(play.earned for play in plays)}"

    async def oracle(self, sandbox: Any) -> tuple[bool | None, str]:
        if not self.shown:
            return None, "nothing is demonstrated"
        plays = []
        for task, shown in self.shown:
            plays.append(await self.play(sandbox, task, [m for m in shown if m.role == "assistant"]))
        said = f"{sum(play.ended for play in plays)} of {len(plays)} ended, rewards {_list(play.earned for play in plays)}"
        knows = isinstance(self.world, Shown)  # others show a sloppy agent, which need not arrive
        return all(play.ended and play.earned > 0 for play in plays) or not knows, said

    async def finite(self, sandbox: Any) -> tuple[bool, str]:
        steps = [step for play in self.plays for step in play.steps]
        numbers = [n for s in steps for n in (s.reward, *s.rewards.values(), *s.parts.values(), *s.checks.values())]
        bad = [n for n in numbers if not math.isfinite(n)]
        resets, seconds = [play.reset_s for play in self.plays], [s for play in self.plays for s in play.step_s]
        speed = f"a reset took {_mean(resets) * 1e3:.1f} ms, an action {_mean(seconds) * 1e3:.1f} ms"
        return not bad, f"a reward is {bad[0]}" if bad else f"{len(steps)} of them; {speed}"

    def episode(self, sandbox: Any) -> Env:
        self.number += 1
        return self.world.episode(f"check/{os.getpid()}/{self.number}", sandbox)

    def turns(self, rng: random.Random, count: int) -> list[Message]:
        """Turns drawn from all that were demonstrated, or from the world's `examples` of actions, or nonsense."""
        known = [m for _, shown in self.shown for m in shown if m.role == "assistant"]
        known = known or [Message("assistant", text) for text in getattr(self.world, "examples", ()) or (NONSENSE,)]
        return [rng.choice(known) for _ in range(count)]

    async def play(self, sandbox: Any, task: Task, turns: Sequence[Message]) -> Play:
        """Takes these turns until the episode ends. Raises RuntimeError where the world says that it broke."""
        play, env = Play(), self.episode(sandbox)
        try:
            began = time.perf_counter()
            play.steps.append(await in_time("reset", env.reset(task, task["seed"])))
            play.reset_s = time.perf_counter() - began
            for turn in turns:
                began = time.perf_counter()
                play.steps.append(await in_time("step", env.step(turn)))
                play.step_s.append(time.perf_counter() - began)
                if play.steps[-1].truncated:
                    raise RuntimeError(f"{task['id']}: the world broke: {play.steps[-1].error}")
                if play.ended:
                    break
        finally:
            await in_time("close", env.close())
        self.plays.append(play)
        return play


async def in_time(name: str, called: Awaitable[T]) -> T:
    """What a call of the world gives. Raises TimeoutError, which says which, where it does not come back."""
    try:
        async with asyncio.timeout(CALL_S) as deadline:
            return await called
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"{name} has not come back within {CALL_S:g} s") from None


def check(world: World, seed: int = 0) -> list[Finding]:
    """Asks a world everything, and at last whether it leaves processes behind."""
    before = descendants(os.getpid())
    findings: list[Finding] = []
    try:
        with sandbox_of(world) as connect:
            checker = Checker(world, seed)

            async def ask() -> None:
                async with connect() as sandbox:
                    findings.extend(await checker.ask_all(sandbox))

            with ThreadPoolExecutor(1) as apart:  # in a notebook this thread has a loop of its own
                apart.submit(asyncio.run, ask()).result()
    finally:
        end(world)
    until = time.monotonic() + _LEFT_S
    while (left := descendants(os.getpid()) - before) and time.monotonic() < until:
        time.sleep(0.05)
    said = f"process {min(left)} is still running: {_command(min(left))}" if left else "none"
    return [*findings, Finding("no process is left", not left, said)]


@contextlib.contextmanager
def sandbox_of(world: World) -> Iterator[Callable[[], Any]]:
    """A sandbox server for as long as it is needed, where the world has need of one; gives what makes a client of it."""
    functions, runs_code = (world.functions,) if world.functions else (), getattr(world, "runs_code", False)
    if not functions and not runs_code:
        yield contextlib.nullcontext
        return
    with EmbeddedServer(functions=functions, code="require" if runs_code else "off") as server:
        yield lambda: SandboxClient(server.url, server.token)


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and theirs, without those that have ended. None where there is no /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    ahead = {pid}
    while ahead:
        ahead = {child for child, parent in parents.items() if parent in ahead} - found
        found |= ahead
    return found


def report(name: str, options: dict[str, Any]) -> int:
    """The command `jaxagent env check`: prints a table; 1 where a question was answered badly."""
    findings = check(find(name)(**options))
    print(name, *(f"{key}={value}" for key, value in sorted(options.items())))
    for finding in findings:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.ok]
        print(f"  {mark}  {finding.question:40}  {finding.said}")
    return int(any(finding.ok is False for finding in findings))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:100]
    return "?"


def _difference(first: list[Any], second: list[Any]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    one, two = (str(seen[at])[:200] if at < len(seen) else "nothing" for seen in (first, second))
    return f"after {at} actions {one} and then {two}"


def _list(numbers: Iterator[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
