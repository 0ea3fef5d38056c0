"""`bfcl`: the leaderboard's rows as tasks, and files that cannot be played."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from calls_made import as_calls, rendered
from scripted import episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.bfcl import Bfcl, kind_of
from jaxagent.envs.check import check
from jaxagent.types import Message, Sampling, ToolCall, Trajectory

PLAIN = PlainTemplate()
AREA = {
    "name": "geometry.area",
    "description": "Area of a rectangle.",
    "parameters": {
        "type": "dict",
        "properties": {"width": {"type": "float"}, "height": {"type": "float"}, "unit": {"type": "string"}},
        "required": ["width", "height"],
    },
}
ROOT = {"name": "root", "parameters": {"type": "dict", "properties": {"of": {"type": "integer"}}, "required": ["of"]}}


def row(kind: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row and its answer: sides of a rectangle, and with `multiple` a root."""
    functions = [AREA, ROOT] if "multiple" in kind else [AREA]
    answers = [{"geometry.area": {"width": [float(number)], "height": [2.5], "unit": ["", "cm"]}}]
    if "parallel" in kind:
        answers.append(
            {"root": {"of": [number]}} if "multiple" in kind else {"geometry.area": {"width": [1.0], "height": [1.0]}}
        )
    asked = [[{"role": "user", "content": f"How large is {number} by 2.5?"}]]
    name = f"{kind}_{number}" if "live" not in kind else f"{kind}_{number}-{number}-0"
    return {"id": name, "question": asked, "function": functions}, {"id": name, "ground_truth": answers}


def files(folder: Path, kind: str, rows: int = 40) -> str:
    (folder / "possible_answer").mkdir(exist_ok=True)
    path = folder / f"BFCL_v4_{kind}.json"
    made = [row(kind, number) for number in range(rows)]
    path.write_text("".join(json.dumps(one) + "\n" for one, _ in made))
    if "relevance" not in kind:
        (folder / "possible_answer" / path.name).write_text("".join(json.dumps(answer) + "\n" for _, answer in made))
    return str(path)


KINDS = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "irrelevance", "live_relevance")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bfcl]:
    folder = tmp_path_factory.mktemp("bfcl")
    return {kind: Bfcl(files(folder, kind)) for kind in KINDS}


def play(world: Bfcl, *said: str | Message) -> Trajectory:
    turns = [one if isinstance(one, Message) else Message("assistant", one) for one in said]
    limits = Limits(max_turns=1, max_tokens=4000)
    task = world.task("train", 0)
    (played,) = asyncio.run(episode(world, task, script(PLAIN, *turns), limits=limits, sampling=Sampling(max_tokens=400)))
    return played


@pytest.mark.parametrize("kind", KINDS)
def test_the_possible_answers_are_right_and_silence_is_where_nothing_fits(kind: str, worlds: dict[str, Bfcl]) -> None:
    world = worlds[kind]
    told = play(world, rendered(as_calls(world.task("train", 0)["answers"] or [{"geometry.area": {"width": [1.0]}}])))
    silent = play(world, "Nothing here can do that.")
    assert told.outcome == (0.0 if kind == "irrelevance" else 1.0), told.turns[0].reason
    assert silent.outcome == (1.0 if kind == "irrelevance" else 0.0)
    assert world.task("train", 0)["difficulty"] == kind.removeprefix("live_").removesuffix("_python")


def test_the_prompt_has_the_functions_and_the_question_and_no_answer(worlds: dict[str, Bfcl]) -> None:
    text = PLAIN.text(play(worlds["simple_python"], "x").tokens)
    assert '"name": "geometry.area"' in text
    assert "by 2.5?" in text
    assert "ground_truth" not in text
    assert '"cm"' not in text


def test_a_familys_own_calls_are_taken_too(worlds: dict[str, Bfcl]) -> None:
    world = worlds["simple_python"]

    async def step(action: Message) -> float:
        env = world.episode("", None)
        await env.reset(world.task("train", 0), 0)
        return (await env.step(action)).reward

    (right,) = as_calls(world.task("train", 0)["answers"])
    assert asyncio.run(step(Message("assistant", calls=(right,)))) == 1.0
    assert asyncio.run(step(Message("assistant", calls=(ToolCall("geometry.area", {}),)))) == 0.0
    unreadable = Message("assistant", rendered([right]), error="the turn did not end")
    assert asyncio.run(step(unreadable)) == 0.0


def test_every_call_at_once_is_not_right(worlds: dict[str, Bfcl]) -> None:
    everything = ", ".join(f"geometry.area(width={n}.0, height=2.5)" for n in range(40))
    assert play(worlds["simple_python"], f"[{everything}]").outcome == 0.0


@pytest.mark.parametrize("name", ["multi_turn_base_0", "simple_java_3", "memory_1", "x", "1"])
def test_kinds_that_are_not_played_are_told(name: str) -> None:
    with pytest.raises(ValueError, match=r"rows of simple, multiple, .* are played here"):
        kind_of(name)


def test_files_that_cannot_be_played_name_the_line(tmp_path: Path) -> None:
    path = Path(files(tmp_path, "simple_python"))
    answers = tmp_path / "possible_answer" / path.name
    answers.write_text(answers.read_text().partition("\n")[2])
    with pytest.raises(ValueError, match=r"line 1: no possible answer of 'simple_python_0'"):
        Bfcl(str(path))
    answers.unlink()
    with pytest.raises(ValueError, match=r"line 1: its possible answers are wanted in .*possible_answer"):
        Bfcl(str(path))
    one, _ = row("irrelevance", 0)
    path.write_text(json.dumps({**one, "question": [*one["question"], *one["question"]]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: one turn was wanted, got 2"):
        Bfcl(str(path))


def test_the_contract_is_kept_and_rows_keep_their_split(worlds: dict[str, Bfcl], tmp_path: Path) -> None:
    world = worlds["multiple"]
    assert [(finding.question, finding.said) for finding in check(world) if finding.ok is False] == []
    more = Bfcl(files(tmp_path, "multiple", rows=80))
    first = {split: {one["row"] for one in rows} for split, rows in world.rows.items()}
    later = {split: {one["row"] for one in rows} for split, rows in more.rows.items()}
    assert all(first[split] <= later[split] for split in first)
