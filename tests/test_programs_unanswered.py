"""Programs whose requests the door could not answer: no reward comes of it, whatever the program makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import urllib.error
from collections.abc import Sequence
from typing import Any

import pytest
from asking import user
from scripted import ScriptedSampler
from test_programs import TASK, TEMPLATE, Program, ask, play, world_of

from jaxagent.agent import Limits
from jaxagent.door.ask import Refused
from jaxagent.door.session import Rules, Session, Slots
from jaxagent.envs.program import ProgramFailed
from jaxagent.programs import Programs, Unanswered
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, Trajectory

SAID = TEMPLATE.turn(Message("assistant", "x"))
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {}}}}  # refused in training


def broken(*at: int, begun: int = 0) -> ScriptedSampler:
    """A policy that says x, of an engine that breaks at the requests `at`; where one streams, after `begun` tokens."""
    numbers = itertools.count()

    async def write(text: str, request: SampleRequest) -> Sequence[int]:
        if next(numbers) not in at:
            return SAID
        for n in range(begun) if request.hear else ():
            request.hear(list(b"half"[: n + 1]))
            await asyncio.sleep(0)
        raise RuntimeError("the device is gone")

    return ScriptedSampler(TEMPLATE, write)


def swallowing(*asks: str, **more: Any) -> Program:
    """A program that asks these things, takes a fault for an empty answer, and is content with itself."""

    def program(task: Any, url: str, key: str) -> float:
        for text in asks:
            with contextlib.suppress(urllib.error.HTTPError, json.JSONDecodeError):  # a stream is no JSON: it is read, and left
                ask(url, key, [user(text)], **more)
        return 1.0

    return program


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_a_fault_of_the_door_that_a_program_swallows_is_no_reward(at: int, stream: bool) -> None:
    sampler = broken(at, begun=3)  # a stream has begun by then, with status 200
    words = "the door left 1 of the program's requests without an answer; the last: RuntimeError: the device is gone"
    with pytest.raises(Unanswered, match=words):
        play(world_of(swallowing("a", "b", stream=stream)), sampler)
    assert len(sampler.requests) == 2


@pytest.mark.parametrize("fault", [ProgramFailed("no more calls"), None])
def test_a_fault_of_the_door_outweighs_a_budget_that_is_used_up(fault: Exception | None) -> None:
    def program(task: Any, url: str, key: str) -> float:
        swallowing("a", "b", "c", "d")(task, url, key)
        if fault:
            raise fault
        return 1.0

    with pytest.raises(Unanswered, match="left 1 of"):
        play(world_of(program), broken(0), max_turns=2)


def played(sampler: ScriptedSampler, attempts: int) -> Trajectory:
    programs = Programs(Slots(TEMPLATE, sampler, 4), Limits(8, 300))
    rollouts = Rollouts(world_of(swallowing("a")), programs, lambda: None, 0, RolloutOptions(attempts=attempts))
    try:
        ((future,),) = rollouts.play([("g", TASK)], 1, Sampling(max_tokens=9))
        (row,) = future.result()
    finally:
        rollouts.close()
    return row


def test_an_episode_that_the_door_broke_is_played_again_and_its_row_says_why() -> None:
    row = played(broken(0, 1), attempts=2)
    assert (row.stop, row.attempts, row.turns) == (StopReason.INFRA_FAILURE, 2, [])
    assert "Unanswered: the door left 1 of" in row.error and "the device is gone" in row.error
    row = played(broken(0), attempts=2)
    assert (row.stop, row.attempts, row.reward) == (StopReason.ANSWERED, 2, 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_asked_again_and_answered_was_no_fault_and_costs_one_call(stream: bool) -> None:
    program = swallowing("a", "a", "a", "b", "b", stream=stream)
    rows = play(world_of(program), broken(0, 1, 3, begun=3), max_turns=2)
    assert [(row.stop, row.reward) for row in rows] == [(StopReason.ANSWERED, 1.0)] * 2


def test_another_answer_or_an_earlier_one_does_not_make_up_for_a_fault() -> None:
    for asks, at in (("abc", 1), ("bac", 0), ("aab", 1)):
        with pytest.raises(Unanswered, match="left 1 of"):
            play(world_of(swallowing(*asks)), broken(at))


def test_what_the_door_refuses_is_no_fault_of_its() -> None:
    def program(task: Any, url: str, key: str) -> float:
        swallowing("a", **FORM)(task, url, key)
        return swallowing("b")(task, url, key)

    assert [row.reward for row in play(world_of(program), broken())] == [1.0]


def test_one_answer_makes_up_for_one_fault_and_a_client_that_leaves_for_none() -> None:
    """Of requests of the same words that are under way side by side."""

    async def whole() -> None:
        session = Session("s", Slots(TEMPLATE, broken(), 4), Rules(300))
        with contextlib.suppress(RuntimeError), session.asked("/v1/x", b"q"), session.asked("/v1/x", b"q"):
            raise RuntimeError("gone")
        assert [one.fault for one in session.faults] == ["RuntimeError: gone"] * 2
        for path, body in (("/v1/y", b"q"), ("/v1/x", b"r")):
            with session.asked(path, body) as asked:
                session.answered(asked)
        with contextlib.suppress(Refused), session.asked("/v1/x", b"q"):
            raise Refused("no")
        with contextlib.suppress(ConnectionResetError), session.asked("/v1/x", b"q"):
            raise ConnectionResetError("who asked is gone")
        assert len(session.faults) == 2
        with session.asked("/v1/x", b"q") as asked:
            assert len(session.faults) == 2  # until it is answered
            session.answered(asked)
        assert len(session.faults) == 1
        with session.asked("/v1/x", b"q") as one, session.asked("/v1/x", b"q") as other:
            session.answered(other)  # of a request that was asked only once
            assert len(session.faults) == 1
            session.answered(one)
        assert session.faults == []
        left = asyncio.create_task(hanging(session))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert session.faults == []
        with pytest.raises(TimeoutError), session.asked("/v1/x", b"q"):
            async with asyncio.timeout(0.0):
                await asyncio.Event().wait()
        assert [one.fault for one in session.faults] == ["TimeoutError: "]
        with pytest.raises(KeyError), session.asked("/v1/x", b"q"):
            raise KeyError("ours")
        assert [one.fault for one in session.faults] == ["KeyError: 'ours'"]  # one in place of the other

    asyncio.run(whole())


async def hanging(session: Session) -> None:
    with session.asked("/v1/x", b"q"):
        await asyncio.Event().wait()
