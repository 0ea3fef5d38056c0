"""Runs of a package's tests, each in a forked child, and what they tell: outcomes, and which test ran which lines.

What a run costs is mostly not the tests. So what the tests import from elsewhere is imported once, in the parent; bytecode is
written once, by the first run, and that of a file goes whenever the file changes, so that none is ever older than its source;
and a bug is tried first on the tests that ran its lines alone.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import importlib
import importlib.util
import json
import os
import py_compile
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from jaxagent.data.packages import Package, tested

_MEMORY_BYTES = 4 << 30
_WRITTEN_BYTES = 16 << 20
_POLL_S = 0.005
# Of every installation the same: no plugin, no settings, no cache. A test file that needs what is not here takes only its own
# tests away. Without traces, which read the source of every frame, a run in which half of the tests fail costs a fifth.
PYTEST_ARGS = (
    *("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "--confcutdir=.", "-o", "addopts="),
    *("--continue-on-collection-errors", "--tb=no"),
)


@dataclass
class Outcomes:
    """What a run of the tests found: those that passed, and what those that failed said."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # id -> what pytest said in a few lines


@dataclass(frozen=True)
class Run:
    """How the tests are run. Args: only: ids; None for all."""

    only: frozenset[str] | None = None
    bytecode: bool = False  # is left behind; and modules from elsewhere are told
    lines: bool = False  # are told


class Runner:
    """Runs the tests of a tree."""

    def __init__(self, package: Package, folder: Path, timeout_s: float):
        self.package, self.folder, self.timeout_s = package, folder.resolve(), timeout_s
        self.cpu_s: float | None = None  # of one run, once it is known: more is a loop
        for path, text in package.files.items():
            self.write(path, text)
        self._pytest = importlib.import_module("pytest")

    def write(self, path: str, text: str) -> None:
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        Path(importlib.util.cache_from_source(place)).unlink(missing_ok=True)
        place.write_bytes(text.encode())

    def restore(self, path: str) -> None:
        """Writes a file as it was, and its bytecode."""
        self.write(path, self.package.files[path])
        with contextlib.suppress(py_compile.PyCompileError):
            py_compile.compile(str(self.folder / path), doraise=True)

    def warm(self) -> None:
        """Writes bytecode, and imports what the tests import from elsewhere, so that no child has to."""
        for name in (self.run(Run(bytecode=True)) or {}).get("modules", []):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)

    def outcomes(self, run: Run = Run()) -> Outcomes | None:
        """What the tests say of the tree as it is; None where they did not end in time."""
        told = self.run(run)
        return None if told is None else Outcomes(set(told["passed"]), told["failed"])

    def lines(self) -> dict[str, dict[int, set[str]]]:
        """By source and line, the tests that ran it; the test "" is what ran before all tests, by import."""
        found: dict[str, dict[int, set[str]]] = {path: {} for path in self.package.sources}
        for name, places in (self.run(Run(lines=True)) or {}).get("lines", []):
            for path, numbers in places.items():
                for number in numbers:
                    found[path].setdefault(number, set()).add(name)
        return found

    def run(self, how: Run) -> dict[str, Any] | None:
        report = self.folder.parent / "report.json"
        report.unlink(missing_ok=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._child(report, how)
            finally:
                os._exit(0)
        deadline = time.monotonic() + self.timeout_s
        ended, used_s = 0, 0.0
        while not ended and time.monotonic() < deadline:
            ended, _, usage = os.wait4(pid, os.WNOHANG)
            used_s = usage.ru_utime + usage.ru_stime
            time.sleep(0 if ended else _POLL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # and whatever it left behind
        if not ended:
            os.waitpid(pid, 0)
            return None
        if not report.is_file():  # it ended before its report: by a signal, or by itself
            return {"passed": [], "failed": {}}
        if how == Run():
            self.cpu_s = max(self.cpu_s or 0.0, used_s)
        told: dict[str, Any] = json.loads(report.read_text())
        return told

    def _child(self, report: Path, how: Run) -> None:
        os.setsid()
        resource = importlib.import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        written = _WRITTEN_BYTES << 4 if how.lines else _WRITTEN_BYTES  # what is told of lines is long
        resource.setrlimit(resource.RLIMIT_FSIZE, (written, written))
        if self.cpu_s is not None and not how.lines:
            limit = int(2 + 3 * self.cpu_s)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.chdir(self.folder)
        sys.dont_write_bytecode = not how.bytecode
        os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self.folder)}
        sys.path[:0] = [str(self.folder / root) for root in self.package.roots]
        before = set(sys.modules)
        files = tested(self.package.tests)
        if how.only is not None:
            files = sorted({name.partition("::")[0] for name in how.only} & set(files))
        found = _Listener(how)
        if how.lines:
            found.watch({str(self.folder / path): path for path in self.package.sources})
        self._pytest.main([*PYTEST_ARGS, *files], plugins=[found])
        told: dict[str, Any] = {"passed": list(found.passed), "failed": found.failed, "lines": found.told()}
        if how.bytecode:
            ours = str(self.folder)
            told["modules"] = [
                name
                for name in set(sys.modules) - before
                if not str(getattr(sys.modules[name], "__file__", ours)).startswith(ours)
            ]
        partial = report.with_suffix(".partial")
        partial.write_text(json.dumps(told))
        partial.rename(report)


class _Listener:
    """A plugin of pytest that chooses tests, remembers how every one ended and, if asked, which lines it ran."""

    def __init__(self, how: Run) -> None:
        self.only = how.only
        self.passed: dict[str, None] = {}
        self.failed: dict[str, str] = {}
        self.ran: dict[str, set[tuple[str, int]]] = {}
        self.now: set[tuple[str, int]] = self.ran.setdefault("", set())

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.only is not None:
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now = self.ran.setdefault(nodeid, set())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = str(getattr(crash, "message", report.longrepr))
            self.passed.pop(report.nodeid, None)  # its end was not clean
        elif report.when == "call" and report.passed:
            self.passed[report.nodeid] = None

    def watch(self, files: dict[str, str]) -> None:
        """Notes the lines of these files, by their paths in the tree, that run from now on."""

        def enter(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
            path = files.get(frame.f_code.co_filename)
            if path is None:
                return None

            def line(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
                self.now.add((path, frame.f_lineno))
                return line

            return line(frame, event, None)

        threading.settrace(enter)
        sys.settrace(enter)

    def told(self) -> list[tuple[str, dict[str, list[int]]]]:
        sys.settrace(None)
        found: list[tuple[str, dict[str, list[int]]]] = []
        for name, places in self.ran.items():
            lines: dict[str, list[int]] = {}
            for path, number in places:
                lines.setdefault(path, []).append(number)
            found.append((name, lines))
        return found


class Seen:
    """Which tests ran the statement that a line of a source belongs to."""

    def __init__(self, source: str, lines: dict[int, set[str]]):
        self.lines = lines
        spans = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.stmt):
                body = getattr(node, "body", None)
                end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
                spans.add((node.lineno, end))
        self.spans = sorted(spans)

    def by(self, line: int) -> set[str]:
        """The ids; "" among them where the line, or one beside it in its statement, ran by import."""
        near = self.spans[: bisect.bisect_right(self.spans, (line, sys.maxsize))]
        start, end = next((span for span in reversed(near) if span[1] >= line), (line, line))
        return set().union(*(self.lines.get(number, ()) for number in range(start, end + 1)))


def touching(seen: Collection[str], stable: set[str]) -> frozenset[str]:
    """The tests that a change of a line can reach, of those that are stable: all, where it ran by import."""
    return frozenset(stable if "" in seen else stable & set(seen))
