"""Many episodes through the real sandbox: whatever breaks becomes a trajectory with a reason, and nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import pytest
from scripted import Ids, ScriptedSampler, never, script
from toys import TASK, Lone

from jaxagent import rollout
from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import audit
from jaxagent.envs.chain import Chain
from jaxagent.envs.env import Env, Step, Task
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, ToolRecord, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient

PLAIN = PlainTemplate()
SAMPLING = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(functions=(Chain.functions,), code="off") as running:
        yield running


@contextmanager
def rollouts(world: Any, sampler: ScriptedSampler, server: EmbeddedServer | None = None, **options: Any) -> Iterator[Rollouts]:
    def sandbox() -> SandboxClient | None:
        return SandboxClient(server.url, server.token) if server else None

    agent = Agent(PLAIN, world.tools, sampler, Limits(max_turns=8, max_tokens=100))
    made = Rollouts(world, agent, sandbox, seed=11, options=RolloutOptions(**options))
    try:
        yield made
    finally:
        made.close()


def rows_of(futures: list[list[Future[list[Trajectory]]]]) -> list[Trajectory]:
    rows = [row for group in futures for future in group for row in future.result(timeout=60)]
    assert [audit(row) for row in rows] == [""] * len(rows)
    return rows


def played(world: Any, sampler: ScriptedSampler, server: EmbeddedServer | None = None, **options: Any) -> list[Trajectory]:
    """The rows of one episode."""
    with rollouts(world, sampler, server, **options) as many:
        return rows_of(many.play([("train/0", TASK)], 1, SAMPLING))


def look(name: str, key: str) -> Message:
    return Message("assistant", calls=(ToolCall(name, {"key": key}),))


def drawing(text: str, request: SampleRequest) -> Sequence[int]:
    """Calls three tools with keys drawn from the request's key and place, then answers with the last result."""
    results = re.findall(r"<result>(..)<turn>", text)
    if len(results) == 3:
        return PLAIN.turn(Message("assistant", results[-1]))
    luck = random.Random(f"{request.key}/{request.start + len(request.tokens)}")
    return PLAIN.turn(look(luck.choice("AB"), f"{luck.randrange(100):02d}"))


def many_tasks(world: Chain, count: int) -> list[tuple[str, Task]]:
    return [(f"train/{i}", world.task("train", i)) for i in range(count)]


def facts(row: Trajectory) -> tuple[Any, ...]:
    """What may not depend on when and how often an episode was played."""
    return row.task, row.group, row.rollout, row.tokens, row.mask, row.stop, [turn.reward for turn in row.turns]


# ====================================================================== episodes


def test_futures_come_by_task_and_rollout_and_draws_depend_on_neither_company_nor_order(server: EmbeddedServer) -> None:
    world = Chain()
    with rollouts(world, ScriptedSampler(PLAIN, drawing), server) as many:
        rows = rows_of(many.play(many_tasks(world, 6), 3, SAMPLING))
    assert [(row.group, row.rollout, row.task) for row in rows] == [
        (f"train/{i}", g, f"chain/train/{i}") for i in range(6) for g in range(3)
    ]
    assert {row.stop for row in rows} == {StopReason.ANSWERED}
    assert len({str(row.tokens) for row in rows}) == 18
    with rollouts(world, ScriptedSampler(PLAIN, drawing), server, concurrency=1) as one:
        alone = rows_of(one.play(many_tasks(world, 6)[::-1], 3, SAMPLING))
    assert sorted(map(facts, alone), key=str) == sorted(map(facts, rows), key=str)


def test_no_more_episodes_are_played_at_once_than_allowed() -> None:
    playing, most = 0, 0

    class Counting(Toy):
        async def step(self, action: Message) -> Step:
            nonlocal playing, most
            playing += 1
            most = max(most, playing)
            await asyncio.sleep(0.001)
            playing -= 1
            return Step(terminated=True)

    with rollouts(Counting(), script(PLAIN, look("A", "1")), concurrency=3) as many:
        rows_of(many.play([(f"train/{i}", TASK) for i in range(20)], 1, SAMPLING))
    assert most == 3


def test_an_ablated_rollout_hides_what_the_tools_say(server: EmbeddedServer) -> None:
    world = Chain()
    with rollouts(world, ScriptedSampler(PLAIN, drawing), server) as many:
        rows = rows_of(many.play(many_tasks(world, 2), 1, SAMPLING, ablated=True))
    assert all(PLAIN.text(row.tokens).count("<result>..<turn>") == 3 for row in rows)


# ====================================================================== what breaks becomes data


class Toy(Lone):
    """A world that needs no sandbox: it asks, and each step of it may be replaced."""

    tools = Chain().tools

    async def step(self, action: Message) -> Step:
        return Step([Message("tool", "52", name="A")])


class NoEpisode(Toy):
    def episode(self, name: str, sandbox: Any) -> Env:
        raise ConnectionError("no room")


class NoReset(Toy):
    async def reset(self, task: Task, seed: int) -> Step:
        raise ConnectionError("no room")


class NoStep(Toy):
    async def step(self, action: Message) -> Step:
        raise ConnectionError("no room")


class NoClose(NoStep):
    async def close(self) -> None:
        raise RuntimeError("nor an end")


@pytest.mark.parametrize(("world", "turns"), [(NoEpisode(), 0), (NoReset(), 0), (NoStep(), 1), (NoClose(), 1)])
def test_a_world_that_raises_is_tried_again_and_then_told_as_an_infrastructure_failure(world: Toy, turns: int) -> None:
    (row,) = played(world, script(PLAIN, look("A", "37")), attempts=3)
    assert (row.stop, row.attempts, len(row.turns)) == (StopReason.INFRA_FAILURE, 3, turns)
    assert row.error == f"turn {turns}: ConnectionError: no room; waiting for the environment" + ", asked for A" * turns
    assert (row.task, row.seed, row.group, row.rollout, row.difficulty) == ("toy/0", 3, "train/0", 0, "easy")
    assert not row.stop.counts


def test_a_world_that_says_it_broke_is_tried_again_and_keeps_its_reason() -> None:
    class Truncated(Toy):
        async def step(self, action: Message) -> Step:
            return Step(truncated=True, error="the emulator froze")

    (row,) = played(Truncated(), script(PLAIN, look("A", "37")), attempts=2)
    assert (row.stop, row.error, row.attempts) == (StopReason.ENV_TRUNCATED, "the emulator froze", 2)


def test_a_sampler_that_raises_is_an_infrastructure_failure() -> None:
    def write(text: str, request: SampleRequest) -> Ids:
        raise MemoryError("no slot")

    (row,) = played(Toy(), ScriptedSampler(PLAIN, write), attempts=1)
    assert (row.stop, row.error) == (StopReason.INFRA_FAILURE, "turn 0: MemoryError: no slot; waiting for the engine")


def test_one_broken_episode_does_not_touch_the_others(server: EmbeddedServer) -> None:
    class Unlucky(Chain):
        def episode(self, name: str, sandbox: Any) -> Env:
            if "train/2#1" in name:
                raise ConnectionError("no room")
            return super().episode(name, sandbox)

    world = Unlucky()
    with rollouts(world, ScriptedSampler(PLAIN, drawing), server) as many:
        rows = rows_of(many.play(many_tasks(world, 4), 2, SAMPLING))
    assert [row.stop for row in rows] == [StopReason.INFRA_FAILURE if i == 5 else StopReason.ANSWERED for i in range(8)]


# ====================================================================== deadlines


def test_a_deadline_missed_while_the_engine_is_waited_for_is_the_infrastructures() -> None:
    (row,) = played(Toy(), ScriptedSampler(PLAIN, lambda text, request: never()), attempts=1, deadline_s=0.1)
    assert row.stop is StopReason.INFRA_FAILURE
    assert row.error == ("turn 0: no end within 0.1 s (rollout.deadline_s), 0.0 s of it in tools; waiting for the engine")


@pytest.mark.parametrize(("stage", "asked"), [("reset", ""), ("step", ", asked for A")])
def test_a_deadline_missed_while_the_world_is_waited_for_says_so_and_names_the_tool(stage: str, asked: str) -> None:
    async def hang(*_: Any) -> Step:
        await never()
        return Step()

    world = type("Hanging", (Toy,), {stage: hang})()
    (row,) = played(world, script(PLAIN, look("A", "37")), attempts=2, deadline_s=0.1)
    assert (row.stop, row.attempts) == (StopReason.INFRA_FAILURE, 2)
    assert row.error.endswith(f"waiting for the environment{asked}")


@pytest.mark.parametrize("stage", ["reset", "step", "close"])
def test_a_world_that_does_not_let_itself_be_ended_keeps_nobody_waiting(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "LEAVE_S", 0.2)
    ended = []

    async def deaf(*_: Any) -> Step:
        try:
            await never()
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):  # the first time it is not heard
                await never()
            ended.append(stage)
        return Step([Message("user", "late")])

    world = type("Deaf", (Toy,), {stage: deaf})()
    sampler = script(PLAIN, look("A", "37"))
    with rollouts(world, sampler, attempts=1, deadline_s=0.1) as many:
        (row,) = rows_of(many.play([("train/0", TASK)], 1, SAMPLING))
        turns = len(row.turns)
        assert row.stop is (StopReason.MAX_TURNS if stage == "close" else StopReason.INFRA_FAILURE)
        assert stage == "close" or "no end within 0.1 s" in row.error
    assert len(row.turns) == turns  # nothing is added to it when the world answers after all
    assert ended == [stage]
    assert sampler.rows == {}


def test_a_deadline_missed_because_of_the_policys_own_slow_calls_is_the_policys_and_is_not_tried_again() -> None:
    class Slow(Toy):
        asked = False

        async def step(self, action: Message) -> Step:
            if self.asked:
                await never()
            self.asked = True
            return Step([Message("tool", "52", name="A")], tools=[ToolRecord("A", {}, "timeout", "52", latency_s=0.1)])

    (row,) = played(Slow(), script(PLAIN, look("A", "37")), attempts=3, deadline_s=0.15)
    assert (row.stop, row.attempts) == (StopReason.POLICY_TIMEOUT, 1)
    assert row.stop.counts
    assert "no end within 0.15 s" in row.error


def test_a_timeout_that_the_world_raises_itself_is_not_called_a_missed_deadline() -> None:
    class Impatient(Toy):
        async def step(self, action: Message) -> Step:
            raise TimeoutError("the database did not answer")

    (row,) = played(Impatient(), script(PLAIN, look("A", "37")), attempts=1)
    told = "turn 1: TimeoutError: the database did not answer; waiting for the environment, asked for A"
    assert (row.stop, row.error) == (StopReason.INFRA_FAILURE, told)


def test_every_seat_of_an_episode_that_broke_has_its_row_with_the_reason() -> None:
    class Table(Toy):
        async def reset(self, task: Task, seed: int) -> Step:
            return Step([Message("user", "q")], agent="white")

        async def step(self, action: Message) -> Step:
            if action.content == "resign":
                raise ConnectionError("no board")
            return Step([Message("user", "r")], agent="black")

    def write(text: str, request: SampleRequest) -> Ids:
        return PLAIN.turn(Message("assistant", "resign" if "black" in request.trajectory else "e4"))

    white, black = played(Table(), ScriptedSampler(PLAIN, write), attempts=2)
    assert [(row.role, row.stop, row.attempts, row.error) for row in (white, black)] == [
        (role, StopReason.INFRA_FAILURE, 2, "turn 1: ConnectionError: no board; waiting for the environment")
        for role in ("white", "black")
    ]
    assert white.seconds == black.seconds > 0


# ====================================================================== the sandbox is lost


def test_an_episode_whose_session_is_lost_is_played_again_with_the_same_draws(server: EmbeddedServer) -> None:
    world = Chain()

    async def lose(turn: Ids) -> Ids:
        await asyncio.to_thread(server.restart)
        return turn

    def write(text: str, request: SampleRequest) -> Any:
        turn = drawing(text, request)
        return lose(turn) if ".1/" in request.trajectory and text.count("<result>") == 2 else turn

    losing = ScriptedSampler(PLAIN, write)
    with rollouts(world, losing, server) as many:
        (row,) = rows_of(many.play(many_tasks(world, 1), 1, SAMPLING))
    with rollouts(world, ScriptedSampler(PLAIN, drawing), server) as many:
        (calm,) = rows_of(many.play(many_tasks(world, 1), 1, SAMPLING))
    assert (row.attempts, calm.attempts) == (2, 1)
    assert facts(row) == facts(calm)
    assert [r.trajectory for r in losing.requests] == ["train/0#0.1/agent"] * 3 + ["train/0#0.2/agent"] * 4
    assert len({request.key for request in losing.requests}) == 1


def test_a_server_killed_in_the_middle_and_started_again_loses_nothing() -> None:
    world = Chain()
    with EmbeddedServer(functions=(Chain.functions,), code="off") as server:
        with rollouts(world, ScriptedSampler(PLAIN, drawing), server) as many:
            calm = rows_of(many.play(many_tasks(world, 8), 4, SAMPLING))
        turns, killed = 0, threading.Event()

        def write(text: str, request: SampleRequest) -> Ids:
            nonlocal turns
            turns += 1
            if turns == 60:  # of 128
                os.kill(json.loads(server.ready_line)["pid"], 9)
                killed.set()
            return drawing(text, request)

        with rollouts(world, ScriptedSampler(PLAIN, write), server) as many:
            futures = many.play(many_tasks(world, 8), 4, SAMPLING)
            assert killed.wait(60)
            while server.alive():
                pass
            server.restart(only_if_dead=True)
            rows = rows_of(futures)
        assert server.restarts() == 1
    assert [facts(row) for row in rows] == [facts(row) for row in calm]
    assert max(row.attempts for row in rows) == 2


# ====================================================================== the end


@pytest.mark.parametrize("where", ["engine", "environment"])
def test_closing_with_episodes_in_flight_cancels_them_and_ends_their_thread(where: str) -> None:
    closed, begun = [], threading.Event()

    class Hanging(Toy):
        async def step(self, action: Message) -> Step:
            begun.set()
            await never()
            return Step()

        async def close(self) -> None:
            closed.append(True)

    def write(text: str, request: SampleRequest) -> Any:
        if where == "environment":
            return PLAIN.turn(look("A", "37"))
        begun.set()
        return never()

    sampler = ScriptedSampler(PLAIN, write)
    with rollouts(Hanging(), sampler, concurrency=4) as many:
        futures = many.play([(f"train/{i}", TASK) for i in range(10)], 1, SAMPLING)
        assert begun.wait(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    for (future,) in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    assert len(sampler.released) <= len(closed) <= 4  # of some that are closed, nothing had begun
    many.close()


def test_closing_ends_the_sessions_of_episodes_in_flight(server: EmbeddedServer) -> None:
    async def sessions() -> int:
        async with SandboxClient(server.url, server.token) as client:
            return (await client.ready()).sessions

    begun = threading.Event()

    def write(text: str, request: SampleRequest) -> Any:
        if "<result>" not in text:
            return drawing(text, request)
        begun.set()
        return never()

    world = Chain()
    held = asyncio.run(sessions())
    with rollouts(world, ScriptedSampler(PLAIN, write), server) as many:
        many.play(many_tasks(world, 1), 1, SAMPLING)
        assert begun.wait(60)
        assert asyncio.run(sessions()) == held + 1
    assert asyncio.run(sessions()) == held


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"attempts": 0}, {"deadline_s": 0.0}])
def test_options_that_would_hang_or_play_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.{next(iter(options))} must be"):
        RolloutOptions(**options)


def test_no_session_name_is_used_twice_by_any_run(server: EmbeddedServer) -> None:
    """A server knows sessions by name: by an old one it would answer with what another run was told."""
    names: list[str] = []

    class Named(Chain):
        def episode(self, name: str, sandbox: Any) -> Env:
            names.append(name)
            return super().episode(name, sandbox)

    world = Named()
    with (
        rollouts(world, ScriptedSampler(PLAIN, drawing), server) as one,
        rollouts(world, ScriptedSampler(PLAIN, drawing), server) as other,
    ):
        both = [many.play(many_tasks(world, 4), 2, SAMPLING) for many in (one, other)]
        first, second = map(rows_of, both)
        again = rows_of(one.play(many_tasks(world, 4), 2, SAMPLING))
    assert len(names) == len(set(names)) == 24
    assert {row.attempts for row in (*first, *second, *again)} == {1}
    assert list(map(facts, first)) == list(map(facts, second)) == list(map(facts, again))
