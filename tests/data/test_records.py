"""Records of files in several formats, each fault with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxagent.data.records import read_records
from jaxagent.envs.questions import Questions

ROWS = [{"question": f"{n}+{n}", "answer": str(2 * n), "tags": ["a", "b"]} for n in range(40)]


def test_lines_are_told_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": 1}\n\n{"question": 2}\n')
    assert read_records(tmp_path / "a.jsonl") == [("line 1", {"question": 1}), ("line 3", {"question": 2})]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: missing answer; got question"):
        read_records(tmp_path / "a.jsonl", ("question", "answer"))


def test_parquet_and_data_sets_on_disk_are_read_alike(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "shards").mkdir()
    for number, part in enumerate((table[:30], table[30:])):
        parquet.write_table(part, tmp_path / "shards" / f"{number}.parquet")
    saved = tmp_path / "saved"  # as `datasets` saves
    saved.mkdir()
    names = []
    for number, part in enumerate((table[:30], table[30:])):
        names.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        with arrow.OSFile(str(saved / names[-1]["filename"]), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(part)
    (saved / "state.json").write_text(json.dumps({"_data_files": names}))
    for path in ("t.parquet", "shards", "saved"):
        found = read_records(tmp_path / path, ("question", "answer"))
        assert found[2] == ("row 3", ROWS[2])
        assert [record for _, record in found] == ROWS
    assert sum(Questions(str(tmp_path / "saved"), toolbox=()).sizes.values()) == 40


@pytest.mark.filterwarnings("default")
def test_what_the_library_itself_saves_to_disk_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra: vendors)")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved.select([7])}).save_to_disk(tmp_path / "several")
    assert [record for _, record in read_records(tmp_path / "one", ("question", "answer"))] == ROWS
    assert read_records(tmp_path / "several" / "test") == [("row 1", ROWS[7])]
    with pytest.raises(ValueError, match=r"several splits are in this folder; name one of .*train"):
        read_records(tmp_path / "several")


def test_faults_of_tables_are_told(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    faulty = arrow.Table.from_pylist([{"question": "a", "answer": "1"}, {"question": "b", "answer": None}])
    parquet.write_table(faulty, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet, row 2: missing answer; got question, answer"):
        read_records(tmp_path / "t.parquet", ("question", "answer"))
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ValueError, match="not Parquet"):
        read_records(tmp_path / "no.parquet")
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits are in this folder; name one of .*train"):
        read_records(tmp_path / "dict")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither Parquet files nor a data set"):
        read_records(tmp_path / "empty")
    with pytest.raises(ValueError, match="no such file"):
        read_records(tmp_path / "nowhere.parquet")


def test_a_task_stays_in_its_split_by_its_id_though_its_words_change(tmp_path: Path) -> None:
    def world(words: str) -> Questions:
        rows = [{"id": n, "question": f"{words} {n}?", "answer": n} for n in range(200)]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Questions(str(tmp_path / "q.jsonl"), toolbox=())

    one, other = world("How much is"), world("Tell me")
    for split in ("train", "valid", "test"):
        assert [task["answer"] for task in one.tasks[split]] == [task["answer"] for task in other.tasks[split]]
