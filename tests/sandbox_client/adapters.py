"""Every adapter with a service to speak to: its fake, our own server, or the real server where its package is installed."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from launching import Running
from services import agent_sandbox, e2b, fusion, mcp, openenv, prime, swe_rex
from services.machine import Machine, serving

from sandbox_client import Backend, ExecResult, SandboxClient, Session
from sandbox_client.backends.agent_sandbox import AgentSandbox
from sandbox_client.backends.e2b import E2B
from sandbox_client.backends.mcp import Mcp
from sandbox_client.backends.openenv import OpenEnv
from sandbox_client.backends.prime import Prime
from sandbox_client.backends.sandbox_fusion import SandboxFusion
from sandbox_client.backends.swe_rex import SweRex
from sandbox_client.backends.v1 import V1

T = TypeVar("T")


@dataclasses.dataclass
class World:
    """A client, what it speaks to, and a session where there are sessions."""

    client: SandboxClient
    machine: Machine | None
    fake: Any
    session: Session | None

    @property
    def can(self) -> Any:
        return self.client.backend.can

    async def run(self, code: str, language: str = "python", timeout_s: float = 10.0, **more: Any) -> ExecResult:
        """Runs a program in the session, or in a fresh sandbox where there are only those."""
        if self.session is not None:
            return await self.session.exec(code, language, timeout_s=timeout_s, **more)
        assert not more
        return await self.client.run_code(code, language, timeout_s=timeout_s)


def cutting(app: web.Application, path: str) -> web.Application:
    """`app`, which carries out a request below `path` and then closes its connection without a reply."""

    @web.middleware
    async def cut(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        if request.path.startswith(path):
            assert request.transport is not None
            request.transport.abort()
        return response

    app.middlewares.append(cut)
    return app


@contextlib.asynccontextmanager
async def world(name: str, server: Running | None = None, cut: str = "") -> AsyncIterator[World]:
    """A world of the adapter `name`, which loses the replies to what is asked below the path `cut`."""
    with tempfile.TemporaryDirectory(prefix="sandbox-test-") as place:
        machine = Machine(Path(place))
        if name == "v1":
            assert server is not None
            backend: Backend = V1()
            async with _client(server.url, server.token, backend) as client:
                yield await _opened(client, None, None)
            return
        if name in REAL:
            with REAL[name][1](place) as (url, token, backend):
                async with _client(url, token, backend) as client:
                    yield await _opened(client, None, None)
            return
        app, token, make, fake = _fake(name, machine, place)
        async with (
            serving(cutting(app, cut) if cut else app) as url,
            _client(url + ("/mcp" if name == "mcp" else ""), token, make(url)) as client,
        ):
            yield await _opened(client, machine, fake)


@contextlib.asynccontextmanager
async def _client(url: str, token: str, backend: Backend) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(url, token, timeout_s=15.0, backend=backend) as client:
        yield client


async def _opened(client: SandboxClient, machine: Machine | None, fake: Any) -> World:
    session = await client.open_session(f"conformance-{id(client)}") if client.backend.can.sessions else None
    return World(client, machine, fake, session)


def _fake(name: str, machine: Machine, place: str) -> tuple[Any, str, Callable[[str], Backend], Any]:
    if name == "sandbox_fusion":
        return fusion.app(machine), "", lambda url: SandboxFusion(), None
    if name == "swe_rex":
        return swe_rex.app(machine), swe_rex.KEY, lambda url: SweRex(place), None
    if name.startswith("e2b"):
        kernel = name == "e2b-interpreter"
        cloud = e2b.Fake(machine)
        return cloud.app(), e2b.KEY, lambda url: E2B(sandbox_url=url, interpreter=kernel), cloud
    if name == "openenv":
        return openenv.app(machine), "", lambda url: OpenEnv(code_key="code"), None
    if name == "agent_sandbox":
        cluster = agent_sandbox.Fake(machine)
        secret, space = agent_sandbox.KUBERNETES_TOKEN, agent_sandbox.NAMESPACE
        return cluster.app(), "", lambda url: AgentSandbox("python-pool", space, url, secret), cluster
    if name == "prime":
        host = prime.Fake(machine)
        return host.app(), prime.KEY, lambda url: Prime(), host
    return mcp.app(machine), "", lambda url: Mcp(code_tool="python"), None


@contextlib.contextmanager
def _swe_rex(place: str) -> Any:
    with _process("-m", "swerex.server", "--auth-token=key", "--host=127.0.0.1", "--port={port}") as url:
        yield url, "key", SweRex(place)


@contextlib.contextmanager
def _mcp(place: str) -> Any:
    source = Path(place, "tools.py")
    source.write_text(
        "import subprocess, sys\n"
        "from mcp.server.mcpserver import MCPServer\n"
        "from mcp.server.mcpserver.exceptions import ToolError\n"
        "server = MCPServer('tools')\n"
        "@server.tool()\n"
        "def python(code: str) -> str:\n"
        "    ran = subprocess.run([sys.executable, '-c', code], capture_output=True)\n"
        "    if ran.returncode: raise ToolError(ran.stderr.decode(errors='replace'))\n"
        "    return ran.stdout.decode(errors='replace')\n"
        "server.run('streamable-http', host='127.0.0.1', port=int(sys.argv[1]))\n"
    )
    with _process(str(source), "{port}") as url:
        yield f"{url}/mcp", "", Mcp(code_tool="python")


@contextlib.contextmanager
def _openenv(place: str) -> Any:
    source = Path(place, "coding.py")
    source.write_text(
        "import subprocess, sys, uvicorn\n"
        "from openenv.core.env_server import create_app\n"
        "from openenv.core.env_server.interfaces import Environment\n"
        "from openenv.core.env_server.types import Action, Observation, State\n"
        "class Code(Action):\n"
        "    code: str\n"
        "class Seen(Observation):\n"
        "    stdout: str = ''\n"
        "    stderr: str = ''\n"
        "    exit_code: int = 0\n"
        "class Coding(Environment):\n"
        "    SUPPORTS_CONCURRENT_SESSIONS = True\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.steps = 0\n"
        "    def reset(self, seed=None, episode_id=None, **kwargs):\n"
        "        self.steps = 0\n"
        "        return Seen()\n"
        "    def step(self, action, timeout_s=None, **kwargs):\n"
        "        self.steps += 1\n"
        "        ran = subprocess.run([sys.executable, '-c', action.code], capture_output=True)\n"
        "        out, err = (data.decode(errors='replace') for data in (ran.stdout, ran.stderr))\n"
        "        return Seen(stdout=out, stderr=err, exit_code=ran.returncode, reward=float(self.steps))\n"
        "    @property\n"
        "    def state(self):\n"
        "        return State(step_count=self.steps)\n"
        "app = create_app(Coding, Code, Seen, env_name='coding', max_concurrent_envs=8)\n"
        "uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[1]), log_level='error', ws_max_size=100 << 20)\n"
    )
    with _process(str(source), "{port}") as url:
        yield url, "", OpenEnv(code_key="code")


@contextlib.contextmanager
def _process(*words: str) -> Any:
    """A server in a process of its own, on a free port; yields its URL once it listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, *(word.format(port=port) for word in words)]
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            listens, until = False, time.monotonic() + 300.0  # some take twenty seconds of a core to be imported
            while not listens and process.poll() is None and time.monotonic() < until:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                    listens = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            if not listens:
                said.seek(0)
                raise AssertionError(said.read().decode() or "it did not listen within 300 s")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


REAL: dict[str, tuple[str, Any]] = {
    "real-swe_rex": ("swerex", _swe_rex),
    "real-mcp": ("mcp", _mcp),
    "real-openenv": ("openenv", _openenv),
}
FAKES = ["sandbox_fusion", "e2b", "e2b-interpreter", "openenv", "agent_sandbox", "swe_rex", "prime", "mcp"]
ALL = ["v1", *FAKES, *REAL]


def play(name: str, request: pytest.FixtureRequest, questions: Callable[[World], Awaitable[T]]) -> T:
    """Runs `questions` in a world of `name`; skips where its package is not installed."""
    if name in REAL and importlib.util.find_spec(REAL[name][0]) is None:
        pytest.skip(f"the package {REAL[name][0]} is not installed: its real server is not asked")
    server = request.getfixturevalue("server") if name == "v1" else None

    async def run() -> T:
        async with world(name, server) as made, asyncio.timeout(60):
            answer = await questions(made)
            if made.session is not None:
                await made.session.close()
            return answer

    return asyncio.run(run())


async def until_true(true: Callable[[], bool]) -> None:
    """Waits for what happens at the other end."""
    async with asyncio.timeout(5.0):
        while not true():  # noqa: ASYNC110 (the other end sends no events)
            await asyncio.sleep(0.001)
