"""Notes: bounded, searchable, and all that is left of the first phase of an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from calling import called
from scripted import ScriptedSampler, episode

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.questions import Questions
from jaxagent.toolbox.box import Toolbox
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, Trajectory

PLAIN = PlainTemplate()


def test_notes_are_written_read_listed_and_found() -> None:
    box = Toolbox({"memory": {"notes": 2, "chars": 20}})
    records = called(
        box,
        ("recall", {}),
        ("remember", {"key": "a", "text": "the ulm tower"}),
        ("remember", {"key": "b", "text": "the bonn bridge"}),
        ("remember", {"key": "c", "text": "x"}),
        ("remember", {"key": "a", "text": "x" * 20}),
        ("recall", {}),
        ("recall", {"key": "a"}),
        ("recall", {"key": "z"}),
        ("search_notes", {"query": "bridge"}),
        ("search_notes", {"query": "xyzzy"}),
    )
    assert [record.result for record in records] == [
        "no notes",
        "noted",
        "noted",
        "error: there are 2 notes already; write over one of them",
        "error: a note has at most 20 characters with its key, this has 21",
        "a, b",
        "the ulm tower",
        "error: no note 'z'; there are a, b",
        "[b] the bonn bridge",
        "nothing found",
    ]
    with pytest.raises(ValueError, match="at least 1, got 0, 500, 3"):
        Toolbox({"memory": {"notes": 0}})


@pytest.fixture
def world(tmp_path: Path) -> Questions:
    rows = [{"question": f"the code of {n}?", "answer": str(n * 7), "context": f"{n} has {n * 7}."} for n in range(100)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Questions(str(tmp_path / "facts.jsonl"), toolbox=("memory",))


def played(world: Questions, write: bool) -> tuple[list[Trajectory], list[str]]:
    seen: list[str] = []

    def policy(text: str, request: SampleRequest) -> Sequence[int]:
        seen.append(text)
        turns = text.count("<turn>") - text.count("<result>")
        if " has " in text.partition("<turn>")[0]:  # the writer
            note = ToolCall("remember", {"key": "code", "text": text.partition(" has ")[2].partition(".")[0]})
            return PLAIN.turn(
                Message("assistant", calls=(note,)) if write and "noted" not in text else Message("assistant", "done")
            )
        if "<result>" not in text:
            return PLAIN.turn(Message("assistant", calls=(ToolCall("recall", {"key": "code"}),)))
        assert turns
        return PLAIN.turn(Message("assistant", text.rpartition("<result>")[2].partition("<turn>")[0]))

    task = world.task("train", 3)
    sampler = ScriptedSampler(PLAIN, policy)
    limits = Limits(max_turns=6, max_tokens=4000)
    return asyncio.run(episode(world, task, sampler, limits=limits, sampling=Sampling(max_tokens=100))), seen


def test_the_reader_knows_only_the_notes_and_both_earn_what_the_answer_is_worth(world: Questions) -> None:
    rows, seen = played(world, write=True)
    assert [row.role for row in rows] == ["writer", "agent"]
    assert [row.reward for row in rows] == [1.0, 1.0]
    assert all(row.stop is StopReason.ANSWERED and row.solved for row in rows)
    context = world.task("train", 3)["context"]
    assert context in seen[0]
    assert not any(context in text for text in seen if text.startswith("<user>the code"))


def test_who_took_no_notes_cannot_answer(world: Questions) -> None:
    rows, _ = played(world, write=False)
    assert [row.reward for row in rows] == [0.0, 0.0]
