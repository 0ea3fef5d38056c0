"""Programs, files, tests and SQL of an episode, in a real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import called

from jaxagent.toolbox import database
from jaxagent.toolbox.box import Toolbox
from jaxagent.tools import dispatch_all
from jaxagent.types import ToolCall, ToolRecord
from sandbox_client import EmbeddedServer, SandboxClient, SandboxStartError

SCRIPT = "create table town(name text, people int); insert into town values ('Ulm', 129), ('Bonn', 336), ('Hof', null);"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    try:
        with EmbeddedServer(functions=(database.__name__,), code="require", min_isolation="L2") as running:
            yield running
    except SandboxStartError as error:
        pytest.skip(f"no isolation here: {error}")


def played(server: EmbeddedServer, box: Toolbox, task: dict[str, Any], *calls: tuple[str, dict[str, Any]]) -> list[ToolRecord]:
    async def play() -> list[ToolRecord]:
        async with SandboxClient(server.url, server.token) as sandbox:
            place = box.workplace(f"sandboxed-{id(calls)}", sandbox, task)
            try:
                tools = box.tools(place, task)
                return await dispatch_all(tools, [ToolCall(name, arguments) for name, arguments in calls])
            finally:
                await place.close()

    return asyncio.run(play())


def test_python_bash_and_files_share_one_directory_and_keep_their_state(server: EmbeddedServer) -> None:
    box = Toolbox(("python", "bash", "files"))
    task = {"files": {"src/a.py": "def double(x):\n    return x + x\n\n\nLAST = 1\n"}}
    records = played(
        server,
        box,
        task,
        ("list_files", {}),
        ("view", {"path": "src/a.py", "start": 2, "lines": 1}),
        ("view", {"path": "src/a.py", "start": 99}),
        ("search_files", {"text": "x + x"}),
        ("search_files", {"text": "; echo $HOME"}),
        ("edit", {"path": "src/a.py", "old": "x + x", "new": "3 * x"}),
        ("edit", {"path": "src/a.py", "old": "x", "new": "y"}),
        ("edit", {"path": "no.py", "old": "x", "new": "y"}),
        ("create", {"path": "deep/er/b.txt", "content": "é"}),
        ("bash", {"command": "cat deep/er/b.txt; cd src; n=5"}),
        ("bash", {"command": "basename $PWD; echo $n"}),
        ("python", {"code": "import sys; sys.path.insert(0, 'src'); import a; y = a.double(4)"}),
        ("python", {"code": "y"}),
    )
    assert [record.result for record in records] == [
        "./src/a.py",
        "    2      return x + x\n[3 more lines]",
        "error: src/a.py has 5 lines",
        "./src/a.py:2:    return x + x",
        "no such line",
        "changed src/a.py",
        "error: the old text must occur exactly once in src/a.py, it occurs 2 times",
        records[7].result,
        "wrote deep/er/b.txt",
        "é",
        "src\n5",
        "no output",
        "12",
    ]
    assert "no.py" in records[7].result and records[7].outcome == "error"


def test_the_tests_of_a_task_can_be_run(server: EmbeddedServer) -> None:
    files = {
        "m.py": "def half(x):\n    return x // 2\n",
        "test_m.py": "from m import half\n\ndef test_half():\n    assert half(3) == 1.5\n",
    }
    box = Toolbox(("tests", "files"))
    run = ("run_tests", {"path": "test_m.py"})
    fixed = ("edit", {"path": "m.py", "old": "//", "new": "/"})
    hostile = ("run_tests", {"path": "; echo pwned #"})
    before, _, after, quoted = played(server, box, {"files": files}, run, fixed, run, hostile)
    assert before.outcome == "error" and "1 failed" in before.result
    assert after.outcome == "ok" and "1 passed" in after.result
    assert "pwned\n" not in quoted.result


def test_sql_answers_in_rows_and_its_faults_can_be_read(server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "towns.sql").write_text(SCRIPT)
    box = Toolbox({"sql": {"script": str(tmp_path / "towns.sql"), "rows": 2, "timeout_s": 1}})
    task = {"database": "create table more(x); insert into more values (x'00ff');"}
    queries = (
        "select name, people from town order by name",
        "select people from town where name = 'Hof'",
        "select name from town where people > 1000",
        "select x from more",
        "selec 1",
        "select 1; select 2",
        "delete from town",
        "attach 'x.db' as x",
        "pragma query_only = off",
        "select load_extension('x')",
        "create virtual table v using fts5(a)",
        "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n",
    )
    records = played(server, box, task, *(("sql", {"query": query}) for query in queries))
    assert [record.result for record in records[:4]] == [
        "name | people\nBonn | 336\nHof | NULL\n[more than 2 rows]",
        "people\nNULL",
        "name\nno rows",
        "x\n00ff",
    ]
    assert [record.outcome for record in records[4:]] == ["error"] * 8
    said = [record.result for record in records[4:]]
    assert "syntax error" in said[0]
    assert all("not authorized" in text for text in said[2:7])
    assert "interrupted" in said[7] or "stopped" in said[7]


def test_a_database_that_may_be_changed_is_the_episodes_own(server: EmbeddedServer) -> None:
    box = Toolbox({"sql": {"read_only": False}})
    count = ("sql", {"query": "select count(*) from town"})
    added = ("sql", {"query": "insert into town values ('Gera', 90)"})
    forbidden = ("sql", {"query": "attach '/tmp/x.db' as x"})
    for _ in range(2):
        one, two, three, four = played(server, box, {"database": SCRIPT}, count, added, count, forbidden)
        assert (one.result, two.result, three.result) == ("count(*)\n3", "done; 1 rows changed", "count(*)\n4")
        assert "not authorized" in four.result


def test_specs_are_told_without_a_sandbox() -> None:
    (record,) = called(Toolbox("sql"), ("sql", {"request": "1"}))
    assert record.outcome == "bad_arguments"
