"""ALFWorld's engine on chores made here; a test skips where the library is not installed."""

from __future__ import annotations

import random
import re

import pytest
from libraries import ended, faults, made, played

from jaxagent.envs import alfworld
from jaxagent.envs.alfworld import CHORES

__all__ = ["ended"]  # a fixture


def way_of(world: alfworld.Shown, index: int, split: str = "demo") -> list[str]:
    task = world.task(split, index)
    return [m.content for m in world.demonstrate(task, random.Random(0)) if m.role == "assistant"]


def test_every_chore_is_done_by_the_planners_way_and_pays_once_at_its_end() -> None:
    world = made(alfworld.make_world)
    for index, chore in enumerate(CHORES):
        way = way_of(world, index)
        assert any(action.startswith({"look": "use", "place": "move", "two": "move"}.get(chore, chore)) for action in way)
        steps = played(world, world.task("demo", index), ["help me", *way])
        assert [step.reward for step in steps] == [0.0] * (len(way) + 1) + [1.0]
        assert (steps[-1].terminated, steps[-1].reason) == (True, "won")
        assert sum(step.checks.get("goal_conditions", 0.0) for step in steps) == pytest.approx(1.0)
        assert "Your task is to: " in steps[0].messages[0].content
        assert (steps[1].messages[0].content.split("\n")[0], steps[1].reason) == ("Nothing happens.", "no such command")
        assert steps[1].state == steps[0].state


def test_conditions_of_a_goal_are_counted_as_they_are_met_and_undone() -> None:
    world = made(alfworld.make_world, chores=("two", "heat"), receptacles=2)
    way = way_of(world, 0)
    first = next(i for i, action in enumerate(way) if action.startswith("move"))
    thing, place = re.findall(r"move (.+) to (.+)", way[first])[0]
    steps = played(world, world.task("demo", 0), [*way[: first + 1], f"take {thing} from {place}"])
    assert [step.checks["goal_conditions"] for step in steps[-2:]] == [0.5, -0.5]
    way = way_of(world, 1)
    heated = next(i for i, action in enumerate(way) if action.startswith("heat"))
    steps = played(world, world.task("demo", 1), way)
    gained = [step.checks["goal_conditions"] for step in steps[1:]]
    assert gained[heated] == pytest.approx(1 / 3) and gained[-1] == pytest.approx(2 / 3)


def test_a_room_is_the_same_state_again_when_it_is_as_it_was() -> None:
    world = made(alfworld.make_world, receptacles=2)
    there, back = re.findall(r"go to [a-z]+ \d", played(world, world.task("train", 0), [])[0].messages[0].content)[-2:]
    steps = played(world, world.task("train", 0), [there, back, there, "look", "inventory", "Go to the nowhere"])
    assert len({steps[i].state for i in (1, 3, 4, 5, 6)}) == 1
    assert len({step.state for step in steps}) == 3


def test_the_older_words_for_putting_down_are_taken_too() -> None:
    world = made(alfworld.make_world, chores=("place",), receptacles=2)
    way = [re.sub(r"move (.+) to (.+)", r"Put the \1 in/on \2.", action) for action in way_of(world, 0)]
    assert any(action.startswith("Put the") for action in way)
    steps = played(world, world.task("demo", 0), way)
    assert steps[-1].reward == 1.0


def test_rooms_of_tests_are_those_that_the_library_keeps_for_them() -> None:
    world = made(alfworld.make_world)
    assert [world.task(split, 0)["unseen"] for split in ("train", "demo", "valid", "test")] == [False, False, False, True]
    assert len({world.task("train", i)["difficulty"] for i in range(6)}) == 6


def test_what_a_policy_writes_does_not_break_the_engine() -> None:
    world = made(alfworld.make_world, receptacles=2, commands=False)
    steps = played(
        world, world.task("train", 1), ["\x00", "", "#task#", "{r.name}", "go to " * 2000, "☃ [x]", "nothing", "look"]
    )
    assert {step.messages[0].content for step in steps[1:-1]} == {"Nothing happens."}
    assert "You are in the middle of a room." in steps[-1].messages[0].content
    assert not any("You can:" in step.messages[0].content for step in steps)


def test_the_checker_finds_nothing_against_chores() -> None:
    assert faults(made(alfworld.make_world, receptacles=2, objects=4)) == {}


def test_what_no_chore_can_be_is_refused() -> None:
    for options, named in (
        ({"chores": ("cook",)}, "chores"),
        ({"objects": -1}, "objects"),
        ({"receptacles": 0}, "receptacles"),
    ):
        with pytest.raises(ValueError, match=rf"env\.options\.{named} must be"):
            alfworld.make_world(**options)
