"""Workers die, hang and lie, and what comes of it is a fault of the infrastructure; nothing is left running."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxagent.envs.workers.pool import Kind, Place, Pool, WorkerFault

ADAPTER = Path(__file__).with_name("misbehaving.py")
KIND = Kind("misbehaving", Path(sys.executable), ADAPTER, {"greeting": "welcome"}, workers=1, slots=2, timeout_s=60.0)
PATIENCE_S = 60.0  # a hang fails by this; nothing is measured


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(KIND)
    yield pool
    pool.close()


def begun(pool: Pool, name: str = "a") -> Place:
    place = pool.take().result(PATIENCE_S)
    place.call("reset", task={"id": name}, seed=7).result(PATIENCE_S)
    return place


def act(place: Place, action: str) -> dict[str, Any]:
    said: dict[str, Any] = place.call("step", action=action).result(PATIENCE_S)
    return said


def pid_of(place: Place) -> int:
    return int(act(place, "pid")["text"])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    until = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_alive(pid)


def test_a_world_is_reset_and_stepped_with_its_options_task_and_seed(pool: Pool) -> None:
    place = pool.take().result(PATIENCE_S)
    said = place.call("reset", task={"id": "one"}, seed=7).result(PATIENCE_S)
    assert said["text"].startswith("welcome one 7 ")
    assert act(place, "ja") == {"text": "ja 1", "reward": 0.5, "done": False, "reason": "counted"}
    assert place.call("oracle").result(PATIENCE_S) == ["one", "end"]


def test_a_place_is_used_again_and_so_is_its_world(pool: Pool) -> None:
    first = pool.take().result(PATIENCE_S)
    world = first.call("reset", task={"id": "one"}, seed=1).result(PATIENCE_S)["text"].split()[-1]
    pid = pid_of(first)
    pool.give_back(first)
    second = pool.take().result(PATIENCE_S)
    assert second.call("reset", task={"id": "two"}, seed=2).result(PATIENCE_S)["text"] == f"welcome two 2 {world}"
    assert pid_of(second) == pid


def test_worlds_of_one_worker_are_apart_and_who_finds_no_place_waits(pool: Pool) -> None:
    one, two = begun(pool, "one"), begun(pool, "two")
    assert [act(one, "x")["text"], act(one, "x")["text"], act(two, "x")["text"]] == ["x 1", "x 2", "x 1"]
    third, fourth = pool.take(), pool.take()
    assert not third.done()
    assert third.cancel()  # who leaves the queue holds nobody up
    pool.give_back(two)
    place = fourth.result(PATIENCE_S)
    assert (place.worker, place.slot) == (one.worker, two.slot)


def test_episodes_are_spread_over_workers_before_they_share_one() -> None:
    pool = Pool(replace(KIND, workers=2))
    try:
        places = [pool.take().result(PATIENCE_S) for _ in range(4)]
        assert [len({p.worker for p in places[:2]}), len({p.worker for p in places})] == [2, 2]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("die", r"misbehaving, step: the worker ended, status 3; its last words: I am leaving"),
        ("garbage", r"misbehaving, step: the worker answered b'hello', which is no JSON"),
        ("another", r"misbehaving, step: the worker answered .*99.*, which answers nothing"),
    ],
)
def test_a_worker_that_fails_is_told_and_replaced(pool: Pool, action: str, said: str) -> None:
    place, beside = begun(pool), begun(pool)
    pid = pid_of(place)
    with pytest.raises(WorkerFault, match=said):
        act(place, action)
    assert gone(pid)
    with pytest.raises(WorkerFault, match=said):  # its other episodes are lost with it
        act(beside, "x")
    pool.give_back(place)
    pool.give_back(beside)
    assert pid_of(begun(pool)) != pid


def test_a_worker_that_hangs_is_ended_at_the_deadline() -> None:
    pool = Pool(replace(KIND, timeout_s=1.0))
    try:
        place = begun(pool)
        pid = pid_of(place)
        with pytest.raises(WorkerFault, match=r"misbehaving, step: no answer within 1 s \(env\.options\.timeout_s\)"):
            act(place, "hang")
        assert gone(pid)
        pool.give_back(place)
        assert act(begun(pool), "x")["text"] == "x 1"
    finally:
        pool.close()


def test_a_world_that_raises_is_thrown_away_and_its_worker_stays(pool: Pool) -> None:
    place, beside = begun(pool), begun(pool)
    pid = pid_of(beside)
    with pytest.raises(WorkerFault, match="world misbehaving, step: KeyError: 'lost'"):
        act(place, "raise")
    with pytest.raises(WorkerFault, match="step before reset in slot"):
        act(place, "x")
    with pytest.raises(WorkerFault, match="the adapter says txet; known are agent, answered"):
        act(begun_again(place), "unknown")
    with pytest.raises(WorkerFault, match="TypeError: Object of type bytes is not JSON serializable"):
        act(begun_again(place), "no json")
    assert pid_of(beside) == pid


def begun_again(place: Place) -> Place:
    place.call("reset", task={"id": "again"}, seed=1).result(PATIENCE_S)
    return place


def test_a_world_that_prints_and_reads_does_not_disturb_the_line(pool: Pool) -> None:
    place = begun(pool)
    assert act(place, "print")["text"] == "print 1"
    assert act(place, "read")["text"] == "''"
    assert act(place, "x")["text"] == "x 3"


def test_what_a_world_prints_does_not_fill_the_disk(pool: Pool) -> None:
    place = begun(pool)
    sizes = [int(act(place, "shout")["text"]) for _ in range(3)]
    assert sizes == [sizes[0]] * 3 and sizes[0] > 5 << 20


def test_a_world_that_swells_is_stopped_before_the_memory_is_full_and_the_others_go_on() -> None:
    pool = Pool(replace(KIND, address_mb=1024))
    try:
        place, beside = begun(pool), begun(pool)
        with pytest.raises(WorkerFault, match="MemoryError"):
            act(place, "swell")
        assert act(beside, "x")["text"] == "x 1"
    finally:
        pool.close()


def test_a_worker_stands_in_a_folder_of_its_own_and_knows_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("SOME_HOME", "/there")
    pool = Pool(replace(KIND, workers=2, variables=("SOME_HOME",)))
    try:
        one, two = begun(pool), begun(pool)
        folders = {act(place, "where")["text"] for place in (one, two)}
        names = act(one, "variables")["text"].split()
        assert "SOME_HOME" in names and "PATH" in names and "SOME_TOKEN" not in names
        assert len(folders) == 2 and str(Path.cwd()) not in folders
    finally:
        pool.close()
    assert not any(Path(folder).exists() for folder in folders)


def test_an_action_larger_than_any_buffer_arrives(pool: Pool) -> None:
    action = "\u2603\n" * 300_000
    assert act(begun(pool), action)["text"] == f"{action} 1"


def test_closing_ends_workers_and_what_their_worlds_started() -> None:
    pool = Pool(KIND)
    place = begun(pool)
    pids = [pid_of(place), int(act(place, "spawn")["text"])]
    assert all(map(is_alive, pids))
    pool.close()
    assert all(map(gone, pids))
    assert not [thread for thread in threading.enumerate() if thread.name == "worker-misbehaving"]
    with pytest.raises(WorkerFault, match="its workers were ended"):
        act(place, "x")
    with pytest.raises(WorkerFault, match="its workers were ended"):
        pool.take()
    pool.close()


def test_closing_ends_a_worker_that_hangs_and_tells_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxagent.envs.workers.pool._LEAVE_S", 0.2)
    pool = Pool(replace(KIND, slots=1))
    place = begun(pool)
    pid = pid_of(place)
    hanging: Future[Any] = place.call("step", action="hang")
    waiting = pool.take()
    pool.close()
    assert gone(pid)
    with pytest.raises(WorkerFault):
        hanging.result(PATIENCE_S)
    assert waiting.cancelled()


def test_an_interpreter_or_an_adapter_that_is_not_there_or_says_nothing_is_told(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    for kind, said in (
        (replace(KIND, python=silent, start_s=0.2), r"its worker did not start: it said nothing within 0\.2 s$"),
        (replace(KIND, python=Path("/nowhere/python")), "cannot be started: No such file or directory"),
        (
            replace(KIND, adapter=ADAPTER.with_name("nothing.py")),
            "its worker did not start: the worker ended, status 1; .*nothing",
        ),
    ):
        pool = Pool(kind)
        try:
            with pytest.raises(WorkerFault, match=said):
                begun(pool)
        finally:
            pool.close()


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from jaxagent.envs.workers.pool import Kind, Pool\n"
        f"pool = Pool(Kind('m', Path(sys.executable), Path({str(ADAPTER)!r})))\n"
        "place = pool.take().result(); place.call('reset', task={'id': 'a'}, seed=1).result()\n"
        "print(*(place.call('step', action=a).result()['text'] for a in ('pid', 'spawn')), flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    try:
        assert all(map(gone, pids))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
