"""Rows of other collections: the same task in every schema is one task, and nothing of a repository runs or leaves its tree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from package_with_tests import FILES
from rows_of_others import NEW, STABLE, TEST, WALK, git, make

from jaxagent.__main__ import main
from jaxagent.data.swe_rows import Store, clone_of, played


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clones")


@pytest.fixture(scope="module")
def rows(clones: Path) -> dict[str, dict[str, Any]]:
    found = make(clones)
    git(clones, "clone", "-q", "--bare", "own__pathlen", "pathlen.git")
    return found


def test_one_task_in_three_schemas_is_one_task(rows: dict[str, dict[str, Any]], clones: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    flags = [f"--rows={tmp_path / 'rows.jsonl'}", f"--repositories={clones}", f"--to={tmp_path / 'tasks.jsonl'}"]
    assert main(["swe", *flags]) == 0
    bench, *others = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    for other in others:
        same = {key: value for key, value in bench.items() if key not in ("instance_id", "base_commit")}
        assert {key: other[key] for key in same} == same
    assert bench["test_files"] == {TEST: FILES[TEST]}
    assert set(bench["files"]) == {*FILES, "src/pathlen/__init__.py"} - {TEST}
    assert "total += a + b" in bench["files"][WALK]
    assert bench["sources"] == ["src/pathlen/__init__.py", NEW, WALK] and bench["roots"] == ["src", "."]
    assert json.loads(bench["FAIL_TO_PASS"]) == [STABLE["back"]] and bench["repo"] == "pathlen"
    assert f"+++ b/{NEW}" in bench["patch"] and TEST not in bench["patch"]


def read(row: dict[str, Any], clones: Path, folder: Path) -> dict[str, Any]:
    return played(row, Store(clone_of(row, clones), folder))


def test_tests_that_come_with_a_row_are_the_ones_that_are_run(
    rows: dict[str, dict[str, Any]], clones: Path, tmp_path: Path
) -> None:
    code = "from pathlen import length\n\n\nclass TestBack:\n    def test_it(self):\n        assert length([4, 1]) == 3\n"
    ran = {"test_file_names": ["test_1.py"], "test_file_codes": [code]}
    row = {**rows["gym"], "execution_result_content": json.dumps(ran), "expected_output_json": '{"TestBack.test_it": "PASSED"}'}
    made = read(row, clones, tmp_path)
    assert json.loads(made["FAIL_TO_PASS"]) == ["r2e_tests/test_1.py::TestBack::test_it"]
    assert made["test_files"]["r2e_tests/test_1.py"] == code and "r2e_tests/test_1.py" not in made["files"]
    ran["test_file_names"] = ["../test_1.py"]
    with pytest.raises(ValueError, match="execution_result_content: names of test files"):
        read({**row, "execution_result_content": ran}, clones, tmp_path)


def added(path: str, mode: str = "100644", text: str = "x") -> str:
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1 @@\n+{text}\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patch": added("../out.py")}, "patch: git apply: .*out.py"),
        ({"patch": added("/tmp/out.py")}, "patch: git apply"),
        ({"patch": added(".git/hooks/post-checkout")}, "patch: git apply: .*hooks"),
        ({"test_patch": added("link/out.py")}, "test_patch: git apply: .*beyond a symbolic link"),
        ({"test_patch": added("tests/l", "120000", "/etc/passwd")}, "test_patch: tests/l is a link"),
        ({"patch": added("sub", "160000", f"Subproject commit {'1' * 40}")}, "patch: sub is a link or a submodule"),
        ({"patch": "nothing like a patch"}, "patch: git apply"),
        ({"patch": ""}, "patch: changes of sources, and of these alone, are wanted, got none"),
        ({"patch": added("tests/test_more.py")}, "patch: changes of sources, .* got tests/test_more.py"),
        ({"patch": None}, "patch: a text is wanted, got NoneType"),
        ({"base_commit": "1" * 40}, "base_commit: no commit 1111"),
        ({"base_commit": "--help"}, "base_commit: a commit's name"),
        ({"repo": "../own"}, "repo: owner/name is wanted"),
        ({"repo": "own/other"}, "repo: no clone of own/other"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: nothing in it"),
        ({"FAIL_TO_PASS": "{"}, "FAIL_TO_PASS: a list of names is wanted"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: a list of names is wanted"),
        ({"PASS_TO_PASS": ["tests/none.py::test_a"]}, "PASS_TO_PASS: 'tests/none.py::test_a' is in no test file"),
        ({"FAIL_TO_PASS": ["test_back (a.B)"]}, "FAIL_TO_PASS: .* is defined in 0 test files"),
    ],
)
def test_rows_that_make_no_task_are_told_with_line_and_field(
    change: dict[str, Any], said: str, rows: dict[str, dict[str, Any]], clones: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps({**rows["bench"], **change}) + "\n")
    flags = [f"--rows={tmp_path / 'rows.jsonl'}", f"--repositories={clones}", f"--to={tmp_path / 'tasks.jsonl'}"]
    assert main(["swe", *flags]) == 2
    with pytest.raises(ValueError, match=f"rows.jsonl, line 1: {said}"):
        raise ValueError(capsys.readouterr().err)


def test_a_binary_file_is_refused_where_a_patch_brings_it(
    rows: dict[str, dict[str, Any]], clones: Path, tmp_path: Path
) -> None:
    here = clones / "own__pathlen"
    (here / "b.dat").write_bytes(b"\xff\xfe\x00")
    git(here, "add", "b.dat")
    patch = git(here, "diff", "--cached", "--binary")
    git(here, "rm", "-q", "-f", "b.dat")
    with pytest.raises(ValueError, match=r"test_patch: b\.dat is not UTF-8 text"):
        read({**rows["bench"], "test_patch": rows["bench"]["test_patch"] + patch}, clones, tmp_path)


def test_nothing_that_a_clone_sets_is_run(rows: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    make(tmp_path / "clones")
    here, seen = tmp_path / "clones" / "own__pathlen", tmp_path / "seen"
    row = {**rows["bench"], "base_commit": git(here, "rev-parse", "HEAD^").strip()}
    for key in ("core.fsmonitor", "filter.f.smudge", "filter.f.clean", "filter.f.process", "diff.f.textconv", "diff.external"):
        git(here, "config", key, f"touch {seen}")
    (here / ".git" / "info" / "attributes").write_text("* filter=f diff=f\n")
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (here / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {seen}\n")
        (here / ".git" / "hooks" / hook).chmod(0o755)
    assert NEW in read(row, tmp_path / "clones", tmp_path / "store")["sources"]
    assert not seen.exists()
    subprocess.run(["git", "-C", str(here), "status"], check=False, capture_output=True)
    assert seen.exists()  # it would have
    assert not list((tmp_path / "store").rglob("*.py"))


@pytest.mark.parametrize("path", ["..", ".git", "a/../../b"])
def test_a_tree_whose_paths_leave_it_is_refused(
    path: str, rows: dict[str, dict[str, Any]], clones: Path, tmp_path: Path
) -> None:
    here = clones / "own__pathlen"
    blob = git(here, "rev-parse", f"HEAD:{WALK}").strip()
    entry = b"100644 " + path.encode() + b"\0" + bytes.fromhex(blob)
    (tmp_path / "tree").write_bytes(entry)
    tree = git(here, "hash-object", "-t", "tree", "--literally", "-w", str(tmp_path / "tree")).strip()
    base = git(here, "commit-tree", tree, "-m", "x").strip()
    with pytest.raises(ValueError, match="git read-tree"):
        read({**rows["bench"], "base_commit": base}, clones, tmp_path / "store")


@pytest.mark.parametrize("packed", [False, True])
def test_a_mirror_without_the_commit_of_its_name_is_read_at_its_head(
    packed: bool, rows: dict[str, dict[str, Any]], clones: Path, tmp_path: Path
) -> None:
    git(clones, "clone", "-q", "--bare", "--no-local", "own__pathlen", str(tmp_path / "own__pathlen.00000000.git"))
    git(tmp_path / "own__pathlen.00000000.git", *(["pack-refs", "--all"] if packed else ["version"]))
    assert (tmp_path / "own__pathlen.00000000.git" / "packed-refs").exists() or not packed
    row = {**rows["smith"], "repo": "mirrors/own__pathlen.00000000"}
    assert read(row, tmp_path, tmp_path / "store")["base_commit"] == rows["gym"]["commit_hash"]
    (tmp_path / "own__pathlen.00000000.git").rename(tmp_path / "pathlen.git")
    with pytest.raises(ValueError, match="no commit 00000000"):
        read(row, tmp_path, tmp_path / "other")
