"""Fleets as files: what they may say, secrets by file or variable, and how many cores a run needs."""

import asyncio
from pathlib import Path

import pytest
from faults import FaultServer

from sandbox_client import Outcome
from sandbox_client.fleet import connect, cores_needed


def written(place: Path, text: str) -> Path:
    path = place / "fleet.toml"
    path.write_text(text)
    return path


def test_a_fleet_is_a_client_of_all_its_servers_with_a_token_read_when_it_is_needed(place: Path) -> None:
    async def run() -> None:
        server = FaultServer(token="T2")
        (place / "token").write_text("t1\n")
        async with server.serving() as url:
            text = f'backend = "v1"\nurls = ["{url}"]\ntoken = {{ file = "{place}/token" }}\nmax_in_flight = 3\ntimeout_s = 2'
            async with connect(written(place, text)) as client:
                assert client._caller.endpoints[0].window.most == 3
                server.token = "T1"
                assert (await client.run_code("1")).outcome is Outcome.OK
                server.token = "T2"  # it is changed at the server and in the file while the client runs
                (place / "token").write_text("t2\n")
                assert (await client.run_code("2")).outcome is Outcome.OK

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('backend = "v2"\nurl = "http://a"', "wanted backend as one of v1, sandbox_fusion"),
        ('backend = "v1"', "got none"),
        ('backend = "v1"\nurl = "ftp://a"', "got 'ftp://a'"),
        ('backend = "v1"\nurl = "http://a-{n}"', "with {n} and replicas"),
        ('backend = "v1"\nurl = "http://a"\nreplica = 3', "got 'replica'"),
        ('backend = "e2b"\nurl = "http://a"\n[options]\ntemplat = "x"', "unexpected keyword argument 'templat'"),
        (
            'backend = "v1"\nurl = "http://a"\ntoken = { env = "NO_SUCH_VARIABLE_HERE" }',
            "NO_SUCH_VARIABLE_HERE, which is not set",
        ),
        ('backend = "v1"\nurl = "http://a"\ntoken = { path = "x" }', "wanted a text, {file = ...} or {env = ...}"),
    ],
)
def test_a_file_that_says_something_else_is_told_what_was_wanted(place: Path, text: str, what: str) -> None:
    with pytest.raises(ValueError, match=r"fleet\.toml") as error:
        connect(written(place, text))
    assert what in str(error.value)


def test_replicas_are_counted_out(place: Path) -> None:
    client = connect(written(place, 'backend = "v1"\nurl = "http://a-{n}.b:80"\nreplicas = 3'))
    assert [endpoint.url for endpoint in client._caller.endpoints] == [f"http://a-{n}.b:80" for n in range(3)]


def test_the_cores_of_the_worked_example() -> None:
    assert cores_needed(100_000, 60, 0.05) == pytest.approx(100, abs=0.1)
    assert cores_needed(100_000, 60, 0.0, starts_per_core_s=128) == pytest.approx(13, abs=0.1)
    assert cores_needed(100_000, 60, 0.001) == pytest.approx(18.3, abs=0.1)
    assert cores_needed(100_000, 60, 0.0, overlap=0.5) == pytest.approx(33.3, abs=0.1)
