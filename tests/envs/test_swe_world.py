"""`swe`: a repaired package wins, and nothing else does: neither less, nor changed tests, nor reports that were forged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler, episode

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.mutants import mutants
from jaxagent.data.packages import Package
from jaxagent.data.swe import row_of
from jaxagent.data.swe_rows import Store, clone_of, played
from jaxagent.data.trials import Outcomes
from jaxagent.envs.swe import Swe
from jaxagent.types import Message, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient, SandboxStartError

sys.path.append(str(Path(__file__).parents[1] / "data"))
from package_with_tests import FILES
from rows_of_others import NEW, RIGHT, STEP, make

PLAIN = PlainTemplate()
WALK, TEST = "src/pathlen/walk.py", "tests/test_walk.py"
STABLE = {f"{TEST}::test_{name}" for name in ("forth", "back", "none", "longest", "constant")}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Swe:
    """Forty times one bug: steps back count as steps forth minus themselves."""
    package = Package("pathlen", FILES, (TEST,), ("src/pathlen/__init__.py", WALK))
    source = FILES[WALK].encode()
    bug = next(one for one in mutants(source) if b"total += a + b" in one.apply(source))
    row = row_of(package, WALK, bug, Outcomes(STABLE - {f"{TEST}::test_back"}), STABLE)
    path = tmp_path_factory.mktemp("swe") / "tasks.jsonl"
    path.write_text("".join(json.dumps({**row, "instance_id": f"pathlen__{n}"}) + "\n" for n in range(40)))
    return Swe(str(path), test_timeout_s=60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    try:
        with EmbeddedServer(functions=(), code="require", min_isolation="L2") as running:
            yield running
    except SandboxStartError as error:
        pytest.skip(f"no isolation here: {error}")


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", calls=(ToolCall(name, arguments),))


class Direct(PlainTemplate):
    """Takes a scripted turn as it is: the plain template cannot hold commas in arguments."""

    def __init__(self, turns: list[Message]):
        self.turns = turns

    def parse(self, ids: Any, tools: Any) -> Message:
        return self.turns.pop(0)


def play(server: EmbeddedServer, world: Swe, *turns: Message) -> Trajectory:
    template = Direct([*turns, Message("assistant", "done")])

    async def game() -> Trajectory:
        async with SandboxClient(server.url, server.token) as sandbox:
            limits, sampling = Limits(max_turns=8, max_tokens=20000), Sampling(max_tokens=50)
            sampler = ScriptedSampler(template, lambda text, request: PLAIN.turn(Message("assistant", "x")))
            task = world.task("train", 0)
            rows = await episode(world, task, sampler, limits=limits, sampling=sampling, sandbox=sandbox)
            return rows[0]

    return asyncio.run(game())


FIX = call("edit", path=WALK, old="total += a + b", new="total += a - b")


def test_a_repair_wins_and_the_tree_has_neither_tests_nor_history(server: EmbeddedServer, world: Swe) -> None:
    row = play(server, world, call("list_files"), call("bash", command="git log; ls -A"), FIX)
    assert (row.outcome, row.stop) == (1.0, StopReason.ANSWERED)
    assert row.turns[-1].reason == "1 of 1 broken tests pass, 4 of 4 others"
    files, history, _ = (record.result for turn in row.turns for record in turn.tools)
    assert WALK in files and "test" not in files
    assert "not a git repository" in history and ".git" not in history.splitlines()[1:]
    assert "pathlen" in PLAIN.text(row.tokens)


AROUND = [
    call("create", path=TEST, content="def test_back(): pass\n"),
    call("create", path="pytest.ini", content="[pytest]\naddopts = --co\n"),
    call("create", path="conftest.py", content="def pytest_runtest_makereport(item, call): return None\n"),
]
# Less than a repair, and attempts on the report: printed, ended early, plugins, settings, tests and sources replaced.
FORGED = "\nimport os, sys\nos.write(1, b'[]'); os.write(2, b'ok')\n"
# It finds the mark of the report in the memory of its process, and says after it what is no report.
NO_REPORT = """import os, sys
frame = sys._getframe()
while "mark" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["out"], (chr(10) + frame.f_locals["mark"] + "[[1], 5]" + chr(10)).encode())
os._exit(0)
"""
ATTEMPTS = {
    "does nothing": [],
    "breaks another": [FIX, call("edit", path=WALK, old="best = path", new="best = None")],
    "ends the process": [call("create", path=WALK, content="import os\nos._exit(0)\n")],
    "prints a report": [call("create", path=WALK, content=f"{FORGED}def length(p): return 3\ndef longest(p): return [1, 9]\n")],
    "reports what is no report": [call("create", path=WALK, content=NO_REPORT)],
    "changes what surrounds the tests": AROUND,
    "deletes": [call("bash", command="rm -r src")],
    "is a link": [call("bash", command=f"ln -sf /etc/passwd {WALK}")],
}


@pytest.mark.attack
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_nothing_but_a_repair_earns_anything(attempt: str, server: EmbeddedServer, world: Swe) -> None:
    row = play(server, world, *ATTEMPTS[attempt])
    assert row.stop.counts, row.error
    assert row.outcome == 0.0, row.turns[-1].reason
    assert row.reward == 0.0


def test_what_is_added_beside_a_repair_does_no_harm(server: EmbeddedServer, world: Swe) -> None:
    row = play(server, world, *AROUND, FIX)
    assert row.outcome == 1.0


def users(words: dict[str, bytes], until: threading.Event) -> dict[str, set[int]]:
    """Whose the processes were, as this machine counts users, in whose command the words stood."""
    found: dict[str, set[int]] = {name: set() for name in words}
    while not until.wait(0.02):
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended
                command = (place / "cmdline").read_bytes()
                for name in (name for name, word in words.items() if word in command):
                    found[name].add(place.stat().st_uid)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="only root has other users to give")
def test_a_repair_is_graded_by_a_user_that_is_not_the_policys(server: EmbeddedServer, world: Swe) -> None:
    ended = threading.Event()
    with ThreadPoolExecutor() as pool:
        words = {"policy": b"sleep\x001.0625", "tests": b"pytest_runtest_logreport"}
        seen = pool.submit(users, words, ended)
        row = play(server, world, FIX, call("bash", command="sleep 1.0625"))
        ended.set()
    assert row.outcome == 1.0
    policy, tests = seen.result()["policy"], seen.result()["tests"]
    assert policy and tests and not policy & tests and 0 not in policy | tests


def test_an_unreadable_turn_and_an_unknown_tool_are_observations(server: EmbeddedServer, world: Swe) -> None:
    row = play(server, world, Message("assistant", "?", error="cannot be read"), call("hammer"), FIX)
    assert row.outcome == 1.0
    assert "error: cannot be read" in PLAIN.text(row.tokens) and "no tool 'hammer'" in PLAIN.text(row.tokens)


def written(world: Swe, folder: Path) -> str:
    """The tasks of a world as a file."""
    records = [record for split in ("train", "valid", "test") for record in world.tasks[split]]
    texts = ("FAIL_TO_PASS", "PASS_TO_PASS")
    lines = [json.dumps({**record, **{key: json.dumps(record[key]) for key in texts}}) for record in records]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return str(folder / "tasks.jsonl")


def test_tests_can_be_left_in_the_tree(world: Swe, tmp_path: Path) -> None:
    path = written(world, tmp_path)
    assert TEST in Swe(path, hide_tests=False).task("train", 0)["files"]
    assert TEST not in world.task("train", 0)["files"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"FAIL_TO_PASS": ["a"]}, "line 1: .* as JSON texts"),
        ({"FAIL_TO_PASS": "[]"}, "line 1: FAIL_TO_PASS is empty"),
        ({"repo": "json"}, "json is installed here"),
        ({"files": None, "sources": None}, ""),
    ],
)
def test_rows_that_cannot_be_played_are_told(change: dict[str, Any], said: str, world: Swe, tmp_path: Path) -> None:
    record = {**world.tasks["train"][0], "FAIL_TO_PASS": '["t"]', "PASS_TO_PASS": "[]", **change}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({key: value for key, value in record.items() if value is not None}) + "\n")
    with pytest.raises(ValueError, match=said or "missing files, sources"):
        Swe(str(tmp_path / "tasks.jsonl"))


def test_a_program_that_ends_its_session_does_not_end_the_episode_without_a_reward(
    server: EmbeddedServer, world: Swe, tmp_path: Path
) -> None:
    with_python = Swe(written(world, tmp_path), toolbox=("files", "python"))
    row = play(server, with_python, FIX, call("python", code="import os; os._exit(0)"), call("python", code="1"))
    assert row.stop is StopReason.ANSWERED and row.outcome == 0.0, row.error
    assert "ended its session" in row.turns[-1].reason
    assert [record.outcome for turn in row.turns for record in turn.tools] == ["ok", "error", "error"]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A row of SWE-bench whose fix brings a file, as `swe` plays it."""
    folder = tmp_path_factory.mktemp("others")
    row = make(folder / "clones")["bench"]
    return played(row, Store(clone_of(row, folder / "clones"), folder / "store"))


REPAIR = [call("create", path=NEW, content=STEP), call("create", path=WALK, content=RIGHT)]
PLAYED = {
    "the fix": (REPAIR, "", 1.0, "1 of 1 broken tests pass, 4 of 4 others"),
    "nothing": ([], "", 0.0, "0 of 1 broken tests pass, 4 of 4 others"),
    "tests rewritten": (AROUND, "", 0.0, "0 of 1 broken tests pass, 4 of 4 others"),
    "a test that is not there": (REPAIR, f"{TEST}::test_gone", 0.0, "1 of 1 broken tests pass, 4 of 5 others"),
}


@pytest.mark.parametrize("attempt", PLAYED)
def test_a_row_of_another_collection_is_won_by_its_fix_alone(
    attempt: str, server: EmbeddedServer, others: dict[str, Any], tmp_path: Path
) -> None:
    turns, more, reward, reason = PLAYED[attempt]
    row = {**others, "PASS_TO_PASS": json.dumps([*json.loads(others["PASS_TO_PASS"]), *filter(None, [more])])}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**row, "instance_id": f"n{n}"}) + "\n" for n in range(40)))
    episode = play(server, Swe(str(tmp_path / "tasks.jsonl"), test_timeout_s=60.0), *turns)
    assert (episode.outcome, episode.turns[-1].reason) == (reward, reason)
