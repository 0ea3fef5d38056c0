"""These tests compile much and run each program once or twice, so they compile as XLA does in a hurry; parity does not."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def hurry(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("parity"):
        request.getfixturevalue("compiled_quickly")
