"""Lanes of a step: who was busy when, what is part of what, and that rows never overlap."""

from __future__ import annotations

import json
from pathlib import Path

from lanes import lanes_of, wrongly_nested

from jaxagent.echoes import About, TraceFile
from jaxagent.metrics import Clock, Span
from jaxagent.timeline import Timeline
from jaxagent.types import StopReason, ToolRecord, Trajectory, Turn


def episode(name: str, began: float, seconds: float, *turns: Turn, **place: int) -> Trajectory:
    row = Trajectory("toy", 1, name, 0, stop=StopReason.ANSWERED, turns=list(turns), seconds=seconds, **place)
    row.began_s = began
    return row


def turn(asked: float, sampled: float, *tools: ToolRecord) -> Turn:
    return Turn(0, 0, 5, "", asked_s=asked, sampled_s=sampled, tools=list(tools))


def call(name: str, seconds: float, began: float = 0.0) -> ToolRecord:
    return ToolRecord(name, {}, "ok", "", seconds, began_s=began)


def made(*rows: Trajectory) -> dict[str, list[tuple[str, float, float]]]:
    """(name, began, seconds) of the spans of every row."""
    clock = Clock()
    clock.zero_s = 1000.0
    timeline, found = Timeline(clock), dict[str, list[tuple[str, float, float]]]()
    timeline.episodes(rows)
    for span in timeline.take():
        found.setdefault(span.row, []).append((span.name, span.began_s, span.seconds))
    assert timeline.take() == []
    return found


def test_an_episode_has_its_turns_and_its_calls_which_may_be_at_once() -> None:
    at_once = turn(1.0, 2.0, call("look", 0.5, 2.0), call("read", 0.25, 2.0))
    assert made(episode("train/0", 1.0, 4.0, at_once, turn(3.0, 4.0))) == {
        "rollout 1": [("train/0#0", 1001.0, 4.0), ("turn 1", 1001.0, 1.0), ("turn 2", 1003.0, 1.0)],
        "tool 1": [("look", 1002.0, 0.5)],
        "tool 2": [("read", 1002.0, 0.25)],
    }


def test_calls_whose_world_does_not_say_when_are_one_after_another_behind_their_turn() -> None:
    found = made(episode("train/0", 1.0, 4.0, turn(1.0, 2.0, call("look", 0.5), call("read", 0.25))))
    assert found["tool 1"] == [("look", 1002.0, 0.5), ("read", 1002.5, 0.25)]


def test_a_row_is_taken_by_the_next_episode_when_it_is_free() -> None:
    rows = [episode("c", 3.0, 1.0), episode("a", 1.0, 2.0), episode("b", 2.0, 9.0)]
    found = made(*rows)
    assert [name for name, _, _ in found["rollout 1"]] == ["a#0", "c#0"]
    assert [name for name, _, _ in found["rollout 2"]] == ["b#0"]


def test_rows_of_one_rollout_are_one_episode_and_kept_ones_have_no_time() -> None:
    first, second = episode("a", 1.0, 4.0, turn(1.0, 2.0)), episode("a", 1.0, 4.0, turn(3.0, 4.0), segment=1)
    branch = episode("a#0@1", 6.0, 1.0, turn(6.0, 7.0), trunk=0, trunk_turns=1)
    kept = episode("b", 0.0, 4.0, turn(0.0, 0.0))
    found = made(first, second, branch, kept)
    assert [name for name, _, _ in found["rollout 1"]] == ["a#0", "turn 1", "turn 2", "a#0@1#0", "turn 2"]
    assert list(found) == ["rollout 1"]


def test_calls_of_an_engine_without_a_pause_are_one_stretch() -> None:
    timeline = Timeline(Clock())
    timeline.engines([[(1.0, 1.5), (1.5, 2.0), (2.5, 3.0)], [], [(1.0, 1.25)]])
    spans = timeline.take()
    assert [(span.row, span.seconds, span.told["calls"]) for span in spans] == [
        ("engine 1", 1.0, 2),
        ("engine 1", 0.5, 1),
        ("engine 3", 0.25, 1),
    ]


def test_times_are_not_stored() -> None:
    row = episode("a", 1.0, 4.0, turn(1.0, 2.0, call("look", 0.5, 2.0)))
    stored = json.dumps(row.to_json())
    assert not any(name in stored for name in ("began_s", "asked_s", "sampled_s"))
    assert Trajectory.from_json(json.loads(stored)) == row


def test_a_trace_that_is_full_has_only_the_parts_of_steps(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("jaxagent.echoes._TRACE_BYTES", 100)
    echo = TraceFile(About(tmp_path, {}, 1))
    for step in (1, 2):
        began = 1000.0 + step
        echo.write(step, {}, [Span("rollout", began, 0.5), Span("a#0", began, 0.25, "rollout", 1)])
    echo.close()
    lanes = lanes_of(tmp_path / "trace.json")
    assert [event["name"] for event in lanes["step"]] == ["step 1", "rollout", "step 2", "rollout"]
    assert [event["name"] for event in lanes["rollout 1"]] == ["a#0"]
    assert "from here on the steps' parts only" in (tmp_path / "trace.json").read_text()


def test_the_check_of_nesting_finds_what_overlaps() -> None:
    first, inner, crossing = ({"name": n, "ts": a, "dur": d} for n, a, d in (("a", 0, 10), ("b", 2, 3), ("c", 4, 9)))
    assert wrongly_nested([first, inner]) == [] == wrongly_nested([])
    assert wrongly_nested([first, inner, crossing]) == [("b", "c")]
