"""Every recipe's world is played once by a script, with the budgets of its `runlocal`: nothing is compiled, nothing learns."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import make
from scripted import SAMPLING, episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.config import load
from jaxagent.envs.env import find
from jaxagent.types import Message, StopReason, ToolCall

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = ("maths", "search_r1", "function_calls")  # of the others the worlds have tests of their own
CALLS = [json.loads(line) for line in (CONFIGS / "calls.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RECIPES)
def test_the_world_of_a_recipe_plays_within_the_budgets_of_its_runlocal(name: str) -> None:
    config, faults = load(f"{CONFIGS / name}.py:runlocal")
    assert faults == []
    world = find(config.env.name)(**config.env.options)
    sampling = replace(SAMPLING, max_tokens=config.sampling.max_tokens)
    for split in ("train", "valid", "test"):
        for index in range(world.sizes[split]):
            sampler = script(PlainTemplate(), Message("assistant", "x"))
            (row,) = asyncio.run(
                episode(world, world.task(split, index), sampler, limits=Limits(**config.agent), sampling=sampling)
            )
            assert row.stop is StopReason.ANSWERED and len(row.tokens) <= config.learner.row_tokens  # the prompt fits


@pytest.mark.parametrize("record", [CALLS[0], next(one for one in CALLS if len(one["calls"]) == 2)])
def test_the_right_calls_of_the_function_calls_recipe_win_and_silence_does_not(record: dict[str, Any]) -> None:
    config, faults = load(str(CONFIGS / "function_calls.py"))
    assert faults == []
    world = find(config.env.name)(**config.env.options)
    task = {**record, "id": "calls", "seed": 0}
    template = make("chatml")
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in record["calls"])
    limits, sampling = Limits(max_turns=1, max_tokens=2000), replace(SAMPLING, max_tokens=400)
    earned = {}
    for said in (Message("assistant", "", calls=calls), Message("assistant", "I do not know.")):
        (row,) = asyncio.run(episode(world, task, script(template, said), limits=limits, sampling=sampling))
        earned[bool(said.calls)] = (row.solved, row.reward)
    assert earned[True] == (True, pytest.approx(1.4)) and earned[False][0] is False and earned[False][1] < 0
