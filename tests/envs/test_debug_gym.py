"""debug-gym, locked, on a planted bug; the episodes skip where the library is not installed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from libraries import ended, made

from jaxagent.envs import debug_gym
from jaxagent.envs.env import Step, World
from jaxagent.envs.workers import install
from jaxagent.envs.workers.pool import WorkerFault
from jaxagent.types import Message, ToolCall

__all__ = ["ended"]  # a fixture
BUG = 'NAME = "adder"\n\n\ndef add(a, b):\n    return a - b\n'
TESTS = """import adder


def test_add():
    assert adder.add(2, 3) == 5


def test_name():
    assert adder.NAME == "adder"
"""
ROW = {
    "problem_statement": "Sums are wrong.",
    "FAIL_TO_PASS": json.dumps(["tests/test_add.py::test_add"]),
    "PASS_TO_PASS": json.dumps(["tests/test_add.py::test_name"]),
    "files": {"adder.py": BUG},
    "test_files": {"tests/test_add.py": TESTS},
}


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"instance_id": f"adder-{i}", **ROW}) + "\n" for i in range(40)))
    return str(path)


def call(name: str, **arguments: object) -> Message:
    return Message("assistant", calls=(ToolCall(name, dict(arguments)),))


def played(world: World, index: int, actions: list[Message]) -> list[Step]:
    async def play() -> list[Step]:
        env = world.episode("played", None)
        try:
            task = world.task("train", index)
            return [await env.reset(task, task["seed"]), *[await env.step(action) for action in actions]]
        except WorkerFault as fault:
            if "no isolation" in str(fault):
                pytest.skip(str(fault))
            raise
        finally:
            await env.close()

    return asyncio.run(play())


def said(step: Step) -> str:
    return step.messages[0].content


def test_a_planted_bug_is_repaired_for_one_and_nothing_of_it_is_left_for_the_next_episode(tasks: str) -> None:
    world = made(debug_gym.make_world, path=tasks, tools=("bash", "view", "edit", "eval", "submit"))
    mess = call(
        "bash",
        command="while :; do echo x > ~/beat; sleep 0.1; done & mkdir -p ~/shut/in; chmod 0 ~/shut; ls /work /etc/shadow",
    )
    cheat = call(
        "bash", command="echo 'def test_add(): pass' > tests/test_add.py; touch conftest.py; : > ~/../tmp/source-*.tests"
    )
    repair = call("edit", path="adder.py", start=5, end=5, new_code="    return a + b")
    steps = played(world, 0, [mess, call("view", path="adder.py"), cheat, call("eval"), repair, call("submit")])
    assert "Sums are wrong." in said(steps[0]) and said(steps[0]).endswith("1 failed, 1 passed")
    assert "function add" in said(steps[0]) and " at 0x" not in said(steps[0])  # it begins alike every time
    assert "No such file" in said(steps[1])
    assert "return a - b" in said(steps[2])
    assert "1 failed, 1 passed" in said(steps[4])  # the tests are those of the task again
    assert [step.reward for step in steps] == [0.0] * 6 + [1.0]
    assert (steps[-1].terminated, steps[-1].reason) == (True, "all tests pass")
    steps = played(world, 1, [call("bash", command="sleep 1; ls -A ~; echo listed"), call("submit")])
    assert said(steps[1]) == "listed"
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].reason) == (0.0, True, "handed in with failing tests")


def test_settings_and_packages_of_the_policys_own_do_not_change_what_the_tests_say(tasks: str) -> None:
    world = made(debug_gym.make_world, path=tasks, tools=("bash", "eval", "submit"))
    settings = "printf '[pytest]\\naddopts=--collect-only\\n' | tee pytest.ini ../pytest.ini"
    package = (
        "mkdir -p pytest; touch pytest/__init__.py; echo 'raise SystemExit(0)' | tee pytest/__main__.py > sitecustomize.py"
    )
    packages = f"{package}; for d in $(python -c 'import site; print(site.USER_SITE)'); do mkdir -p $d; cp -r pytest $d; done"
    shut = "chmod 0 tests ..; echo shut"
    spoilt = [step for command in (settings, packages, shut) for step in (call("bash", command=command), call("eval"))]
    steps = played(world, 0, [*spoilt, call("submit")])
    assert all("1 failed, 1 passed" in said(step) for step in steps[2:-1:2])
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].reason) == (0.0, True, "handed in with failing tests")


@pytest.mark.parametrize("spoil", ["chmod 0 ~ $TMPDIR /box/shm /box", "mv ~ /box/kept; rm -rf $TMPDIR; ln -s /usr $TMPDIR"])
def test_whatever_is_done_to_its_folders_the_next_episode_finds_them_new(tasks: str, spoil: str) -> None:
    world = made(debug_gym.make_world, path=tasks, tools=("bash", "eval", "submit"))
    full = "for d in ~ $TMPDIR /dev/shm /box; do echo note > $d/note; done; head -c 600M /dev/zero > /dev/shm/full; ls /dev/shm"
    assert "full" in said(played(world, 0, [call("bash", command=full), call("bash", command=spoil)])[1])
    steps = played(world, 1, [call("bash", command="ls -A ~ /dev/shm/ /box; find /box -name note"), call("submit")])
    assert said(steps[1]).split() == ["/box:", "shm", "tmp", "work", "/box/work:", "/dev/shm/:"]
    assert "1 failed, 1 passed" in said(steps[0]) and steps[-1].reason == "handed in with failing tests"


def test_options_that_fit_nothing_are_refused(tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "python_of", lambda name: Path("/no/python"))
    with pytest.raises(ValueError, match=r"env\.options\.tools must be among bash, view, .*; got 'pdb'"):
        debug_gym.make_world(tasks, tools=("pdb",))
    with pytest.raises(ValueError, match=r"env\.options\.test_timeout_s must be from 1 to below timeout_s, 300; got 300"):
        debug_gym.make_world(tasks, test_timeout_s=300)
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"instance_id": "adder-1", **ROW}) + "\n")
    with pytest.raises(ValueError, match="too few tasks, none is left for "):
        debug_gym.make_world(str(few))
    few.write_text(json.dumps({"instance_id": "adder-1", **ROW, "FAIL_TO_PASS": "test_add"}) + "\n")
    with pytest.raises(ValueError, match="line 1: FAIL_TO_PASS and PASS_TO_PASS must be lists of names"):
        debug_gym.make_world(str(few))
    world = debug_gym.make_world(tasks)
    assert world.kind.confined and world.kind.slots == 1
    assert sum(world.sizes.values()) == 40 and not hasattr(world, "demonstrate")
