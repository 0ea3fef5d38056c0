"""Whether tasks of `jaxagent swe` can be won, and only by a repair: `python benchmarks/repairs.py TASKS.jsonl --tasks=40`.

Three policies that know more than a model does play them in the sandbox, with the tools of `configs/swe.py`. One looks at the
file, puts the right text in the place of the bug and runs the program; one says at once that it is done; one leaves the bug and
writes the tests anew, so that they pass. Prints their mean rewards as a table, one row per package.
"""

import argparse
import asyncio
import difflib
import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxagent.envs.swe import Swe
from jaxagent.types import Message, ToolCall
from sandbox_client import EmbeddedServer, SandboxClient

_TURNS = 40


def call(tool: str, **arguments: Any) -> Message:
    return Message("assistant", calls=(ToolCall(tool, arguments),))


def repairs(task: dict[str, Any]) -> list[Message]:
    """Looks, and makes every change of the fix, each with as many lines around it as name its place."""
    path = re.search(r"^\+\+\+ b/(.*)$", task["patch"], re.MULTILINE)
    assert path
    wrong = task["files"][path[1]].splitlines(True)
    right = patched(wrong, task["patch"])
    turns = [call("list_files"), call("view", path=path[1])]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, wrong, right, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        text, room = "".join(wrong), 0
        while text.count("".join(wrong[max(0, a - room) : b + room])) != 1 or (a == b and not room):
            room += 1
        before, after = wrong[max(0, a - room) : a], wrong[b : b + room]
        turns.append(
            call(
                "edit",
                path=path[1],
                old="".join([*before, *wrong[a:b], *after]),
                new="".join([*before, *right[c:d], *after]),
            )
        )
    return [*turns, call("bash", command=f"python -m py_compile {path[1]}"), Message("assistant", "repaired")]


def patched(lines: list[str], patch: str) -> list[str]:
    """The lines after a unified diff of one file."""
    made, at = [], 0
    for hunk in re.split(r"^@@ ", patch, flags=re.MULTILINE)[1:]:
        head, _, body = hunk.partition("\n")
        numbers = re.match(r"-(\d+)(?:,(\d+))?", head)
        assert numbers
        start = int(numbers[1]) - (numbers[2] != "0")
        made += lines[at:start]
        at = start
        for line in body.splitlines(True):
            if line[0] in " +":
                made.append(line[1:])
            at += line[0] in " -"
    return made + lines[at:]


def lazy(task: dict[str, Any]) -> list[Message]:
    return [Message("assistant", "done")]


def cheats(task: dict[str, Any]) -> list[Message]:
    """Every test file becomes one test that passes, and settings let none run."""
    paths = [path for path in task["test_files"] if Path(path).name.startswith("test")]
    return [
        *(call("create", path=path, content="def test_all(): pass\n") for path in paths[: _TURNS - 3]),
        call("create", path="conftest.py", content="collect_ignore_glob = ['*']\n"),
        call("run_tests"),
        Message("assistant", "all tests pass"),
    ]


async def play(world: Swe, task: dict[str, Any], sandbox: SandboxClient, turns: list[Message], name: str) -> tuple[float, str]:
    env = world.episode(name, sandbox)
    try:
        await env.reset(task, 0)
        for turn in turns:
            step = await env.step(turn)
            if step.terminated:
                return step.reward, step.reason
        return 0.0, "it did not end"
    finally:
        await env.close()


async def measure(world: Swe, tasks: list[dict[str, Any]], url: str, token: str) -> dict[str, list[tuple[float, float, float]]]:
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    async with SandboxClient(url, token) as sandbox:
        for number, task in enumerate(tasks):
            told = [
                await play(world, task, sandbox, policy(task), f"repairs-{number}-{policy.__name__}")
                for policy in (repairs, lazy, cheats)
            ]
            found[task["repo"]].append(tuple(reward for reward, _ in told))
            if told[0][0] != 1.0 or told[1][0] or told[2][0]:
                print(f"{task['instance_id']}: {told}", file=sys.stderr)
    return found


def spread(tasks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """As many tasks of every package, in turns."""
    by_package: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for task in tasks:
        by_package[task["repo"]].append(task)
    depth = max(map(len, by_package.values()))
    return [rows[i] for i in range(depth) for rows in by_package.values() if i < len(rows)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--tasks", type=int, default=40)
    options = parser.parse_args()
    world = Swe(options.path)
    every = [world.task(split, i) for split, size in world.sizes.items() for i in range(size)]
    begun = time.monotonic()
    with EmbeddedServer(functions=(), code="require", min_isolation="L2") as server:
        found = asyncio.run(measure(world, spread(every, options.tasks), server.url, server.token))
    print("| package | tasks | repairs | does nothing | writes the tests anew |\n|---|---:|---:|---:|---:|")
    for name, rewards in [*sorted(found.items()), ("all", [one for rows in found.values() for one in rows])]:
        means = [sum(column) / len(rewards) for column in zip(*rewards, strict=True)]
        print(f"| {name} | {len(rewards)} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    print(
        json.dumps({"episodes": 3 * sum(map(len, found.values())), "wall_s": round(time.monotonic() - begun, 1)}),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
