"""A policy that learns: the smoke test from its first demonstration to held-out mazes, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.learning
def test_the_maze_is_learnt_and_not_without_its_tools(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    overrides = ["train.steps=15", "evaluate.every=0", "evaluate.final_tasks=64"]
    command = [sys.executable, "-m", "jaxagent", "train", "--config=configs/maze.py", f"--workdir={tmp_path}"]
    command += [f"--config.{override}" for override in overrides]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    success = {name: table["success"] for name, table in json.loads((tmp_path / "eval.json").read_text()).items()}
    assert success["before"] <= 0.25
    assert success["after"] >= 0.5
    assert success["ablated"] <= 0.05
