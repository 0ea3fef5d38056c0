"""SIGTERM to several processes while they sample: all save at once, and as many or more of them go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_hosts import HERE, PATIENCE_S, STORY, environment, free_port, stored, weights_of

from jaxagent import train
from jaxagent.metrics import read

STEPS = 3
RUN = (*(word for word in STORY if not word.startswith("env.name")), "env.name=tests.lagging", f"train.steps={STEPS}")


def begun(workdir: Path, hosts: int, lag_from: int | None = None) -> list[subprocess.Popen[str]]:
    """Processes of two devices each; from group `lag_from` on nothing is over."""
    port, lag = free_port(), {} if lag_from is None else {"LAG_FROM": str(lag_from), "LAG_MARK": str(workdir / "lags")}
    command = [sys.executable, "-m", "jaxagent", "train", f"--config={HERE.parent / 'configs' / 'base.py'}"]
    command += [f"--workdir={workdir}", *(f"--config.{setting}" for setting in (*RUN, "mesh.cpu_devices=2"))]
    found = []
    for index in range(hosts):
        own = {**environment(port, index if hosts > 1 else -1), **lag}
        del own["JAX_NUM_CPU_DEVICES"]
        found.append(subprocess.Popen(command, cwd=HERE.parent, env=own, stdout=-1, stderr=subprocess.STDOUT, text=True))
    return found


def ended(processes: list[subprocess.Popen[str]], code: int) -> list[str]:
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return said


def stopped_in_the_second_step(workdir: Path, hosts: int) -> None:
    """Where the episodes of the second step never end, SIGTERM ends the run, and it is saved as it was after the first."""
    processes = begun(workdir, hosts, lag_from=4)
    deadline = time.monotonic() + PATIENCE_S
    while len(list(workdir.glob("lags-*"))) < hosts and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    said = ended(processes, train.EXIT_AGAIN)
    assert "saved at step 1; the same command resumes" in said[0]
    assert len(read(workdir / "metrics.jsonl")) == 1


@pytest.mark.learning
def test_processes_that_are_told_while_they_sample_save_and_go_on_with_as_many_or_with_more(tmp_path: Path) -> None:
    whole, two, one = (tmp_path / name for name in ("whole", "two", "one"))
    ended(begun(whole, 2), train.EXIT_DONE)
    for workdir, hosts in ((two, 2), (one, 1)):
        stopped_in_the_second_step(workdir, hosts)
        assert "resumed at step 1" in ended(begun(workdir, 2), train.EXIT_DONE)[0]
        assert [record["step"] for record in read(workdir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert stored(two, step) == stored(whole, step) and len(stored(one, step)) == 16
        tasks = [{key: task for key, (task, _) in stored(workdir, step).items()} for workdir in (one, whole)]
        assert tasks[0] == tasks[1]
    want, found, grown = (weights_of(workdir, STEPS) for workdir in (whole, two, one))
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value)
        np.testing.assert_allclose(grown[name], value, atol=1e-5)  # its first step was of one process, in another order
