"""A workdir whose disk is full while `jaxagent train` runs: a sentence and nothing else, and the same command goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_train import PATIENCE_S, SPEC, TINY

from jaxagent.metrics import read

STEPS = 40
RUN = (
    *TINY,
    *("mesh.cpu_devices=1", "mesh.data=1", "warmup.steps=2", f"train.steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=2"),
    *("evaluate.every=0", "evaluate.final_tasks=4", "evaluate.ablate=False", "alarms.stop="),
)


def called(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not called("mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)):
        pytest.skip("no file system may be mounted here")
    yield folder
    called("umount", "--lazy", str(folder))


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """No byte more goes onto it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    yield
    filler.unlink()


@contextmanager
def running(workdir: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "jaxagent", "train", f"--config={SPEC}", f"--workdir={workdir}"]
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
    command += [f"--config.{setting}" for setting in RUN]
    process = subprocess.Popen(command, env={**os.environ, **quick}, stdout=-1, stderr=-1, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def saved(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdecimal())


@pytest.mark.learning
def test_a_run_whose_workdir_takes_no_more_says_so_and_goes_on_when_it_does_again(disk: Path, tmp_path: Path) -> None:
    workdir, cache = disk / "run", tmp_path / "compiled"
    with running(workdir, cache) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not saved(workdir) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with full(disk):
            said, errors = process.communicate(timeout=PATIENCE_S)
            kept = saved(workdir)
    assert process.returncode == 2, (said, errors)
    (sentence,) = errors.splitlines()
    assert f": No space left on device; the checkpoint of step {kept[-1]} is whole." in sentence
    assert sentence.endswith("Once there is room, or the right to write, the same command resumes.")
    with running(workdir, cache) as process:
        said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, ""), said
    assert f"resumed at step {kept[-1]}" in said
    assert [record["step"] for record in read(workdir / "metrics.jsonl")] == list(range(1, STEPS + 3))
