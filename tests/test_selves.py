"""Earlier versions of the policy: which are kept, who sits, and that a stopped run goes on against the same opponents."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_train import CONFIGS, configured, run, steady_metrics

from jaxagent import evaluate
from jaxagent.data.store import Store
from jaxagent.follow import follow
from jaxagent.metrics import EVALUATIONS, read

OPTIONS = ("train.steps=3", "env.options.past_keep=2", "checkpoint.every=2", "checkpoint.keep=9", "evaluate.every=0")
WARMUP = 2


def trained(workdir: Path) -> str:
    return run(configured(*OPTIONS, "mesh.data=2", spec=f"{CONFIGS / 'kuhn.py'}:runlocal", tiny=()), workdir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("whole")
    trained(workdir)
    return workdir


def test_the_last_versions_are_kept_and_one_before_the_step_sits(whole: Path) -> None:
    held = {step: sorted(path.name for path in (whole / "checkpoints" / str(step)).glob("past_*")) for step in (WARMUP, 4, 5)}
    assert held == {WARMUP: ["past_0"], 4: ["past_1", "past_2"], 5: ["past_2", "past_3"]}
    for step, record in enumerate(read(whole / "metrics.jsonl")[WARMUP:]):
        rows = Store(whole / "trajectories").read(f"train-{step + 1:06d}")
        seated = {v for row in rows if row.past for v in row.version if v >= 0}
        assert seated <= {int(record["rollout/past_version"])}
        assert record["rollout/past_version"] < max(step, 1)
        ours = {v for row in rows if not row.past for v in row.version if v >= 0}
        assert ours == {step}
        games = {(row.group, row.rollout): row.difficulty for row in rows}
        assert {row.difficulty for row in rows if row.past} <= {"past"}
        assert all(len([r for r in rows if (r.group, r.rollout) == game]) <= 2 for game in games)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_the_first_opponent_in_the_checkpoint_of_the_warm_up_is_what_was_warmed_up(whole: Path) -> None:
    folder, reader = (whole / "checkpoints" / str(WARMUP)).absolute(), ocp.PyTreeCheckpointer()
    params, past = (jax.tree.leaves(reader.restore(folder / name)) for name in ("params", "past_0"))
    assert len(params) == len(past) > 0
    for one, other in zip(params, past, strict=True):
        np.testing.assert_array_equal(one, other)


def test_who_was_set_aside_is_in_no_number(whole: Path) -> None:
    for step, record in enumerate(read(whole / "metrics.jsonl")[WARMUP:]):
        rows = Store(whole / "trajectories").read(f"train-{step + 1:06d}")
        ours = [row for row in rows if not row.past]
        assert record["reward/mean"] == pytest.approx(sum(row.reward for row in ours) / len(ours))
        assert all(turn.advantage is None for row in rows if row.past for turn in row.turns)
    table = json.loads((whole / "eval.json").read_text())["after"]
    assert set(table["by_difficulty"]) == {"random", "equilibrium", "past"}


def test_a_stopped_run_goes_on_against_the_same_opponents(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "5")
    assert "resumed at step 4" in trained(tmp_path / "cut")
    assert steady_metrics(tmp_path / "cut") == steady_metrics(whole)
    assert (tmp_path / "cut" / "eval.json").read_text() == (whole / "eval.json").read_text()


def test_an_evaluation_of_a_checkpoint_seats_its_own_earlier_versions(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.report(evaluate.Asked(str(whole)), as_json=True) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["broken"] == 0
    own = json.loads((whole / "eval.json").read_text())["after"]
    for one in (table, own):  # of the policy the run says the step, and what is evaluated later the digest of its weights too
        assert one["settings"].pop("policy")["step"] == 5
    assert table == own


# What reads a checkpoint that lacks a file leaves coroutines behind, whose event loop is closed when they are collected.
left_behind = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def followed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's checkpoints evaluated afterwards, without one that lacks a file."""
    workdir = tmp_path_factory.mktemp("followed") / "run"
    shutil.copytree(whole, workdir)
    (workdir / "checkpoints" / str(WARMUP) / "params" / "manifest.ocdbt").unlink()
    assert follow(evaluate.Asked(str(workdir))) == 0
    gc.collect()
    return workdir


@left_behind
def test_who_follows_leaves_out_a_checkpoint_that_lacks_a_file(followed: Path) -> None:
    assert [record["step"] for record in read(followed / EVALUATIONS)] == [4, 5]


@left_behind
def test_who_follows_seats_the_versions_that_training_seats_after_a_step(followed: Path) -> None:
    """One before the step, counted from the end of the warm-up: at 4 version 1 of 1 and 2, at 5 version 2 of 2 and 3."""
    seated = {}
    for folder in (followed / "evals").glob("valid-*"):
        rows = Store(folder).read("episodes")
        step = json.loads((folder / "settings.json").read_text())["policy"]["step"]
        seated[step] = {v for row in rows if row.past for v in row.version if v >= 0}
    assert seated == {4: {1}, 5: {2}}
