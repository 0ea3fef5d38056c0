"""The contract of a world: three calls, tasks, and demonstrations. Nothing here knows tokens.

Rules. `reset` and `step` return the same type. `reward` is the increment for the action just taken. `truncated` with an
`error` is the only way to say that the world broke: such an episode is never learnt from. A malformed action is not an
error but an observation. `(task, seed)` reproduces the episode; a group is several resets with the same pair.
"""

from __future__ import annotations

import difflib
import importlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxagent.types import Message, ToolRecord, ToolSpec

Task = dict[str, Any]
ENDLESS = 10**9  # tasks of a split that is drawn from seeds


@dataclass
class Step:
    """What the world says.

    Args:
        messages: the observation; on reset the whole beginning of the dialogue.
        reward: the increment for the action just taken, and `reason` why.
        parts: of the reward, by name, where it is more than an outcome; algorithms may compare them separately. The part
            "outcome", or else what the parts leave of the reward, says whether the task was done: success is measured by it.
        checks: scores of the same action by other scorers, which nothing is trained on: their distance from the outcome says
            whether the reward is being gamed.
        terminated: the episode is over; `answered` where the policy's final answer ended it.
        truncated: the world broke; `error` says how.
        state: key of the state that the next action is taken in, for anchor-state credit.
        agent: whose seat acts next, in worlds of several agents. What stands before a `#` is its role: `solver#1` and
            `solver#2` are two seats of one role, which is compared with itself. A seat's dialogue begins with its first step.
        past: that seat is played by an earlier version of the policy, from which nothing is learnt; see `World`.
        rewards: increments for seats other than the one that acted, as at the end of a game.
        tools: the calls that the action caused.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    reason: str = ""
    terminated: bool = False
    answered: bool = False
    truncated: bool = False
    error: str = ""
    state: str = ""
    agent: str = "agent"
    past: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    tools: list[ToolRecord] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)


class Env(Protocol):
    """One episode."""

    async def reset(self, task: Task, seed: int) -> Step: ...

    async def step(self, action: Message) -> Step: ...

    async def close(self) -> None: ...


class World(Protocol):
    """One per run: tells its tools and tasks, makes episodes, and shows how a (sloppy) agent behaves.

    A world may also have `sizes`, how many tasks its splits have, where they are not without end; `runs_code = True`, where its
    sessions run programs that the policy wrote; `close`, which ends what it has started; `past`, where earlier versions of the
    policy play some of its seats; `seats`, how many the policy has in an episode, where they are several; and `forks = True`,
    where its episodes have `async fork(name)`, a copy under another name that goes on from the same state: continuations of a
    turn then need not take the turns before it again. One that has nothing to show leaves `demonstrate` away, and trains
    without a warm-up.
    """

    @property
    def tools(self) -> Sequence[ToolSpec]: ...

    @property
    def functions(self) -> str:
        """The module whose `session_functions` the sandbox server must hold, several with commas, or nothing."""
        ...

    def task(self, split: str, index: int) -> Task:
        """Task `index` of a split: train, demo, valid or test. Every task has `id`, `seed` and `difficulty`."""
        ...

    def episode(self, name: str, sandbox: Any) -> Env:
        """A fresh episode; `name` keys its sandbox session and is never used twice, by any run."""
        ...

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A dialogue for the supervised warm-up."""
        ...


@dataclass(frozen=True)
class Past:
    """Which earlier versions of the policy a world plays with: one of every `every` training steps, the last `keep` of them."""

    every: int
    keep: int

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"env.options.past_{name} must be at least 1, got {getattr(self, name)}")


def past_of(world: World) -> Past | None:
    """Which earlier versions of the policy a world wants, if any."""
    return getattr(world, "past", None)


def seats_of(world: World) -> int:
    """How many seats the policy has in an episode."""
    return int(getattr(world, "seats", 1))


def size_of(world: World, split: str) -> int:
    """How many tasks a split has."""
    return getattr(world, "sizes", {}).get(split, ENDLESS)


def end(world: World) -> None:
    """Ends what a world has started, where it says how."""
    getattr(world, "close", lambda: None)()


def _near(name: str) -> str:
    """A hint at the world that was perhaps meant."""
    worlds = [file.stem for file in Path(__file__).parent.glob("*.py") if "\nmake_world = " in file.read_text()]
    near = difflib.get_close_matches(name, worlds, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def find(name: str) -> Callable[..., World]:
    """What makes the world `name`, a file of this folder or a dotted module; its parameters are the world's options."""
    module = name if "." in name else f"jaxagent.envs.{name}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # something that the world itself imports
            raise
        hint = f"; nothing of that name is installed or in a folder of PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
        hint = hint if "." in name else _near(name)
        raise ValueError(f"env.name must be a file of jaxagent/envs or a dotted module; got {name!r}{hint}") from None
    if not hasattr(found, "make_world"):
        raise ValueError(f"env.name={name!r}: module {module} has no `make_world`")
    return found.make_world


class Ablated:
    """An episode whose tool results say nothing: what a policy scores here it did not get from its tools.

    Args:
        mute: in a world without tools, nothing that it says is told, its beginning included.
    """

    def __init__(self, env: Env, mute: bool = False):
        self.env, self.mute = env, mute

    async def reset(self, task: Task, seed: int) -> Step:
        step = await self.env.reset(task, seed)
        return self._hidden(step) if self.mute else step

    async def step(self, action: Message) -> Step:
        return self._hidden(await self.env.step(action))

    def _hidden(self, step: Step) -> Step:
        silent = [self.mute or message.role == "tool" for message in step.messages]
        dots = [Message(message.role, "." * len(message.content), name=message.name) for message in step.messages]
        step.messages = [dot if hide else said for dot, hide, said in zip(dots, silent, step.messages, strict=True)]
        return step

    async def close(self) -> None:
        await self.env.close()
