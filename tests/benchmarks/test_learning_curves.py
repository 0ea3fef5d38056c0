"""What benchmarks/learning.py says of itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def test_it_tells_what_it_can_be_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "learning.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    assert "95 % intervals" in capsys.readouterr().out
