"""JAXAGENT_ALL_INSTALLED, under which `make clients` and `make vendors` run: what lacks a package has failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LACKS = """
import pytest

def test_says_so():
    pytest.importorskip("nowhere_at_all", reason="nowhere is not installed")

def test_says_nothing():
    pytest.importorskip("nowhere_at_all")

@pytest.fixture
def one():
    pytest.importorskip("nowhere_at_all")

def test_of_a_fixture(one):
    pass

def test_skips_for_another_reason():
    pytest.skip("no such machine")
"""
WHOLE = "import pytest\npytest.importorskip('nowhere_at_all')\n"


@pytest.mark.parametrize(("wanted", "code", "words"), [("1", 1, "2 failed, 1 skipped, 2 errors"), ("", 0, "5 skipped")])
def test_what_lacks_a_package_fails_where_all_is_installed(tmp_path: Path, wanted: str, code: int, words: str) -> None:
    (tmp_path / "test_lacks.py").write_text(LACKS)
    (tmp_path / "test_whole.py").write_text(WHOLE)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(HERE.parent / "pyproject.toml"), "--rootdir", "."]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "JAXAGENT_ALL_INSTALLED": wanted}
    ran = subprocess.run(
        [*command, "--continue-on-collection-errors", "."], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert words in ran.stdout and ran.returncode == code, ran.stdout + ran.stderr
