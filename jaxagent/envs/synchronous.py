"""Worlds that are synchronous objects, `reset(task, seed)`, `step(action)` and `close()`, as worlds of the contract.

`Here` calls one in this process: for worlds of ours, which take microseconds and import nothing. `There` calls one in a
worker: libraries, which may be slow, print, leak, crash or fight with the trainer's own requirements. What they say is a dict,
whose words stand in workers/program.py.

Where a world has no tools, the text of the policy's turn is the action.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.workers import install
from jaxagent.envs.workers.pool import Kind, Place, Pool
from jaxagent.types import Message, ToolCall, ToolRecord, ToolSpec

SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
SPLIT_SIZE = 10**9
ADAPTERS = Path(__file__).with_name("adapters")

Said = dict[str, Any]


def seed_of(split: str, index: int) -> int:
    """A seed that no other task has."""
    return SPLITS[split] * SPLIT_SIZE + index


class Synchronous(Protocol):
    """One world, for many episodes."""

    def reset(self, task: Task, seed: int) -> Said: ...

    def step(self, action: Any) -> Said: ...

    def close(self) -> None: ...


class Venue(Protocol):
    """Where a synchronous world is called."""

    async def call(self, name: str, **arguments: Any) -> Any: ...

    def leave(self) -> None: ...


class Here:
    """In this process."""

    def __init__(self, world: Synchronous):
        self.world = world

    async def call(self, name: str, **arguments: Any) -> Any:
        return getattr(self.world, name)(**arguments)

    def copy(self) -> Here:
        return Here(copy.deepcopy(self.world))

    def leave(self) -> None:
        self.world.close()


class There:
    """In a worker; its place is taken at the first call."""

    def __init__(self, pool: Callable[[], Pool]):
        self.pool = pool
        self._asked: Future[Place] | None = None

    async def call(self, name: str, **arguments: Any) -> Any:
        if self._asked is None:
            self._asked = self.pool().take()
        place = await asyncio.wrap_future(self._asked)
        return await asyncio.wrap_future(place.call(name, **arguments))

    def leave(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and not asked.cancel() and not asked.cancelled():
            self.pool().give_back(asked.result())


class SynchronousEpisode:
    """One episode, as the contract wants it."""

    def __init__(self, venue: Venue, tools: Sequence[ToolSpec] = (), rules: str = ""):
        self.venue, self.tools, self.rules = venue, tuple(tools), rules
        self.last: Said = {}

    async def reset(self, task: Task, seed: int) -> Step:
        self.last = await self.venue.call("reset", task=task, seed=seed)
        text = self.last.get("text", "")
        return self._step(self.last, [Message("user", f"{self.rules}\n\n{text}" if self.rules else text)])

    async def step(self, action: Message) -> Step:
        if fault := fault_of(action, self.tools):
            return self._refuse(action, fault)
        if not self.tools:
            self.last = await self.venue.call("step", action=action.content.strip())
            return self._step(self.last, [Message("user", self.last.get("text", ""))])
        whole: Step | None = None
        for call in action.calls:
            self.last = await self.venue.call("step", action={"name": call.name, "arguments": call.arguments})
            text = self.last.get("text", "")
            step = self._step(self.last, [Message("tool", text, name=call.name)])
            outcome = "bad_arguments" if self.last.get("invalid") else "ok"
            step.tools = [ToolRecord(call.name, call.arguments, outcome, text, size_bytes=len(text.encode()))]
            whole = step if whole is None else _and_then(whole, step)
            if step.terminated or step.truncated:
                break
        assert whole is not None  # a turn without a call has a fault
        return whole

    async def fork(self, name: str) -> SynchronousEpisode:
        """A copy that goes on from here, its luck included. Raises TypeError for a world in a worker: nothing copies that."""
        if not isinstance(self.venue, Here):
            raise TypeError(f"{name}: only a world in this process can be copied; leave `forks` of its world away")
        made = SynchronousEpisode(self.venue.copy(), self.tools, self.rules)
        made.last = dict(self.last)
        return made

    async def close(self) -> None:
        self.venue.leave()

    def _refuse(self, action: Message, fault: str) -> Step:
        """What cannot be an action moves nothing: the same agent is asked again."""
        said = f"error: {fault}"
        step = Step(state=_state(self.last), agent=self.last.get("agent", "agent"), reason=fault)
        if not self.tools:
            step.messages = [Message("user", said)]
            return step
        names = [call.name for call in action.calls] or [""]
        step.messages = [Message("tool", said, name=name) for name in names]
        step.tools = [ToolRecord(name, {}, "bad_arguments", said) for name in names]
        return step

    def _step(self, said: Said, messages: list[Message]) -> Step:
        broken = str(said.get("broken", ""))
        return Step(
            messages,
            reward=float(said.get("reward", 0.0)),
            reason=said.get("reason", ""),
            terminated=bool(said.get("done")),
            answered=bool(said.get("answered")),
            truncated=bool(broken),
            error=broken,
            state=_state(said),
            agent=said.get("agent", "agent"),
            rewards=dict(said.get("rewards", {})),
            parts=dict(said.get("parts", {})),
            checks=dict(said.get("checks", {})),
        )


def fault_of(action: Message, tools: Sequence[ToolSpec]) -> str:
    """Why a turn can be no action, in words for the policy."""
    names = [tool.name for tool in tools]
    if action.error:
        return action.error
    if action.calls and not tools:
        return "there are no tools here: write the action as text"
    if tools and not action.calls:
        return f"call one of the tools: {', '.join(names)}"
    unknown = [call.name for call in action.calls if call.name not in names]
    return f"no tool {unknown[0]!r}; there are {', '.join(names)}" if unknown else ""


def _state(said: Said) -> str:
    """What the world says that its state is, or what it shows of it."""
    return str(said.get("state", said.get("text", "")))


def _and_then(first: Step, then: Step) -> Step:
    """Two calls of one turn as one step."""
    then.messages = [*first.messages, *then.messages]
    then.tools = [*first.tools, *then.tools]
    then.reward += first.reward
    then.reason = "; ".join(filter(None, (first.reason, then.reason)))
    then.parts = {name: first.parts.get(name, 0.0) + then.parts.get(name, 0.0) for name in {**first.parts, **then.parts}}
    return then


class Served:
    """A world whose library is in workers.

    Args:
        name: of the adapter, and of the library in workers/install.py.
        options: of the adapter.
        describe: what a task has beside its id and seed, from split and index; `difficulty` is among it.
        tools: where the actions are calls.
        rules: what is said before the first observation.
        workers: processes at most; 0: as cores and memory allow.
        slots: episodes that one process holds at once; who finds none free waits, and the episode's deadline runs.
        timeout_s: of one call.

    Raises ValueError where the library is not installed, and says how it is.
    """

    functions = ""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        describe: Callable[[str, int], Task],
        *,
        tools: Sequence[ToolSpec] = (),
        rules: str = "",
        workers: int = 0,
        slots: int = 128,
        timeout_s: float = 60.0,
    ):
        if workers < 0:
            raise ValueError(f"env.options.workers must be 0 or more, got {workers}")
        if timeout_s <= 0:
            raise ValueError(f"env.options.timeout_s must be positive, got {timeout_s}")
        self.name, self.describe, self.rules, self.tools = name, describe, rules, tuple(tools)
        library = install.library_of(name)
        self.kind = Kind(
            name=name,
            python=install.python_of(name),
            adapter=ADAPTERS / f"{name}.py",
            options=options,
            workers=workers or install.most_workers(name),
            slots=slots,
            timeout_s=timeout_s,
            address_mb=install.address_mb(name, slots),
            variables=library.variables,
            start_s=library.start_s,
            confined=library.confined,
        )
        self.sizes: dict[str, int] = {}  # of splits that are not without end
        self.guide: Callable[[list[Any], random.Random], Callable[[str], Any]] = in_turn  # how demonstrators follow an oracle
        self.examples: tuple[str, ...] = ()  # actions, for a checker that has no demonstrations
        self._pool: Pool | None = None

    def pool(self) -> Pool:
        """The workers; none is started before the first episode."""
        if self._pool is None:
            self._pool = Pool(self.kind)
        return self._pool

    def task(self, split: str, index: int) -> Task:
        described = self.describe(split, index)
        return {"id": f"{self.name}/{split}/{index}", "seed": seed_of(split, index), "split": split, **described}

    def episode(self, name: str, sandbox: Any) -> Env:
        return SynchronousEpisode(There(self.pool), self.tools, self.rules)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class Shown(Served):
    """A served world that knows how its tasks are done."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """The oracle's actions, and what the world says to them."""
        pool = self.pool()
        place = pool.take().result()
        try:
            said = place.call("reset", task=task, seed=task["seed"]).result()
            text = said.get("text", "")
            messages = [Message("user", f"{self.rules}\n\n{text}" if self.rules else text)]
            follow = self.guide(place.call("oracle").result(), rng)
            while (action := follow(said.get("text", ""))) is not None:
                messages.append(spoken(action))
                said = place.call("step", action=action).result()
                if said.get("done"):
                    break
                messages.append(_heard(action, said))
        finally:
            pool.give_back(place)
        return messages


def in_turn(actions: list[Any], rng: random.Random) -> Callable[[str], Any]:
    """From what the world says to the demonstrator's next action, None at the end: the oracle's, one after the other."""
    left = iter(actions)
    return lambda text: next(left, None)


def spoken(action: Any) -> Message:
    """An action as the policy's turn."""
    if isinstance(action, str):
        return Message("assistant", action)
    return Message("assistant", calls=(ToolCall(action["name"], dict(action["arguments"])),))


def _heard(action: Any, said: Said) -> Message:
    text = said.get("text", "")
    return Message("user", text) if isinstance(action, str) else Message("tool", text, name=action["name"])
