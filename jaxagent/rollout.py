"""Many episodes at once, on an asyncio loop of its own. The only place where an exception becomes data.

A failure of the infrastructure is tried again under the same key, so that nothing is resampled; if it stays, the trajectory
says so and leaves the loss and its group's statistics. So it is with a continuation whose world did not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxagent.agent import Agent, Player
from jaxagent.envs.env import Ablated, Env, Task, World
from jaxagent.stem import Resumed, Stem
from jaxagent.types import Sampling, StopReason, Trajectory, sampling_key


@dataclass(frozen=True)
class RolloutOptions:
    """How many episodes are played at once, how long one may take, and how often a broken one is tried again."""

    concurrency: int = 256
    deadline_s: float = 600.0
    attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} must be at least 1, got {getattr(self, name)}")
        if self.deadline_s <= 0:
            raise ValueError(f"rollout.deadline_s must be positive, got {self.deadline_s}")


class Rollouts:
    """Plays episodes of one world. `seed` and the episode's names fix every draw."""

    def __init__(self, world: World, agent: Player, sandbox: Callable[[], Any], seed: int, options: RolloutOptions):
        """Args: sandbox: makes the sandbox client, called once inside the loop."""
        self.world, self.agent, self.seed, self.options = world, agent, seed, options
        self._nonce, self._attempts = secrets.token_hex(6), itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._sandbox, self._gate = self._run(self._open(sandbox)).result()

    def play(
        self, tasks: Iterable[tuple[str, Task]], rollouts: int, sampling: Sampling, *, ablated: bool = False
    ) -> list[list[Future[list[Trajectory]]]]:
        """Starts `rollouts` episodes for every (group name, task); a list of futures per task.

        An episode gives one row for every seat at its table, and one more wherever a seat's conversation was begun anew.
        """
        return [[self._run(self._episode(group, task, i, sampling, ablated)) for i in range(rollouts)] for group, task in tasks]

    def branch(self, stem: Stem, task: Task, numbers: Iterable[int], sampling: Sampling) -> list[Future[list[Trajectory]]]:
        """Starts the continuations `numbers` of a stem; a future of its rows for each.

        The same number of the same stem is the same continuation. The world is brought back for each of them by taking the
        stem's turns again; where it `forks`, once for all of them.

        Raises ValueError where the task is another than the stem's, and where programs of the user's play.
        """
        if not isinstance(self.agent, Agent):
            raise ValueError(f"{stem.group}: an episode that a program plays cannot be taken up again at one of its turns")
        if (task["id"], task["seed"]) != (stem.task, stem.seed):
            raise ValueError(f"{stem.group} is of task {stem.task} with seed {stem.seed}, got {task['id']} with {task['seed']}")
        numbers = list(numbers)
        origin = None
        if getattr(self.world, "forks", False):
            name = f"{self._nonce}.{next(self._attempts)}/{stem.group}"
            origin = _Origin(lambda: self.world.episode(name, self._sandbox), len(numbers))
        return [self._run(self._continuation(stem, task, number, sampling, origin)) for number in numbers]

    def close(self) -> None:
        """Ends the loop; episodes that are still played are cancelled."""
        if self._loop.is_closed():
            return
        self._run(self._shut()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self, sandbox: Callable[[], Any]) -> tuple[Any, asyncio.Semaphore]:
        return sandbox(), asyncio.Semaphore(self.options.concurrency)

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.agent.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _episode(self, group: str, task: Task, rollout: int, sampling: Sampling, ablated: bool) -> list[Trajectory]:
        async with self._gate:
            for attempt in range(1, self.options.attempts + 1):
                difficulty = task.get("difficulty", "")
                rows = [Trajectory(task["id"], task["seed"], group, rollout, attempts=attempt, difficulty=difficulty)]
                await self._attempt(rows, task, sampling, ablated)
                if rows[0].stop.counts:
                    break
            return rows

    async def _continuation(
        self, stem: Stem, task: Task, number: int, sampling: Sampling, origin: _Origin | None
    ) -> list[Trajectory]:
        try:
            async with self._gate:
                for attempt in range(1, self.options.attempts + 1):
                    rows = [stem.row(number, attempt)]
                    await self._attempt(rows, task, sampling, False, stem, origin if attempt == 1 else None)
                    if rows[0].stop.counts:
                        break
                return rows
        finally:
            if origin:
                await origin.leave()

    async def _attempt(
        self,
        rows: list[Trajectory],
        task: Task,
        sampling: Sampling,
        ablated: bool,
        stem: Stem | None = None,
        origin: _Origin | None = None,
    ) -> None:
        began, first = time.monotonic(), rows[0]
        # A sandbox remembers sessions by their key: neither another run's nor one that a killed run left may be found by it.
        name = f"{self._nonce}.{next(self._attempts)}/{first.group}#{first.rollout}"
        key = sampling_key(self.seed, first.group, first.rollout)
        deadline = asyncio.timeout(self.options.deadline_s)
        env: Env | None = None
        try:
            async with deadline:
                if stem and isinstance(self.agent, Agent):
                    resumed = None
                    if origin:
                        env, resumed = await origin.fork(name, partial(self.agent.retrace, task=task, stem=stem))
                    else:
                        env = self.world.episode(name, self._sandbox)
                    await self.agent.play(env, task, rows, key, sampling, stem, resumed)
                else:
                    env = self.world.episode(name, self._sandbox)
                    await self.agent.play(Ablated(env) if ablated else env, task, rows, key, sampling)
        except Exception as error:
            fault = StopReason.INFRA_FAILURE, f"{type(error).__name__}: {error}"
            stop, text = self._missed(rows) if isinstance(error, TimeoutError) and deadline.expired() else fault
            for row in rows:
                row.stop, row.error = stop, f"turn {row.trunk_turns + len(row.turns)}: {text}"
        finally:
            seconds = time.monotonic() - began
            for row in rows:
                row.seconds = seconds
            if env is not None:
                await _leave(env)

    def _missed(self, rows: list[Trajectory]) -> tuple[StopReason, str]:
        """A missed deadline is the policy's fault where its own tool calls took most of the time."""
        limit_s = self.options.deadline_s
        spent = sum(record.latency_s for row in rows for turn in row.turns for record in turn.tools)
        waiting = next((row.waiting for row in rows if row.waiting), "agent")
        text = f"no end within {limit_s:g} s (rollout.deadline_s), {spent:.1f} s of it in tools; waiting for the {waiting}"
        return StopReason.POLICY_TIMEOUT if spent > limit_s / 2 else StopReason.INFRA_FAILURE, text


class _Origin:
    """An episode brought back to a stem's end once; all continuations get forks of it, and the last one out closes it."""

    def __init__(self, make: Callable[[], Any], continuations: int):
        self.make, self.left = make, continuations
        self._env: Any = None
        self._retraced: asyncio.Task[Resumed] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def fork(self, name: str, retrace: Callable[[Env], Coroutine[Any, Any, Resumed]]) -> tuple[Env, Resumed]:
        """A fork, and where it stands. Raises what retracing and forking raise, in every continuation that asks."""
        if self._retraced is None:
            self._env = self.make()
            self._retraced = asyncio.create_task(retrace(self._env))
        resumed = await asyncio.shield(self._retraced)
        async with self._one_at_a_time:
            return await self._env.fork(name), resumed

    async def leave(self) -> None:
        """One continuation is over."""
        self.left -= 1
        if not self.left and self._retraced is not None:
            self._retraced.cancel()
            await _leave(self._env)


async def _leave(env: Env) -> None:
    """Closes an episode's world; a fault here cannot change what was sampled."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(env.close(), 5.0)


def wait(futures: list[Future[list[Trajectory]]]) -> list[Trajectory]:
    """The rows of a group's episodes, in the order of its rollouts."""
    return [row for future in futures for row in future.result()]
