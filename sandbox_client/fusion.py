"""SandboxFusion's one question, /run_code: a program in any language found here, in a child of its own, answered in its words.

Fields of ours stand beside SandboxFusion's: `outcome`, `dropped_bytes`, `level`.
"""

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Mapping
from typing import Any

from . import wire
from .languages import Language
from .line import Child, ChildDied
from .metrics import Metrics
from .pools import Pools
from .sessions import Gate, JailedSession, Refused, Reply, Spec, busy, execute, killed, no_child

_TIMEOUT_S = 10.0


def wanted_timeout(head: Reply, most_s: float, key: str = "timeout_s") -> float:
    """Returns the time limit that a request names. Raises ValueError for one that is not to be had."""
    value: float = wire.take(head, key, float, int)
    if not 0 < value <= most_s:
        raise ValueError(f"wanted {key!r} above 0 and at most {most_s:g} (the server's --max-timeout-s), got {value}")
    return value


def decoded_files(value: Any) -> dict[str, bytes]:
    """Returns path -> content from path -> base64. Raises ValueError."""
    try:
        return {path: base64.b64decode(text or "", validate=True) for path, text in (value or {}).items()}
    except (binascii.Error, AttributeError, TypeError) as problem:
        raise ValueError(f"wanted 'files' as path -> base64, got {problem}") from None


class Fusion:
    """Answers /run_code."""

    def __init__(self, pools: Pools, gate: Gate, languages: Mapping[str, Language], metrics: Metrics) -> None:
        self._pools, self._gate, self._languages, self._metrics = pools, gate, languages, metrics

    async def run_code(self, head: Reply, deadline: float | None) -> bytes:
        """Returns the reply. `deadline`: when it is too late to start, on the loop's clock. Raises Refused, ValueError."""
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout(head, "run_timeout")
        name = wire.take(head, "language", str)
        language = self._languages.get(name)
        if language is None and name != "python":
            known = ", ".join(("python", *self._languages))
            raise Refused(422, "language_unknown", f"no language {name!r} here; there are {known}")
        memory_mb = head.get("memory_limit_MB", -1)
        work = {
            "code": wire.take(head, "code", str),
            "language": name,
            "timeout_s": timeout_s,
            "once": True,
            "memory_bytes": memory_mb << 20 if type(memory_mb) is int and memory_mb > 0 else 0,
        }
        stdin = wire.take(head, "stdin", str, type(None)) or ""
        files = decoded_files(head.get("files"))
        asked = loop.time()
        until = asked + timeout_s + wire.CLIENT_MARGIN_S if deadline is None else deadline
        async with self._gate.enter(until):
            turn = loop.time()
            try:
                child = await self._pools.take(code=work["code"] if language is None else "")
            except ChildDied as death:
                raise no_child(death) from None
            start = loop.time()
            try:
                for path, content in files.items():
                    await self._move(child, path, content)
                compiled = None
                if language:
                    compiled = await self._prepare(child, language, work, head)
                if compiled and compiled["outcome"] != "ok":
                    reply = compiled
                else:
                    reply = await execute(
                        child, work, wire.RUN_OUTPUT_BYTES, self._memory, stdin.encode("utf-8", "surrogatepass")
                    )
                fetched = {} if reply["session_lost"] else await self._fetch(child, head)
            except ChildDied as death:
                if death.cause == "killed":
                    raise killed() from None
                raise busy("the server is stopping") from None
            finally:
                child.kill("closed")
        self._metrics.observe("run_code", reply)
        self._metrics.time("queue", turn - asked)
        self._metrics.time("set_up", start - turn)
        self._metrics.time("total", loop.time() - asked)
        return wire.encode({**fusion_words(reply, compiled), "files": fetched, "level": self._pools.level})

    def _timeout(self, head: Reply, key: str) -> float:
        most_s = self._gate.longest_s
        return wanted_timeout({key: min(_TIMEOUT_S, most_s), **head}, most_s, key)

    @property
    def _memory(self) -> int:
        return self._pools.limits.memory_bytes

    async def _move(self, child: Child, path: str, content: bytes | None, room: int = wire.FILE_MAX_BYTES) -> bytes:
        return await JailedSession("", "", Spec(), child, self._memory).move_file(path, content, room)

    async def _prepare(self, child: Child, language: Language, work: Reply, head: Reply) -> Reply | None:
        """Writes the program, compiles it where that is needed, and turns `work` into its run."""
        await self._move(child, language.file, work["code"].encode("utf-8", "surrogatepass"))
        if language.address_bytes:
            work["memory_bytes"] = 0  # it speaks of address space
        work |= {"command": language.run, "address_bytes": language.address_bytes, "libraries": language.libraries}
        work["code"] = ""
        if not language.compile:
            return None
        timeout_s = self._timeout(head, "compile_timeout")
        build = {**work, "once": False, "timeout_s": timeout_s, "command": language.compile}
        build["address_bytes"] = max(language.address_bytes, self._memory)
        return await execute(child, build, wire.EXEC_OUTPUT_BYTES, self._memory)

    async def _fetch(self, child: Child, head: Reply) -> dict[str, str]:
        fetched, room = {}, wire.RUN_OUTPUT_BYTES
        for path in head.get("fetch_files") or ():
            with contextlib.suppress(Refused):  # what the program did not write is not there
                content = await self._move(child, str(path), None, room)
                room -= len(content)
                fetched[path] = base64.b64encode(content).decode()
        return fetched


def _result(reply: Reply) -> Reply:
    late = reply["outcome"] == "program_timeout"
    return {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": reply["elapsed_s"],
        "return_code": None if late else _code(reply),
        "stdout": reply["stdout"],
        "stderr": reply["stderr"],
    }


def _code(reply: Reply) -> int:
    code: int | None = reply["exit_code"]
    if code is None:
        return 0 if reply["outcome"] == "ok" else -9 if reply["session_lost"] else 1
    return code


def fusion_words(reply: Reply, compiled: Reply | None = None) -> Reply:
    """Returns an exec's reply in SandboxFusion's form. It knows no outcome but a return code or a time limit."""
    good = reply["outcome"] != "program_timeout" and _code(reply) == 0
    return {
        "status": "Success" if good else "Failed",
        "message": reply["error"] or "",
        "compile_result": _result(compiled) if compiled else None,
        "run_result": None if reply is compiled else _result(reply),
        "executor_pod_name": None,
        "outcome": reply["outcome"],
        "dropped_bytes": reply["dropped_bytes"],
    }
