"""A run that is killed again and again, wherever it is, ends as the one that nothing disturbed: bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train import PATIENCE_S, SPEC, TINY, assert_same_run, configured, run

from jaxagent.journal import read as read_journal
from jaxagent.metrics import read

KILLS = int(os.environ.get("JAXAGENT_KILLS", "8"))
# One save per four steps, so that most kills come after steps that no checkpoint holds.
RUN = (*TINY[:-1], "train.steps=8", "evaluate.every=4", "checkpoint.every=4", "checkpoint.keep=3", "train.minibatches=1")


def grown(workdir: Path) -> int:
    """How much has been written: it tells how far a run has come, however fast the machine is."""
    files = [path for name in ("journal", "trajectories", "checkpoints") for path in (workdir / name).glob("*")]
    return len(read(workdir / "metrics.jsonl")) + len(files)


@pytest.mark.learning
def test_a_run_killed_at_random_points_equals_the_one_that_was_never_stopped(tmp_path: Path) -> None:
    run(configured(*RUN), tmp_path / "whole")
    workdir, luck = tmp_path / "killed", random.Random(0)
    arguments = [f"--config={SPEC}", f"--workdir={workdir}", *(f"--config.{override}" for override in (*TINY, *RUN))]
    command = [sys.executable, "-m", "jaxagent", "train", *arguments]
    kills, said, code = 0, "", -signal.SIGKILL
    while code == -signal.SIGKILL:
        past = grown(workdir) + luck.randint(1, 8)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            deadline = time.monotonic() + PATIENCE_S
            while grown(workdir) <= past and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if kills < KILLS:
                time.sleep(luck.uniform(0.0, 0.3))
                process.kill()
                kills += 1
            said += process.communicate(timeout=PATIENCE_S)[0].decode()
        code = process.returncode
    assert code == 0, said
    assert kills > 2  # the last may have come too late
    assert "the journal holds" in said
    assert_same_run(workdir, tmp_path / "whole")
    records = [record for path in (workdir / "journal").iterdir() for record in read_journal(path)]
    assert records
