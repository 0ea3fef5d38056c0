"""What all tests share. The device wing runs on eight CPU devices; JAX is imported only by the tests that need it.

Compiled programs are kept in the user's cache between runs, where training keeps them too. Nearly all of a first run is
compilation of programs that run once or twice, so they are compiled quickly and run slowly; what learns or is compared with
torch runs as it is shipped.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

# Read by JAX when it is imported, by the programs that a test starts as well.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxagent" / "xla"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_configure(config: pytest.Config) -> None:
    """Without most optimizations, and by the emitters that jaxlib 0.10 still has beside the slower ones of today."""
    if config.option.markexpr in ("learning", "parity"):
        return
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    if version("jaxlib").startswith("0.10."):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


LACKING = ("is not installed", "could not import")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Where JAXAGENT_ALL_INSTALLED is set, as by `make clients`, a test that lacks a package has failed."""
    report = yield
    return failed_if_lacking(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """So has a file of tests."""
    report = yield
    return failed_if_lacking(report)


def failed_if_lacking(report: Any) -> Any:
    if report.skipped and os.environ.get("JAXAGENT_ALL_INSTALLED") and any(why in str(report.longrepr) for why in LACKING):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """No collection looks again at what earlier modules have left, traces most of all: in the end one took seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Fixes the number of devices before a run of the trainer can ask for another; nothing where JAX is not used."""
    if "jax" in sys.modules:
        assert len(sys.modules["jax"].devices()) == 8
