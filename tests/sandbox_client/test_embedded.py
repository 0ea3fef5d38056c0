"""A server inside a trainer: started, killed, started again, and gone with its parent."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import HERE, PATIENCE_S, REPOSITORY, descendants

from sandbox_client import EmbeddedServer, InfrastructureError, Outcome, SandboxClient, SandboxStartError


async def _add(server: EmbeddedServer, key: str) -> object:
    async with SandboxClient(server.url, server.token) as client, await client.open_session(key, "counting") as session:
        return (await session.call("add", {"amount": 2})).value


def test_it_starts_serves_and_stops_leaving_no_file_and_no_process() -> None:
    server = EmbeddedServer(functions=("counting",), code="auto")
    assert not server.alive()
    with server:
        ready = json.loads(server.ready_line)
        assert (ready["url"], ready["level"]) == (server.url, server.level)
        assert server.alive()
        family = descendants(ready["pid"])
        assert asyncio.run(_add(server, "one")) == 2
    assert not server.alive()
    assert not [member for member in family if Path(f"/proc/{member}").exists()]
    assert not Path(ready["token_file"]).exists()
    server.stop()


def test_after_kill_9_a_restart_has_the_same_address_and_new_sessions_work() -> None:
    async def live(server: EmbeddedServer) -> None:
        async with SandboxClient(server.url, server.token, timeout_s=10) as client:
            before = await client.open_session("before", "counting")
            assert (await before.call("add", {})).outcome is Outcome.OK
            os.kill(json.loads(server.ready_line)["pid"], 9)
            while server.alive():
                pass
            restart = asyncio.to_thread(server.restart, only_if_dead=True)
            restarting = asyncio.gather(restart, asyncio.to_thread(server.restart, only_if_dead=True))
            again = await client.open_session("again", "counting")  # its connections are retried meanwhile
            await restarting
            assert (await again.call("add", {"amount": 5})).value == 5
            with pytest.raises(InfrastructureError):
                await before.call("add", {})

    with EmbeddedServer(functions=("counting",), code="off") as server:
        address = server.url, server.token
        asyncio.run(live(server))
        assert (server.url, server.token) == address
        assert server.restarts() == 1
        server.restart()
        assert server.restarts() == 2
        assert asyncio.run(_add(server, "third")) == 2


def test_it_may_be_started_and_stopped_from_threads_that_end() -> None:
    server = EmbeddedServer(functions=("counting",), code="off")
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    time.sleep(0.1)  # a process bound to the thread that started it would be gone by now
    assert server.alive()
    assert asyncio.run(_add(server, "thread")) == 2
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    stopper.join()
    assert not server.alive()


def test_a_start_that_fails_carries_the_servers_own_sentence(place: Path) -> None:
    with pytest.raises(SandboxStartError, match=r"^wanted functions module no_such_module: No module named"):
        EmbeddedServer(functions=("no_such_module",), code="off").start()
    log = place / "log"
    with pytest.raises(SandboxStartError, match="not loopback"):
        EmbeddedServer(code="off", log_file=log, options=("--host=0.0.0.0",)).start()
    assert "not loopback" in log.read_text()
    with pytest.raises(SandboxStartError, match=r"call start\(\)"):
        EmbeddedServer().restart()


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_the_server_is_gone_when_its_trainer_is(ending: str, place: Path) -> None:
    code = f"""
import os, sys
from sandbox_client import EmbeddedServer
server = EmbeddedServer(functions=("counting",), code="auto")
server.start()
copy = os.fork()
if copy == 0:
    import time; time.sleep(600); os._exit(0)  # it holds every descriptor of the trainer
print(server.ready_line, copy, sep="\\n", flush=True)
{ending}
"""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{HERE}", "API_KEY": "the-key-of-the-trainer"}
    environment["TMPDIR"] = str(place)  # a killed trainer cannot remove its files
    trainer = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout:
        pid, copy = json.loads(trainer.stdout.readline())["pid"], int(trainer.stdout.readline())
    family = descendants(pid)
    for member in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended already
            assert b"the-key-of-the-trainer" not in Path(f"/proc/{member}/environ").read_bytes()
    trainer.wait()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while any(Path(f"/proc/{member}").exists() for member in family):
            assert time.monotonic() < deadline, "the server has outlived its trainer"
    finally:
        os.kill(copy, signal.SIGKILL)
