"""Evaluations beside training: which checkpoint is next, that it is held, and where what came of it stands."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxagent import config as configs
from jaxagent.__main__ import main as command
from jaxagent.data.store import Store
from jaxagent.evaluate import held_out, settings_of
from jaxagent.follow import RETRY_S, Following, Unreadable
from jaxagent.metrics import EVALUATIONS, read, with_evaluations
from jaxagent.types import Trajectory
from jaxagent.view import overview

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = f"{REPOSITORY / 'configs' / 'quickstart.py'}:runlocal"
CONFIG = configs.load(QUICKSTART, [])[0]
SETTINGS = settings_of(CONFIG, held_out(CONFIG), split="valid", tasks=4, k=1)


def saved(workdir: Path, step: int) -> Path:
    """A checkpoint, as far as files go."""
    folder = workdir / "checkpoints" / str(step)
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "weights").write_text(f"weights of {step}")
    return folder


def table(step: int, held: Path, success: float = 0.5, lost: float = 0.25) -> tuple[dict[str, Any], float]:
    assert [path.name for path in (held / "checkpoints").iterdir()] == [str(step)]
    assert (held / "checkpoints" / str(step) / "params" / "weights").read_text() == f"weights of {step}"
    told = {"policy": {"step": step}, **SETTINGS}
    counted = {"n": 4, "broken": round(4 * lost), "by_difficulty": {"1 hop": success}}
    return {"success": success, "ci95": [0.1, 0.9], "turns": 2.0, **counted, "settings": told}, lost


def following(workdir: Path, settings: dict[str, Any] = SETTINGS) -> Following:
    return Following(workdir, workdir, settings, first=4, last=6, max_broken=0.5)


def test_checkpoints_are_evaluated_once_each_the_oldest_first_from_the_first_step_of_training(tmp_path: Path) -> None:
    for step in (5, 2, 6, 4):
        saved(tmp_path, step)
    (tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()  # being written
    one = following(tmp_path)
    assert [one.next(table)["step"] for _ in range(2)] == [4, 5]  # type: ignore[index]
    assert not one.over
    again = following(tmp_path)  # another process takes it up
    assert again.next(table)["step"] == 6 and again.next(table) is None and again.over  # type: ignore[index]
    assert [record["step"] for record in read(tmp_path / EVALUATIONS)] == [4, 5, 6]
    assert not (tmp_path / "evals" / "held").exists()


def test_a_checkpoint_that_training_deletes_meanwhile_is_there_until_it_is_evaluated(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5)

    def score(step: int, held: Path) -> tuple[dict[str, Any], float]:
        shutil.rmtree(folder)
        return table(step, held)

    record = following(tmp_path).next(score)
    assert record and record["step"] == 5 and following(tmp_path).due() is None


def test_a_checkpoint_that_is_gone_before_it_is_held_is_not_evaluated(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5)
    one = following(tmp_path)
    assert one.due() == 5
    shutil.rmtree(folder)
    with one.held(5) as held:
        assert held is None
    assert not (tmp_path / "evals" / "held").exists()


def test_a_killed_process_leaves_nothing_that_the_next_one_takes_for_its_own(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    saved(tmp_path, 5)

    def killed(step: int, held: Path) -> tuple[dict[str, Any], float]:
        shutil.copytree(held, tmp_path / "left")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        following(tmp_path).next(killed)
    shutil.copytree(tmp_path / "left", tmp_path / "evals" / "held")
    (tmp_path / EVALUATIONS).write_text('{"step": 5, "eval/succ')
    one = following(tmp_path)
    assert [one.next(table)["step"] for _ in range(2)] == [4, 5]  # type: ignore[index]
    assert [record["step"] for record in read(tmp_path / EVALUATIONS)] == [4, 5]


@pytest.mark.parametrize(("allowed", "lost"), [(0.5, 0.75), (1.0, 1.0)])
def test_what_the_infrastructure_broke_is_no_result_and_is_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], allowed: float, lost: float
) -> None:
    saved(tmp_path, 6)
    one = Following(tmp_path, tmp_path, SETTINGS, first=4, last=6, max_broken=allowed)
    assert one.next(lambda step, held: table(step, held, math.nan, lost)) is None
    assert f"step 6: {lost:.0%} of the episodes were lost" in capsys.readouterr().err
    assert read(one.path) == [] and not one.over and one.pause_s == RETRY_S
    record = one.next(table)
    assert record and (record["step"], record["n"], record["broken"]) == (6, 4, 1) and one.over
    assert read(one.path) == [record]


def test_a_checkpoint_that_cannot_be_read_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (4, 5, 6):
        saved(tmp_path, step)

    def score(step: int, held: Path) -> tuple[dict[str, Any], float]:
        if step != 5:
            raise Unreadable("no such file")
        return table(step, held)

    one = following(tmp_path)
    assert [bool(one.next(score)) for _ in range(3)] == [False, True, False] and one.over
    assert "step 4 is left out: its checkpoint cannot be read (no such file)" in capsys.readouterr().err
    assert [record["step"] for record in read(one.path)] == [5]


def test_a_run_is_followed_by_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs.save(CONFIG, tmp_path / "config.json")
    held = tmp_path / "evals" / "held"
    held.mkdir(parents=True)
    with (tmp_path / "evaluations.lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert command(["eval", f"--workdir={tmp_path}", "--follow"]) == 2
    assert "another process follows this run there already" in capsys.readouterr().err
    assert held.exists()


def test_evaluations_of_other_settings_never_come_into_one_file(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    assert following(tmp_path).next(table)
    warm = settings_of(CONFIG, held_out(CONFIG, temperature=0.3), split="valid", tasks=4, k=1)
    with pytest.raises(ValueError, match=r"cannot be compared: sampling is .*'temperature': 1.0.*'temperature': 0.3"):
        following(tmp_path, warm)


def test_settings_that_are_not_the_runs_own_are_refused_beside_its_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs.save(CONFIG, tmp_path / "config.json")
    assert command(["eval", f"--workdir={tmp_path}", "--follow", "--temperature=0.3"]) == 2
    assert "--to=FOLDER" in capsys.readouterr().err
    assert command(["eval", "--config=x.py", "--follow", "--endpoint=http://127.0.0.1/v1", "--model=m"]) == 2
    assert "--follow evaluates the checkpoints of a run" in capsys.readouterr().err


def test_curves_have_evaluations_at_the_steps_that_they_are_of_and_the_runs_own_stand(tmp_path: Path) -> None:
    configs.save(CONFIG, tmp_path / "config.json")
    steps = [{"step": step, "policy/nll": 1.0} for step in (4, 5, 6)]
    steps[2]["eval/success"] = 0.875
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    for step in (4, 6):
        saved(tmp_path, step)
    one = following(tmp_path)
    assert one.next(lambda step, held: table(step, held, 0.25)) and one.next(lambda step, held: table(step, held, 0.75))
    told = [record.get("eval/success") for record in with_evaluations(tmp_path)]
    assert told == [0.25, None, 0.875]
    assert overview(tmp_path)["curves"]["eval/success"] == told


@pytest.mark.learning
def test_a_follower_plays_what_training_would_have_played_at_every_checkpoint(tmp_path: Path) -> None:
    """Both at once, two processes; training evaluates every step too, so that every bit can be compared."""
    workdir = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    jaxagent = [sys.executable, "-m", "jaxagent"]
    given = ["train.steps=4", "evaluate.every=1", "checkpoint.every=1", "checkpoint.keep=9", "evaluate.ablate=False"]
    train = [*jaxagent, "train", f"--config={QUICKSTART}", f"--workdir={workdir}", *(f"--config.{one}" for one in given)]
    trainer = subprocess.Popen(train, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (workdir / "config.json").exists():
            assert trainer.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                trainer.wait(0.2)
        follow = [*jaxagent, "eval", f"--workdir={workdir}", "--follow"]
        done = subprocess.run(follow, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert trainer.wait() == 0
    finally:
        trainer.kill()
    records = {record["step"]: record for record in read(workdir / EVALUATIONS)}
    assert list(records) == [4, 5, 6, 7, 8]  # the end of the warm-up, and every step after it
    own = {record["step"]: record["eval/success"] for record in read(workdir / "metrics.jsonl") if "eval/success" in record}
    assert {step: records[step]["eval/success"] for step in own} == own and len(own) == 3
    folders = {
        json.loads((path / "settings.json").read_text())["policy"]["step"]: path for path in workdir.glob("evals/valid-*")
    }

    def told(row: Trajectory) -> tuple[Any, ...]:
        return row.task, row.rollout, row.tokens, row.mask, row.logprob, row.reward

    for step in own:
        beside, within = Store(folders[step]).read("episodes"), Store(workdir / "trajectories").read(f"valid-{step - 4:06d}")
        assert [told(row) for row in beside] == [told(row) for row in within]
