"""One process at a time: who is refused, who is waited for, and that the lock ends with its holder."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxagent.lock import alone

HOLD = "import sys, time\nfrom pathlib import Path\nfrom jaxagent.lock import alone\nwith alone(Path(sys.argv[1]), ''):\n"
HOLD += "    print('held', flush=True)\n    sys.stdin.read()\n"


def test_a_second_process_is_refused_and_told_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as first:
        assert first.stdout and first.stdout.readline() == b"held\n"
        with (
            pytest.raises(ValueError, match=f"process {first.pid} on .* trains there already"),
            alone(lock, "trains there already"),
        ):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with alone(lock, "trains there already"):
            pass


def test_a_holder_on_another_machine_is_waited_for(tmp_path: Path) -> None:
    lock, held, over = tmp_path / "run.lock", threading.Event(), threading.Event()

    def hold() -> None:
        with alone(lock, ""):
            lock.write_text("process 7 on a-machine-that-is-not-this-one")
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with pytest.raises(ValueError, match="process 7 on a-machine-that-is-not-this-one is here"), alone(lock, "is here", 0.0):
        pass
    threading.Timer(0.2, over.set).start()
    with alone(lock, "is here", lease_s=60.0):
        assert over.is_set()
    holder.join()
