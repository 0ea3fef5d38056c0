"""A disk that is full and a workdir that may not be written: real ones, under the command, which says so and can go on."""

from __future__ import annotations

import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_train import PATIENCE_S, SPEC, TINY, configured, final_params, run, steady_metrics, trajectories

from jaxagent.checkpoint import Checkpoints

pytestmark = pytest.mark.learning
RUN = (*TINY, "warmup.steps=2", "train.steps=8", "evaluate.every=0", "checkpoint.every=2", "train.minibatches=1")
LAST = 10
# Root writes everywhere unless the kernel is told that it may not: PR_CAPBSET_DROP of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
ORDINARY = (
    "import ctypes, os, sys; [ctypes.CDLL(None).prctl(24, n, 0, 0, 0) for n in (1, 2)]; os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("whole")
    run(configured(*RUN[len(TINY) :]), workdir)
    return workdir


def begun(workdir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxagent", "train", f"--config={SPEC}", f"--workdir={workdir}"]
    command += [f"--config.{override}" for override in RUN]
    return subprocess.Popen(
        [sys.executable, "-c", ORDINARY, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
    return process.returncode, said


def when_saved(workdir: Path, process: subprocess.Popen[str]) -> None:
    """Waits for the first checkpoint."""
    deadline = time.monotonic() + PATIENCE_S
    while not (workdir / "checkpoints" / "2").is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def told(code: int, said: str, fault: str, workdir: Path) -> None:
    """It ended with a sentence that says what is wrong, where, what there is and what to do; and what it says there is."""
    assert code == 2, said
    assert "Traceback" not in said
    found = re.search(
        rf"(\S+): cannot be written at step \d+: {fault}; the checkpoint of step (\d+) is whole\. Once there", said
    )
    assert found and found[1].startswith(str(workdir)), said
    checkpoints = Checkpoints(workdir / "checkpoints", keep=99)
    assert checkpoints.latest() == int(found[2]) and checkpoints.facts(int(found[2]))["step"] == int(found[2])
    checkpoints.close()
    assert final_params(workdir, int(found[2]))


def goes_on(workdir: Path, whole: Path) -> None:
    code, said = ended(begun(workdir))
    assert code == 0 and "resumed at step" in said, said
    assert steady_metrics(workdir) == steady_metrics(whole)
    assert trajectories(workdir) == trajectories(whole)


def test_files_that_may_not_grow_end_the_run_and_it_goes_on_when_they_may(whole: Path, tmp_path: Path) -> None:
    process = begun(workdir := tmp_path / "run")
    when_saved(workdir, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    told(*ended(process), "File too large", workdir)
    goes_on(workdir, whole)


@pytest.fixture
def small_disk(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two thirds of a run."""
    used = sum(path.stat().st_blocks * 512 for path in whole.rglob("*"))
    (place := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={used * 2 // 3}", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_ends_the_run_and_it_goes_on_when_there_is_room(whole: Path, small_disk: Path) -> None:
    workdir = small_disk / "run"
    told(*ended(begun(workdir)), "No space left on device", workdir)
    subprocess.run(["mount", "-o", "remount,size=1g", str(small_disk)], check=True)
    goes_on(workdir, whole)


def test_a_workdir_that_may_not_be_written_any_more_ends_the_run_and_it_goes_on_when_it_may(
    whole: Path, tmp_path: Path
) -> None:
    process = begun(workdir := tmp_path / "run")
    when_saved(workdir, process)
    kept = {path: stat.S_IMODE(path.stat().st_mode) for path in (workdir, *workdir.iterdir())}
    for path in kept:
        path.chmod(0o555 if path.is_dir() else 0o444)
    told(*ended(process), "Permission denied", workdir)
    code, said = ended(begun(workdir))
    assert code == 2 and f"--workdir={workdir} cannot be written: Permission denied" in said, said
    assert "get the right to write" in said and "Traceback" not in said
    for path, mode in kept.items():
        path.chmod(mode)
    goes_on(workdir, whole)
