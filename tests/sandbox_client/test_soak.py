"""Ten thousand calls and a thousand sessions at once leave nothing behind: `pytest -m soak`, some minutes."""

import json
import subprocess
import sys

import pytest
from launching import REPOSITORY


@pytest.mark.soak
def test_ten_thousand_calls_give_back_what_they_took() -> None:
    words = [sys.executable, str(REPOSITORY / "benchmarks" / "sandbox.py"), "--soak=10000"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=True)
    report = json.loads(done.stdout)
    assert report["calls"] == 10_000
    assert [row["sessions"] for row in report["at_once"]] == [1000, 1000]
    assert report["after"] == report["before"]
