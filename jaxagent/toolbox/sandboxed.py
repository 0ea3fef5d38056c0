"""Tools that work in the episode's sandbox session: programs, files, tests, SQL. Here are their faces; nothing runs here."""

from __future__ import annotations

import shlex
from pathlib import Path

from jaxagent.toolbox import database
from jaxagent.toolbox.kit import GRACE_S, Kit, Task, Workplace, text_of
from jaxagent.tools import Tool, ToolFailed, tool

_LINES = 200  # that one look at a file shows at most
_SQL_ROWS = 50
# Plugins of this installation are none of the task's business, and cost seconds in every run.
PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -q -x -p no:cacheprovider"


def python(timeout_s: float = 10.0) -> Kit:
    """The kit `python`. Args: timeout_s: of one program."""

    def tools(place: Workplace, task: Task) -> list[Tool]:
        async def python(code: str) -> str:
            """Runs Python and returns what it prints and the value of its last expression. Names stay defined between calls."""
            return text_of(await (await place.session()).exec(code, timeout_s=timeout_s))

        return [tool(python, timeout_s + GRACE_S)]

    return Kit(tools, runs_code=True)


def bash(timeout_s: float = 10.0) -> Kit:
    """The kit `bash`. Args: timeout_s: of one script."""

    def tools(place: Workplace, task: Task) -> list[Tool]:
        async def bash(command: str) -> str:
            """Runs a bash script. Its directory, variables and functions stay between calls."""
            return text_of(await (await place.session()).exec(command, language="bash", timeout_s=timeout_s))

        return [tool(bash, timeout_s + GRACE_S)]

    return Kit(tools, runs_code=True)


def files(root: str = ".", timeout_s: float = 10.0) -> Kit:
    """The kit `files`: look at, search and change the files of the session's work directory.

    Args: root: the directory that paths are relative to. What lies outside the work directory is the sandbox's to refuse.
    """

    def tools(place: Workplace, task: Task) -> list[Tool]:
        def place_of(path: str) -> str:
            return path if path.startswith("/") else str(Path(root, path))

        async def shell(*words: str) -> str:
            script = f"( {' '.join(map(shlex.quote, words))} )"  # apart from the shell whose state the bash tool keeps
            return text_of(await (await place.session()).exec(script, language="bash", timeout_s=timeout_s))

        async def read(path: str) -> str:
            return (await (await place.session()).read_file(place_of(path))).decode(errors="replace")

        async def view(path: str, start: int = 1, lines: int = 100) -> str:
            """Shows lines of a file with their numbers."""
            every = (await read(path)).splitlines()
            first = max(1, start)
            chosen = every[first - 1 : first - 1 + max(1, min(lines, _LINES))]
            if not chosen:
                raise ToolFailed(f"error: {path} has {len(every)} lines")
            shown = "\n".join(f"{number:>5}  {line}" for number, line in enumerate(chosen, first))
            left = len(every) - (first - 1) - len(chosen)
            return shown + (f"\n[{left} more lines]" if left else "")

        async def list_files(path: str = ".") -> str:
            """Lists the files below a directory."""
            return await shell("command", "find", place_of(path), "-type", "f", "-not", "-path", "*/.*", "-size", "-1024k")

        async def search_files(text: str, path: str = ".") -> str:
            """Finds the lines below a directory that contain a text, as path:number:line."""
            words = ("command", "grep", "-rnIF", "--exclude-dir=.?*", "-m", "50", "-e", text, "--", place_of(path))
            try:
                return await shell(*words)
            except ToolFailed as failure:
                if str(failure).endswith("exit code 1"):  # of grep: nothing found
                    return "no such line"
                raise

        async def edit(path: str, old: str, new: str) -> str:
            """Replaces a text that occurs exactly once in a file by another."""
            text = await read(path)
            count = text.count(old) if old else 0
            if count != 1:
                raise ToolFailed(f"error: the old text must occur exactly once in {path}, it occurs {count} times")
            await (await place.session()).write_file(place_of(path), text.replace(old, new).encode())
            return f"changed {path}"

        async def create(path: str, content: str) -> str:
            """Writes a file, in place of one that is there."""
            await (await place.session()).write_file(place_of(path), content.encode())
            return f"wrote {path}"

        limit_s = timeout_s + GRACE_S
        return [tool(function, limit_s) for function in (view, list_files, search_files, edit, create)]

    return Kit(tools, runs_code=True)


def tests(command: str = PYTEST, root: str = ".", timeout_s: float = 60.0) -> Kit:
    """The kit `tests`. Args: command: what runs them, in `root`; a path that the policy names is put after it."""

    def tools(place: Workplace, task: Task) -> list[Tool]:
        async def run_tests(path: str = "") -> str:
            """Runs the tests, or those of one file."""
            script = f"( cd {shlex.quote(root)} && {command} {shlex.quote(path) if path else ''} )"
            return text_of(await (await place.session()).exec(script, language="bash", timeout_s=timeout_s))

        return [tool(run_tests, timeout_s + GRACE_S)]

    return Kit(tools, runs_code=True)


def sql(script: str = "", read_only: bool = True, rows: int = _SQL_ROWS, timeout_s: float = 10.0) -> Kit:
    """The kit `sql`: a SQLite database in memory for every episode, in its sandbox session, which must be isolated.

    Args:
        script: a file of SQL that makes the database. A task's own SQL under the key `database` comes after it.
        read_only: refuse whatever changes it.
        rows: that an answer shows at most.
    """
    common = ""
    if script:
        if not Path(script).is_file():
            raise ValueError(f"toolbox.sql.script={script}: no such file; SQL that makes the database is wanted")
        common = Path(script).read_text(encoding="utf-8")

    def options(task: Task) -> dict[str, object]:
        return {"script": common + "\n" + str(task.get("database", "")), "read_only": read_only, "rows": rows}

    def tools(place: Workplace, task: Task) -> list[Tool]:
        async def sql(query: str) -> str:
            """Runs one SQL statement on a SQLite database; sqlite_master lists its tables."""
            reply = await (await place.session()).call("sql", {"query": query}, timeout_s=timeout_s)
            if reply.outcome != "ok":
                raise ToolFailed(f"error: {reply.error or reply.outcome}")
            return str(reply.value)

        return [tool(sql, timeout_s + GRACE_S)]

    return Kit(tools, runs_code=True, functions=database.__name__, options=options)
