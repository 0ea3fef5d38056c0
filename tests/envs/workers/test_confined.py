"""A worker that runs what the policy wrote: what it reaches, tried from inside. Skips where there is no such lock."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxagent.envs.workers.pool import Kind, Place, Pool, WorkerFault

PATIENCE_S = 60.0
ADAPTER = '''
"""A world whose action is a program."""
class World:
    def reset(self, task, seed):
        return {"text": "ready"}
    def step(self, action):
        found = {}
        exec(action, found)
        return {"text": str(found["found"])}
    def close(self):
        pass
def make():
    return World()
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    adapter = tmp_path_factory.mktemp("prying") / "prying.py"
    adapter.write_text(ADAPTER)
    pool = Pool(Kind("prying", Path(sys.executable), adapter, confined=True, address_mb=1024))
    try:
        place = pool.take().result(PATIENCE_S)
        try:
            place.call("reset", task={}, seed=0).result(PATIENCE_S)
        except WorkerFault as fault:
            if "no isolation" not in str(fault):
                raise
            pytest.skip(str(fault))
        yield place
    finally:
        pool.close()


def tried(place: Place, program: str) -> str:
    """The value of `found`, or the fault that the program raised."""
    lines = "".join(f"    {line}\n" for line in program.splitlines())
    guarded = f"try:\n{lines}except Exception as error:\n    found = type(error).__name__"
    return str(place.call("step", action=guarded).result(PATIENCE_S)["text"])


def test_nothing_of_the_host_is_read_but_its_tools(place: Place, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    for path in (tmp_path / "secret", Path(__file__), Path("/etc/shadow")):
        assert tried(place, f"import os\nfound = os.stat({str(path)!r})") == "FileNotFoundError"
    assert tried(place, "import subprocess\nfound = subprocess.check_output(['ls', '/usr']).decode().split()").startswith("['")


def test_no_port_of_the_host_is_reached(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"import socket\nfound = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert tried(place, reach) in ("PermissionError", "OSError")


def test_no_process_of_the_host_is_seen_or_ended(place: Place) -> None:
    assert tried(place, "import os\nfound = os.getpid()") == "1"
    assert tried(place, f"import os\nfound = os.kill({os.getpid()}, 0)") == "ProcessLookupError"


def test_files_are_written_in_one_place_only_and_are_gone_with_it(place: Place) -> None:
    assert tried(place, "found = open('mine', 'w').write('x')") == "1"
    for path in (sys.prefix, "/usr", "/"):
        assert tried(place, f"found = open({path!r} + '/mine', 'w').write('x')") in (
            "OSError",
            "PermissionError",
            "FileNotFoundError",
        )
    tried(place, "found = open('/tmp/mine', 'w').write('x')")  # its own, where it has one
    assert not Path("/tmp/mine").exists()
    assert not Path("/box").exists()


def test_no_variable_of_the_trainer_is_there(place: Place) -> None:
    names = tried(place, "import os\nfound = sorted(os.environ)")
    assert "HOME" in names and "PYTEST_CURRENT_TEST" not in names
