"""What benchmarks/kills.py rests on: where it kills, what it sees a process do, and that no difference escapes it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxagent import config as configs
from jaxagent.checkpoint import Checkpoints
from jaxagent.data.store import Store
from jaxagent.types import StopReason, Trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kills() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import kills
    finally:
        sys.path.pop(0)
    return kills


def test_a_hundred_kills_are_aimed_at_every_phase_at_least_five_times_and_spread_over_the_run(kills: Any) -> None:
    config = configs.load(str(ROOT / "configs" / "quickstart.py"), [])[0]
    plan, warm, end = kills.planned(config, 100, 0), config.warmup.steps, config.warmup.steps + config.train.steps
    assert plan == kills.planned(config, 100, 0) != kills.planned(config, 100, 1) and len(plan) == 100
    aimed = Counter(aim for _, aim in plan)
    assert all(aimed[name] >= 5 for name in (*kills.PHASES[:-1], "any"))
    steps = [step for step, _ in plan]
    assert steps == sorted(steps) and steps[-1] <= end
    assert sum(step < warm for step in steps) == 10
    for tenth in range(10):  # of training
        assert sum(tenth <= 10 * (step - warm) // config.train.steps < tenth + 1 for step in steps if step > warm) >= 2


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ("train.main parts.build", "start"),
        ("train.story train.resume replicas.publish", "start"),
        ("train.story train.warm_up supervised.supervise", "warm-up"),
        ("train.story train.warm_up train.before evaluate.evaluate", "evaluation"),
        ("train.story train.train feed.take", "sampling"),
        ("train.story train.train feed.take update.work", "gradient"),
        ("train.story train.train update.finish", "gradient"),
        ("train.story train.train replicas.publish", "publish"),
        ("train.story train.train train.done train.save", "save"),
        ("train.story train.train metrics.write", "between"),
        ("train.story train.finish evaluate.evaluate", "evaluation"),
    ],
)
def test_what_a_process_does_is_read_from_its_stacks(kills: Any, stack: str, phase: str) -> None:
    here = {tuple(place.split(".")) for place in stack.split()}
    assert kills.phase(here, False, 0) == phase
    assert kills.phase(here, False, 3) == ("tool call" if phase == "sampling" else phase)
    assert kills.phase(here, True, 3) == ("start" if phase == "start" else "save")


def test_a_stack_is_read_from_its_innermost_function_outwards(kills: Any) -> None:
    here = kills.places(sys._getframe())
    assert ("test_killed_runs", "test_a_stack_is_read_from_its_innermost_function_outwards") in here
    assert ("python", "pytest_pyfunc_call") in here


def test_a_task_that_waits_in_the_client_of_the_sandbox_is_a_tool_call(kills: Any) -> None:
    async def call(event: asyncio.Event) -> None:
        await event.wait()

    call.__code__ = call.__code__.replace(co_filename="/somewhere/sandbox_client/client.py")

    async def episode(event: asyncio.Event) -> None:
        await call(event)

    async def looked() -> tuple[int, int]:
        event = asyncio.Event()
        tasks = [asyncio.create_task(episode(event)) for _ in range(3)]
        await asyncio.sleep(0)
        found = kills.in_sandbox(asyncio.get_running_loop())
        event.set()
        await asyncio.gather(*tasks)
        return found, kills.in_sandbox(asyncio.get_running_loop())

    assert asyncio.run(looked()) == (3, 0)


# ---------------------------------------------------------------------- what is compared


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of one step, as far as it is compared."""
    workdir = tmp_path_factory.mktemp("ended")
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    checkpoints.save(1, {"params": {"w": jnp.arange(4.0)}, "opt_state": {"mu": {"w": jnp.zeros(4)}}}, {})
    checkpoints.close()
    (workdir / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time/cpu_s": 3.0}) + "\n")
    rows = [Trajectory("t", 7, "train/0", i, stop=StopReason.ANSWERED) for i in range(2)]
    Store(workdir / "trajectories").write("train-000001", rows)
    (workdir / "eval.json").write_text("{}")
    return workdir


def test_two_runs_that_are_equal_but_for_times_are_found_equal(kills: Any, ended: Path, tmp_path: Path) -> None:
    other = shutil.copytree(ended, tmp_path / "other")
    (other / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time/cpu_s": 4.0}) + "\n")
    assert set(kills.differences(ended, other, 1).values()) == {""}


def test_every_difference_is_found_and_named(kills: Any, ended: Path, tmp_path: Path) -> None:
    other = shutil.copytree(ended, tmp_path / "other")
    shutil.rmtree(other / "checkpoints")
    checkpoints = Checkpoints(other / "checkpoints", keep=1)
    changed = jnp.arange(4.0).at[0].set(-0.0)  # equal in value, not in its bits
    checkpoints.save(1, {"params": {"w": changed}, "opt_state": {"mu": {"w": jnp.zeros(4)}}}, {})
    checkpoints.close()
    (other / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.25}) + "\n")
    rows = [Trajectory("t", 8, "train/0", i, stop=StopReason.ANSWERED) for i in range(2)]
    Store(other / "trajectories").write("train-000001", rows)
    (other / "eval.json").write_text("{ }")
    found = kills.differences(ended, other, 1)
    assert list(found.values()) == ["params['w']", "step 1: ['reward/mean']", "another multiset", "", "train-000001", "differs"]
