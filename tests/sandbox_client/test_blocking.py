"""The client for scripts: the same operations, each waiting for its result, beside a loop that runs already."""

import asyncio
import subprocess
import sys
import threading

import pytest
from conftest import Running
from launching import REPOSITORY

from sandbox_client import BlockingClient, Cancelled, Outcome, RequestRefused


def test_a_script_needs_no_loop_of_its_own(server: Running) -> None:
    with BlockingClient(server.url, server.token) as client:
        assert client.ready().code
        assert client.run_code("print(2)").stdout == "2\n"
        with client.open_session("blocking", "counting") as session:
            assert session.call("add", {"amount": 2}).value == 2
            assert session.exec("x = 3\nx").value == "3"
            session.write_file("a", b"1")
            assert session.read_file("a") == b"1"
            with pytest.raises(RequestRefused):
                session.read_file("b")
            grade = session.grade("reward = float(open('submission/a').read())", collect=["a"])
            assert grade.reward == 1.0
            with BlockingClient(server.url, session.ticket().token) as worker:
                assert worker.join(session.ticket()).read_file("a") == b"1"
            session.reset()
            assert session.exec("x").outcome is Outcome.PROGRAM_ERROR
            assert session.call("add", {"amount": 2}).value == 2
        assert client.metrics()["client/attempts"] > 5
    assert not [thread for thread in threading.enumerate() if thread.name == "sandbox-client"]
    client.close()


def test_it_works_where_a_loop_runs_already(server: Running) -> None:
    async def notebook() -> str:
        with BlockingClient(server.url, server.token) as client:
            return client.run_code("print(1)").stdout

    assert asyncio.run(notebook()) == "1\n"


def test_the_client_s_loop_is_asyncio_s_own_even_where_another_is_installed() -> None:
    script = """
import importlib.abc, sys, types
class Found(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "uvloop":
            raise SystemExit("uvloop was looked for")
sys.meta_path.insert(0, Found())
from sandbox_client import BlockingClient
client = BlockingClient("http://127.0.0.1:9", "token")
assert type(client._loop._loop).__module__.startswith("asyncio."), type(client._loop._loop)
client.close()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_client_says_so(server: Running) -> None:
    client = BlockingClient(server.url, server.token)
    client._loop.run(client._client.close())
    with pytest.raises(Cancelled, match="the client is closed"):
        client.run_code("1")
    client.close()
