"""`program`: an episode is a run of the user's own agent program, which asks the policy through the OpenAI-compatible door.

The program is code of the user's and runs as the trainer does: a command, or a Python function. It is given one task of
another world and the address of a door of its own, plays however it likes, and in the end says what it has earned.

A command gets the task as JSON on its standard input and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
ANTHROPIC_API_KEY in its environment. It writes {"reward": 1.0, "reason": "..."}, with "parts" and "checks" as in `Step` if it
likes, into the file that JAXAGENT_RESULT names: what it prints may be the policy's words, and earns nothing. A function is
called as f(task, base_url, api_key), in a thread of its own unless it is async, and returns the same, or a number. With a
`verifier`, the reward is what verifier(task, said) returns: `said` is that object, with "exit_code" and "output" of a command.
Without one, a command that exits with another status than 0 has failed, whatever it wrote.

With a `reward` the program need not say what it has earned, and is not believed if it does. What is scored is its answer: a
text that it returns, or "answer" of its object, or else what the policy said last. It is scored by the scorers of
rewards/scorers.py, with the task, or by "world": as the only turn of an episode of the world whose tasks are played, which fits
worlds that look at an answer alone (the world's checks are left out: they may look at the way there).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import random
import runpy
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jaxagent.envs.env import Env, Step, Task, end, find, size_of
from jaxagent.rewards.compose import Case, Scorer, names_of
from jaxagent.rewards.scorers import fault_of_task, scorer_of
from jaxagent.tools import in_thread
from jaxagent.types import Message
from sandbox_client import InfrastructureError

KEPT_BYTES = 1 << 20  # of a command's output, its end; and the most of what it earned
BY_WORLD = "world"  # the reward of the world whose tasks are played


class ProgramFailed(Exception):
    """The program ended without saying what it has earned."""


@dataclass(frozen=True)
class Door:
    """Where a program finds the policy: `{url}/v1` for OpenAI's clients, `url` for Anthropic's."""

    url: str
    key: str

    def environment(self) -> dict[str, str]:
        openai = {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key}
        return {**openai, "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key}


@dataclass(frozen=True)
class Outcome:
    """What a program earned, and why."""

    reward: float
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)


class ProgramWorld:
    """The world. Its tasks and demonstrations are those of another one.

    Options: `command`, or `function` as module:name or file.py:name; `verifier` likewise, or `reward` ("world", a scorer, or
    several as in `questions`) with `reward_options` by scorer; `world` and `inner`, the world whose tasks are played and its
    options, as in `env.name`, or file.py with a `make_world`.
    """

    functions = ""
    runs_code = False
    runs_program = True

    def __init__(
        self,
        command: tuple[str, ...] = (),
        function: str = "",
        verifier: str = "",
        reward: str = "",
        reward_options: Mapping[str, Mapping[str, Any]] | None = None,
        world: str = "chain",
        inner: Mapping[str, Any] | None = None,
    ):
        if bool(command) == bool(function):
            raise ValueError("env.options: give command or function, the program that plays an episode, and not both")
        if verifier and reward:
            raise ValueError(f"env.options: verifier={verifier!r} and reward={reward!r}, of which one can pay; take one away")
        self.command = tuple(command)
        self.function = load(function, "function") if function else None
        self.verifier = load(verifier, "verifier") if verifier else None
        make = load(f"{world}:make_world", "world") if world.endswith(".py") else find(world)
        self.inner = make(**dict(inner or {}))
        self.tools = self.inner.tools
        self.sizes = {split: size_of(self.inner, split) for split in ("train", "demo", "valid", "test")}
        if hasattr(self.inner, "demonstrate"):
            self.demonstrate = self._demonstrate
        self.reward, self.score = reward, self._scorer(reward, reward_options or {})
        if reward == BY_WORLD:
            self.functions, self.runs_code = self.inner.functions, getattr(self.inner, "runs_code", False)

    def _scorer(self, reward: str, options: Mapping[str, Mapping[str, Any]]) -> Scorer | None:
        """The scorer of `reward`, where it is not the world's. Raises ValueError where it or its tasks do not fit."""
        if reward in ("", BY_WORLD):
            if options:
                raise ValueError(f"env.options.reward_options are of scorers, which env.options.reward={reward!r} has none of")
            return None
        try:
            scorer = scorer_of(reward, options)
        except ValueError as error:
            raise ValueError(f"env.options.reward {error}; {BY_WORLD!r} is that of the world whose tasks are played") from None
        for split in self.sizes:
            if self.sizes[split] and (fault := fault_of_task(reward, self.inner.task(split, 0))):
                raise ValueError(f"env.options.reward={reward!r}: the tasks of {split} do not fit it: {fault}")
        self.runs_code = "code_tests" in names_of(reward)[1]
        return scorer

    def close(self) -> None:
        end(self.inner)

    def task(self, split: str, index: int) -> Task:
        return self.inner.task(split, index)

    def episode(self, name: str, sandbox: Any) -> Env:
        return ProgramEpisode(self, name, sandbox)

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.inner.demonstrate(task, rng)


class ProgramEpisode:
    """One run of the program."""

    def __init__(self, world: ProgramWorld, name: str = "", sandbox: Any = None):
        self.world, self.name, self.sandbox = world, name, sandbox
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, task: Task, door: Door) -> Any:
        """Runs the program to its end; what it said. Raises ProgramFailed."""
        return await self._call(task, door) if self.world.function else await self._spawn(task, door)

    async def earned(self, task: Task, said: Any, last: Message) -> Outcome:
        """What a program that said this has earned. Raises ProgramFailed, or what a verifier, a scorer or the world raises.

        Args: last: what the policy said last, which is the answer where the program names none.
        """
        if self.world.reward:
            answer = said if isinstance(said, str) else said.get("answer") if isinstance(said, dict) else None
            return await self._scored(task, last if answer is None else Message("assistant", str(answer)))
        if self.world.verifier is None:
            return outcome_of(said)
        verify, arguments = self.world.verifier, (task, said)
        judged = (
            await verify(*arguments) if inspect.iscoroutinefunction(verify) else await in_thread(lambda: verify(*arguments))
        )
        return outcome_of(judged)

    async def _scored(self, task: Task, answer: Message) -> Outcome:
        if self.world.score is None:
            return await self._scored_by_world(task, answer)

        def fresh_session() -> Any:
            return self.sandbox.open_session(f"{self.name}/scored")

        case = Case(task, answer.content, answer.calls, answer.error, fresh_session)
        score, reason = await self.world.score(case)
        parts = score if isinstance(score, dict) else {}
        return Outcome(sum(parts.values()) if parts else float(score), reason, parts)

    async def _scored_by_world(self, task: Task, answer: Message) -> Outcome:
        if answer.calls or answer.error:
            return Outcome(0.0, f"no answer: {answer.error or 'the last turn was a call'}")
        episode = self.world.inner.episode(f"{self.name}/scored", self.sandbox)
        try:
            step = await episode.reset(task, task["seed"])
            if not (step.truncated or step.terminated):
                step = await episode.step(answer)
        finally:
            await episode.close()
        if not step.answered:
            raise ProgramFailed(
                f"env.options.reward={BY_WORLD!r}: this world does not score an answer alone {step.error}".strip()
            )
        return Outcome(step.reward, step.reason, step.parts)

    async def _call(self, task: Task, door: Door) -> Any:
        function = self.world.function
        assert function is not None
        arguments = task, f"{door.url}/v1", door.key
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await in_thread(lambda: function(*arguments))
        except (ProgramFailed, InfrastructureError):
            raise
        except Exception as error:
            raise ProgramFailed(f"{type(error).__name__}: {error}") from error

    async def _spawn(self, task: Task, door: Door) -> dict[str, Any]:
        with (
            tempfile.TemporaryDirectory(prefix="jaxagent-program-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as asked,
            tempfile.TemporaryFile() as output,  # no pipes: what the program leaves running would hold them open
            tempfile.TemporaryFile() as errors,
        ):
            asked.write(json.dumps(task).encode() + b"\n")
            asked.seek(0)
            result = Path(folder) / "result.json"
            environment = {**os.environ, **door.environment(), "JAXAGENT_RESULT": str(result)}
            self._process = process = await asyncio.create_subprocess_exec(
                *self.world.command, stdin=asked, stdout=output, stderr=errors, env=environment, start_new_session=True
            )
            code = await process.wait()
            await self.close()
            said = result_in(result)
            silent = "" if said or self.world.reward else " and said no reward"
            if (code or silent) and self.world.verifier is None:
                raise ProgramFailed(f"{self.world.command[0]} ended with {code}{silent}: {_tail(errors)[-300:].strip()}")
            return {**(said or {}), "exit_code": code, "output": _tail(output)}

    async def close(self) -> None:
        """Ends the program and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def reset(self, task: Task, seed: int) -> Step:
        return Step(truncated=True, error="an episode of this world is run by its program, not step by step")

    async def step(self, action: Message) -> Step:
        return await self.reset({}, 0)


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT_BYTES))
    return file.read(KEPT_BYTES).decode(errors="replace")


def result_in(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, if there is one."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(KEPT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def outcome_of(said: Any) -> Outcome:
    """What a program or a verifier said. Raises ProgramFailed where it is no reward."""
    if isinstance(said, int | float):
        return Outcome(float(said))
    try:
        parts, checks = ({str(k): float(v) for k, v in dict(said.get(name, {})).items()} for name in ("parts", "checks"))
        return Outcome(float(said["reward"]), str(said.get("reason", "")), parts, checks)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ProgramFailed(f'a number or {{"reward": ...}} is wanted, the program said {said!r:.200}') from None


def load(name: str, option: str) -> Callable[..., Any]:
    """The function `module:name` or `file.py:name`."""
    module, _, function = name.rpartition(":")
    try:
        there = runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
        return there[function]
    except (ImportError, OSError, KeyError, ValueError) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        if lacks and not f"{module}.".startswith(f"{lacks}."):
            raise ValueError(
                f"env.options.{option}={name!r} needs the package {lacks!r}, which is not installed; those of the examples "
                "come with pip install 'jaxagent[agents]'"
            ) from None
        raise ValueError(f"env.options.{option}={name!r}: module:name or file.py:name is wanted: {error!r}") from None


make_world = ProgramWorld
