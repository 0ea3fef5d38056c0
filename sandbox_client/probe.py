"""Attacks that the server makes on itself before it serves: a level is what has stopped them, not what is installed.

Each payload runs in a locked child like any program and ends in an expression: "" when it was stopped, otherwise what
it reached. The suite is also `sandbox-server --self-test`.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .attacks import USE, Attack
from .attacks_reach import REACH
from .groups import Limits
from .line import Child, ChildDied
from .pool import Pool
from .sessions import Reply, execute

MakePool = Callable[[str, Limits, int], Pool]  # level, limits, warm children

_SMALL_BYTES = 96 << 20
ATTACKS = (*USE, *REACH)
LADDER = ("L3", "L2", "L1")
_EVERY = ("a kernel of its own", "a share of the CPU per session: only each process's CPU time is bounded")
_NO_CGROUP = ("a bound on a session's total memory: only each process is bounded",)
MISSING = {
    "L3": _EVERY,
    "L2": (*_EVERY, *_NO_CGROUP),
    "L1": (
        *_EVERY,
        *_NO_CGROUP,
        "a disk quota: only each file is bounded",
        "a process limit per session: all sessions share one",
        "private Unix sockets: they are denied",
        "hiding what exists: names of host files and processes can be guessed at, not read",
    ),
    "L0": ("every guarantee: programs run as this user, with this user's files and network",),
}


@contextlib.contextmanager
def _bait(pool: Pool) -> Iterator[dict[str, Any]]:
    """Sets out what the payloads try to reach, and yields where it is."""
    canary = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as place, socket.socket() as tcp, contextlib.ExitStack() as stack:
        Path(place).chmod(0o755)
        secret = Path(place, "secret")
        secret.write_text(canary)
        secret.chmod(0o644)  # only the jail hides it
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        abstract = f"\0sandbox-{canary}"
        line = stack.enter_context(socket.socket(socket.AF_UNIX))
        line.bind(abstract)
        line.listen()
        os.environ[f"CANARY_{canary}"] = canary
        stack.callback(os.environ.pop, f"CANARY_{canary}")
        limits = pool.limits
        yield {
            "secret": str(secret),
            "place": place,
            "canary": canary,
            "tcp": tcp.getsockname()[1],
            "abstract": abstract,
            "pids": [os.getpid(), os.getppid(), *pool.process_ids()],
            "processes": limits.processes * (4 if pool.level == "L1" else 1),  # there all sessions share one count
            "memory_mb": limits.memory_bytes >> 20,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
        }


async def _attack(pool: Pool, attack: Attack, bait: dict[str, Any]) -> str:
    """Returns "" when the attack was stopped, otherwise what it reached."""
    try:
        child = await pool.take()
        try:
            reply = await _strike(child, attack, bait, pool.limits.memory_bytes)
            if attack.ends == "twice":
                child.kill("closed")
                await child.ended
                child = await pool.take()
                reply = await _strike(child, attack, bait, pool.limits.memory_bytes)
        finally:
            child.kill("closed")
    except ChildDied as death:
        return f"no child could be started ({death.cause})"
    await child.ended
    if not child.out.at_end:
        return "a process that outlived its session"
    return judged(attack, reply)


def judged(attack: Attack, reply: Reply) -> str:
    """Returns "" when the reply shows that the attack was stopped, otherwise what it reached."""
    if attack.ends == "flood":
        return "" if reply["dropped_bytes"] and len(reply["stdout"]) < 2 * wire.EXEC_OUTPUT_BYTES else "all of it"
    if attack.ends == "killed":
        return "" if reply["outcome"] == "program_timeout" and reply["session_lost"] else str(reply["outcome"])
    if attack.ends == "lost":
        return "" if reply["outcome"] == "program_error" and reply["session_lost"] else str(reply["outcome"])
    if reply["session_lost"]:
        return ""  # it was killed for trying
    return str(reply["error"] or reply["value"].strip("'\""))


async def _strike(child: Child, attack: Attack, bait: dict[str, Any], memory_bytes: int) -> Reply:
    code = f"import json\nP = json.loads({json.dumps(bait)!r})\n{attack.code}"
    head = {"code": code, "language": "python", "timeout_s": attack.timeout_s}
    return await execute(child, head, wire.EXEC_OUTPUT_BYTES, memory_bytes)


async def _attack_all(pool: Pool, attacks: Sequence[Attack]) -> list[tuple[Attack, str]]:
    with _bait(pool) as bait:
        return list(zip(attacks, await asyncio.gather(*(_attack(pool, a, bait) for a in attacks)), strict=True))


async def run_attacks(pool: Pool, make_pool: MakePool, *, starting: bool) -> list[tuple[Attack, str]]:
    """Makes every attack that the pool's level promises to stop. Returns each with what it reached, "" if stopped."""
    chosen = [a for a in ATTACKS if a.level <= pool.level and (a.at_start or not starting)]
    cheap, costly = ([a for a in chosen if (a.level == "L3") is dear] for dear in (False, True))
    both = await asyncio.gather(_attack_all(pool, cheap), _attack_small(pool, make_pool, costly))
    return [result for results in both for result in results]


async def _attack_small(pool: Pool, make_pool: MakePool, attacks: Sequence[Attack]) -> list[tuple[Attack, str]]:
    """Makes the attacks that must really use the memory: so with a small limit."""
    if not attacks:
        return []
    small = make_pool(pool.level, Limits(memory_bytes=_SMALL_BYTES), 1)
    problem = await small.start()
    results = [(a, problem["reason"]) for a in attacks] if problem else await _attack_all(small, attacks)
    await small.close()
    return results


@dataclass(frozen=True, slots=True)
class Rung:
    """Why a level was not reached."""

    level: str
    reason: str
    remedy: str | None


class FatalError(Exception):
    """What no other level would cure, such as a functions module that cannot be imported."""


async def climb(
    make_pool: MakePool, levels: Sequence[str], limits: Limits, warm: int, *, starting: bool = True
) -> tuple[Pool | None, list[tuple[Attack, str]], list[Rung]]:
    """Returns the pool of the best of `levels` that stops its attacks, their results, and why better ones failed."""
    rungs = []
    for level in levels:
        pool = make_pool(level, limits, warm)
        problem = await pool.start()
        if "fatal" in problem:
            raise FatalError(problem["fatal"])
        if problem:
            rungs.append(Rung(level, problem["reason"], problem["remedy"]))
            await pool.close()
            continue
        results = await run_attacks(pool, make_pool, starting=starting)
        through = [f"{attack.name} ({reached})" for attack, reached in results if reached]
        if not through:
            return pool, results, rungs
        rungs.append(Rung(level, f"attacks got through: {'; '.join(through)}", None))
        await pool.close()
    return None, [], rungs
