"""`chain`: what can be won in it, how, and by whom not."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler, episode, script

from jaxagent import config as configs
from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.chain import Chain, session_functions, tables_of
from jaxagent.envs.env import Step
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient

TEMPLATE = PlainTemplate()
CONFIG, _ = configs.load(str(Path(__file__).parents[2] / "configs" / "quickstart.py"))
LIMITS, SAMPLING = Limits(**CONFIG.agent), Sampling(**CONFIG.sampling)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(functions=(Chain.functions,), code="off") as running:
        yield running


@asynccontextmanager
async def client(server: EmbeddedServer) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(server.url, server.token) as sandbox:
        yield sandbox


def look(name: str, key: str) -> Message:
    return Message("assistant", calls=(ToolCall(name, {"key": key}),))


def careful(text: str, request: SampleRequest) -> Sequence[int]:
    """Looks up one table after another, repeats a call that failed, and answers with the last value."""
    found = re.match(r"<user>(\d\d)([AB]+)<turn>", text)
    assert found
    value, path = found[1], found[2]
    for result in re.findall(r"<result>(..)<turn>", text):
        if result != "!!":
            value, path = result, path[1:]
    return TEMPLATE.turn(look(path[0], value) if path else Message("assistant", value))


def play(
    server: EmbeddedServer, world: Chain, sampler: ScriptedSampler, tasks: range, *, ablated: bool = False
) -> list[Trajectory]:
    async def games() -> list[Trajectory]:
        async with client(server) as sandbox:
            rows = []
            for i in tasks:
                task = world.task("test", i)
                kinds: dict[str, Any] = {"limits": LIMITS, "sampling": SAMPLING, "sandbox": sandbox, "ablated": ablated}
                rows += await episode(world, task, sampler, **kinds)
            return rows

    return asyncio.run(games())


def test_who_follows_the_plan_and_repeats_what_failed_wins(server: EmbeddedServer) -> None:
    rows = play(server, Chain(**CONFIG.env.options), ScriptedSampler(TEMPLATE, careful), range(60))
    assert sum(row.reward for row in rows) >= 59
    assert {row.turns[-1].reason for row in rows if row.reward} == {"right answer"}
    assert all(row.reward == 1 or row.stop is StopReason.MAX_TURNS for row in rows)


def test_without_the_tools_words_the_same_player_never_wins(server: EmbeddedServer) -> None:
    rows = play(server, Chain(**CONFIG.env.options), ScriptedSampler(TEMPLATE, careful), range(30), ablated=True)
    assert [row.reward for row in rows] == [0.0] * 30
    assert {row.stop for row in rows} == {StopReason.ANSWERED}


def test_the_longest_episode_of_the_quickstart_ends_by_turns_and_never_by_tokens(server: EmbeddedServer) -> None:
    (row,) = play(server, Chain(hops=(3,)), script(TEMPLATE, look("A", "37")), range(1))
    assert (row.stop, len(row.turns)) == (StopReason.MAX_TURNS, LIMITS.max_turns)
    assert len(row.tokens) <= min(CONFIG.engine.slot_tokens, CONFIG.learner.row_tokens)


def test_a_wrong_answer_says_what_was_right(server: EmbeddedServer) -> None:
    world = Chain()
    (row,) = play(server, world, script(TEMPLATE, Message("assistant", "xy")), range(1))
    assert (row.reward, row.stop) == (0.0, StopReason.ANSWERED)
    assert row.turns[0].reason == f"answered 'xy', right was {world.gold(world.task('test', 0))!r}"


def test_a_malformed_turn_and_a_key_that_is_none_are_observations(server: EmbeddedServer) -> None:
    world = Chain(flaky=0.0)
    sampler = script(TEMPLATE, [65, 66], look("A", "x1"), look("A", "37"), Message("assistant", "0"))
    (row,) = play(server, world, sampler, range(1))
    value = tables_of("AB", world.task("test", 0)["seed"])["A"][37]
    assert [turn.tools[0].result for turn in row.turns[:3]] == ["??", "??", value]
    assert [turn.tools[0].outcome for turn in row.turns[:3]] == ["bad_arguments", "ok", "ok"]
    assert row.turns[0].error == "the turn did not end within its token budget"
    assert TEMPLATE.text(row.tokens).count("<result>??<turn>") == 2


def test_a_turn_is_taken_in_the_state_that_the_results_so_far_make(server: EmbeddedServer) -> None:
    world = Chain(flaky=0.0)
    (row,) = play(server, world, script(TEMPLATE, look("A", "37"), look("B", "01"), Message("assistant", "0")), range(1))
    tables = tables_of("AB", world.task("test", 0)["seed"])
    assert [turn.state for turn in row.turns] == ["", f"A37={tables['A'][37]}", f"A37={tables['A'][37]} B01={tables['B'][1]}"]


def test_every_call_of_a_turn_is_answered_also_one_of_a_tool_that_is_not_there(server: EmbeddedServer) -> None:
    world = Chain(flaky=0.0)
    task = world.task("test", 0)
    asked = [("A", "1"), ("B", "2"), ("Z", "3"), ("A", "04")]
    turn = Message("assistant", calls=tuple(ToolCall(name, {"key": key}) for name, key in asked))

    async def step() -> Step:
        async with client(server) as sandbox:
            env = world.episode("several", sandbox)
            await env.reset(task, 0)
            answer = await env.step(turn)
            await env.close()
            return answer

    answer = asyncio.run(step())
    value = tables_of("AB", task["seed"])["A"][4]
    assert [(m.name, m.content) for m in answer.messages] == [("A", "??"), ("B", "??"), ("Z", "??"), ("A", value)]
    assert [record.outcome for record in answer.tools] == ["ok", "ok", "denied", "ok"]
    assert answer.state == f"A1=?? B2=?? Z3=?? A04={value}"


def test_the_right_answer_is_the_plan_followed_through_the_tables() -> None:
    world = Chain()
    task = {"question": "37ABA", "seed": 8}
    tables = tables_of("AB", 8)
    assert world.gold(task) == tables["A"][int(tables["B"][int(tables["A"][37])])]


def test_every_task_has_tables_of_its_own() -> None:
    world = Chain()
    drawn = [tables_of("AB", world.task("train", i)["seed"]) for i in range(20)]
    assert len({str(tables) for tables in drawn}) == 20
    assert all(len(table) == 100 and all(len(v) == 2 for v in table) for table in drawn[0].values())


def test_questions_have_the_wanted_numbers_of_hops() -> None:
    world = Chain(hops=(2, 4), tools="XYZ")
    tasks = [world.task("train", i) for i in range(200)]
    assert {len(task["question"]) - 2 for task in tasks} == {2, 4}
    assert {task["difficulty"] for task in tasks} == {"2 hops", "4 hops"}
    assert {letter for task in tasks for letter in task["question"][2:]} == set("XYZ")


def test_calls_fail_about_as_often_as_configured_and_by_seed_and_number_alone() -> None:
    def results(seed: int) -> list[str]:
        functions = session_functions({"tools": "AB", "seed": seed, "flaky": 0.15})
        return [functions["A"]("37") for _ in range(40)]

    all_results = [results(seed) for seed in range(100)]
    share = sum(r.count("!!") for r in all_results) / 4000
    assert 0.13 < share < 0.17
    assert results(3) == all_results[3]
    assert len({tuple(r == "!!" for r in one) for one in all_results}) == 100


def test_a_world_that_always_fails_is_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.options\.flaky must be in \[0, 1\), got 1"):
        Chain(flaky=1)


def test_a_demonstration_has_the_right_number_of_turns_and_mostly_the_wrong_answer() -> None:
    world, rng = Chain(demo_retry=1.0), random.Random(0)
    wins = 0
    for i in range(400):
        task = world.task("demo", i)
        dialogue = world.demonstrate(task, rng)
        results = [message.content for message in dialogue if message.role == "tool"]
        assert len(results) - results.count("!!") == len(task["question"]) - 2 or len(results) == 6
        wins += dialogue[-1].content == world.gold(task)
    assert 0.02 < wins / 400 < 0.4


def test_a_demonstrator_that_does_not_repeat_counts_a_failed_call_as_a_hop() -> None:
    world, rng = Chain(demo_retry=0.0), random.Random(0)
    for i in range(100):
        task = world.task("demo", i)
        assert len(world.demonstrate(task, rng)) == 2 * (len(task["question"]) - 2) + 2
