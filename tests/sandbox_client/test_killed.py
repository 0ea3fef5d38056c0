"""Who has killed a program's process: itself, which the model is told, or somebody else, of which it hears nothing."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable

import pytest
from conftest import Start, ask
from launching import Running
from marked import init_with

from sandbox_client import Outcome, SandboxClient, SessionLost

_NAP = "import subprocess; subprocess.Popen(['sleep', '{mark}'], stdin=subprocess.DEVNULL){then}"


def _mark() -> str:
    return f"{time.monotonic_ns() % 10**9 + 10**6}.5"


def _namespaced(running: Running) -> Running:
    if running.ready["level"] < "L2":
        pytest.skip(f"no namespaces here: {running.ready['reason']}")
    return running


async def _killed(mark: str, work: Awaitable[object]) -> SessionLost:
    """Kills the init of the process that bears `mark`, as soon as there is one, while `work` goes on. Returns its failure."""
    working = asyncio.ensure_future(work)
    async with asyncio.timeout(20):
        while not (pid := init_with(mark)):  # noqa: ASYNC110 (it is another process that gets there)
            await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
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
            os.kill(init_with(mark), signal.SIGKILL)
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

    ask(_namespaced(jailed), use)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(7)",
        "import os, time; os.close(3); time.sleep(30)",  # its line to the server: then it is killed
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
        "import ctypes; ctypes.string_at(0)",
        # the thread that leads ends alone; another hangs up, and is killed
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(.2), os.close(3), time.sleep(30))).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)",
    ],
    ids=["exit", "hang up", "cpu limit", "segfault", "a thread hangs up"],
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


def test_inside_its_namespace_a_program_cannot_kill_its_own_process(jailed: Running) -> None:
    result = ask(_namespaced(jailed), lambda client: client.run_code("import os; os.kill(os.getpid(), 9); print('deaf')"))
    assert (result.outcome, result.stdout) == (Outcome.OK, "deaf\n")
