"""SQL inside the sandbox: a SQLite database per session, in memory. The sandbox server imports this file, so it is light.

What the policy writes is hostile, and a statement is a program: the kit says `runs_code`, so that the session's process is
isolated as for any other. Within it SQLite's authorizer forbids every other file, extensions and settings, and steps and
memory are bounded; that alone would not hold against a fault in SQLite itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

_READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_NEVER = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_CREATE_VTABLE,
    sqlite3.SQLITE_DROP_VTABLE,
}
_FORBIDDEN_FUNCTIONS = {"load_extension", "fts3_tokenizer", "zeroblob", "randomblob"}
_STEPS = 200_000_000  # of SQLite's machine, for one statement: some seconds
_TICK = 100_000  # steps between two looks at the count
_HEAP_BYTES = 128 << 20
_VALUE_BYTES = 1 << 20


def session_functions(options: dict[str, Any]) -> dict[str, Callable[..., str]]:
    """The tool of one episode, run by the sandbox server.

    Args: options: `script`, SQL that makes the database; `read_only`; `rows`, the most that one answer shows.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(f"PRAGMA hard_heap_limit={_HEAP_BYTES}")
    connection.executescript(options["script"])
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_judge_fn(options["read_only"]))

    def sql(query: str) -> str:
        left = _STEPS // _TICK

        def tick() -> int:
            nonlocal left
            left -= 1
            return int(left < 0)

        connection.set_progress_handler(tick, _TICK)
        try:
            cursor = connection.execute(query)
            names = [column[0] for column in cursor.description or ()]
            found = cursor.fetchmany(options["rows"] + 1)
        finally:
            connection.set_progress_handler(None, 0)
        if not names:
            return f"done; {max(0, cursor.rowcount)} rows changed"
        lines = [" | ".join(names), *(" | ".join(_spoken(value) for value in row) for row in found[: options["rows"]])]
        more = [f"[more than {options['rows']} rows]"] if len(found) > options["rows"] else []
        cursor.close()
        return "\n".join([*lines, *more] if found else [lines[0], "no rows"])

    return {"sql": sql}


def _judge_fn(read_only: bool) -> Callable[..., int]:
    def judge(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action in _NEVER or (read_only and action not in _READING):
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    return judge


def _spoken(value: Any) -> str:
    return "NULL" if value is None else value.hex() if isinstance(value, bytes) else str(value)
