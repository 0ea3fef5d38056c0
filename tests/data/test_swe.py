"""Bugs planted in a package with tests: what they change, which of them make tasks, and what a row tells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from package_with_tests import FILES, write

from jaxagent.__main__ import main
from jaxagent.data.mutants import mutants, patch
from jaxagent.data.packages import fetch, read_package
from jaxagent.data.swe import kept, statement
from jaxagent.data.trials import Outcomes


def changed(source: str) -> dict[str, set[str]]:
    """The sources that the bugs make, by kind."""
    found: dict[str, set[str]] = {}
    for one in mutants(source.encode()):
        found.setdefault(one.kind, set()).add(one.apply(source.encode()).decode())
    return found


@pytest.mark.parametrize(
    ("source", "kind", "becomes"),
    [
        ("x = a < b\n", "comparison", {"x = a <= b\n"}),
        ("x = a  not  in b\n", "comparison", {"x = a  in b\n"}),
        ("x = 'é' + (a) * b\n", "arithmetic", {"x = 'é' - (a) * b\n", "x = 'é' + (a) // b\n"}),
        ("x = (a) and (b)\n", "logic", {"x = (a) or (b)\n"}),
        ("if a or b: pass\n", "condition", {"if not (a or b): pass\n"}),
        ("x = f(41, 'é', 1)\n", "off by one", {"x = f(42, 'é', 1)\n", "x = f(41, 'é', 2)\n"}),
        ("x = f(a, 'é', 1)\n", "swapped arguments", {"x = f('é', a, 1)\n"}),
        ("def f():\n    return 3\n", "lost result", {"def f():\n    return None\n"}),
        ("x = 1\ny = [\n  2]\n", "left out", {"y = [\n  2]\n", "x = 1\n"}),
    ],
)
def test_a_bug_changes_one_place_and_leaves_the_rest(source: str, kind: str, becomes: set[str]) -> None:
    assert changed(source)[kind] == becomes


@pytest.mark.parametrize(
    "source", ["", "x = True\n", "def f():\n    return None\n", "x = f(*a, b)\n", "'''1 < 2'''\n", "x = 0x1F\n"]
)
def test_some_sources_have_no_place_for_one(source: str) -> None:
    assert mutants(source.encode()) == []


def test_every_bug_compiles_and_its_patch_is_one_that_git_applies(tmp_path: Path) -> None:
    source = FILES["src/pathlen/walk.py"]
    found = mutants(source.encode())
    assert len(found) > 8
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for one in found:
        wrong = one.apply(source.encode()).decode()
        compile(wrong, "walk.py", "exec")
        (tmp_path / "walk.py").write_text(wrong)
        text = patch("walk.py", wrong, source)
        subprocess.run(["git", "apply"], input=text.encode(), cwd=tmp_path, check=True)
        assert (tmp_path / "walk.py").read_text() == source


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("swe")
    sdist = folder / "pathlen-1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(write(folder / "pathlen-1"), "pathlen-1")
    (folder / "empty").mkdir()
    (folder / "all.txt").write_text(f"# two sources\n{folder / 'empty'}\n{sdist}  # this one is good\n")
    command = [f"--source={folder / 'all.txt'}", f"--to={folder / 'tasks.jsonl'}", "--count=4", "--timeout=60"]
    done = subprocess.run([sys.executable, "-m", "jaxagent", "swe", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pathlen: 5 tests that pass; 4 tasks of" in done.stdout
    assert re.search(r"4 tasks of 1 packages, \d+% of the bugs tried, \d+\.\d\d a CPU-second", done.stdout)
    assert f"left out: {folder / 'empty'}: no tests in it" in done.stderr
    yield [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]


def test_rows_have_a_bug_that_some_tests_notice_and_nothing_that_tells_it(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 4
    assert len({row["instance_id"] for row in rows}) == 4
    for row in rows:
        fails, passes = json.loads(row["FAIL_TO_PASS"]), json.loads(row["PASS_TO_PASS"])
        assert fails and passes and not set(fails) & set(passes)
        assert (
            len(fails) + len(passes) == 5
        )  # the flaky one is in neither, nor the one whose name is another in every interpreter
        assert "tests/test_walk.py::test_constant" in passes
        assert set(row["files"]) == set(FILES) - {"tests/test_walk.py"}
        assert row["test_files"] == {"tests/test_walk.py": FILES["tests/test_walk.py"]}
        differs = [path for path, text in row["files"].items() if text != FILES[path]]
        assert len(differs) == 1 and f"+++ b/{differs[0]}" in row["patch"]
        assert "test_" not in row["problem_statement"] and "pathlen" in row["problem_statement"]


def test_what_rows_say_is_what_pytest_says_of_their_trees_with_the_bug(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for number, row in enumerate(rows):
        for path, text in {**row["files"], **row["test_files"]}.items():
            (tmp_path / str(number) / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(number) / path).write_text(text)
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-o", "pythonpath=src", "--rootdir=."]
        said = subprocess.run(
            command,
            cwd=tmp_path / str(number),
            env={**os.environ, "HOME": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        said = re.sub(r" at 0x[0-9a-f]+", "", said)
        for field, word in (("FAIL_TO_PASS", "FAILED"), ("PASS_TO_PASS", "PASSED")):
            assert all(re.search(rf"^{word} {re.escape(name)}( |$)", said, re.MULTILINE) for name in json.loads(row[field]))
        seen = [line.strip() for line in row["problem_statement"].splitlines() if line.startswith("    ")]
        assert seen and all(line in said for line in seen)
    assert any("assert " in row["problem_statement"] for row in rows)


@pytest.mark.parametrize(
    ("passed", "task"),
    [({"a", "b", "c"}, True), ({"a", "b", "c", "d"}, False), ({"a"}, False), (set(), False), ({"a", "b"}, True)],
)
def test_a_bug_is_kept_that_some_tests_notice_and_not_most(passed: set[str], task: bool) -> None:
    assert kept(Outcomes(passed), {"a", "b", "c", "d"}) is task
    assert kept(None, {"a"}) is False


def test_a_statement_names_no_test_and_no_address() -> None:
    said = statement(
        "towns",
        "assert 3 == 4\n +  where 3 = <function people at 0x7f8a>('Ulm')\ntests/test_towns.py:7: in test_people",
    )
    assert "assert 3 == 4" in said and "<function people>('Ulm')" in said and "test_" not in said
    assert "wrong results" in statement("towns", "")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a/__init__.py": "", "a/b.py": "x = 1\n"}, "no tests in it"),
        ({"test_a.py": "def test_a(): pass\n"}, "no package and no module"),
    ],
)
def test_a_source_that_makes_no_tasks_is_told(
    files: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in files.items():
        (tmp_path / "x" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / path).write_text(text)
    assert main(["swe", f"--source={tmp_path / 'x'}", f"--to={tmp_path / 't.jsonl'}"]) == 2
    assert said in capsys.readouterr().err
    (tmp_path / "none.txt").write_text("# nothing\n")
    assert main(["swe", f"--source={tmp_path / 'none.txt'}", f"--to={tmp_path / 't.jsonl'}"]) == 2
    assert "no source stands there" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no such directory or archive"):
        read_package(tmp_path / "nowhere")


def test_a_pinned_name_that_no_index_has_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"pathlen==9: no sdist to be had by -m pip download"):
        fetch("pathlen==9", tmp_path)
    (tmp_path / "pathlen-9").mkdir(exist_ok=True)
    (tmp_path / "pathlen-9" / "pathlen-9.tar.gz").touch()
    assert fetch("pathlen==9", tmp_path) == tmp_path / "pathlen-9" / "pathlen-9.tar.gz"  # and is not fetched twice


def test_an_installed_package_with_its_tests_inside_is_a_tree_of_its_own(tmp_path: Path) -> None:
    home = tmp_path / "towns"
    (home / "tests").mkdir(parents=True)
    for path in ("__init__.py", "people.py", "tests/__init__.py", "tests/test_people.py"):
        (home / path).write_text("x = 1\n")
    package = read_package(home)
    assert (package.name, package.roots) == ("towns", (".",))
    assert package.sources == ("towns/__init__.py", "towns/people.py")
    assert package.tests == ("towns/tests/__init__.py", "towns/tests/test_people.py")
