"""Who has killed a program's process: itself, which the model is told, or somebody else, of which it hears nothing."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
from conftest import Start, ask
from launching import PATIENCE_S, Running
from marked import init_with

from sandbox_client import Outcome, SandboxClient, SessionLost
from sandbox_client.groups import time_may_be_up

CORES = os.cpu_count() or 1
_NAP = "import subprocess; subprocess.Popen(['sleep', '{mark}'], stdin=subprocess.DEVNULL){then}"
# Runs about the clock's ticks alone, by which a limit on CPU is counted: far less is used than is counted.
_TICK_DODGER = """import resource, time
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
COARSE = 6  # a clock that moves with the ticks
while True:
    now = time.clock_gettime(COARSE)
    while time.clock_gettime(COARSE) == now: pass
    time.sleep(0.9 * time.clock_getres(COARSE))
"""


def _mark() -> str:
    return f"{time.monotonic_ns() % 10**9 + 10**6}.5"


def _namespaced(running: Running) -> Running:
    if running.ready["level"] < "L2":
        pytest.skip(f"no namespaces here: {running.ready['reason']}")
    return running


def _kill(mark: str) -> None:
    """Kills the init of the process that bears `mark`. Raises LookupError where there is none."""
    pid = init_with(mark)
    assert pid > 1
    os.kill(pid, signal.SIGKILL)


async def _kill_when_there(mark: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(LookupError):  # it is another process that gets there
                return _kill(mark)
            await asyncio.sleep(0.01)


async def _killed(mark: str, work: Awaitable[object]) -> SessionLost:
    """Kills the init of the process that bears `mark`, as soon as there is one, while `work` goes on. Returns its failure."""
    working = asyncio.ensure_future(work)
    await _kill_when_there(mark)
    with pytest.raises(SessionLost) as lost:
        await working
    return lost.value


def test_a_process_that_others_have_killed_is_lost_and_never_a_program_s_failure(jailed: Running) -> None:
    async def use(client: SandboxClient) -> None:
        async with await client.open_session(_mark()) as session:
            mark = _mark()
            during = await _killed(mark, session.exec(_NAP.format(mark=mark, then=".wait()"), timeout_s=30))
        async with await client.open_session(_mark()) as session:
            mark = _mark()
            await session.exec(_NAP.format(mark=mark, then=""))
            _kill(mark)
            with pytest.raises(SessionLost) as lost:
                await session.exec("1")
            between = lost.value
        async with await client.open_session(_mark(), "counting") as session:
            mark = _mark()
            await session.exec(_NAP.format(mark=mark, then=""))
            in_function = await _killed(mark, session.call("sleep", {"seconds": 30}, timeout_s=40))
        mark = _mark()
        stateless = await _killed(mark, client.run_code(_NAP.format(mark=mark, then=".wait()"), timeout_s=30))
        mark = _mark()
        in_bash = await _killed(mark, client.run_code(f"sleep {mark}; true", "bash", timeout_s=30))
        for loss in (during, between, in_function, stateless, in_bash):
            assert loss.may_have_executed and not loss.caused_by_program and "killed from outside" in str(loss), loss

    if _namespaced(jailed).ready["level"] < "L3":
        pytest.skip("no memory cgroups here, which alone tell that it was not for memory")
    ask(jailed, use)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(7)",
        "import os, time; os.close(3); time.sleep(30)",  # its line to the server: then it is killed
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        _TICK_DODGER,
        "import ctypes; ctypes.string_at(0)",
        # the thread that leads ends alone; another hangs up, and is killed
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(.2), os.close(3), time.sleep(30))).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)",
    ],
    ids=["exit", "hang up", "cpu limit", "no cpu at all", "cpu only at ticks", "segfault", "a thread hangs up"],
)
def test_what_a_program_does_to_its_own_process_is_its_own_failure(jailed: Running, code: str) -> None:
    async def use(client: SandboxClient) -> None:
        async with await client.open_session(_mark()) as session:
            result = await session.exec(code, timeout_s=20)
            assert (result.outcome, result.session_lost) == (Outcome.PROGRAM_ERROR, True), result
            with pytest.raises(SessionLost) as lost:
                await session.exec("1")
            assert lost.value.caused_by_program

    ask(_namespaced(jailed), use)


def test_without_a_pid_namespace_every_sigkill_counts_as_the_program_s_own(start: Start) -> None:
    running = start(
        "--functions=counting", "--code=auto", "--warm=8", "--min-isolation=L1", user="ordinary", lock="no namespaces"
    )
    if running.ready["level"] != "L1":
        pytest.skip(f"no Landlock here: {running.ready['reason']}")
    result = ask(running, lambda client: client.run_code("import os; os.kill(os.getpid(), 9)"))
    assert (result.outcome, result.error) == (Outcome.PROGRAM_ERROR, "signal 9")


def test_without_memory_cgroups_every_sigkill_counts_as_the_program_s_own_for_it_may_have_been_for_memory(start: Start) -> None:
    running = start("--functions=counting", "--code=auto", "--warm=8", user="ordinary")
    if running.ready["level"] != "L2":
        pytest.skip(f"an ordinary user has {running.ready['level']} here: {running.ready['reason']}")

    async def use(client: SandboxClient) -> None:
        mark = _mark()
        working = asyncio.ensure_future(client.run_code(f"sleep {mark}; true", "bash", timeout_s=30))
        await _kill_when_there(mark)
        result = await working
        assert (result.outcome, result.error) == (Outcome.PROGRAM_ERROR, "signal 9")

    ask(running, use)


def test_of_time_a_process_may_have_died_that_lowered_its_limit_or_is_so_old_that_it_could_have_reached_it() -> None:
    with subprocess.Popen(["sleep", "30"]) as process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (10, 600))
            stat, limits = (Path(f"/proc/{process.pid}/{name}").read_text() for name in ("stat", "limits"))
        finally:
            process.kill()
    assert [time_may_be_up(stat, limits, limit_s, CORES) for limit_s in (600, 601, 0)] == [False, True, True]
    begun = stat.rpartition(")")[2].split()[19]
    assert time_may_be_up(stat.replace(f" {begun} ", " 0 "), limits, 1, CORES)
    odd = [("", limits), ("1 (sleep) Z 0", limits), (stat, ""), (stat, "Limit\n\n"), (stat, limits.replace("600", "unlimited"))]
    assert all(time_may_be_up(*words, 600, CORES) for words in odd)


def test_inside_its_namespace_a_program_cannot_kill_its_own_process(jailed: Running) -> None:
    result = ask(_namespaced(jailed), lambda client: client.run_code("import os; os.kill(os.getpid(), 9); print('deaf')"))
    assert (result.outcome, result.stdout) == (Outcome.OK, "deaf\n")
