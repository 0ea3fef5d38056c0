"""The tools of MCP servers, over both transports."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from calling import called

from jaxagent.toolbox.box import Toolbox
from jaxagent.toolbox.model_context import Connection
from sandbox_client import InfrastructureError

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
stdio = pytest.importorskip("mcp.client.stdio", reason="the extra `mcp` is not installed")

SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("towns")
count = 0

@server.tool()
def people(town: str) -> int:
    """Tells how many people a town has."""
    return {"Ulm": 129, "Bonn": 336}[town]

@server.tool()
def more() -> int:
    """Counts its calls."""
    global count
    count += 1
    return count

@server.tool()
def die() -> int:
    """Ends the server."""
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "towns.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture(scope="module")
def url(script: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_are_listed_called_and_their_faults_read(transport: str, script: str, request: pytest.FixtureRequest) -> None:
    over = {"command": f"{sys.executable} {script}"} if transport == "stdio" else {"url": request.getfixturevalue("url")}
    box = Toolbox({"mcp": {**over, "pure": ("people",)}})
    assert [spec.name for spec in box.specs] == ["people", "more", "die"]
    assert box.specs[0].description == "Tells how many people a town has."
    assert box.specs[0].parameters["properties"]["town"]["type"] == "string"
    one, two, _, again = called(box, ("people", {"town": "Ulm"}), ("people", {"town": "Hof"}), ("more", {}), ("more", {}))
    assert (one.outcome, one.result) == ("ok", "129")
    assert two.outcome == "error" and "people" in two.result
    if transport == "stdio":  # every episode has a server of its own
        assert again.result == called(box, ("more", {}), ("more", {}))[1].result == "2"
        with pytest.raises(InfrastructureError):
            called(box, ("die", {}))


def test_a_caller_that_gives_up_while_a_server_opens_leaves_one_to_the_next(tmp_path: Path) -> None:
    program = f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, str(time.time_ns())).touch(); time.sleep(1.0); " + SERVER

    async def play() -> str:
        slow = stdio.StdioServerParameters(command=sys.executable, args=["-c", "import sys; sys.argv[1:] = []\n" + program])
        connection = Connection(slow, 30.0)
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connection.call("people", {"town": "Ulm"}), 0.5)
            return await connection.call("people", {"town": "Ulm"})
        finally:
            await connection.close()

    assert asyncio.run(play()) == "129"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_server_that_does_not_open_is_told_before_the_run(script: str) -> None:
    with pytest.raises(ValueError, match="did not open"):
        Toolbox({"mcp": {"command": f"{sys.executable} -c 'raise SystemExit(1)'"}})
    with pytest.raises(ValueError, match=r"mcp\.pure names 'cities'; .* has people, more, die"):
        Toolbox({"mcp": {"command": f"{sys.executable} {script}", "pure": ("cities",)}})
