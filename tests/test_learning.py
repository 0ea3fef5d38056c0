"""A policy that learns: the smoke test from its first demonstration to held-out mazes, as a user starts it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jaxagent.envs.chain import Chain
from jaxagent.metrics import read
from jaxagent.types import Message

REPOSITORY = Path(__file__).parents[1]


def learnt(workdir: Path, verb: str, config: str, *overrides: str) -> dict[str, float]:
    """Runs a story as a user starts it; returns the held-out success of its evaluations."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "jaxagent", verb, f"--config=configs/{config}", f"--workdir={workdir}"]
    command += [f"--config.{override}" for override in overrides]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: table["success"] for name, table in json.loads((workdir / "eval.json").read_text()).items()}


@pytest.mark.learning
def test_the_maze_is_learnt_and_not_without_its_tools(tmp_path: Path) -> None:
    success = learnt(tmp_path, "train", "maze.py", "train.steps=15", "evaluate.every=0", "evaluate.final_tasks=64")
    assert success["before"] <= 0.25
    assert success["after"] >= 0.5
    assert success["ablated"] <= 0.05


@pytest.mark.learning
def test_frozen_lakes_never_seen_are_crossed_by_who_sees_the_holes(tmp_path: Path) -> None:
    short = "warmup.steps=120", "warmup.demos=1920", "train.steps=25", "evaluate.every=0", "evaluate.final_tasks=128"
    success = learnt(tmp_path, "train", "frozen_lake.py", *short)
    assert success["after"] >= success["before"] + 0.1
    assert success["ablated"] <= 0.2


def written(message: Message) -> dict[str, object]:
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in message.calls]
    said = {"role": message.role, "content": message.content, "name": message.name}
    return {**said, "tool_calls": calls} if calls else said


@pytest.mark.learning
def test_a_file_of_dialogues_teaches_to_look_up_what_no_line_of_it_says(tmp_path: Path) -> None:
    """Held-out tasks have tables of their own: what is learnt is to ask the tool, and to repeat what it says."""
    world = Chain(hops=(1,), flaky=0.0, demo_right_tool=1.0, demo_last_value=1.0)
    dialogues = [world.demonstrate(world.task("demo", i), random.Random(i)) for i in range(2000)]
    lines = [json.dumps({"messages": [written(message) for message in dialogue]}) for dialogue in dialogues]
    (tmp_path / "dialogues.jsonl").write_text("\n".join(lines))
    success = learnt(tmp_path / "run", "finetune", f"sft.py:{tmp_path / 'dialogues.jsonl'}", "train.steps=150")
    assert success["before"] <= 0.05
    assert success["after"] >= 0.8
    assert success["ablated"] <= 0.1


@pytest.mark.learning
def test_the_best_of_each_group_teaches_a_weak_policy(tmp_path: Path) -> None:
    success = learnt(tmp_path, "finetune", "raft.py", "evaluate.ablate=False")
    assert success["before"] <= 0.3
    assert success["after"] >= 0.6
    outcomes = [record["reward/outcome"] for record in read(tmp_path / "metrics.jsonl") if "reward/outcome" in record]
    assert outcomes[-1] > outcomes[0] + 0.3


@pytest.mark.learning
def test_preferring_the_best_of_a_group_to_its_worst_widens_the_margin_and_wins_more(tmp_path: Path) -> None:
    success = learnt(tmp_path, "finetune", "dpo.py", "evaluate.ablate=False")
    assert success["before"] <= 0.3
    assert success["after"] >= success["before"] + 0.15
    steps = [record for record in read(tmp_path / "metrics.jsonl") if "dpo/margin" in record]
    first, last = steps[:5], steps[15:20]  # of the first round, whose pairs are the start policy's own
    for name in ("dpo/margin", "dpo/accuracy"):
        early, late = (sum(record[name] for record in part) / 5 for part in (first, last))
        assert late > early + 0.1
    assert steps[0]["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.learning
def test_a_program_of_its_own_teaches_the_policy_that_it_asks(tmp_path: Path) -> None:
    """The task of the quickstart, played over HTTP by `configs/programs/look_up.py`, which knows nothing of tokens."""
    overrides = "train.steps=40", "evaluate.every=0", "evaluate.final_tasks=128"
    success = learnt(tmp_path, "train", "program.py", *overrides)
    assert success["before"] <= 0.3
    assert success["after"] >= 0.6
    assert success["ablated"] <= 0.05
