"""The stream of tasks, and task files whose faults are told by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxagent.data.tasks import TaskStream, ValueStream, examples_at, numbered, read_jsonl


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


def test_examples_at_a_place_are_those_that_the_stream_has_there() -> None:
    drawn = TaskStream(7, seed=5).take(40)
    assert [i for first in range(0, 40, 4) for i in examples_at(7, 5, first, 4)] == drawn
    assert examples_at(7, 5, 29, 3) == drawn[29:32]


# ---------------------------------------------------------------------- by value


def test_what_is_known_to_teach_is_drawn_more_often_than_what_is_solved_or_hopeless() -> None:
    stream = ValueStream(30, seed=0, max_repeats=30)
    for index in range(30):
        stream.tell(index, solved=(0, 50, 100)[index % 3], played=100)
    values = stream.values()
    assert values[1] == pytest.approx(0.25)
    assert values[0] == pytest.approx(values[2]) == pytest.approx(1 / 102 * 101 / 102)
    drawn = [index % 3 for _ in range(60) for index in stream.take(1)]
    assert drawn.count(1) > 50


def test_a_task_that_was_never_played_is_worth_most() -> None:
    stream = ValueStream(3, seed=0, max_repeats=1)
    stream.tell(0, 4, 8)
    stream.tell(1, 8, 8)
    assert stream.values().tolist() == pytest.approx([0.25, 0.09, 0.25])


@pytest.mark.parametrize("max_repeats", [1, 2, 5])
def test_no_task_is_drawn_more_often_in_a_round_than_allowed(max_repeats: int) -> None:
    stream = ValueStream(20, seed=1, max_repeats=max_repeats)
    for index in range(1, 20):
        stream.tell(index, 0, 1000)  # one task is worth far more than all others
    for _ in range(3):
        drawn = [index for _ in range(5) for index in stream.take(4)]
        assert max(map(drawn.count, drawn)) <= max_repeats
        assert drawn.count(0) == max_repeats


def test_the_tasks_of_one_step_differ_where_there_are_enough() -> None:
    stream = ValueStream(6, seed=2, max_repeats=6)
    for _ in range(20):
        assert len(set(stream.take(4))) == 4
    assert len(ValueStream(2, seed=0, max_repeats=9).take(5)) == 5


def test_a_stream_by_value_goes_on_from_its_state_through_json() -> None:
    def play(stream: ValueStream, steps: int) -> list[int]:
        drawn = []
        for _ in range(steps):
            for index in stream.take(3):
                stream.tell(index, solved=index % 5, played=4)
                drawn.append(index)
        return drawn

    stream, resumed = ValueStream(40, seed=3, max_repeats=2), ValueStream(40, seed=3, max_repeats=2)
    play(stream, 11)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert play(resumed, 30) == play(stream, 30)
    assert ValueStream(40, seed=4, max_repeats=2).take(20) != ValueStream(40, seed=3, max_repeats=2).take(20)


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feed\.max_repeats must be at least 1"):
        ValueStream(3, 0, 0)


# ---------------------------------------------------------------------- files


def test_numbered_lines_count_the_empty_ones(tmp_path: Path) -> None:
    assert [number for number, _ in numbered(written(tmp_path, '\n{"a": 1}\n\n{"b": 2}\n'))] == [2, 4]


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
        ('{"name": "x", "id": null}\n', r"line 1: missing id \(it is null\)"),
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
