"""What keeps a desktop of ours from starting is told; none of it needs one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jaxagent.envs.desktop import local
from jaxagent.envs.desktop.guest import GuestFault
from jaxagent.envs.desktop.local import Desk


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Xvfb and xdotool by name, in the bin of a home."""
    (tmp_path / "bin").mkdir()
    for name in ("Xvfb", "xdotool"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize("home", ["", "below/it"])
def test_a_program_beside_which_home_would_be_read_is_refused(
    home: str, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(programs / home))
    assert f"outside of {programs}, all of which a desktop would read" in local.missing()
    monkeypatch.setenv("HOME", str(programs / "bin" / "else"))
    assert "home is there" in local.missing()
    monkeypatch.setenv("HOME", str(programs.parent / "else"))
    assert "home is there" not in local.missing()


def test_a_desktop_whose_start_fails_says_so_to_who_waits(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def start() -> None:
        try:
            desk.start()
        except GuestFault as fault:
            said.append(str(fault))

    monkeypatch.setattr(local, "missing", lambda: "")
    desk = Desk(("no such program of ours",))
    waiting = threading.Thread(target=start, daemon=True)
    waiting.start()
    waiting.join(10.0)
    assert said
    assert "a desktop did not start: FileNotFoundError" in said[0]
    assert desk.lost
    desk.close()
