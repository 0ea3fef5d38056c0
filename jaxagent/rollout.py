"""Many episodes at once, on an asyncio loop of its own. The only place where an exception becomes data.

A failure of the infrastructure is tried again under the same key, so that nothing is resampled; if it stays, the trajectory
says so and leaves the loss and its group's statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxagent.agent import Agent
from jaxagent.envs.env import Ablated, Env, Task, World
from jaxagent.types import Sampling, StopReason, Trajectory, sampling_key


@dataclass(frozen=True)
class RolloutOptions:
    """How many episodes are played at once, how long one may take, and how often a broken one is tried again."""

    concurrency: int = 256
    deadline_s: float = 600.0
    attempts: int = 3


class Rollouts:
    """Plays episodes of one world. `seed` and the episode's names fix every draw."""

    def __init__(self, world: World, agent: Agent, sandbox: Callable[[], Any], seed: int, options: RolloutOptions):
        """Args: sandbox: makes the sandbox client, called once inside the loop."""
        self.world, self.agent, self.seed, self.options = world, agent, seed, options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._sandbox, self._gate = self._run(self._open(sandbox)).result()

    def play(
        self, tasks: Iterable[tuple[str, Task]], rollouts: int, sampling: Sampling, *, ablated: bool = False
    ) -> list[list[Future[list[Trajectory]]]]:
        """Starts `rollouts` episodes for every (group name, task); a list of futures per task.

        An episode gives one row for every seat at its table.
        """
        return [[self._run(self._episode(group, task, i, sampling, ablated)) for i in range(rollouts)] for group, task in tasks]

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
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _episode(self, group: str, task: Task, rollout: int, sampling: Sampling, ablated: bool) -> list[Trajectory]:
        async with self._gate:
            for attempt in range(1, self.options.attempts + 1):
                trajectory = Trajectory(
                    task["id"], task["seed"], group, rollout, attempts=attempt, difficulty=task.get("difficulty", "")
                )
                rows = await self._attempt(trajectory, task, sampling, ablated)
                if trajectory.stop.counts:
                    break
            return rows

    async def _attempt(self, trajectory: Trajectory, task: Task, sampling: Sampling, ablated: bool) -> list[Trajectory]:
        began = time.monotonic()
        name = f"{trajectory.group}#{trajectory.rollout}.{trajectory.attempts}"
        env: Env = self.world.episode(name, self._sandbox)
        env = Ablated(env) if ablated else env
        key = sampling_key(self.seed, trajectory.group, trajectory.rollout)
        try:
            async with asyncio.timeout(self.options.deadline_s):
                return await self.agent.play(env, task, trajectory, key, sampling)
        except TimeoutError:
            self._missed(trajectory)
        except Exception as error:
            trajectory.stop = StopReason.INFRA_FAILURE
            trajectory.error = f"turn {len(trajectory.turns)}: {type(error).__name__}: {error}"
        finally:
            trajectory.seconds = time.monotonic() - began
            await self._leave(env)
        return [trajectory]

    def _missed(self, trajectory: Trajectory) -> None:
        """A missed deadline is the policy's fault where its own tool calls took most of the time."""
        spent = sum(record.latency_s for turn in trajectory.turns for record in turn.tools)
        slow = spent > self.options.deadline_s / 2
        trajectory.stop = StopReason.POLICY_TIMEOUT if slow else StopReason.INFRA_FAILURE
        trajectory.error = (
            f"turn {len(trajectory.turns)}: no end within {self.options.deadline_s:g} s (rollout.deadline_s), "
            f"{spent:.1f} s of it in tools; waiting for the {trajectory.waiting}"
        )

    @staticmethod
    async def _leave(env: Env) -> None:
        """Closes an episode's world; a fault here cannot change what was sampled."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(env.close(), 5.0)
