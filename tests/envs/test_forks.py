"""Shipped worlds that can be copied: what goes on from a copy is told what it would be told after a replay, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from scripted import ScriptedSampler

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import audit
from jaxagent.envs.chain import Chain
from jaxagent.envs.env import World
from jaxagent.envs.frozen_lake import FrozenLake
from jaxagent.envs.maze import Maze
from jaxagent.envs.retail import Retail
from jaxagent.envs.sokoban import Sokoban
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.stem import stem_of
from jaxagent.types import Message, SampleRequest, Sampling, ToolCall, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient

PLAIN = PlainTemplate()
LIMITS, SAMPLING = Limits(max_turns=9, max_tokens=2000), Sampling(max_tokens=8)


def call(name: str, **arguments: str) -> Message:
    return Message("assistant", calls=(ToolCall(name, arguments),))


# A world and its actions, some of which it cannot read; half of chain's calls fail, and a step on this ice slips.
WORLDS: dict[str, tuple[Callable[[], World], Sequence[Message]]] = {
    "maze": (lambda: Maze(rooms=26, distance=(13, 13)), [call("A"), call("B"), call("C"), call("A")]),
    "chain": (lambda: Chain(flaky=0.5), [call("A", key="17"), call("B", key="05"), call("A", key="x"), call("B", key="70")]),
    "frozen_lake": (
        lambda: FrozenLake(size=8, slippery=True),
        [Message("assistant", way) for way in ("left", "down", "right", "up", "fly")],
    ),
    "retail": (lambda: Retail(rules=False), [Message("assistant", word) for word in ("who?", "order?", "why?", "pay?", "no")]),
    "sokoban": (lambda: Sokoban(boxes=2), [Message("assistant", way) for way in ("left", "down", "right", "up", "fly")]),
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(functions=(Chain.functions, Maze.functions), code="off") as running:
        yield running


def facts(row: Trajectory) -> tuple[Any, ...]:
    turns = [(turn.start, turn.state, turn.reward, turn.reason) for turn in row.turns]
    return row.tokens, row.mask, row.stop, turns, [record.result for turn in row.turns for record in turn.tools]


@pytest.mark.parametrize("name", WORLDS)
def test_a_copy_of_a_shipped_world_goes_on_as_its_replay_does(name: str, server: EmbeddedServer) -> None:
    make, actions = WORLDS[name]

    def drawing(text: str, request: SampleRequest) -> Sequence[int]:
        luck = random.Random(f"{request.key}/{request.start + len(request.tokens)}")
        return PLAIN.turn(luck.choice(actions))

    def continued(task: int, forks: bool) -> tuple[Trajectory, list[list[Trajectory]]]:
        """A trunk, and three continuations from each of two of its turns."""
        world = make()
        assert world.forks is True
        world.forks = forks
        agent = Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, drawing), LIMITS)
        client = lambda: SandboxClient(server.url, server.token)  # noqa: E731
        many = Rollouts(world, agent, client, seed=3, options=RolloutOptions(attempts=1))
        try:
            one = world.task("train", task)
            (trunk,) = many.play([("g", one)], 1, SAMPLING)[0][0].result(60)
            places = [turn for turn in (1, len(trunk.turns) - 1) if 0 < turn < len(trunk.turns)]
            started = [many.branch(stem_of(trunk, turn), one, range(3), SAMPLING) for turn in places]
            return trunk, [[row for future in futures for row in future.result(60)] for futures in started]
        finally:
            many.close()

    seen = set()
    for task in range(3):
        trunk, copied = continued(task, True)
        again, replayed = continued(task, False)
        assert facts(trunk) == facts(again)
        assert [[facts(row) for row in rows] for rows in copied] == [[facts(row) for row in rows] for rows in replayed]
        rows = [row for rows in copied for row in rows]
        assert all(row.stop.counts for row in rows), [row.error for row in rows]
        assert [audit(row) for row in rows] == [""] * len(rows)
        seen |= {str(row.tokens) for row in rows}
    assert len(seen) > 6
