"""Many episodes at once, on an asyncio loop of its own. The only place where an exception becomes data.

A failure of the infrastructure is tried again under the same key, so that nothing is resampled; if it stays, the trajectory
says so and leaves the loss and its group's statistics. So it is with a continuation whose world did not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxagent.agent import Agent, Player
from jaxagent.envs.env import Ablated, Env, Task, World
from jaxagent.journal import Journal, Recorded
from jaxagent.lengths import Gate, Lengths, Member, Ranked, Siblings
from jaxagent.stem import Resumed, Stem
from jaxagent.types import Sampling, StopReason, Trajectory, sampling_key

STOP_POLL_S = 0.2  # how often it is looked whether the run is to stop
LEAVE_S = 5.0  # that a world has to end or to close when it is told to; then it is left behind


class Stopped(Exception):
    """The run is to stop while rollouts are waited for."""


class DeadlineMissed(Exception):
    """An episode was not over when its time was; `ended` says whether it let itself be ended."""

    def __init__(self, ended: bool):
        super().__init__()
        self.ended = ended


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


@dataclass(frozen=True)
class _How:
    """What the episodes of one call have in common."""

    sampling: Sampling
    ablated: bool = False
    journal: Journal | None = None
    stem: Stem | None = None  # what continuations go on from
    origin: _Origin | None = None  # where their world stands, if it can be copied


class Rollouts:
    """Plays episodes of one world. `seed` and the episode's names fix every draw."""

    def __init__(
        self,
        world: World,
        agent: Player,
        sandbox: Callable[[], Any],
        seed: int,
        options: RolloutOptions,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Args:
        sandbox: makes the sandbox client, called once inside the loop.
        loop: one that nobody runs yet, such as one of another clock; a new one otherwise.
        """
        self.world, self.agent, self.seed, self.options = world, agent, seed, options
        self._nonce, self._attempts = secrets.token_hex(6), itertools.count()
        self._loop = loop or asyncio.new_event_loop()
        self._lengths, self._lengths_of_rests = Lengths(self._loop.time), Lengths(self._loop.time)
        self._waves = itertools.count(1)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._sandbox, self._gate = self._run(self._open(sandbox)).result()

    def play(
        self,
        tasks: Iterable[tuple[str, Task]],
        rollouts: int,
        sampling: Sampling,
        *,
        ablated: bool = False,
        journal: Journal | None = None,
    ) -> list[list[Future[list[Trajectory]]]]:
        """Starts `rollouts` episodes for every (group name, task); a list of futures per task.

        An episode gives one row for every seat at its table, and one more wherever a seat's conversation was begun anew. Where
        places are scarce, episodes of earlier calls go first, and of one call those that are expected to be long.

        Args:
            journal: keeps what is sampled, and gives what it kept before the run was stopped.
        """
        how = _How(sampling, ablated, journal)
        wave, started = next(self._waves), []
        for group, task in tasks:
            siblings = Siblings(self._lengths, task["id"], wave)
            members = [Member(siblings) for _ in range(rollouts)]
            started.append([self._run(self._episode(group, task, i, member, how)) for i, member in enumerate(members)])
        return started

    def branch(self, stem: Stem, task: Task, numbers: Iterable[int], sampling: Sampling) -> list[Future[list[Trajectory]]]:
        """Starts the continuations `numbers` of a stem; a future of its rows for each.

        The same number of the same stem is the same continuation. The world is brought back for each of them by taking the
        stem's turns again; where it `forks`, once for all of several.

        Raises ValueError where the task is another than the stem's, and where programs of the user's play.
        """
        if not isinstance(self.agent, Agent):
            raise ValueError(f"{stem.group}: an episode that a program plays cannot be taken up again at one of its turns")
        if (task["id"], task["seed"]) != (stem.task, stem.seed):
            raise ValueError(f"{stem.group} is of task {stem.task} with seed {stem.seed}, got {task['id']} with {task['seed']}")
        numbers = list(numbers)
        origin = None
        if getattr(self.world, "forks", False) and len(numbers) > 1:
            name = f"{self._nonce}.{next(self._attempts)}/{stem.group}"
            origin = _Origin(lambda: self.world.episode(name, self._sandbox), len(numbers))
        # What is left of an episode from some turn on says nothing of whole ones.
        how, siblings = _How(sampling, stem=stem, origin=origin), Siblings(self._lengths_of_rests, stem.group, wave=0)
        return [self._run(self._continuation(task, number, Member(siblings), how)) for number in numbers]

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

    async def _open(self, sandbox: Callable[[], Any]) -> tuple[Any, Gate]:
        return sandbox(), Gate(self.options.concurrency)

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * LEAVE_S)
        await self.agent.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _episode(self, group: str, task: Task, rollout: int, member: Member, how: _How) -> list[Trajectory]:
        try:
            if how.journal and (kept := how.journal.episode(group, rollout, task)):
                return kept
            async with self._gate.place(member.rank):
                for attempt in range(1, self.options.attempts + 1):
                    difficulty = task.get("difficulty", "")
                    rows = [Trajectory(task["id"], task["seed"], group, rollout, attempts=attempt, difficulty=difficulty)]
                    rows = await self._attempt(rows, task, member, how)
                    if rows[0].stop.counts:
                        break
                if how.journal:
                    how.journal.finish(rows)
                return rows
        finally:
            member.leave()

    async def _continuation(self, task: Task, number: int, member: Member, how: _How) -> list[Trajectory]:
        assert how.stem
        try:
            async with self._gate.place(member.rank):
                for attempt in range(1, self.options.attempts + 1):
                    again = how if attempt == 1 else replace(how, origin=None)
                    rows = await self._attempt([how.stem.row(number, attempt)], task, member, again)
                    if rows[0].stop.counts:
                        break
                return rows
        finally:
            member.leave()
            if how.origin:
                await how.origin.leave()

    async def _attempt(self, rows: list[Trajectory], task: Task, member: Member, how: _How) -> list[Trajectory]:
        """Plays an episode into `rows` and returns them; of one that could not be ended, a copy that nobody writes to."""
        began, opened = self._loop.time(), list[Env]()
        try:
            await self._within_deadline(asyncio.create_task(self._play(rows, task, member, how, opened)))
        except Exception as error:
            fault = StopReason.INFRA_FAILURE, f"{type(error).__name__}: {error}"
            stop, text = self._missed(rows) if isinstance(error, DeadlineMissed) else fault
            if isinstance(error, DeadlineMissed) and not error.ended:
                self.agent.release(rows)
                rows = copy.deepcopy(rows)
            for row in rows:
                row.stop, row.error = stop, f"turn {row.trunk_turns + len(row.turns)}: {text}"
        finally:
            seconds = self._loop.time() - began
            for row in rows:
                row.seconds = seconds
            member.end(rows[0].stop.counts)
            for env in opened:
                await _leave(env)
        return rows

    async def _play(self, rows: list[Trajectory], task: Task, member: Member, how: _How, opened: list[Env]) -> None:
        """Args: opened: gets the episode's world as soon as there is one."""
        agent, first = self.agent, rows[0]
        if isinstance(agent, Agent):
            agent = agent.through(lambda sampler: Ranked(sampler, member))
        else:  # a program asks in its own name
            member.begin()
        # A sandbox remembers sessions by their key: neither another run's nor one that a killed run left may be found by it.
        name = f"{self._nonce}.{next(self._attempts)}/{first.group}#{first.rollout}"
        key = sampling_key(self.seed, first.group, first.rollout)
        if isinstance(agent, Agent) and how.stem and how.origin:
            env, resumed = await how.origin.fork(name, partial(agent.retrace, task=task, stem=how.stem))
            opened.append(env)
            await agent.play(env, task, rows, key, how.sampling, how.stem, resumed)
            return
        env = self.world.episode(name, self._sandbox)
        opened.append(env)
        if isinstance(agent, Agent) and how.stem:
            await agent.play(env, task, rows, key, how.sampling, how.stem)
            return
        if isinstance(agent, Agent) and (journal := how.journal):  # of a program only whole episodes are kept
            agent = agent.through(lambda sampler: Recorded(sampler, journal, first))
        await agent.play(Ablated(env) if how.ablated else env, task, rows, key, how.sampling)

    async def _within_deadline(self, episode: asyncio.Task[None]) -> None:
        """Waits for an episode. Raises DeadlineMissed; a world that catches its cancellation cannot keep the step waiting."""
        try:
            await asyncio.wait({episode}, timeout=self.options.deadline_s)
            missed = not episode.done()
        finally:  # also where the rollouts are closed meanwhile
            if not episode.done():
                episode.cancel()
                await asyncio.wait({episode}, timeout=LEAVE_S)
        if not missed:
            episode.result()
            return
        if episode.done() and not episode.cancelled():
            episode.exception()  # whatever came of the cancellation, it is asked for, or asyncio would complain
        raise DeadlineMissed(ended=episode.done())

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
    """Closes an episode's world; a fault here cannot change what was sampled, and nobody waits for one that hangs."""
    with contextlib.suppress(Exception):
        closing = asyncio.ensure_future(env.close())
        if not (await asyncio.wait({closing}, timeout=LEAVE_S))[0]:
            closing.cancel()
        elif not closing.cancelled():
            closing.exception()


def wait(futures: list[Future[list[Trajectory]]], stop: Callable[[], bool] | None = None) -> list[Trajectory]:
    """The rows of a group's episodes, in the order of its rollouts. Raises Stopped where `stop` says so before all are over."""
    while stop and (left := [future for future in futures if not future.done()]):
        if stop():
            raise Stopped
        wait_for(left, STOP_POLL_S)
    return [row for future in futures for row in future.result()]
