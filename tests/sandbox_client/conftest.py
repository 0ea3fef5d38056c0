"""Servers shared by the tests of the sandbox, each started once, when first asked for."""

import asyncio
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from launching import IS_ROOT, ORDINARY_UID, Running, serving

from sandbox_client import SandboxClient, cgroups

T = TypeVar("T")
Start = Callable[..., Running]


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    """Starts servers by flags and user, the same ones only once."""
    known: dict[tuple[Any, ...], Running] = {}
    with contextlib.ExitStack() as stack:

        def get(*flags: str, user: str = "", lock: str = "") -> Running:
            key = flags, user, lock
            if key not in known:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-test-")))
                known[key] = stack.enter_context(serving(place, *flags, user=user, lock=lock))
            return known[key]

        yield get


@pytest.fixture(scope="session")
def delegated() -> Iterator[str]:
    """A memory cgroup that an ordinary user may divide, as the file that moves a process into it."""
    if not IS_ROOT:
        pytest.skip("only root can delegate")
    try:
        base = cgroups.create(ORDINARY_UID)
    except cgroups.CgroupError as error:
        pytest.skip(f"no memory cgroup to delegate: {error}")
    place = base / "zygote" if (base / "zygote").is_dir() else base
    for owned in (place, place / "cgroup.procs"):
        os.chown(owned, ORDINARY_UID, ORDINARY_UID)
    yield str(place / "cgroup.procs")
    cgroups.remove(base)


@pytest.fixture(params=["root", "ordinary", "delegated", "landlocked"])
def attacked(request: pytest.FixtureRequest, start: Start) -> Running:
    """A server at the best level that root gets, an ordinary user without and with a cgroup, and one without namespaces."""
    flags, user = ("--functions=counting", "--code=auto"), request.param
    if user == "landlocked":
        return start(*flags, "--min-isolation=L1", user="ordinary", lock="no namespaces")
    if user == "root" and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    return start(*flags, user=request.getfixturevalue("delegated") if user == "delegated" else user)


@pytest.fixture(params=["root", "ordinary"])
def jailed(request: pytest.FixtureRequest, start: Start) -> Running:
    """A server at the best level this machine gives to root and to an ordinary user; without any, functions only."""
    if request.param == "root" and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    return start("--functions=counting", "--code=auto", "--warm=8", user=request.param)


@pytest.fixture(params=["root", "ordinary", "delegated"])
def besieged(request: pytest.FixtureRequest, start: Start) -> Running:
    """The server of `attacked` at each level that has namespaces."""
    if request.param == "root" and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    user = request.getfixturevalue("delegated") if request.param == "delegated" else request.param
    return start("--functions=counting", "--code=auto", user=user)


@pytest.fixture
def server(start: Start) -> Running:
    """The best server that this user can start; skips where programs are refused, which test_refusal asserts."""
    running = start("--functions=counting", "--code=auto", "--warm=8", user="root" if IS_ROOT else "ordinary")
    if not running.ready["code"]:
        pytest.skip(f"no jail here: {running.ready['reason']}")
    return running


def ask(running: Running, questions: Callable[[SandboxClient], Awaitable[T]]) -> T:
    """Runs `questions` with a client of `running`."""

    async def session() -> T:
        async with SandboxClient(running.url, running.token) as client:
            return await questions(client)

    return asyncio.run(session())


async def raw(
    running: Running, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Sends one request by hand. Returns status, JSON and headers."""
    data = io.BytesIO(body) if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {running.token}", **(headers or {})}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, running.url + path, data=data, headers={k: v for k, v in sent.items() if v}) as reply,
    ):
        text = await reply.read()
        return (
            reply.status,
            json.loads(text) if text.startswith(b"{") else {"text": text},
            {name.lower(): value for name, value in reply.headers.items()},
        )


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an ordinary user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="sandbox-test-") as name:
        yield Path(name)
