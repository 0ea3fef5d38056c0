"""The whole story with rollouts ahead of their step: old tokens are within the bound, and a stop loses no place."""

from __future__ import annotations

import shutil
from pathlib import Path

from test_train import TINY, configured, run

from jaxagent.checkpoint import Checkpoints
from jaxagent.data.store import Store, audit
from jaxagent.metrics import read

AHEAD = (
    "train.steps=6",
    "train.minibatches=1",
    "checkpoint.every=3",
    "evaluate.every=3",
    "evaluate.final_tasks=2",
    "evaluate.ablate=False",
)
DECOUPLED = ("feed.max_staleness=2", "algo.name=decoupled", "train.old_logprob=trainer", "engine.recompute=True")


def places(workdir: Path) -> list[list[tuple[str, str]]]:
    """The groups and tasks of every step."""
    store = Store(workdir / "trajectories")
    return [sorted({(row.group, row.task) for row in store.read(f"train-{step:06d}")}) for step in range(1, 7)]


def test_a_run_ahead_of_its_steps_keeps_its_bound_and_a_stop_loses_no_group(tmp_path: Path) -> None:
    config = configured(*AHEAD, *DECOUPLED, tiny=TINY)
    run(config, tmp_path / "whole")
    records = read(tmp_path / "whole" / "metrics.jsonl")[18:]
    assert [record["feed/ahead"] for record in records] == [4, 4, 4, 4, 2, 0]  # two steps of two groups, while there are steps
    assert all(record["feed/staleness_max"] <= min(step, 2) for step, record in enumerate(records))
    assert max(record["feed/staleness_max"] for record in records) > 0
    assert all(record["feed/staleness_mean"] <= record["feed/staleness_max"] for record in records)
    assert all("off_policy/rho_mean" in record for record in records if "policy/tokens" in record)
    store = Store(tmp_path / "whole" / "trajectories")
    for step in range(1, 7):
        for row in store.read(f"train-{step:06d}"):
            ages = {step - 1 - version for version, sampled in zip(row.version, row.mask, strict=True) if sampled}
            assert audit(row) == "" and min(ages) >= 0 and max(ages) <= 2
    # Killed after the save of training step 3, with four groups in flight: they are played again, in their places.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (24, 22):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / str(step), ignore_errors=True)
    checkpoints = Checkpoints(tmp_path / "cut" / "checkpoints", keep=99)
    state = checkpoints.facts(21)["feed"]
    checkpoints.close()
    assert (state["drawn"], [number for number, _ in state["ahead"]]) == (10, [6, 7, 8, 9])
    assert "resumed at step 21" in run(config, tmp_path / "cut")
    assert places(tmp_path / "cut") == places(tmp_path / "whole")
    assert max(record["feed/staleness_max"] for record in read(tmp_path / "cut" / "metrics.jsonl")[18:]) <= 2
