"""Many episodes at once, on an asyncio loop of its own. The only place where an exception becomes data.

A failure of the infrastructure is tried again under the same key, so that nothing is resampled; if it stays, the trajectory
says so and leaves the loss and its group's statistics. So it is with a continuation whose world did not come back.

Nothing hangs. An attempt at an episode ends with its deadline, a world that does not let itself be ended is left behind, and
what is still there when the call that asked for it has had its time (`RolloutOptions.budget_s`) is ended by `Rollouts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxagent.agent import Agent, Player
from jaxagent.envs.env import Ablated, Env, Task, World
from jaxagent.hold import Hold
from jaxagent.journal import Journal, Recorded
from jaxagent.lengths import Gate, Lengths, Member, Ranked, Siblings
from jaxagent.stem import Resumed, Stem
from jaxagent.types import Sampling, StopReason, Trajectory, sampling_key

STOP_POLL_S = 0.2  # how often it is looked whether the run is to stop
LEAVE_S = 5.0  # that a world has to end or to close when it is told to; then it is left behind
GRACE = 0.25  # of the time until every group had enough episodes, for those that are left


class Stopped(Exception):
    """The run is to stop while rollouts are waited for."""


class Interrupted(Exception):
    """A world or a sampler gave up an episode by what would have ended more than that: a cancellation, an exit."""


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

    def budget_s(self, episodes: int) -> float:
        """Seconds within which so many episodes are over, whatever hangs in them.

        ceil(episodes / concurrency) rounds of places, in each of which all attempts miss their deadline, do not end when they
        are told to, and neither does their world close; and as much once more to end what then is left.
        """
        leaving_s = 3 * LEAVE_S
        return -(-episodes // self.concurrency) * self.attempts * (self.deadline_s + leaving_s) + leaving_s


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
        self._nonce, self._attempts_made = secrets.token_hex(6), itertools.count()
        self._loop = loop or asyncio.new_event_loop()
        self._lengths, self._lengths_of_rests = Lengths(self._loop.time), Lengths(self._loop.time)
        self._waves, self._closing = itertools.count(1), False
        self._holds: dict[Future[list[Trajectory]], Hold] = {}  # of episodes that are played, or wait for it
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
            started.append(
                [self._start(partial(self._episode, group, task, i, member, how)) for i, member in enumerate(members)]
            )
        self._supervise([future for futures in started for future in futures])
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
            name = f"{self._nonce}.{next(self._attempts_made)}/{stem.group}"
            origin = _Origin(lambda: self.world.episode(name, self._sandbox), len(numbers))
        # What is left of an episode from some turn on says nothing of whole ones.
        how, siblings = _How(sampling, stem=stem, origin=origin), Siblings(self._lengths_of_rests, stem.group, wave=0)
        started = [self._start(partial(self._continuation, task, number, Member(siblings), how)) for number in numbers]
        self._supervise(started)
        return started

    def hurry(self, groups: Sequence[Sequence[Future[list[Trajectory]]]], least: int) -> None:
        """Once every group has `least` episodes that are over, those that are left get GRACE of the time so far, and end.

        What ends so becomes a row that says so, never a reward. Who was slow depends on time, and slow are the long ones: see
        docs/concepts/failures.md.
        """
        held = [[hold for future in group if (hold := self._holds.get(future))] for group in groups]
        wanted = [max(0, least - len(group) + len(left)) for group, left in zip(groups, held, strict=True)]
        self._loop.call_soon_threadsafe(self._hurry, held, wanted, least)

    def open(self) -> list[str]:
        """Where every episode is that is played now: its turn, what it waits for, its session. Any thread may ask."""
        now = self._loop.time()
        played = [hold for hold in list(self._holds.values()) if hold.task and hold.rows and not hold.over]
        return [
            f"{hold.rows[0].group}#{hold.rows[0].rollout}, "
            + self._told(hold.rows[0], hold.rows, f"{now - hold.asked_s:.0f} s since it was asked for", hold)
            for hold in played
        ]

    def close(self) -> None:
        """Ends the loop; episodes that are still played are cancelled."""
        if self._loop.is_closed():
            return
        self._closing = True
        self._run(self._shut()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self, episode: Callable[[Hold], Coroutine[Any, Any, list[Trajectory]]]) -> Future[list[Trajectory]]:
        hold = Hold(self._loop.time())
        future: Future[list[Trajectory]] = self._run(episode(hold))
        self._holds[future] = hold
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[list[Trajectory]]) -> None:
        self._holds.pop(future).tell()

    def _supervise(self, futures: Sequence[Future[list[Trajectory]]]) -> None:
        """Ends what is left of these when the budget of all that is played now is spent."""
        budget_s = self.options.budget_s(len(self._holds))
        holds = [hold for future in futures if (hold := self._holds.get(future))]
        why = f"no end within the {budget_s:g} s that a call's episodes may take (rollout.deadline_s and rollout.attempts)"
        self._loop.call_soon_threadsafe(self._end_late, holds, budget_s - 3 * LEAVE_S, why)

    def _end_late(self, holds: Sequence[Hold], seconds: float, why: str) -> None:
        left = [hold for hold in holds if hold.left]
        count = len(left)

        def end() -> None:
            for hold in left:
                hold.end(StopReason.INFRA_FAILURE, why)

        def over() -> None:
            nonlocal count
            count -= 1
            if not count:
                timer.cancel()

        timer = self._loop.call_later(seconds if left else 0.0, end)
        for hold in left:
            hold.heard.append(over)

    def _hurry(self, groups: Sequence[Sequence[Hold]], wanted: list[int], least: int) -> None:
        if not any(groups):
            return
        since = min(hold.asked_s for hold in itertools.chain(*groups))

        def enough() -> None:
            grace_s = GRACE * (self._loop.time() - since)
            why = f"its group goes on, {least} of it are over (feed.min_group): it took {grace_s:.1f} s longer than those"
            for hold in itertools.chain(*groups):
                self._loop.call_later(grace_s, hold.end, StopReason.STRAGGLER, why)

        def over(number: int) -> None:
            wanted[number] -= 1
            if wanted[number] == 0 and not any(n > 0 for n in wanted):
                enough()

        for number, group in enumerate(groups):
            for hold in group:
                if hold.over:  # meanwhile
                    wanted[number] -= 1
                else:
                    hold.heard.append(partial(over, number))
        if not any(n > 0 for n in wanted):
            enough()

    async def _open(self, sandbox: Callable[[], Any]) -> tuple[Any, Gate]:
        return sandbox(), Gate(self.options.concurrency)

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * LEAVE_S)
        await _close(self.agent.close)
        if self._sandbox is not None:
            await _close(self._sandbox.close)

    async def _episode(self, group: str, task: Task, rollout: int, member: Member, how: _How, hold: Hold) -> list[Trajectory]:
        if how.journal and (kept := how.journal.episode(group, rollout, task)):
            member.leave()
            return kept
        difficulty = task.get("difficulty", "")

        def row(attempt: int) -> Trajectory:
            return Trajectory(task["id"], task["seed"], group, rollout, attempts=attempt, difficulty=difficulty)

        rows = await self._attempts(row, task, member, how, hold)
        if how.journal:
            how.journal.finish(rows)
        return rows

    async def _continuation(self, task: Task, number: int, member: Member, how: _How, hold: Hold) -> list[Trajectory]:
        assert how.stem
        try:
            return await self._attempts(partial(how.stem.row, number), task, member, how, hold)
        finally:
            if how.origin:
                with contextlib.suppress(asyncio.CancelledError):  # what was played stands
                    await how.origin.leave()

    async def _attempts(
        self, row: Callable[[int], Trajectory], task: Task, member: Member, how: _How, hold: Hold
    ) -> list[Trajectory]:
        """Waits for a place and plays an episode until it counts, so often as may be; or until it is ended from outside."""
        rows = hold.rows = [row(1)]
        rows[0].waiting = "place"
        try:
            hold.begin()
            async with self._gate.place(member.rank):
                for attempt in range(1, self.options.attempts + 1):
                    rows = hold.rows = [row(attempt)]
                    rows = await self._attempt(rows, task, member, how if attempt == 1 else replace(how, origin=None), hold)
                    if rows[0].stop.counts or hold.stop:
                        break
        except asyncio.CancelledError:
            if self._closing:
                raise
            hold.caught()
        except Exception as error:  # of what stands around an episode, not in it
            hold.stop, hold.why = StopReason.INFRA_FAILURE, f"{type(error).__name__}: {error}"
        finally:
            hold.over = True
            member.leave()
        for one in rows:  # what has a reason already keeps it
            if hold.stop and one.stop is StopReason.CANCELLED:
                one.stop, one.error = hold.stop, self._told(one, rows, hold.why, hold)
        return rows

    def _told(self, row: Trajectory, rows: Sequence[Trajectory], text: str, hold: Hold) -> str:
        """Where an episode broke: its turn, what it waited for, which names the tools, and its session in the sandbox."""
        waiting = next((one.waiting for one in rows if one.waiting), "agent")
        session = f"; sandbox session {hold.session}" if self._sandbox is not None and hold.session else ""
        return f"turn {row.trunk_turns + len(row.turns)}: {text}; waiting for the {waiting}{session}"

    async def _attempt(self, rows: list[Trajectory], task: Task, member: Member, how: _How, hold: Hold) -> list[Trajectory]:
        """Plays an episode into `rows` and returns them; of one that could not be ended, a copy that nobody writes to."""
        began = self._loop.time()
        try:
            await self._within_deadline(partial(self._play, rows, task, member, how, hold), hold)
        except Exception as error:
            fault = StopReason.INFRA_FAILURE, f"{type(error).__name__}: {error}"
            stop, text = self._missed(rows, hold) if isinstance(error, DeadlineMissed) else fault
            if isinstance(error, DeadlineMissed) and not error.ended:
                self.agent.release(rows)
                rows = copy.deepcopy(rows)
            for row in rows:
                row.stop, row.error = stop, self._told(row, rows, text, hold)
        finally:
            seconds = self._loop.time() - began
            for row in rows:
                row.began_s, row.seconds = began, seconds
            member.end(rows[0].stop.counts)
            hold.over = rows[0].stop.counts
            while hold.opened:
                try:
                    await _close(hold.opened.pop().close)
                except asyncio.CancelledError:
                    if self._closing:
                        raise
                    hold.caught()
        return rows

    async def _play(self, rows: list[Trajectory], task: Task, member: Member, how: _How, hold: Hold) -> None:
        """Raises Interrupted where something in it wanted to end the whole process."""
        try:
            await self._played(rows, task, member, how, hold)
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end the loop, and with it all episodes
            raise Interrupted(f"{type(error).__name__}: {error}") from error

    async def _played(self, rows: list[Trajectory], task: Task, member: Member, how: _How, hold: Hold) -> None:
        agent, first, rows[0].waiting = self.agent, rows[0], "environment"
        if isinstance(agent, Agent):
            agent = agent.through(lambda sampler: Ranked(sampler, member))
        else:  # a program asks in its own name
            member.begin()
        # A sandbox remembers sessions by their key: neither another run's nor one that a killed run left may be found by it.
        name = hold.session = f"{self._nonce}.{next(self._attempts_made)}/{first.group}#{first.rollout}"
        key = sampling_key(self.seed, first.group, first.rollout)
        if isinstance(agent, Agent) and how.stem and how.origin:
            first.waiting = "copy of its world"
            env, resumed = await how.origin.fork(name, partial(agent.retrace, task=task, stem=how.stem))
            hold.opened.append(env)
            await agent.play(env, task, rows, key, how.sampling, how.stem, resumed)
            return
        env = self.world.episode(name, self._sandbox)
        hold.opened.append(env)
        if isinstance(agent, Agent) and how.stem:
            await agent.play(env, task, rows, key, how.sampling, how.stem)
            return
        if isinstance(agent, Agent) and (journal := how.journal) and journal.keep_broken:  # else only whole episodes are kept
            agent = agent.through(lambda sampler: Recorded(sampler, journal, first))
        await agent.play(Ablated(env, not self.world.tools) if how.ablated else env, task, rows, key, how.sampling)

    async def _within_deadline(self, play: Callable[[], Coroutine[Any, Any, None]], hold: Hold) -> None:
        """Waits for an episode. Raises DeadlineMissed; a world that catches its cancellation cannot keep the step waiting."""
        episode = asyncio.create_task(play())
        try:
            await asyncio.wait({episode}, timeout=self.options.deadline_s)
        except asyncio.CancelledError:
            if self._closing:
                raise
            hold.caught()
        finally:
            missed = not episode.done()
            if missed:
                episode.cancel()
                await asyncio.wait({episode}, timeout=LEAVE_S)
        if not missed:
            if episode.cancelled():
                raise Interrupted("cancelled from within")
            episode.result()
            return
        if episode.done() and not episode.cancelled():
            episode.exception()  # whatever came of the cancellation, it is asked for, or asyncio would complain
        raise DeadlineMissed(ended=episode.done())

    def _missed(self, rows: list[Trajectory], hold: Hold) -> tuple[StopReason, str]:
        """A missed deadline is the policy's fault where its own tool calls took most of the time."""
        if hold.stop:
            return hold.stop, hold.why
        limit_s = self.options.deadline_s
        spent = sum(record.latency_s for row in rows for turn in row.turns for record in turn.tools)
        text = f"no end within {limit_s:g} s (rollout.deadline_s), {spent:.1f} s of it in tools"
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
            await asyncio.wait({self._retraced}, timeout=LEAVE_S)
            await _close(self._env.close)


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    """Closes an episode's world, or what all share: no fault here can change what was sampled, and nobody waits if it hangs."""
    closing: asyncio.Future[None] | None = None
    try:
        closing = asyncio.ensure_future(close())
        await asyncio.wait({closing}, timeout=LEAVE_S)
        if closing.done() and not closing.cancelled():
            closing.exception()
    except Exception:
        return  # it is not even a coroutine
    finally:
        if closing and not closing.done():
            closing.cancel()


def wait(futures: list[Future[list[Trajectory]]], stop: Callable[[], bool] | None = None) -> list[Trajectory]:
    """The rows of a group's episodes, in the order of its rollouts. Raises Stopped where `stop` says so before all are over."""
    while stop and (left := [future for future in futures if not future.done()]):
        if stop():
            raise Stopped
        wait_for(left, STOP_POLL_S)
    return [row for future in futures for row in future.result()]
