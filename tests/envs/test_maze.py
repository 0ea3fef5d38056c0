"""`maze`: a search finds the way out, and without the signs it does not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler, episode, script

from jaxagent import config as configs
from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.maze import DOORS, TRAP, Map, Maze, session_functions
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient

TEMPLATE = PlainTemplate()
CONFIG, _ = configs.load(str(Path(__file__).parents[2] / "configs" / "maze.py"))
LIMITS, SAMPLING = Limits(**CONFIG.agent), Sampling(**CONFIG.sampling)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(functions=(Maze.functions,), code="off") as running:
        yield running


def through(door: str) -> Message:
    return Message("assistant", calls=(ToolCall(door),))


def steadfast(text: str, request: SampleRequest) -> Sequence[int]:
    """Goes on through the first open door, which is neither a trap nor the way it came."""
    signs = re.findall(r"<(?:user|result)>.(...)<turn>", text)[-1]
    return TEMPLATE.turn(through(DOORS[max(signs.find("o"), 0)]))


def play(
    server: EmbeddedServer, world: Maze, sampler: ScriptedSampler, tasks: range, *, ablated: bool = False
) -> list[Trajectory]:
    async def games() -> list[Trajectory]:
        async with SandboxClient(server.url, server.token) as sandbox:
            rows = []
            for i in tasks:
                kinds: dict[str, Any] = {"limits": LIMITS, "sampling": SAMPLING, "sandbox": sandbox, "ablated": ablated}
                rows += await episode(world, world.task("test", i), sampler, **kinds)
            return rows

    return asyncio.run(games())


def test_who_goes_on_and_avoids_the_traps_always_arrives(server: EmbeddedServer) -> None:
    rows = play(server, Maze(**CONFIG.env.options), ScriptedSampler(TEMPLATE, steadfast), range(40))
    assert [row.reward for row in rows] == [1.0] * 40
    assert {row.stop for row in rows} == {StopReason.ENV_TERMINATED}
    assert all(len({turn.state for turn in row.turns}) == len(row.turns) for row in rows)


def test_without_the_signs_the_same_player_is_lost(server: EmbeddedServer) -> None:
    rows = play(server, Maze(**CONFIG.env.options), ScriptedSampler(TEMPLATE, steadfast), range(40), ablated=True)
    assert sum(row.reward for row in rows) <= 1


def test_the_longest_episode_of_the_config_ends_by_turns_and_never_by_tokens(server: EmbeddedServer) -> None:
    def stubborn(text: str, request: SampleRequest) -> Sequence[int]:
        signs = re.findall(r"<(?:user|result)>.(...)<turn>", text)[-1]
        return TEMPLATE.turn(through(DOORS[signs.index("!")]))

    (row,) = play(server, Maze(**CONFIG.env.options), ScriptedSampler(TEMPLATE, stubborn), range(1))
    assert (row.stop, len(row.turns)) == (StopReason.MAX_TURNS, LIMITS.max_turns)
    assert len(row.tokens) <= min(CONFIG.engine.slot_tokens, CONFIG.learner.row_tokens)
    assert len({turn.state for turn in row.turns}) == 1


def test_a_text_ends_the_walk_and_a_malformed_turn_does_not(server: EmbeddedServer) -> None:
    (row,) = play(server, Maze(), script(TEMPLATE, [65, 66], Message("assistant", "no")), range(1))
    assert (row.stop, row.reward, len(row.turns)) == (StopReason.ANSWERED, 0.0, 2)
    assert row.turns[0].tools[0].outcome == "bad_arguments"
    assert "<result>?<turn>" in TEMPLATE.text(row.tokens)


def test_a_door_that_is_not_there_moves_nobody(server: EmbeddedServer) -> None:
    async def step() -> tuple[str, str, str]:
        world = Maze()
        async with SandboxClient(server.url, server.token) as sandbox:
            env = world.episode("no-such-door", sandbox)
            before = await env.reset(world.task("test", 0), 0)
            answer = await env.step(through("X"))
            await env.close()
            return before.state, answer.state, answer.tools[0].outcome

    before, after, outcome = asyncio.run(step())
    assert before == after
    assert outcome != "ok"


@pytest.mark.parametrize("rooms", [3, 16, 26])
def test_every_room_has_a_door_on_a_door_back_and_a_trap(rooms: int) -> None:
    maze = Map(rooms, (1, 1), seed=4)
    for room, doors in enumerate(maze.doors):
        assert sorted(doors) == sorted([TRAP, (room + 1) % rooms, (room - 1) % rooms])


def test_doors_lead_where_their_signs_say() -> None:
    for seed in range(20):
        maze = Map(16, (5, 8), seed)
        start = maze.room
        assert sorted(maze.signs()[1:]) == sorted("oo!")
        for _ in range(4):
            left = maze.room
            maze.move(DOORS[maze.signs()[1:].index("o")])
            assert (maze.room - left) % 16 in (1, 15)
            assert sorted(maze.signs()[1:]) == sorted("o-!")
        here = maze.room
        maze.move(DOORS[maze.signs()[1:].index("-")])
        assert maze.room == left
        maze.move(DOORS[maze.signs()[1:].index("-")])
        assert maze.room == here
        maze.move(DOORS[maze.signs()[1:].index("!")])
        assert maze.room == start


def test_the_goal_is_as_far_as_the_task_says() -> None:
    world = Maze(rooms=16, distance=(5, 8))
    seen = set()
    for i in range(100):
        task = world.task("train", i)
        maze = world.map(task["seed"])
        around = (maze.goal - maze.start) % 16
        seen.add(min(around, 16 - around))
        assert task["difficulty"] == f"{min(around, 16 - around)} rooms away"
    assert seen == {5, 6, 7, 8}


def test_the_sandbox_walks_the_same_map_as_the_world() -> None:
    world = Maze()
    task = world.task("valid", 2)
    functions = session_functions({"rooms": world.rooms, "distance": list(world.distance), "seed": task["seed"]})
    maze = world.map(task["seed"])
    for door in "ABCCBAABBCCA":
        maze.move(door)
        assert functions[door]() == maze.signs()


@pytest.mark.parametrize(
    "options", [{"rooms": 2}, {"rooms": 27}, {"distance": (0, 3)}, {"rooms": 16, "distance": (5, 9)}, {"distance": (4, 3)}]
)
def test_a_maze_that_cannot_be_built_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"env\.options\.(rooms|distance) must be"):
        Maze(**options)  # type: ignore[arg-type]
