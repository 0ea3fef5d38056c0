"""The client against a server and a network that fail: how often a call may run, and when it must have ended."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from conftest import ask
from faults import FaultServer, http
from launching import Running

from sandbox_client import (
    AiohttpTransport,
    Cancelled,
    InfrastructureError,
    Outcome,
    Overloaded,
    ProtocolError,
    RequestRefused,
    SandboxClient,
    SessionLost,
    Unknown,
    Unreachable,
)

Question = Callable[[SandboxClient], Awaitable[Any]]


def against(server: FaultServer, question: Question, timeout_s: float = 2.0) -> Any:
    async def run() -> Any:
        async with server.serving() as url, SandboxClient(url, "token", timeout_s=timeout_s) as client:
            return await question(client)

    return asyncio.run(run())


def calling(timeout_s: float = 10.0) -> Question:
    async def call(client: SandboxClient) -> Any:
        session = await client.open_session("key")
        return await session.call("add", {}, timeout_s=timeout_s)

    return call


@pytest.mark.parametrize("fault", ["reset", "lose", "half", "429:0.01", "503", "500", "502", "504", "429:nonsense"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_keyed_call_survives_the_fault_and_runs_once(fault: str, times: int) -> None:
    server = FaultServer([fault] * times)
    result = against(server, calling())
    assert (result.outcome, result.value, result.attempts) == (Outcome.OK, 1, times + 1)
    assert server.executions == {"key/1": 1}


@pytest.mark.parametrize("fault", ["garbage", "huge", "endless", "nan", "crossed", "gzip"])
def test_a_reply_that_cannot_be_trusted_is_a_protocol_error(fault: str) -> None:
    server = FaultServer([fault])
    with pytest.raises(ProtocolError) as error:
        against(server, calling())
    assert error.value.may_have_executed
    assert server.executions == {"key/1": 1}


@pytest.mark.parametrize("fault", ["stall", "drip"])
def test_a_reply_too_slow_is_unknown_at_the_deadline_and_not_later(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 0.3)
    server = FaultServer([fault] * 100)
    start = time.monotonic()
    with pytest.raises(Unknown) as error:
        against(server, calling(timeout_s=0.2))
    assert 0.5 <= time.monotonic() - start < 1.5
    assert error.value.may_have_executed
    assert server.executions == {"key/1": 1}


@pytest.mark.parametrize("storm", ["429:0.02", "429:1e12", "503:-5", "429:inf", "429:nan"])
def test_a_storm_of_refusals_is_overloaded_within_the_deadline_and_never_ran(
    storm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 0.3)
    server = FaultServer([storm] * 10_000)
    start = time.monotonic()
    with pytest.raises(Overloaded) as error:
        against(server, calling(timeout_s=0.2))
    assert time.monotonic() - start < 1.5
    assert not error.value.may_have_executed
    assert not server.executions


def test_refused_connections_are_retried_until_the_server_is_there() -> None:
    async def late() -> Any:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        server = FaultServer([])
        async with SandboxClient(f"http://127.0.0.1:{port}", "token", timeout_s=10) as client:
            opening = asyncio.create_task(client.open_session("key"))
            await asyncio.sleep(0.2)
            async with server.serving(port):
                session = await opening
                assert (await session.call("add", {})).attempts == 1
        assert server.executions == {"key/1": 1}

    asyncio.run(late())


def test_nobody_there_is_unreachable_and_certainly_not_executed() -> None:
    async def nobody() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        async with SandboxClient(f"http://127.0.0.1:{port}", "token", timeout_s=0.4) as client:
            with pytest.raises(Unreachable) as error:
                await client.ready()
            assert error.value.attempts >= 2
            assert not error.value.may_have_executed

    start = time.monotonic()
    asyncio.run(nobody())
    assert time.monotonic() - start < 1.4


@pytest.mark.parametrize("status", [404, 410])
def test_a_lost_session_is_final(status: int) -> None:
    server = FaultServer([])
    body = {"error": {"code": "session_lost", "message": "it was idle", "caused_by_program": False}} if status == 410 else {}

    async def answer(path: str, _: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(http(status, json.dumps(body).encode()))

    async def call(client: SandboxClient) -> None:
        session = await client.open_session("key")
        server._answer = answer  # type: ignore[method-assign]
        with pytest.raises(SessionLost) as lost:
            await session.call("add", {})
        assert (lost.value.attempts, lost.value.caused_by_program) == (1, False)
        await session.close()  # and closing it is still no failure

    against(server, call)


def test_a_run_is_repeated_only_where_the_server_announces_its_memory() -> None:
    async def run_twice(client: SandboxClient) -> Any:
        await client.run_code("1")
        return await client.run_code("2")

    remembering = FaultServer(["honest", "lose", "reset"])
    assert against(remembering, run_twice).attempts == 3
    assert set(remembering.executions.values()) == {1}
    forgetful = FaultServer(["honest", "lose"], announces_memory=False)
    with pytest.raises(Unknown) as error:
        against(forgetful, run_twice)
    assert error.value.may_have_executed
    assert forgetful.requests == 2


def test_cancelling_at_any_moment_leaks_nothing_and_the_session_goes_on() -> None:
    async def cancel(client: SandboxClient) -> None:
        session = await client.open_session("key")
        for pause_s in (0.0, 0.0001, 0.001, 0.01):
            call = asyncio.create_task(session.call("add", {}))
            await asyncio.sleep(pause_s)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        assert (await session.call("add", {})).outcome is Outcome.OK
        assert len(asyncio.all_tasks()) <= 2 + client._caller.in_flight + 8  # ours and the server's connections

    server = FaultServer([])
    against(server, cancel)
    assert max(server.executions.values()) == 1


def test_closing_the_client_ends_its_calls_with_cancelled() -> None:
    async def close(client: SandboxClient) -> None:
        session = await client.open_session("key")
        calls = [asyncio.create_task(session.call("add", {})), asyncio.create_task(client.ready())]
        await asyncio.sleep(0.05)
        await client.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [Cancelled, Cancelled]
        with pytest.raises(Cancelled, match="the client is closed"):
            await client.ready()

    against(FaultServer(["stall", "stall"]), close)


def test_a_client_in_a_second_event_loop_is_told_so() -> None:
    client = SandboxClient("http://127.0.0.1:1", "token", timeout_s=0.01)

    async def use() -> None:
        with pytest.raises(InfrastructureError):
            await client.ready()

    async def use_again() -> None:
        with pytest.raises(RuntimeError, match="another event loop: make one client per loop"):
            await client.ready()

    with asyncio.Runner() as runner:
        runner.run(use())
        asyncio.run(use_again())
        runner.run(client.close())


def test_a_wrong_token_is_refused_at_once(server: Running) -> None:
    stranger = Running(server.process, server.ready, "not the token")
    with pytest.raises(RequestRefused) as refusal:
        ask(stranger, lambda client: client.open_session("key"))
    assert refusal.value.code == "unauthorized"


def test_arguments_that_json_cannot_hold_never_leave(server: Running) -> None:
    async def call(client: SandboxClient) -> None:
        async with await client.open_session("nan", "counting") as session:
            with pytest.raises(ValueError, match="Out of range"):
                await session.call("echo", {"value": float("nan")})
            assert (await session.call("add", {})).value == 1

    ask(server, call)


class ChaosProxy:
    """Stands between a client and the real server and cuts connections at random moments, by a seeded schedule."""

    def __init__(self, url: str, seed: int) -> None:
        self._port = int(url.rpartition(":")[2])
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        away_reader, away_writer = await asyncio.open_connection("127.0.0.1", self._port)
        pumps = {
            asyncio.create_task(self._pump(reader, away_writer)),
            asyncio.create_task(self._pump(away_reader, writer)),
        }
        self._tasks |= pumps
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, away_writer):
            end.transport.abort()
        await asyncio.wait(pumps)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                fate = self._random.random()
                if fate < 0.08:  # nothing of it arrives, or half of it
                    self.cuts += 1
                    sink.write(data[: len(data) // 2] if fate < 0.04 else b"")
                    await sink.drain()
                    return
                sink.write(data)
                await sink.drain()


@pytest.mark.parametrize("seed", range(4))
def test_under_any_cutting_of_connections_every_call_runs_exactly_once(server: Running, seed: int) -> None:
    async def count() -> None:
        proxy = ChaosProxy(server.url, seed)
        front = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
        port = front.sockets[0].getsockname()[1]
        running = Running(server.process, server.ready, server.token)
        token = running.token
        # the proxy's port is another one than the server expects in Host, so the header is put right
        async with SandboxClient(f"http://localhost:{port}", token, make_transport=_with_host(server.url)) as client:

            async def one(number: int) -> None:
                session = await client.open_session(f"chaos-{seed}-{number}", "counting")
                values = [(await session.call("add", {})).value for _ in range(25)]
                assert values == list(range(1, 26))
                await session.close()

            await asyncio.gather(*(one(number) for number in range(6)))
        front.close()
        await asyncio.gather(*proxy._tasks)
        assert proxy.cuts > 10

    asyncio.run(count())


def _with_host(url: str) -> Any:
    class Transport(AiohttpTransport):
        async def send(self, request: Any, to: str, headers: dict[str, str], *rest: Any) -> Any:
            return await super().send(request, to, {**headers, "Host": url.removeprefix("http://")}, *rest)

    return Transport
