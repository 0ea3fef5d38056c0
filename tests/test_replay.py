"""A step of training comes out again as it was recorded, and what was made to differ is found where it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_process import logits_of, rollout
from test_train import configured, run

from jaxagent import config as configs
from jaxagent.__main__ import main as command
from jaxagent.algos.table import choose
from jaxagent.data.store import Store
from jaxagent.parts import Learning, learning
from jaxagent.process import Process
from jaxagent.replay import STAGES, Found, compare, stored
from jaxagent.train import Course
from jaxagent.types import Group

# Failed calls cost something, so that a policy that has learnt nothing is told apart from one that has learnt less.
SMALL = (
    *("warmup.steps=2", "warmup.batch=4", "warmup.demos=8", "train.steps=3", "evaluate.every=0", "evaluate.final_tasks=2"),
    *("evaluate.ablate=False", "checkpoint.every=2", "reward.failed_calls=0.3", "optimizer.lr=0.0003"),
    *("feed.prompts=4", "feed.rollouts=4"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps of warm-up and 3 of reinforcement, saved after 2 and 4 steps and at its end."""
    workdir = tmp_path_factory.mktemp("run")
    run(configured(*SMALL), workdir)
    return workdir


@pytest.fixture(scope="module")
def parts(whole: Path) -> Learning:
    """What learns in it, for all who replay a copy."""
    return learning(configs.read(whole / "config.json"))


def compared(workdir: Path, parts: Learning, step: int) -> list[Found]:
    config = configs.read(workdir / "config.json")
    parts = replace(parts, algorithm=choose(**config.algo))
    parts.learner.algorithm = parts.algorithm  # its programs are compiled already, and stay
    course = Course(config, workdir, parts)
    try:
        return compare(course, step)
    finally:
        course.checkpoints.close()


def test_a_step_comes_out_again_to_the_last_bit(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["replay", str(whole), "--step=3"]) == 0
    told = capsys.readouterr().out
    assert "step 3: the same, to the last bit" in told
    found = {line.split()[0]: line.split()[1] for line in told.splitlines()[1:-1]}
    assert tuple(found) == STAGES
    assert all(int(compared) > 0 for compared in found.values())


@pytest.mark.parametrize("step", [1, 2])
def test_weights_that_were_not_saved_are_taught_again(whole: Path, parts: Learning, tmp_path: Path, step: int) -> None:
    """Step 2 from the checkpoint before step 1; step 1, whose checkpoint is gone, from the beginning of the run."""
    copy = shutil.copytree(whole, tmp_path / "run")
    if step == 1:
        shutil.rmtree(copy / "checkpoints" / "2")
        parts = replace(parts, learner=learning(configs.read(copy / "config.json")).learner)  # as it begins
    found = compared(copy, parts, step)
    assert [one.stage for one in found if not one.same] == []
    assert max(one.difference for one in found) == 0


def of_rows(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes one row of those that are stored for step 3: the first that teaches something."""

    def apply(workdir: Path) -> None:
        path = workdir / "trajectories" / "train-000003.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(next(row for row in rows if any(turn["advantage"] for turn in row["turns"])))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return apply


def of_config(**changes: Any) -> Callable[[Path], None]:
    def apply(workdir: Path) -> None:
        config = configs.read(workdir / "config.json")
        with config.unlocked():
            for name, value in changes.items():
                section, _, key = name.partition("__")
                config[section][key] = value
        configs.save(config, workdir / "config.json")

    return apply


def of_metric(name: str) -> Callable[[Path], None]:
    def apply(workdir: Path) -> None:
        path = workdir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record[name] = 1.01 * record.get(name, 0.0)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return apply


def other_weights(step: int, taken: int) -> Callable[[Path], None]:
    """The checkpoint `step` holds the weights of another."""

    def apply(workdir: Path) -> None:
        for name in ("params", "opt_state"):
            shutil.rmtree(workdir / "checkpoints" / str(step) / name)
            shutil.copytree(workdir / "checkpoints" / str(taken) / name, workdir / "checkpoints" / str(step) / name)

    return apply


FAULTS = {
    "a token": (of_rows(lambda row: row["tokens"].__setitem__(0, 65)), "trajectories"),
    "a version": (of_rows(lambda row: row["version"].__setitem__(row["mask"].index(True), 0)), "trajectories"),
    "a reward": (of_rows(lambda row: row["turns"][-1].update(reward=row["turns"][-1]["reward"] + 0.5)), "rewards"),
    "another shaping": (of_config(reward__failed_calls=0.2), "rewards"),
    "an advantage": (of_rows(lambda row: row["turns"][0].update(advantage=0.3)), "credit"),
    "another estimator": (of_config(algo__advantage="centred"), "credit"),
    "another denominator": (of_config(algo__aggregate="sequence_sum"), "packing"),
    "a log-prob of the sampler": (of_rows(lambda row: row.update(logprob=[x - 0.5 for x in row["logprob"]])), "log-probs"),
    "weights before": (other_weights(4, taken=2), "log-probs"),
    "a loss": (of_metric("policy/loss"), "loss"),
    "a norm of the gradient": (of_metric("policy/grad_norm"), "gradient"),
    "another optimizer": (of_config(optimizer__clip_norm=0.001), "update"),
    "weights after": (other_weights(5, taken=4), "weights"),
}


@pytest.mark.parametrize(("fault", "stage"), FAULTS.values(), ids=FAULTS)
def test_what_differs_is_found_at_the_stage_where_it_was_made(
    whole: Path, parts: Learning, tmp_path: Path, fault: Callable[[Path], None], stage: str
) -> None:
    copy = shutil.copytree(whole, tmp_path / "run")
    fault(copy)
    first = next(one for one in compared(copy, parts, 3) if not one.same)
    assert first.stage == stage, first
    assert first.worst


def test_what_is_not_stored_is_asked_for_by_name(whole: Path, parts: Learning, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no training step 9"):
        compared(whole, parts, 9)
    copy = shutil.copytree(whole, tmp_path / "run")
    (copy / "trajectories" / "train-000001.jsonl").unlink()
    with pytest.raises(ValueError, match=r"train-000001\.jsonl is missing"):
        compared(copy, parts, 2)


def test_stored_rows_are_the_steps_groups_with_their_continuations_and_what_was_known_before_the_update(tmp_path: Path) -> None:
    rows = [rollout(i, ("s", "a", 0.0), ("s2", "b", 0.3 * i)) for i in range(2)]
    rows[1].turns[1].outcome, rows[1].turns[1].parts = 0.2, {"form": 0.1}
    again = rollout(0, ("s2", "c", 1.0))
    again.group, again.trunk, again.trunk_turns = "g#0@1", 0, 1
    before = [(turn.reward, turn.parts) for row in (*rows, again) for turn in row.turns]
    group = Group("g", rows, branches=[again])
    Process(0).pay([group], logits_of(*group.rows, value=0.7), 0.9)
    assert all("process" in turn.parts for row in group.rows for turn in row.turns)
    Store(tmp_path).write("train-000001", group.rows)
    (read,) = stored(Store(tmp_path), 1)
    assert (read.key, len(read.trajectories), len(read.branches)) == ("g", 2, 1)
    after = [(turn.reward, turn.parts) for row in read.rows for turn in row.turns]
    assert [parts for _, parts in after] == [parts for _, parts in before]
    assert [reward for reward, _ in after] == pytest.approx([reward for reward, _ in before], abs=1e-15)
    assert [row.reward for row in read.rows] == pytest.approx([0.0, 0.3, 1.0], abs=1e-15)
