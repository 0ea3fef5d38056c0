"""A session done again elsewhere: not only when it is lost, but when its server stays out of reach."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_client import (
    AiohttpTransport,
    EmbeddedServer,
    InfrastructureError,
    ProtocolError,
    Reply,
    Request,
    SandboxClient,
    SessionLost,
)
from sandbox_client.transport import BadReply, NotSent

Pair = tuple[EmbeddedServer, EmbeddedServer]


@pytest.fixture
def pair(place: Path) -> Iterator[Pair]:
    """Two real servers with one token."""
    one, two = (EmbeddedServer(functions=("counting",), code="off", token_file=place / "token") for _ in range(2))
    with one, two:
        yield one, two


class Blackholes(AiohttpTransport):
    """Swallows what goes to some addresses: no connection is made, and nobody says so for a while."""

    swallowed: set[str]

    async def send(self, request: Request, url: str, headers: dict[str, str], timeout_s: float) -> Reply:
        if any(url.startswith(one) for one in self.swallowed):
            await asyncio.sleep(min(0.4, timeout_s))
            raise NotSent("swallowed by the test")
        return await super().send(request, url, headers, timeout_s)


def home(pair: Pair, session: Any) -> EmbeddedServer:
    return next(server for server in pair if server.url == session._seat.endpoint.url)


def test_a_replayable_session_moves_from_a_server_that_stays_away_and_goes_on_as_it_was(pair: Pair) -> None:
    async def move() -> None:
        async with SandboxClient([server.url for server in pair], pair[0].token) as client:
            session = await client.open_session("moves", "counting", {"start": 5}, replayable=True)
            assert [(await session.call("add", {})).value for _ in range(2)] == [6, 7]
            await asyncio.to_thread(home(pair, session).stop)
            start = time.monotonic()
            assert (await session.call("add", {})).value == 8
            assert time.monotonic() - start < 10
            assert session.rebuilt == 1
            assert home(pair, session).alive()
            assert (await session.call("add", {})).value == 9
            assert session.rebuilt == 1

    asyncio.run(move())


@pytest.mark.parametrize("why", ["not replayable", "nowhere to go"])
def test_without_a_journal_or_another_server_it_is_an_infrastructure_failure_in_time(
    pair: Pair, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 1.5)

    async def stay() -> None:
        urls = [server.url for server in pair][: 1 if why == "nowhere to go" else 2]
        async with SandboxClient(urls, pair[0].token) as client:
            session = await client.open_session("stays", "counting", replayable=why == "nowhere to go")
            await session.call("add", {})
            await asyncio.to_thread(home(pair, session).stop)
            start = time.monotonic()
            with pytest.raises(InfrastructureError) as error:
                await session.call("add", {}, timeout_s=0.5)
            assert not isinstance(error.value, SessionLost)
            assert time.monotonic() - start < 3.0
            assert session.rebuilt == 0

    asyncio.run(stay())


def test_a_server_that_swallows_connections_is_left_when_half_of_the_time_is_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 1.5)

    async def move() -> None:
        made: list[Blackholes] = []

        def make(most: int) -> Blackholes:
            made.append(Blackholes(most))
            made[0].swallowed = set()
            return made[0]

        async with SandboxClient([server.url for server in pair], pair[0].token, make_transport=make) as client:
            session = await client.open_session("swallowed", "counting", replayable=True)
            assert (await session.call("add", {})).value == 1
            made[0].swallowed = {home(pair, session).url}
            start = time.monotonic()
            assert (await session.call("add", {}, timeout_s=0.5)).value == 2
            assert 1.0 <= time.monotonic() - start < 2.0
            assert session.rebuilt == 1

    asyncio.run(move())


class Breaks(AiohttpTransport):
    """Gives one reply to a call away as one that cannot be trusted."""

    calls, bad = 0, 0

    async def send(self, request: Request, url: str, headers: dict[str, str], timeout_s: float) -> Reply:
        self.calls += url.endswith("/call")
        if url.endswith("/call") and self.calls == self.bad:
            raise BadReply("spoilt by the test")
        return await super().send(request, url, headers, timeout_s)


def test_a_replay_that_stops_half_way_is_begun_anew_and_never_gone_on_from(pair: Pair) -> None:
    async def stop() -> None:
        made: list[Breaks] = []

        def make(most: int) -> Breaks:
            made.append(Breaks(most))
            return made[0]

        async with SandboxClient(pair[0].url, pair[0].token, make_transport=make) as client:
            session = await client.open_session("half", "counting", replayable=True)
            assert [(await session.call("add", {})).value for _ in range(3)] == [1, 2, 3]
            await session._end()  # behind its back
            made[0].bad = made[0].calls + 3  # the call that meets the loss, the first step again, the second
            with pytest.raises(ProtocolError, match="spoilt"):
                await session.call("add", {})
            assert (await session.call("add", {})).value == 4  # the half session would say 2
            assert session.rebuilt == 1

    asyncio.run(stop())
