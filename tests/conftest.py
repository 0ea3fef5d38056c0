"""What all tests share. The device wing runs on eight CPU devices; JAX is imported only by the tests that need it.

Compiled programs are kept in the user's cache between runs, where training keeps them too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by JAX when it is imported, by the programs that a test starts as well.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxagent" / "xla"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Fixes the number of devices before a run of the trainer can ask for another; nothing where JAX is not used."""
    if "jax" in sys.modules:
        assert len(sys.modules["jax"].devices()) == 8


@pytest.fixture
def compiled_quickly() -> Iterator[None]:
    """For tests whose programs run once or twice: compiling them well would take longer than all else."""
    config = sys.modules["jax"].config
    config.update("jax_disable_most_optimizations", True)
    yield
    config.update("jax_disable_most_optimizations", False)
