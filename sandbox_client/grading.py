"""Graders: the trainer's own program judges a session's files, where the session's program has never been.

A grader is a fresh child of another zygote, under another uid where root has started the server. The tests are written
there and nowhere else, the session's files come as data, and the reward goes back on the child's line to the server: not
by a file or by output, which what is graded could write. What is graded runs by `run_submission` only, in a Landlock
domain that sees its own directory and the system's tools, and neither tests nor grader.
"""

import math
from pathlib import PurePosixPath
from typing import Any

from . import wire
from .fusion import decoded_files, wanted_timeout
from .line import Child, ChildDied
from .metrics import Metrics
from .pool import Pool
from .sessions import Gate, JailedSession, Refused, Reply, Spec, execute, killed, lost, no_child

_SUBMISSION, _TESTS = "submission", "tests"


def _inside(path: Any) -> str:
    if type(path) is not str or not path or "\0" in path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"wanted a path inside the work directory, got {path!r}")
    return path


class Grader:
    """Answers /v1/sessions/{id}/grade."""

    def __init__(self, pool: Pool, gate: Gate, metrics: Metrics) -> None:
        self._pool, self._gate, self._metrics = pool, gate, metrics

    async def grade(self, session: JailedSession, head: Reply, deadline: float) -> Reply:
        """Returns the reply with `reward`, None where the grader gave none. Raises Refused, ValueError."""
        code, timeout_s = wire.take(head, "code", str), wanted_timeout(head, self._gate.longest_s)
        tests = {_inside(path): content for path, content in decoded_files(head.get("files")).items()}
        wanted = [_inside(path) for path in wire.take({"collect": [], **head}, "collect", list)]
        async with self._gate.enter(deadline):
            found, missing = await self._collect(session, wanted)
            try:
                child = await self._pool.take()
            except ChildDied as death:
                raise no_child(death) from None
            try:
                for place, files in ((_SUBMISSION, found), (_TESTS, tests)):
                    for path, content in files.items():
                        await self._write(child, f"{place}/{path}", content)
                work = {"code": code, "language": "python", "timeout_s": timeout_s, "once": True, "grade": True}
                reply = await execute(child, work, wire.EXEC_OUTPUT_BYTES, self._pool.memory_bytes)
            except ChildDied as death:
                raise (killed() if death.cause == "killed" else lost("the server is stopping", by_program=False)) from None
            finally:
                child.kill("closed")
        reply["reward"] = _checked_reward(reply)
        self._metrics.observe("grade", reply)
        return {**reply, "missing": missing, "session_lost": False}

    async def _collect(self, session: JailedSession, wanted: list[str]) -> tuple[dict[str, bytes], list[str]]:
        """Returns the session's files, and which of them are not to be had."""
        found: dict[str, bytes] = {}
        room = wire.FILE_MAX_BYTES
        for path in wanted:
            try:
                found[path] = await session.move_file(path, None, room)
            except Refused as refusal:
                if refusal.status == 410:
                    raise
            room -= len(found.get(path, b""))
        return found, [path for path in wanted if path not in found]

    async def _write(self, child: Child, path: str, content: bytes) -> None:
        await JailedSession("", "", Spec(), child, self._pool.memory_bytes).move_file(path, content)


def _checked_reward(reply: Reply) -> float | None:
    """Returns the reward of a grader that ran to its end and gave a finite one; otherwise makes the reply a failure."""
    reward = reply.pop("reward", None)
    if reply["outcome"] != "ok":
        return None
    if type(reward) not in (int, float) or not math.isfinite(reward):
        error = f"wanted the grader to set `reward` to a finite number, got {reward!r:.100}"
        reply |= {"outcome": "program_error", "error": error}
        return None
    return float(reward)
