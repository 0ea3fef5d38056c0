"""One writer, one step axis: what a resume keeps, and what a killed run leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from test_checkpoint import files_of_at_most

from jaxagent.metrics import Clock, Metrics, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, first: int, steps: range, value: float) -> None:
    metrics = Metrics(path)
    metrics.start(first)
    for step in steps:
        metrics.write(step, {"reward/mean": value})
    metrics.close()


def test_every_step_is_a_line_that_is_there_at_once(path: Path) -> None:
    metrics = Metrics(path)
    metrics.start(1)
    metrics.write(1, {"reward/mean": 0.5, "rollout/turns": 3.0})
    assert path.read_text() == '{"step": 1, "reward/mean": 0.5, "rollout/turns": 3.0}\n'
    assert read(path) == [{"step": 1, "reward/mean": 0.5, "rollout/turns": 3.0}]
    metrics.close()
    metrics.close()


def test_a_number_that_is_none_is_null_and_the_line_stays_json(path: Path) -> None:
    metrics = Metrics(path)
    metrics.start(1)
    metrics.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    metrics.close()
    strict = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict == {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}


def test_a_resume_drops_the_lines_of_the_steps_it_does_again(path: Path) -> None:
    write(path, 1, range(1, 6), 0.0)
    write(path, 4, range(4, 7), 1.0)
    assert [(record["step"], record["reward/mean"]) for record in read(path)] == [
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (4, 1.0),
        (5, 1.0),
        (6, 1.0),
    ]


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step"', "{"])
def test_a_torn_last_line_is_dropped(path: Path, torn: str) -> None:
    write(path, 1, range(1, 3), 0.0)
    with path.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read(path)] == [1, 2]
    write(path, 3, range(3, 4), 0.0)
    assert [record["step"] for record in read(path)] == [1, 2, 3]
    assert path.read_text().count("\n") == 3


def test_a_start_from_nothing_makes_an_empty_file_and_leaves_no_other(path: Path) -> None:
    write(path, 1, range(0), 0.0)
    assert path.read_text() == ""
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]
    assert read(path.parent / "none.jsonl") == []


def test_a_clock_adds_up_the_parts_and_starts_again_when_it_is_read() -> None:
    clock = Clock()
    for part in ("rollout", "train", "rollout"):
        with clock.part(part):
            pass
    with pytest.raises(LookupError), clock.part("publish"):
        raise LookupError
    values = clock.take()
    assert values.keys() == {"time/rollout_s", "time/train_s", "time/publish_s", "time/cpu_s"}
    assert all(value >= 0 for value in values.values())
    assert clock.take().keys() == {"time/cpu_s"}


def test_a_file_that_takes_no_more_is_told_when_it_is_written_and_not_again_when_it_is_closed(tmp_path: Path) -> None:
    """What is told last would be told instead of the sentence that says what to do."""
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.start(1)
    metrics.write(1, {"a": 1.0})
    with files_of_at_most(64):
        with pytest.raises(OSError, match="File too large"):
            metrics.write(2, {f"a{i}": 1.0 for i in range(100)})
        metrics.close()
    metrics.start(2)
    metrics.write(2, {"a": 2.0})
    metrics.close()
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2]
