"""`questions`: a task file with its splits and faults, and Python in the sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from scripted import ScriptedSampler, episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.config import load
from jaxagent.envs.env import ENDLESS, find, size_of
from jaxagent.envs.questions import Questions
from jaxagent.parts import build, faults
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient, SandboxStartError

PLAIN = PlainTemplate()
CONFIG = str(Path(__file__).parents[2] / "configs" / "questions.py")


def task_file(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return task_file(tmp_path / "sums.jsonl", [{"question": f"{n}+{n}", "answer": 2 * n} for n in range(100)])


def run(code: str) -> Message:
    return Message("assistant", calls=(ToolCall("python", {"code": code}),))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    try:
        with EmbeddedServer(functions=(), code="require", min_isolation="L2") as running:
            yield running
    except SandboxStartError as error:
        pytest.skip(f"no isolation here: {error}")


def play(server: EmbeddedServer | None, world: Questions, sampler: ScriptedSampler) -> Trajectory:
    async def game() -> Trajectory:
        limits, sampling = Limits(max_turns=8, max_tokens=8000), Sampling(max_tokens=200)
        if server is None:
            return (await episode(world, world.task("train", 0), sampler, limits=limits, sampling=sampling))[0]
        async with SandboxClient(server.url, server.token) as sandbox:
            rows = await episode(world, world.task("train", 0), sampler, limits=limits, sampling=sampling, sandbox=sandbox)
            return rows[0]

    return asyncio.run(game())


def test_a_task_stays_in_its_split_when_the_file_grows(tmp_path: Path) -> None:
    records = [{"question": f"q{n}", "answer": n} for n in range(400)]
    small, large = (Questions(task_file(tmp_path / f"{n}.jsonl", records[:n])) for n in (200, 400))
    for split in ("train", "valid", "test"):
        assert {t["question"] for t in small.tasks[split]} <= {t["question"] for t in large.tasks[split]}
    assert sum(large.sizes.values()) == 400
    assert all(20 < large.sizes[split] < 65 for split in ("valid", "test"))  # a tenth each, by chance


def test_a_test_file_is_the_test_split_whole(sums: str, tmp_path: Path) -> None:
    other = task_file(tmp_path / "test.jsonl", [{"question": "?", "answer": "!", "difficulty": "odd"}])
    world = Questions(sums, test_path=other)
    assert world.sizes["test"] == 1
    assert world.task("test", 0)["difficulty"] == "odd"
    assert size_of(world, "train") + size_of(world, "valid") == 100
    assert size_of(find("chain")(), "train") == ENDLESS


def test_columns_of_the_file_do_not_replace_what_a_task_must_have(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": 1, "difficulty": 3, "id": n + 7, "seed": "x", "source": "book"} for n in range(60)]
    task = Questions(task_file(tmp_path / "rows.jsonl", rows)).task("train", 4)
    assert (task["id"], task["seed"], task["difficulty"], task["source"]) == ("questions/train/4", 4, "3", "book")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (['{"question": "a"', '{"question": "b", "answer": 1}'], "line 1: not JSON"),
        ([{"question": "a", "answer": 1}, {"question": "b"}], "line 2: missing answer"),
        ([{"question": "a", "answer": 1}], "too few tasks"),
        ([{"question": f"{n}", "answer": "#### 18"} for n in range(60)], "needs numbers as answers, got '#### 18'"),
    ],
)
def test_a_faulty_task_file_is_told_before_anything_starts(records: list[Any], said: str, tmp_path: Path) -> None:
    path = task_file(tmp_path / "tasks.jsonl", records)
    config, faults = load(f"{CONFIG}:{path}", [])
    assert not faults
    with pytest.raises(ValueError, match=said) as raised:
        build(config)
    assert path in str(raised.value)


def test_a_warm_up_without_demonstrations_is_refused(sums: str) -> None:
    config, _ = load(f"{CONFIG}:{sums}", ["warmup.steps=5"])
    with pytest.raises(ValueError, match=r"warmup\.steps=5, but the world questions has no demonstrations"):
        build(config)


def test_programs_cannot_be_wanted_and_forbidden(sums: str) -> None:
    config, _ = load(f"{CONFIG}:{sums}", ["sandbox.code=off"])
    with pytest.raises(ValueError, match=r"sandbox\.code=off"):
        build(config)


def test_a_given_sandbox_that_runs_no_programs_is_refused(sums: str, tmp_path: Path) -> None:
    with EmbeddedServer(functions=(), code="off", token_file=tmp_path / "token") as running:
        given = [f"sandbox.url={running.url}", f"sandbox.token_file={tmp_path / 'token'}"]
        config, _ = load(f"{CONFIG}:{sums}", given)
        with pytest.raises(ValueError, match=f"sandbox.url={running.url}: the server runs no programs: "):
            build(config)


def test_an_unknown_reward_is_told(sums: str) -> None:
    with pytest.raises(ValueError, match=r"reward must be made of exact_match, f1_match, .*; got 'luck'"):
        Questions(sums, reward="luck")


def test_kits_are_chosen_with_their_options_in_a_config(sums: str) -> None:
    config, _ = load(f"{CONFIG}:{sums}", ['env.options.toolbox=["calculator","python"]'])
    assert [spec.name for spec in Questions(**config.env.options).tools] == ["calculate", "python"]
    with config.unlocked():
        del config.env.options.toolbox
        config.env.options.toolbox = ConfigDict({"calculator": {}, "memory": {"notes": 3}})
    assert [spec.name for spec in Questions(**config.env.options).tools][:2] == ["calculate", "remember"]
    assert not faults(config)


def test_names_live_between_programs_and_the_answer_is_rewarded(server: EmbeddedServer, sums: str) -> None:
    world = Questions(sums, reward="last_number")
    question = world.task("train", 0)["question"]
    row = play(
        server, world, script(PLAIN, run(f"x = {question}"), run("x"), Message("assistant", f"It is {eval_sum(question)}."))
    )
    results = [record.result for turn in row.turns for record in turn.tools]
    assert results == ["no output", eval_sum(question)]
    assert (row.stop, row.reward, row.turns[-1].reason) == (StopReason.ANSWERED, 1.0, "right number")


def eval_sum(question: str) -> str:
    return str(2 * int(question.partition("+")[0]))


def test_a_program_that_fails_or_never_ends_is_a_result(server: EmbeddedServer, sums: str) -> None:
    turns = [run("print('so far'); 1/0"), run("while True: pass"), run("print('y' * 5000)"), Message("assistant", "?")]
    row = play(server, Questions(sums, toolbox={"python": {"timeout_s": 0.5}}), script(PLAIN, *turns))
    failed, endless, long = (record.result for turn in row.turns for record in turn.tools)
    assert failed.startswith("so far")
    assert "ZeroDivisionError" in failed
    assert "error: " in endless
    assert [record.outcome for turn in row.turns for record in turn.tools] == ["error", "error", "ok"]
    assert "yyy\n[3000 more characters]\nyyy" in long
    assert len(long) < 2100
    assert (row.reward, row.stop) == (0.0, StopReason.ANSWERED)


def test_a_malformed_call_is_answered_with_what_is_wrong(sums: str) -> None:
    seen: list[str] = []

    def write(text: str, request: SampleRequest) -> Sequence[int]:
        seen.append(text)
        return PLAIN.turn(
            Message("assistant", calls=(ToolCall("ruby", {"code": "1"}),)) if len(seen) == 1 else Message("assistant", "0")
        )

    row = play(None, Questions(sums), ScriptedSampler(PLAIN, write))
    assert "error: no tool 'ruby'; there are python" in seen[1]
    assert row.turns[0].error
    assert row.reward == 0.0
