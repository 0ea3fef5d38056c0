"""Level L4 is refused in words that say what was found: nothing, a runsc that lets attacks through, or one that would do."""

import asyncio
from pathlib import Path

import pytest
from launching import IS_ROOT, refused

from sandbox_client import gvisor

ONWARD = 'while [ "$1" != do ]; do shift; done; shift; '


@pytest.fixture
def tools(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH, with a shell in it."""
    place.chmod(0o755)
    (place / "tools").mkdir()
    (place / "tools" / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(place / "tools"))
    return place / "tools"


def write_runsc(tools: Path, script: str) -> None:
    (tools / "runsc").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "runsc").chmod(0o755)


@pytest.mark.attack
def test_a_server_that_is_to_give_level_four_refuses_and_says_where_it_is_to_be_had(place: Path, tools: Path) -> None:
    code, said = refused(place, "--min-isolation=L4")
    assert code == 2
    assert said.startswith("sandbox-server: wanted isolation L4 or better; L4: no runsc (gVisor) on the PATH: give sandbox.url")
    assert "launch/agent-sandbox.yaml" in said


def test_level_four_is_refused_also_where_no_isolation_would_be_accepted(place: Path) -> None:
    code, said = refused(place, "--min-isolation=L4", "--i-understand-unsandboxed", user="ordinary")
    assert code == 2
    assert said.startswith("sandbox-server: wanted isolation L4 or better; L4: ")


@pytest.mark.attack
def test_a_runsc_that_isolates_nothing_is_seen_through(tools: Path) -> None:
    write_runsc(tools, ONWARD + 'exec "$@"')
    said = asyncio.run(gvisor.refusal())
    assert f"in {tools}/runsc attacks got through: " in said
    if IS_ROOT:  # the locks are put on, and the host's processes are seen all the same
        assert "proc and sys (" in said
        assert "not made" not in said


@pytest.mark.attack
@pytest.mark.parametrize("script", ["exit 1", "echo fatal >&2", ONWARD + 'exec "$1" -c "print(1)"'])
def test_a_payload_that_did_not_run_is_no_attack_stopped(tools: Path, script: str) -> None:
    write_runsc(tools, script)
    said = asyncio.run(gvisor.refusal())
    assert said.count("not made: ") == len(gvisor.PAYLOADS)


@pytest.mark.attack
def test_a_runsc_that_cannot_be_executed_is_told_as_one_that_made_nothing(tools: Path) -> None:
    write_runsc(tools, "")
    (tools / "runsc").write_bytes(b"\x7fELF")
    assert asyncio.run(gvisor.refusal()).count("not made: [Errno ") == len(gvisor.PAYLOADS)


@pytest.mark.attack
def test_even_where_the_payloads_are_stopped_no_program_is_placed_there_by_this_server(tools: Path) -> None:
    write_runsc(tools, "echo reached:")
    assert asyncio.run(gvisor.refusal()).endswith("but this server starts no gVisor per program")
