"""The stream of tasks, and task files whose faults are told by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxagent.data.tasks import TaskStream, read_jsonl


def test_an_epoch_holds_every_task_once_and_every_epoch_has_its_own_order() -> None:
    drawn = TaskStream(50, seed=0).take(150)
    epochs = [drawn[:50], drawn[50:100], drawn[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_and_not_on_how_much_is_taken_at_once() -> None:
    one, other = TaskStream(50, seed=3), TaskStream(50, seed=3)
    assert one.take(70) == [task for _ in range(7) for task in other.take(10)]
    assert TaskStream(50, seed=4).take(50) != TaskStream(50, seed=3).take(50)


def test_a_stream_goes_on_from_its_state_through_json() -> None:
    stream = TaskStream(1000, seed=1)
    stream.take(37)
    state = json.loads(json.dumps(stream.state()))
    wanted = stream.take(2000)
    resumed = TaskStream(1000, seed=1)
    resumed.restore(state)
    assert resumed.take(2000) == wanted


def test_a_stream_of_a_generated_world_is_not_held_in_memory() -> None:
    assert len(set(TaskStream(10**9, seed=0).take(100))) == 100


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "tasks.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_task_file_is_read_line_by_line_and_empty_lines_do_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": 1, "q": "é"}\n\n  \r\n{"id": 2, "q": "b", "more": [1]}\r\n')
    assert read_jsonl(path, ["id", "q"]) == [{"id": 1, "q": "é"}, {"id": 2, "q": "b", "more": [1]}]


def test_line_ends_inside_a_json_string_are_not_line_ends_of_the_file(tmp_path: Path) -> None:
    words = "a\u2028b\u0085c\u2029d"
    path = written(tmp_path, json.dumps({"id": 1, "q": words}, ensure_ascii=False) + "\n" + '{"id": 2}\n')
    assert [record["id"] for record in read_jsonl(str(path), ["id"])] == [1, 2]
    assert read_jsonl(path, ["id"])[0]["q"] == words


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"id": 1}\n\n{"id": 2,}\n', r"line 3: not JSON \(.* at column \d+\)"),
        ('{"id": 1}\n{"id"', r"line 2: not JSON"),
        ('{"id": 1}\n[1, 2]\n', "line 2: an object is wanted, got list"),
        ('{"id": 1}\n"text"\n', "line 2: an object is wanted, got str"),
        ('{"name": "x", "other": 1}\n', "line 1: missing id; got name, other"),
        ("{}\n", "line 1: missing id; got nothing"),
        (b'{"id": 1}\n{"id": "\xff"}\n', r"line 2: not UTF-8 \(invalid start byte at byte 8\)"),
        ("\n \n", "nothing in it"),
        ("", "nothing in it"),
    ],
)
def test_a_broken_line_is_told_with_file_number_and_what_was_wanted(tmp_path: Path, content: str | bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"tasks\.jsonl(, |: ){fault}"):
        read_jsonl(written(tmp_path, content), ["id"])


def test_a_missing_file_says_what_would_be_read_from_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file; one JSON object per line with id, question is wanted"):
        read_jsonl(tmp_path / "none.jsonl", ["id", "question"])
