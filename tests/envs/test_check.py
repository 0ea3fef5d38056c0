"""The checker passes the worlds that are there and names what is wrong with those that are made to be."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxagent.__main__ import main
from jaxagent.envs import synchronous
from jaxagent.envs.check import Finding, check, descendants
from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.frozen_lake import FrozenLake
from jaxagent.envs.maze import Maze
from jaxagent.envs.questions import Questions
from jaxagent.envs.synchronous import Shown
from jaxagent.envs.workers.install import LIBRARIES, Library
from jaxagent.types import Message

CONFIGS = Path(__file__).parents[2] / "configs"


def failed(findings: list[Finding]) -> dict[str, str]:
    return {finding.question: finding.said for finding in findings if finding.ok is False}


def test_worlds_with_and_without_a_sandbox_keep_the_contract() -> None:
    for world in (FrozenLake(), Maze(), Questions(str(CONFIGS / "arithmetic.jsonl"), reward="last_number", toolbox=())):
        findings = check(world)
        assert failed(findings) == {}
        assert len(findings) == 11


class Bad:
    """A lake with one fault, which a test says."""

    functions, tools = "", ()

    def __init__(self, fault: str):
        self.fault, self.lake, self.count = fault, FrozenLake(), 0

    def task(self, split: str, index: int) -> Task:
        task = self.lake.task("train" if self.fault == "splits" else split, index)
        if self.fault == "splits":
            task["id"] = f"frozen_lake/{split}/{index}"
        if self.fault == "ids":
            task["id"] = "frozen_lake"
        if self.fault == "keys":
            del task["difficulty"]
        if self.fault == "moving":
            self.count += 1
            task["seed"] = f"{task['seed']}/{self.count}"
        return task

    def episode(self, name: str, sandbox: Any) -> Env:
        return BadEpisode(self, self.lake.episode(name, sandbox))

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.lake.demonstrate(task, rng)[: 1 if self.fault == "demonstrations" else None]


class BadEpisode:
    def __init__(self, world: Bad, env: Env):
        self.world, self.env, self.closed = world, env, False

    async def reset(self, task: Task, seed: int) -> Step:
        step = await self.env.reset(task, seed)
        self.world.count += 1
        if self.world.fault == "beginning":
            step.messages = [Message("user", str(self.world.count))]
        return step

    async def step(self, action: Message) -> Step:
        fault = self.world.fault
        if fault == "raises" and action.error:
            raise ValueError("cannot read this")
        step = await self.env.step(action)
        if fault == "hangs":
            await asyncio.sleep(600.0)
        if fault == "ends" and step.reason == "no way to go":
            step.terminated = True
        if fault == "pays" and action.error:
            step.reward = 1.0
        if fault == "breaks":
            step.truncated, step.error = True, "no disk"
        if fault == "infinite":
            step.reward = float("nan")
        if fault == "drifts":
            self.world.count += 1
            step.reward = self.world.count / 1000
        return step

    async def close(self) -> None:
        if self.closed and self.world.fault == "closing":
            raise RuntimeError("closed already")
        self.closed = True
        await self.env.close()


@pytest.mark.parametrize(
    ("fault", "question", "said"),
    [
        ("keys", "tasks have keys, and splits share none", "a task has no 'difficulty'"),
        ("ids", "tasks have keys, and splits share none", "two tasks have the id 'frozen_lake'"),
        ("splits", "tasks have keys, and splits share none", "frozen_lake/train/0 and frozen_lake/demo/0 are the same task"),
        ("moving", "tasks have keys, and splits share none", "gave another task the second time"),
        ("demonstrations", "demonstrations are made", "it has no turn of the assistant"),
        ("beginning", "the same task and seed begin alike", "after 0 actions"),
        ("drifts", "the same actions have the same results", "after 1 actions"),
        ("raises", "an unreadable turn is answered", "ValueError: cannot read this"),
        ("pays", "an unreadable turn is answered", "told"),
        ("ends", "a nonsense action is answered", "it ended the episode"),
        ("closing", "closing twice does no harm", "RuntimeError: closed already"),
        ("breaks", "a random agent plays", "the world broke: no disk"),
        ("infinite", "rewards are finite numbers", "a reward is nan"),
    ],
)
def test_every_fault_is_named(fault: str, question: str, said: str) -> None:
    assert said in failed(check(Bad(fault)))[question]


def test_a_call_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxagent.envs.check.CALL_S", 0.05)
    assert "step has not come back within 0.05 s" in failed(check(Bad("hangs")))["a nonsense action is answered"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Shown]]:
    monkeypatch.setitem(LIBRARIES, "misbehaving", Library((), ()))
    monkeypatch.setattr(synchronous, "ADAPTERS", Path(__file__).with_name("workers"))
    yield lambda: Shown("misbehaving", {}, lambda split, index: {"difficulty": "easy"}, workers=1, timeout_s=30.0)


def test_a_served_world_is_played_by_its_oracle_and_leaves_no_process(served: Callable[..., Shown]) -> None:
    before = descendants(1)
    findings = {finding.question: finding for finding in check(served())}
    assert findings["what is demonstrated can be played"].said == "3 of 3 ended, rewards 1, 1, 1"
    assert findings["no process is left"].ok
    assert failed(list(findings.values())) == {"a nonsense action is answered": "it earned 0.5"}
    assert not [pid for pid in descendants(1) - before if b"misbehaving" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_process_that_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxagent.envs.check._LEFT_S", 0.1)
    world = FrozenLake()
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(world, "close", lambda: started.append(subprocess.Popen(["sleep", "60"])), raising=False)
    try:
        assert "is still running: sleep 60" in failed(check(world))["no process is left"]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_command_prints_a_table_and_its_exit_code_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "frozen_lake"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("frozen_lake\n  ok    tasks have keys, and splits share none")
    assert main(["env", "check", "no_such_world"]) == 2
    assert "must be a file of jaxagent/envs" in capsys.readouterr().err
    assert main(["env", "check", f"{__name__}_world"]) == 2


def test_the_world_of_a_config_is_checked_with_its_options_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "env",
                "check",
                f"--config={CONFIGS / 'maze.py'}",
                "--config.env.options.rooms=9",
                "--config.env.options.distance=(2,4)",
            ]
        )
        == 0
    )
    assert "maze distance=(2, 4) rooms=9\n" in capsys.readouterr().out
    assert main(["env", "check", f"--config={CONFIGS / 'maze.py'}", "--config.env.options.rooms=2"]) == 2
    assert "rooms must be 3 to 26" in capsys.readouterr().err
    assert main(["env", "check", f"--config={CONFIGS / 'maze.py'}", "--config.env.nmae=x"]) == 2
    assert "unknown key 'env.nmae'" in capsys.readouterr().err


def test_nothing_of_jax_is_imported_for_a_check() -> None:
    program = (
        "import sys; from jaxagent.__main__ import main\n"
        f"code = main(['env', 'check', '--config={CONFIGS / 'maze.py'}'])\n"
        "sys.exit(code or bool({'jax', 'flax', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
