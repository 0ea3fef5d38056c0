"""`sokoban`: every room can be solved, pushes are Sokoban's, and a wrong one may be the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from scripted import ScriptedSampler, episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.sokoban import Cell, Game, Room, Sokoban, room_of
from jaxagent.types import Message, SampleRequest, StopReason

TEMPLATE = PlainTemplate()
LIMITS = Limits(max_turns=30, max_tokens=3000)


def read(picture: str) -> tuple[Room, int]:
    """A room from its picture."""
    rows = picture.split("\n")
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}

    def where(signs: str) -> frozenset[Cell]:
        return frozenset(cell for cell, sign in cells.items() if sign in signs)

    (at,) = where("@+")
    return Room(where("_@+$*."), where("+*."), (at, where("$*"))), len(rows)


def solver(text: str, request: SampleRequest) -> Sequence[int]:
    room, _ = read(text.rpartition("<user>")[2].partition("<turn>")[0])
    solution = room.solve(room.start)
    assert solution
    return TEMPLATE.turn(Message("assistant", solution[0]))


@pytest.mark.parametrize("boxes", [1, 2])
def test_who_reads_the_picture_solves_every_room_in_as_many_moves_as_the_task_says(boxes: int) -> None:
    world = Sokoban(boxes=boxes, rules=False)
    for i in range(8):
        task = world.task("test", i)
        (row,) = asyncio.run(episode(world, task, ScriptedSampler(TEMPLATE, solver), limits=LIMITS))
        assert (row.reward, row.stop, row.turns[-1].reason) == (1.0, StopReason.ENV_TERMINATED, "all boxes are home")
        assert task["difficulty"] == f"{len(row.turns):02d} moves"


def play(picture: str, *ways: str) -> list[str]:
    room, size = read(picture)
    state, seen = room.start, []
    for way in ways:
        state = room.push(state, way)
        seen.append(room.picture(state, size))
    return seen


def test_a_box_is_pushed_and_never_pulled_and_stops_at_walls_and_boxes() -> None:
    start = "#####\n#@$_#\n#_$.#\n#__.#\n#####"
    assert play(start, "right", "right", "left", "down", "down") == [
        "#####\n#_@$#\n#_$.#\n#__.#\n#####",
        "#####\n#_@$#\n#_$.#\n#__.#\n#####",  # the wall is behind the box
        "#####\n#@_$#\n#_$.#\n#__.#\n#####",
        "#####\n#__$#\n#@$.#\n#__.#\n#####",
        "#####\n#__$#\n#_$.#\n#@_.#\n#####",
    ]
    assert play("#####\n#@$$#\n#_._#\n#_._#\n#####", "right") == ["#####\n#@$$#\n#_._#\n#_._#\n#####"]
    assert play("#####\n#@$.#\n#_._#\n#_$_#\n#####", "right")[0] == "#####\n#_@*#\n#_._#\n#_$_#\n#####"


def test_a_box_in_a_corner_cannot_be_solved() -> None:
    room, _ = read("#####\n#$__#\n#@_.#\n#___#\n#####")
    assert room.solve(room.start) is None


def test_rooms_have_the_wanted_moves_and_splits_share_none_by_seed() -> None:
    for seed in range(30):
        room, solution = room_of(6, 1, (5, 9), seed)
        assert 5 <= len(solution) <= 9
        state = room.start
        for way in solution:
            state = room.push(state, way)
        assert state[1] == room.goals
    world = Sokoban()
    seeds = {world.task(split, i)["seed"] for split in ("train", "demo", "valid", "test") for i in range(20)}
    assert len(seeds) == 80


def test_boxes_that_come_home_earn_their_part_and_pay_it_back_when_they_leave() -> None:
    game = Game(5, 2, (1, 9), 0.25)
    game.room, _ = read("#####\n#@$.#\n#_._#\n#_$_#\n#####")
    game.state = game.room.start
    came = game.step("right")
    assert (came["reward"], came["parts"], came["done"]) == (0.25, {"outcome": 0.0, "boxes": 0.25}, False)
    game.room, _ = read("#####\n#_.@#\n#__*#\n#_$_#\n#####")
    game.state = game.room.start
    left = game.step("down")
    assert (left["reward"], left["parts"], left["reason"]) == (-0.25, {"outcome": 0.0, "boxes": -0.25}, "a box left home")


def test_nonsense_moves_nothing() -> None:
    world = Sokoban(rules=False)
    (row,) = asyncio.run(episode(world, world.task("train", 0), script(TEMPLATE, Message("assistant", "jump")), limits=LIMITS))
    assert row.stop is StopReason.MAX_TURNS
    assert len({turn.state for turn in row.turns}) == 1


def test_the_demonstrator_arrives_unless_it_strays() -> None:
    def wins(slips: float) -> int:
        world = Sokoban(demo_slips=slips, rules=False, letters=True)
        won = 0
        for i in range(30):
            task = world.task("demo", i)
            game = world.game()
            game.reset(task, 0)
            for message in world.demonstrate(task, random.Random(i)):
                if message.role == "assistant":
                    assert message.content in "ldru"
                    done = game.step(message.content)["done"]
            won += done
        return won

    assert wins(0.0) == 30
    assert 3 < wins(0.5) < 28


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 3}, "size"),
        ({"boxes": 5}, "boxes"),
        ({"moves": (3, 2)}, "moves"),
        ({"box_reward": 1.0}, "box_reward"),
        ({"demo_slips": 2.0}, "demo_slips"),
    ],
)
def test_rooms_that_cannot_be_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"env\.options\.{named} "):
        Sokoban(**options)


def test_a_room_that_is_not_found_is_told() -> None:
    with pytest.raises(ValueError, match="no room of size 4 with 1 boxes and a solution of 40 to 50 moves"):
        Sokoban(size=4, moves=(40, 50)).task("train", 0)
