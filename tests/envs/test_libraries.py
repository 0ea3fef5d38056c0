"""Adapters of libraries, each played to its reward; a test skips where the library is not installed."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from libraries import ended, faults, made, played
from scripted import ScriptedSampler, episode

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.tasks import ValueStream
from jaxagent.envs import crafter, gymnasium_text, reasoning_gym, scienceworld, textarena, textworld
from jaxagent.envs.workers import install
from jaxagent.types import Message, SampleRequest, Sampling, StopReason

__all__ = ["ended"]  # a fixture
TEMPLATE = PlainTemplate()
LIMITS, SAMPLING = Limits(max_turns=40, max_tokens=20_000), Sampling(max_tokens=200)


@pytest.mark.parametrize(
    "make", [textworld.make_world, reasoning_gym.make_world, textarena.make_world, gymnasium_text.make_world]
)
def test_the_checker_finds_nothing(make: object) -> None:
    assert faults(made(make)) == {}


# ---------------------------------------------------------------------- TextWorld


def demonstrated(world: textworld.Shown, index: int) -> list[str]:
    task = world.task("demo", index)
    return [message.content for message in world.demonstrate(task, random.Random(0)) if message.role == "assistant"]


@pytest.mark.parametrize("kind", ["coins", "quest"])
def test_a_text_adventure_is_won_by_its_walkthrough_and_pays_once(kind: str) -> None:
    world = made(textworld.make_world, kind=kind, levels=(3,))
    way = demonstrated(world, 0)
    assert len(way) == 3
    steps = played(world, world.task("demo", 0), ["inventory", *way])
    assert [step.reward for step in steps] == [0.0] * 4 + [1.0]
    assert (steps[-1].terminated, steps[-1].reason) == (True, "won")
    assert "You can: " in steps[0].messages[0].content
    assert "$$" not in steps[0].messages[0].content  # the library's banner


def test_told_in_brief_a_room_is_a_line_and_its_letters_win_as_commands_do() -> None:
    world = made(textworld.make_world, levels={"train": (103,), "held_out": (104,)}, told=("brief",), rules=False)
    assert [world.task(split, 0)["level"] for split in ("train", "demo", "valid", "test")] == [103, 103, 104, 104]
    way = demonstrated(world, 0)
    assert (len(way), way[-1], set(way[:-1]) <= set("ensw")) == (3, "t", True)
    spoken = {"e": "go east", "n": "go north", "s": "go south", "w": "go west", "t": "take coin"}
    for actions in (way, [spoken[letter] for letter in way]):
        steps = played(world, world.task("demo", 0), ["", "sing", "quit", *actions])
        lines = [step.messages[0].content for step in steps]
        assert lines[0] == lines[1] == lines[2] == lines[3]  # nothing has moved
        assert all(re.fullmatch(r"[a-z -]+ [enstw]+", line) for line in lines)
        assert [letter in line.split()[-1] for letter, line in zip(way, lines[3:], strict=False)] == [True] * 3
        assert ([step.reward for step in steps], steps[-1].reason) == ([0.0] * 6 + [1.0], "won")


def test_a_demonstrator_that_slips_goes_other_ways_and_comes_back_to_its_walkthrough() -> None:
    options: dict[str, Any] = {"levels": {"train": (103,), "demo": (103,)}, "told": ("brief",), "rules": False}
    straight, slipping = (made(textworld.make_world, **options, demo_slips=slips) for slips in (0.0, 0.5))
    task = slipping.task("demo", 0)
    way = demonstrated(straight, 0)
    walks = [slipping.demonstrate(task, random.Random(seed)) for seed in range(4)]
    assert len(way) == 3
    ended = 0
    for messages in walks:
        rooms = [message.content.split()[-1] for message in messages if message.role == "user"]
        walk = [message.content for message in messages if message.role == "assistant"]
        assert all(letter in room for room, letter in zip(rooms, walk, strict=False))
        kept = list[str]()  # without what was walked back
        for letter in walk:
            if kept and letter == textworld.BACK.get(kept[-1]):
                kept.pop()
            else:
                kept.append(letter)
        assert kept == way[: len(kept)] or len(walk) == 12  # gave up
        ended += kept == way
    assert (ended > 0, max(map(len, walks)) > 2 * len(way)) == (True, True)


def test_a_demonstrator_that_slips_gives_up_after_its_moves() -> None:
    guide = textworld.Slipping(["e", "t"], random.Random(0), slips=0.0, moves=1)
    assert [guide("attic e"), guide("cellar tw")] == ["e", None]


def test_a_curriculum_has_longer_games_level_by_level_and_draws_those_at_the_edge_of_a_player() -> None:
    world = made(textworld.make_world, levels=(1, 2, 3, 4, 5), told=("brief",), rules=False)
    assert [len(demonstrated(world, index)) for index in range(5)] == [world.task("demo", i)["level"] for i in range(5)]
    quests = made(textworld.make_world, kind="quest", levels=(1, 2, 3))
    assert [len(demonstrated(quests, index)) for index in range(3)] == [1, 2, 3]

    def wins(index: int, moves: int) -> bool:
        return played(world, world.task("demo", index), demonstrated(world, index)[:moves])[-1].reward == 1.0

    won = [[wins(index, moves) for moves in (2, 3)] for index in range(5)]
    assert [sum(both) for both in won] == [2, 2, 1, 0, 0]  # of a player who has two moves or three
    stream, drawn = ValueStream(5, seed=0, max_repeats=5), list[int]()
    for _ in range(400):
        (index,) = stream.take(1)
        drawn.append(1 + index)
        stream.tell(index, sum(won[index]), 2)
    assert drawn[200:].count(3) > 0.6 * 200


def test_commands_that_end_the_machine_or_write_files_are_no_moves() -> None:
    world = made(textworld.make_world, levels=(2,))
    nothing = ["quit", "Restart", "save\ngame", "\x00", "☃", "", "x" * 5000, "undo. quit", "look. quit. yes"]
    nothing += ["look then save", "look, save", "look; save", "look then restore", "look then transcripts", "tw-print version"]
    steps = played(world, world.task("train", 0), [*nothing, "look"])
    assert not any(step.terminated or step.reward for step in steps)
    assert all("That is no move." in step.messages[0].content for step in steps[-7:-1])
    assert "-= " in steps[-1].messages[0].content


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "maze"}, "kind must be"),
        ({"levels": (0,)}, "levels must be"),
        ({"levels": {"train": (1,), "held_out": (301,)}}, "levels must be"),
        ({"levels": {"demo": (1,)}}, "levels must be"),
        ({"games": 1}, "games must be"),
        ({"kind": "quest", "told": ("brief",)}, "told must be"),
        ({"told": ("brief", "hints")}, "told must be"),
        ({"told": ("brief",), "demo_slips": 1.0}, "demo_slips must be"),
        ({"demo_slips": 0.3}, "demo_slips must be"),
    ],
)
def test_what_no_adventure_can_be_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"env\.options\.{named}"):
        textworld.make_world(**options)


# ---------------------------------------------------------------------- Reasoning Gym


def test_a_question_is_scored_by_the_librarys_scorer_with_tags_and_without() -> None:
    world = made(reasoning_gym.make_world, tasks=("chain_sum", "word_sorting"))
    for index in range(4):
        task = world.task("demo", index)
        (right,) = (m.content for m in world.demonstrate(task, random.Random(0)) if m.role == "assistant")
        for answer, reward in ((right, 1.0), (f"<answer>1</answer> no: <answer>{right}</answer>", 1.0), ("soup", 0.0)):
            _, step = played(world, task, [answer])
            assert (step.reward, step.terminated, step.answered) == (reward, True, True)


def test_an_answer_that_is_a_program_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    attack = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    tasks = ("countdown", "puzzle24", "n_queens", "spiral_matrix", "binary_matrix", "string_insertion", "chain_sum")
    world = made(reasoning_gym.make_world, tasks=tasks, size=20)
    for index, name in enumerate(tasks):
        task = world.task("train", index)
        for answer in (attack, f"[{attack}]", f"({attack})", "9**9**9**9"):
            _, step = played(world, task, [answer])
            assert (task["task"], step.reward < 1) == (name, True)
        (right,) = (m.content for m in world.demonstrate(task, random.Random(0)) if m.role == "assistant")
        assert played(world, task, [right])[1].reward == 1
    assert not mark.exists()
    with pytest.raises(ValueError, match="simple_integration is scored by running the answer as a program"):
        reasoning_gym.make_world(tasks=("simple_integration",))


def test_an_answer_that_would_fill_the_memory_or_is_too_large_a_number_is_wrong() -> None:
    world = made(reasoning_gym.make_world, tasks=("coin_flip",))
    task = world.task("train", 0)
    for answer in ("1e9999999999", "1E9_999,999 999", "1e-99999999", "p is 1e9999999999", "1e999", "9" * 500, "9" * 10**6):
        assert played(world, task, [answer])[1].reward < 1


def test_splits_of_questions_do_not_meet() -> None:
    world = made(reasoning_gym.make_world, size=20)
    asked = {
        split: {played(world, world.task(split, i), [])[0].messages[0].content for i in range(20)} for split in world.sizes
    }
    assert len(set().union(*asked.values())) == sum(map(len, asked.values())) == 80


# ---------------------------------------------------------------------- TextArena


def test_two_seats_play_in_turn_and_each_gets_its_own_result() -> None:
    world = made(textarena.make_world)
    moves = {"player 0": iter(("[0]", "[1]", "[2]")), "player 1": iter(("[4]", "nonsense", "[0]", "[5]"))}

    def write(text: str, request: SampleRequest) -> Sequence[int]:
        return TEMPLATE.turn(Message("assistant", next(moves[request.trajectory.rpartition("/")[2]])))

    play = episode(world, world.task("train", 0), ScriptedSampler(TEMPLATE, write), limits=LIMITS, sampling=SAMPLING)
    first, second = asyncio.run(play)
    assert (first.role, first.reward, first.stop) == ("player 0", 1.0, StopReason.ENV_TERMINATED)
    assert (second.role, second.reward, [turn.reason for turn in second.turns]) == (
        "player 1",
        -1.0,
        ["", "no legal move", "no legal move", ""],
    )
    heard = TEMPLATE.text(second.tokens)
    assert heard.startswith("<user>You are Player 1 in Tic Tac Toe.")
    assert "Player 0: [0]" in heard and "Player 1: [4]" not in heard


def test_who_makes_too_many_illegal_moves_loses() -> None:
    world = made(textarena.make_world, errors=2)
    steps = played(world, world.task("train", 0), ["?", "?", "?"])
    assert [step.terminated for step in steps] == [False, False, False, True]
    assert (steps[-1].reward, steps[-1].rewards) == (-1.0, {"player 1": 1.0})


def test_a_game_of_one_player_is_won_and_has_one_seat() -> None:
    world = made(textarena.make_world, game="GuessTheNumber-v0", players=1)
    steps = played(world, world.task("train", 0), [f"[{number}]" for number in (1, 2)])
    assert steps[0].agent == "agent"

    def write(text: str, request: SampleRequest) -> Sequence[int]:
        low, high = 1, 20
        for guess, way in re.findall(r"\[(\d+)\]<eos><user>The target number is (higher|lower)", text):
            low, high = (max(low, int(guess) + 1), high) if way == "higher" else (low, min(high, int(guess) - 1))
        return TEMPLATE.turn(Message("assistant", f"[{(low + high) // 2}]"))

    play = episode(world, world.task("train", 0), ScriptedSampler(TEMPLATE, write), limits=LIMITS, sampling=SAMPLING)
    (row,) = asyncio.run(play)
    assert (row.reward, row.stop) == (1.0, StopReason.ENV_TERMINATED)


def test_games_of_one_worker_do_not_share_their_luck() -> None:
    world = made(textarena.make_world, game="Blackjack-v0", players=1)

    async def both() -> list[list[str]]:
        alone = await game(world, 1, between=False)
        beside = await game(world, 1, between=True)
        return [alone, beside]

    async def game(world: textarena.Served, index: int, *, between: bool) -> list[str]:
        env, other = world.episode("a", None), world.episode("b", None)
        task = world.task("train", index)
        seen = [(await env.reset(task, task["seed"])).messages[0].content]
        for _ in range(3):
            if between:
                await other.reset(world.task("train", 2), 2)
            step = await env.step(Message("assistant", "[Hit]"))
            seen += [m.content for m in step.messages]
            if step.terminated:
                break
        await env.close()
        await other.close()
        return seen

    alone, beside = asyncio.run(both())
    assert alone == beside


# ---------------------------------------------------------------------- Gymnasium


def test_a_taxi_is_driven_to_its_reward() -> None:
    world = made(gymnasium_text.make_world)
    index, at = next(
        (i, text)
        for i in range(200)
        if "passenger waits at (1, 1)" in (text := played(world, world.task("train", i), [])[0].messages[0].content)
        and "go to (5, 1)" in text
        and re.search(r"taxi is at \(\d, 1\)", text)
    )
    row = int(re.findall(r"taxi is at \((\d)", at)[0])
    drive = ["north"] * (row - 1) + ["pick up"] + ["south"] * 4 + ["drop off"]
    steps = played(world, world.task("train", index), ["Fly", *drive])
    assert (steps[1].reward, steps[1].terminated, steps[1].reason) == (0.0, False, "no such action")
    assert [step.reward for step in steps[2:]] == [-1.0] * (len(drive) - 1) + [20.0]
    assert (steps[-1].terminated, steps[-1].parts) == (True, {"outcome": 1.0, "game": 19.0})
    assert "passenger is in the taxi" in steps[-2].messages[0].content


def test_a_cliff_is_walked_round_and_a_fall_is_paid_for() -> None:
    world = made(gymnasium_text.make_world, game="CliffWalking-v1")
    steps = played(world, world.task("train", 0), ["right", "up", *["1"] * 11, "down"])
    assert (steps[1].reward, steps[1].parts["outcome"]) == (-100.0, 0.0)
    assert (steps[-1].reward, steps[-1].parts["outcome"], steps[-1].terminated) == (-1.0, 1.0, True)


def test_a_world_without_words_is_played_by_number_and_one_without_end_is_refused() -> None:
    world = made(gymnasium_text.make_world, game="CartPole-v1")
    steps = played(world, world.task("train", 0), ["1", "7", "0"])
    assert [step.reward for step in steps] == [0.0, 1.0, 0.0, 1.0]
    world = made(gymnasium_text.make_world, game="Pendulum-v1")
    with pytest.raises(Exception, match="its actions are no finite set"):
        played(world, world.task("train", 0), [])


# ---------------------------------------------------------------------- heavy ones


def test_an_experiment_is_done_by_its_gold_path_and_a_wrong_focus_ends_it() -> None:
    world = made(scienceworld.make_world)
    assert world.kind.slots == 1
    task = world.task("demo", 0)
    way = [message.content for message in world.demonstrate(task, random.Random(0)) if message.role == "assistant"]
    steps = played(world, task, ["fly to the moon", *way])
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    assert (steps[1].terminated, steps[-1].terminated, steps[-1].reason) == (False, True, "done")
    focus = next(action for action in way if action.startswith("focus on"))
    wrong = played(world, task, [*way[: way.index(focus)], "focus on door"])
    assert "wrong" in wrong[-1].reason or not wrong[-1].terminated
    again = [[m.content for s in played(world, task, way[:5]) for m in s.messages] for _ in range(2)]
    assert again[0] == again[1]


def test_first_achievements_are_rewarded_in_an_open_world_and_two_runs_are_alike() -> None:
    world = made(crafter.make_world, steps=40)
    actions = ["fly", *(["place sapling", "sleep"] + ["noop"] * 3), *["do", "move_left", "do", "move_down"] * 10]
    runs = [played(world, world.task("train", 0), actions) for _ in range(2)]
    seen = [[(step.messages[0].content, step.reward) for step in steps] for steps in runs]
    assert seen[0] == seen[1]
    steps = runs[0]
    assert (steps[1].reason, steps[1].reward) == ("no such action", 0.0)
    fresh = [step for step in steps if "achieved" in step.reason]
    assert fresh and all(step.reward == pytest.approx(1 / 22, abs=0.05) for step in fresh)
    assert steps[-1].terminated


def test_a_world_whose_library_is_missing_is_refused_with_the_command_that_gets_it(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXAGENT_ENVS", str(tmp_path))
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="run: jaxagent env install textworld"):
        textworld.make_world()
