"""`frozen_lake`: gymnasium's rules on maps of our own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from scripted import ScriptedSampler, episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.frozen_lake import FrozenLake, Lake, holes_of, moved, way_of, way_to_goal
from jaxagent.types import Message, SampleRequest, StopReason

TEMPLATE = PlainTemplate()
LIMITS = Limits(max_turns=20, max_tokens=2000)


def said(text: str) -> Message:
    return Message("assistant", text)


def guided(text: str, request: SampleRequest) -> Sequence[int]:
    """Reads the picture and takes the shortest way."""
    rows = text.rpartition("<user>")[2].partition("<turn>")[0].split("\n")
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    at = next(cell for cell, sign in cells.items() if sign == "P")
    holes = frozenset(cell for cell, sign in cells.items() if sign == "O")
    way = way_to_goal(at, holes, len(rows))
    assert way
    return TEMPLATE.turn(said(way[0]))


def test_who_reads_the_picture_crosses_still_ice_in_as_many_steps_as_the_task_says() -> None:
    world = FrozenLake(slippery=False, rules=False)
    for i in range(20):
        task = world.task("test", i)
        (row,) = asyncio.run(episode(world, task, ScriptedSampler(TEMPLATE, guided), limits=LIMITS))
        assert (row.reward, row.stop, row.turns[-1].reason) == (1.0, StopReason.ENV_TERMINATED, "reached the goal")
        assert task["difficulty"] == f"{len(row.turns)} steps"


def test_a_hole_ends_the_episode_with_nothing() -> None:
    world = FrozenLake(slippery=False)
    index = next(i for i in range(100) if (0, 1) in holes_of(4, world.task("train", i)["seed"]))
    (row,) = asyncio.run(episode(world, world.task("train", index), script(TEMPLATE, said("Right.")), limits=LIMITS))
    assert (row.reward, row.stop, row.turns[-1].reason) == (0.0, StopReason.ENV_TERMINATED, "fell into a hole")
    assert TEMPLATE.text(row.tokens).startswith("<user>You stand on a frozen lake")


def test_slippery_ice_goes_each_of_three_ways_equally_often_and_never_back() -> None:
    went: Counter[tuple[int, int]] = Counter()
    lake = Lake(5, slippery=True)
    for seed in range(3000):
        lake.reset({"seed": 0}, seed)
        lake.holes, lake.at = frozenset(), (2, 2)
        lake.step("down")
        went[lake.at] += 1
    assert went.keys() == {(3, 2), (2, 1), (2, 3)}
    assert all(abs(n - 1000) < 120 for n in went.values())  # over four deviations


def test_the_same_seed_slips_alike() -> None:
    walks = []
    for seed in (1, 1, 2):
        lake = Lake(8, slippery=True)
        lake.reset({"seed": 5}, seed)
        walks.append([lake.step(way)["text"] for way in ("down", "right") * 4])
    assert walks[0] == walks[1] != walks[2]


def test_words_and_first_letters_are_ways_and_nothing_else_moves() -> None:
    assert [way_of(word) for word in ("left", "D", " Up! ", "r.", "north", "", "downright")] == [
        *("left", "down", "up", "right"),
        *(None, None, None),
    ]
    lake = Lake(4, slippery=False)
    began = lake.reset({"seed": 1}, 0)
    answer = lake.step("swim")
    assert answer["text"] == f"what?\n{began['text']}" and answer["invalid"] and "done" not in answer


def test_the_shore_stops_a_step() -> None:
    assert [moved((0, 0), way, 4) for way in ("left", "up", "down")] == [(0, 0), (0, 0), (1, 0)]


def test_four_in_five_cells_are_frozen_before_maps_without_a_way_are_thrown_away() -> None:
    holes = sum(len(holes_of(8, seed)) for seed in range(300)) / (300 * 62)
    assert 0.1 < holes < 0.2  # maps that can be crossed have fewer than one in five


def test_no_map_of_a_split_is_met_in_another() -> None:
    world = FrozenLake()
    maps = [{holes_of(4, world.task(split, i)["seed"]) for i in range(200)} for split in ("train", "demo", "valid", "test")]
    assert len(set.union(*maps)) == sum(len(each) for each in maps)
    assert all(len(each) > 50 for each in maps)


def test_the_demonstrator_strays_now_and_then_and_arrives_where_it_does_not() -> None:
    tasks = [FrozenLake().task("demo", i) for i in range(60)]
    ends = {}
    for slips in (0.0, 0.5):
        world = FrozenLake(slippery=False, demo_slips=slips, letters=True, rules=False)
        shown = [world.demonstrate(task, random.Random(i)) for i, task in enumerate(tasks)]
        assert {m.content for dialogue in shown for m in dialogue if m.role == "assistant"} <= set("ldru")
        ends[slips] = sum(
            f"{sum(m.role == 'assistant' for m in d)} steps" == t["difficulty"] for d, t in zip(shown, tasks, strict=True)
        )
    assert ends[0.0] == 60
    assert 2 < ends[0.5] < 40


@pytest.mark.parametrize("options", [{"size": 2}, {"size": 13}, {"demo_slips": 1.5}])
def test_lakes_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"env\.options\.{next(iter(options))} must be"):
        FrozenLake(**options)  # type: ignore[arg-type]
