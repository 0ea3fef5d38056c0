"""What a run waits for itself has an owner too: a phase that does not end, ends the process, which says where it stood."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import tiny
from engine.test_replicas import engines
from test_hosts import PATIENCE_S, environment, free_port

from jaxagent import watchdog
from jaxagent.algos.table import TABLE
from jaxagent.checkpoint import Checkpoints
from jaxagent.hosts import ALONE
from jaxagent.learner import Learner, LearnerOptions
from jaxagent.train import watchdog_of
from jaxagent.update import Update, UpdateOptions
from jaxagent.watchdog import AGAIN, STUCK, TRIES, Budgets, Watchdog, Watched

HERE = Path(__file__).parent
SOON = Budgets(first_s=0.3, floor_s=0.3)


class Ended:
    """What the end of the process is in these tests: it is written down, and lets go what hung."""

    def __init__(self) -> None:
        self.code, self.go = -1, threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.go.set()

    def hang(self) -> None:
        assert self.go.wait(60), "nobody ended it"


@contextmanager
def ended_in(phase: str, path: Path) -> Iterator[tuple[Ended, Watchdog]]:
    end = Ended()
    dog = Watchdog(path / "overrun.log", budgets=SOON, end=end)
    dog.place = lambda: "step 7"
    yield end, dog
    assert end.code == AGAIN
    assert f"step 7: {phase} is not over within its 0.3 s" in (path / "overrun.log").read_text()


def test_a_publish_that_the_engine_never_gets_to_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engines(tensor=1) as replicas, ended_in("publish", tmp_path) as (end, dog):
        replicas.engines[0].post(end.hang)
        with dog.within("publish"):
            replicas.engines[0].run(lambda: None)
    said = capsys.readouterr().err
    assert said.startswith("step 7: publish is not over within its 0.3 s; the same command resumes\n0 episodes are open\n")
    assert "thread engine:\n" in said and "end.hang" not in said and ", in hang\n" in said  # the stacks of all threads
    assert "thread MainThread:\n" in said and ", in run\n    self.post(work).result()" in said


def test_an_engine_that_cannot_be_held_is_ended_and_so_is_the_update_that_wants_to_hold_it(tmp_path: Path) -> None:
    options = LearnerOptions(batch_rows=8, row_tokens=16)
    learner = Learner(tiny.config(), tiny.params(tiny.config()), tiny.mesh(), TABLE["grpo"], options)
    with engines(tensor=2) as replicas:
        with ended_in("hold", tmp_path) as (end, dog):
            replicas.engines[1].post(end.hang)
            with dog.within("hold"), replicas.hold():
                pass
        with ended_in("train", tmp_path) as (end, dog):
            replicas.engines[1].post(end.hang)
            update = Update(learner, None, [replicas], UpdateOptions(minibatches=2), place=(0, 0), baselines={})
            with dog.within("train"):
                update.finish([])


def test_a_disk_that_does_not_take_what_is_saved_is_ended(tmp_path: Path) -> None:
    class Slow(dict[str, Any]):
        def items(self) -> Any:
            end.hang()
            return super().items()

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    with ended_in("save", tmp_path) as (end, dog):
        checkpoints.save(1, {"params": {"x": jnp.zeros(2)}}, {"facts": Slow(step=1)})
        with dog.within("save"):
            checkpoints.wait()
    checkpoints.close()
    assert checkpoints.whole() == 1


def test_hosts_that_wait_for_one_that_hangs_all_end_and_say_where(tmp_path: Path) -> None:
    """Two real processes: one in a world that blocks the loop with a call that is not awaited, one that gathers."""
    port, command = free_port(), [sys.executable, str(HERE / "hung_host.py"), str(tmp_path)]
    both = [
        subprocess.Popen(command, env=environment(port, i, devices=1), stdout=-1, stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert both[0].returncode == AGAIN, said
    assert both[1].returncode == AGAIN, said
    assert "rollout is not over within its 2 s" in said[0] and "\n0 episodes are open\n" in said[0]
    assert ", in gather\n" in said[0]
    (told,) = re.findall(r"1 episodes are open:\n  (.*)\n", said[1])
    assert re.fullmatch(r"train/1#0, turn 1: \d+ s since it was asked for; waiting for the environment", told)
    assert ", in step\n    time.sleep(3600)" in said[1] and ", in step\n" in (tmp_path / "overrun-1.log").read_text()


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(HERE.parent), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=paths, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_what_never_gives_up_the_interpreter_is_ended_as_well(tmp_path: Path) -> None:
    program = (
        "import re, sys\nfrom pathlib import Path\nfrom jaxagent import watchdog\nwatchdog.UNHEARD_S = 0.2\n"
        "dog = watchdog.Watchdog(Path(sys.argv[1]), {'rollout': 0.1}, watchdog.Budgets(floor_s=0.1))\n"
        "with dog.within('rollout'):\n    re.match('(a|a)+$', 'a' * 60 + 'b')\n"
    )
    done = run_python(program, str(tmp_path / "log"))
    assert done.returncode == 1, done
    assert "Timeout" in done.stderr and "in match" in done.stderr


def test_the_process_ends_in_time_after_sigterm_whatever_it_does(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, threading\nfrom pathlib import Path\nfrom jaxagent.watchdog import Watchdog\n"
        "dog = Watchdog(Path(sys.argv[1]))\ndog.place = lambda: 'step 3'\n"
        "signal.signal(signal.SIGTERM, lambda *_: dog.hurry(0.2, 'SIGTERM'))\n"
        "with dog.within('train'):\n    os.kill(os.getpid(), signal.SIGTERM)\n    threading.Event().wait()\n"
    )
    done = run_python(program, str(tmp_path / "log"))
    assert done.returncode == AGAIN, done
    assert done.stderr.startswith("step 3: train is not over 0.2 s after SIGTERM; the same command resumes\n")


def test_the_process_ends_though_neither_its_log_nor_its_terminal_nor_what_is_asked_answers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")  # whoever opens it waits for another end, as one does for a disk that has hung
    program = (
        "import sys, threading\nfrom pathlib import Path\nfrom jaxagent import watchdog\nwatchdog.TELL_S = 0.2\n"
        "sys.stderr.close()\n"
        "dog = watchdog.Watchdog(Path(sys.argv[1]), {'rollout': 0.0}, watchdog.Budgets(floor_s=0.1))\n"
        "dog.place = dog.episodes = lambda: 1 / 0\n"
        "with dog.within('rollout'):\n    threading.Event().wait()\n"
    )
    assert run_python(program, str(tmp_path / "log")).returncode == AGAIN


def test_a_disk_that_hangs_does_not_keep_the_report_from_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "overrun.log")
    monkeypatch.setattr(watchdog, "TELL_S", 0.2)
    end = Ended()
    dog = Watchdog(tmp_path / "overrun.log", {"rollout": 0.0}, Budgets(floor_s=0.01), end=end)
    with dog.within("rollout"):
        end.hang()
    assert end.code == AGAIN
    assert capsys.readouterr().err.startswith("the start: rollout is not over within its 0.01 s; the same command resumes\n")
    for _ in range(2):  # lets go who still waits for it
        os.close(os.open(tmp_path / "overrun.log", os.O_RDWR | os.O_NONBLOCK))


def test_a_host_that_lost_one_that_hung_ends_as_that_one_did(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nimport jax\nfrom jaxagent.hosts import Hosts\n"
        "from jaxagent.watchdog import overruns\n"
        "with Hosts(0, 2).ending_together((), overruns(Path(sys.argv[1]))):\n"
        "    with open(sys.argv[1] + '/overrun-1.log', 'a') as file:\n        file.write(sys.argv[2])\n"
        "    raise jax.errors.JaxRuntimeError('connection reset')\n"
    )
    (tmp_path / "overrun-1.log").write_text(f"earlier; {watchdog.GIVEN_UP}\n")
    ends = [run_python(program, str(tmp_path), text).returncode for text in ("", "within its 2 s; the same command resumes")]
    assert ends == [1, AGAIN]
    later = watchdog.overruns(tmp_path)
    with (tmp_path / "overrun-1.log").open("a") as file:
        file.write(f"so it was 3 times, and {watchdog.GIVEN_UP}")
    assert later() == STUCK


def test_where_a_step_hangs_every_time_it_is_not_started_for_ever(tmp_path: Path) -> None:
    codes = []
    for step in (4, *[5] * TRIES, 6):
        end = Ended()
        dog = Watchdog(tmp_path / "overrun.log", {"rollout": 0.0}, Budgets(floor_s=0.01), end=end)
        dog.place = lambda step=step: f"step {step}"  # type: ignore[misc]
        with dog.within("rollout"):
            end.hang()
        codes.append(end.code)
    assert codes == [AGAIN, *[AGAIN] * (TRIES - 1), STUCK, AGAIN]


def test_what_is_not_declared_may_compile_first_and_then_take_a_multiple_of_what_it_took() -> None:
    end = Ended()
    dog = Watchdog(Path("nowhere"), {"rollout": 60.0}, Budgets(first_s=100.0, least_s=0.02, floor_s=0.02, times=10.0), end=end)
    clock = Watched(dog)
    for _ in range(2):
        assert dog.budget_s("train") == 100.0
        with clock.part("train"):
            assert dog.phase == "train"
            time.sleep(0.01)
    assert 0.1 <= dog.budget_s("train") <= 10 * clock.parts["train"]
    assert dog.budget_s("rollout") == 60.02
    with dog.within("between"):
        with clock.part("rollout"):
            assert dog.phase == "rollout"
        assert dog.phase == "between"
    assert dog.phase == "" and end.code == -1


def test_nothing_watches_outside_of_phases() -> None:
    dog = Watchdog(Path("nowhere"), {"rollout": 60.0}, end=Ended())
    with dog.within("rollout"):
        assert "watchdog" in {thread.name for thread in threading.enumerate()}
    deadline = time.monotonic() + 60
    while "watchdog" in {thread.name for thread in threading.enumerate()} and time.monotonic() < deadline:
        time.sleep(0.001)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
    with dog.within("rollout"):  # and again
        assert "watchdog" in {thread.name for thread in threading.enumerate()}


def test_what_stands_between_phases_may_always_take_long_however_short_it_was_before(tmp_path: Path) -> None:
    dog = watchdog_of(tmp_path, ALONE)
    for _ in range(9):
        with dog.within("between"):
            pass
    assert dog.budget_s("between") >= Budgets().first_s
    for _ in range(9):
        with dog.within("train"):  # of a step without anything to learn
            pass
    assert dog.budget_s("train") == Budgets().least_s >= 3600
