"""GEM's games, each played to its reward; a test skips where the library is not installed."""

from __future__ import annotations

import asyncio
import random

import pytest
from libraries import ended, faults, made, played

from jaxagent.envs import gem
from jaxagent.envs.env import Step, World
from jaxagent.types import Message

__all__ = ["ended"]  # a fixture


def shown(world: World, index: int = 0) -> list[str]:
    task = world.task("demo", index)
    return [m.content for m in world.demonstrate(task, random.Random(0)) if m.role == "assistant"]


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


@pytest.mark.parametrize("game", ["GuessTheNumber-v0-hard", "Mastermind-v0-easy", "Sudoku-v0-easy", "TowerofHanoi-v0-easy"])
def test_a_game_is_won_by_its_oracle_for_one_in_all(game: str) -> None:
    world = made(gem.make_world, game=game)
    steps = played(world, world.task("demo", 0), shown(world))
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    assert (steps[-1].terminated, steps[-1].reason) == (True, "won")
    assert sum(step.parts.get("outcome", 0.0) for step in steps) == 1.0
    assert all(sum(step.parts.values()) == pytest.approx(step.reward) for step in steps)


@pytest.mark.parametrize("game", ["Minesweeper-v0-easy", "Sokoban-v0-easy", "Game2048-v0-easy", "FifteenPuzzle-v0-easy"])
def test_a_game_without_an_oracle_is_played_at_random_to_its_end_and_twice_alike(game: str) -> None:
    world = made(gem.make_world, game=game)
    rng = random.Random(1)
    actions = [boxed(f"reveal {rng.randrange(5)} {rng.randrange(5)}") for _ in range(60)]
    if "Minesweeper" not in game:
        actions = [rng.choice(world.examples) for _ in range(60)]

    async def play() -> list[Step]:
        env = world.episode("played", None)
        steps = [await env.reset(world.task("train", 1), 0)]
        while not steps[-1].terminated:
            steps.append(await env.step(Message("assistant", actions[len(steps) - 1])))
        await env.close()
        return steps

    first, second = asyncio.run(play()), asyncio.run(play())
    assert [(s.messages, s.reward) for s in first] == [(s.messages, s.reward) for s in second]
    assert first[-1].reason in ("lost", "won", "out of turns")


def test_a_turn_without_an_answer_costs_a_tenth_and_ends_only_a_strict_game() -> None:
    for strict in (False, True):
        world = made(gem.make_world, strict=strict)
        _, step = played(world, world.task("train", 0), ["is it 3?"])
        assert (step.reward, step.terminated, step.reason) == (-0.1, strict, "no answer in a box")


def test_turns_without_answers_use_up_a_game_too() -> None:
    world = made(gem.make_world)
    steps = played(world, world.task("train", 0), ["soup"] * 4)
    assert [step.terminated for step in steps] == [False] * 4 + [True]
    assert sum(step.parts["outcome"] for step in steps[1:]) == 0


def test_answers_that_are_no_moves_move_nothing() -> None:
    world = made(gem.make_world, game="Sudoku-v0-easy")
    nothing = ["9" * 10**6, boxed("9" * 5000), boxed("9" * 3900 + " 1 1"), boxed("0 0 0"), boxed("99 1 1"), "\x00"]
    steps = played(world, world.task("train", 0), nothing)
    assert not any(step.terminated or step.reward > 0 for step in steps)
    assert len({step.state for step in steps}) == 1


def test_games_of_one_worker_keep_their_own_luck() -> None:
    world = made(gem.make_world, game="Game2048-v0-easy")
    ways = [boxed(way) for way in ("left", "up", "right", "down", "left", "up")]

    async def seen(*, beside: bool) -> list[str]:
        env, other = world.episode("a", None), world.episode("b", None)
        texts = [(await env.reset(world.task("train", 0), 0)).messages[0].content]
        for way in ways:
            if beside:
                await other.reset(world.task("train", 5), 0)
            texts.append((await env.step(Message("assistant", way))).messages[0].content)
        await env.close()
        await other.close()
        return texts

    assert asyncio.run(seen(beside=False)) == asyncio.run(seen(beside=True))


def test_the_checker_finds_nothing_against_a_game() -> None:
    assert faults(made(gem.make_world)) == {}


@pytest.mark.parametrize("game", ["GuessTheNumber", "Sudoku-v0-soft", "math:GSM8K", "FifteenPuzzle-v0-random"])
def test_what_is_no_game_here_is_refused(game: str) -> None:
    with pytest.raises(ValueError, match=r"env\.options\.game must be one of GuessTheNumber, "):
        gem.make_world(game=game)
