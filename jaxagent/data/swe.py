"""`jaxagent swe`: tasks of software engineering from any package that ships its tests, made offline by planting bugs.

    jaxagent swe --source=inflection-0.5.1.tar.gz --to=tasks.jsonl --count=100

Every row has SWE-bench's fields and is whole in itself: `files` is the tree with its bug, `test_files` are the tests that grade
it. `patch` is the fix. A bug is kept where at least one test fails by it (FAIL_TO_PASS) and one does not (PASS_TO_PASS), where
it does so twice, and where less than half of the tests fail. Tests that do not pass twice without a bug are left out of
everything. Nothing of the past is in a row: no history, no version control, and the fix nowhere but in `patch`.

The package's own code runs here, with and without bugs, under limits of time, memory and file size: it must be one you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxagent.data.mutants import Mutant, mutants, patch

MAX_FILE_BYTES = 256 << 10
_MEMORY_BYTES = 4 << 30
_WRITTEN_BYTES = 16 << 20
_STATEMENT_LINES = 12
# Of every installation the same: no plugin, no settings, no cache, no bytecode that could be a bug older than its source.
PYTEST_ARGS = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "--confcutdir=.", "-o", "addopts=")


@dataclass
class Outcomes:
    """What a run of the tests found: those that passed, and what the first that failed said."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # id -> what pytest said in a few lines


@dataclass(frozen=True)
class Package:
    """A tree of text files, which of them is the package, and which are tests."""

    name: str
    files: dict[str, str]
    tests: tuple[str, ...]  # paths of files
    sources: tuple[str, ...]

    @property
    def roots(self) -> tuple[str, ...]:
        """What must be on the import path."""
        return ("src", ".") if any(path.startswith("src/") for path in self.sources) else (".",)


def read_package(source: Path) -> Package:
    """The package of a directory or of an sdist (.tar.gz), or of an installed package's directory whose tests are inside it.

    Raises ValueError where there is none, or no tests.
    """
    if source.is_file():
        with tempfile.TemporaryDirectory() as folder:
            try:
                with tarfile.open(source) as archive:
                    archive.extractall(folder, filter="data")
            except tarfile.TarError as error:
                raise ValueError(f"{source}: not an archive that can be read ({error})") from None
            inside = [path for path in Path(folder).iterdir() if path.is_dir()]
            return read_package(inside[0] if len(inside) == 1 else Path(folder))
    if not source.is_dir():
        raise ValueError(f"{source}: no such directory or archive")
    prefix = f"{source.name}/" if (source / "__init__.py").is_file() else ""  # the package itself: its parent is the tree
    files = {}
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        if not path.is_file() or any(part.startswith(".") or part in ("__pycache__", "build", "dist") for part in parts):
            continue
        if path.stat().st_size <= MAX_FILE_BYTES:
            with contextlib.suppress(UnicodeDecodeError):
                files[prefix + "/".join(parts)] = path.read_bytes().decode()
    python = [path for path in files if path.endswith(".py")]
    tests = tuple(path for path in python if is_test(path))
    if not any(Path(path).name.startswith("test") or path.endswith("_test.py") for path in tests):
        raise ValueError(f"{source}: no tests in it (test_*.py, or a folder tests); take the sdist, not the wheel")
    top = [path for path in python if path not in tests and Path(path).name not in ("setup.py", "noxfile.py", "conf.py")]
    homes = {path.removeprefix("src/").partition("/")[0] for path in top if path.endswith("/__init__.py")}
    single = {Path(path).stem for path in top if "/" not in path.removeprefix("src/")}
    names = sorted(homes or single, key=lambda name: -sum(p.removeprefix("src/").startswith(name) for p in top))
    if not names:
        raise ValueError(f"{source}: no package and no module in it")
    name = names[0]
    own = tuple(p for p in top if p.removeprefix("src/").startswith(f"{name}/") or p.removeprefix("src/") == f"{name}.py")
    return Package(name, files, tests, own)


def is_test(path: str) -> bool:
    """Whether a path is a test's or what tests need beside them."""
    *folders, name = path.split("/")
    return bool({"tests", "test", "testing"} & set(folders)) or bool(
        re.fullmatch(r"test_.*\.py|.*_test\.py|conftest\.py", name)
    )


class Runner:
    """Runs the tests of a tree in forked children, one run each: what they import besides the tree is imported once, here."""

    def __init__(self, package: Package, folder: Path, timeout_s: float):
        self.package, self.folder, self.timeout_s = package, folder, timeout_s
        for path, text in package.files.items():
            self.write(path, text)
        self._pytest = importlib.import_module("pytest")

    def write(self, path: str, text: str) -> None:
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())

    def warm(self) -> None:
        """Imports what the tests import from elsewhere, so that no child has to."""
        for name in (self.run(tell_modules=True) or {}).get("modules", []):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)

    def outcomes(self) -> Outcomes | None:
        """What the tests say of the tree as it is; None where they did not end in time."""
        told = self.run()
        return None if told is None else Outcomes(set(told["passed"]), told["failed"])

    def run(self, tell_modules: bool = False) -> dict[str, Any] | None:
        report = self.folder.parent / "report.json"
        report.unlink(missing_ok=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._child(report, tell_modules)
            finally:
                os._exit(0)
        deadline = time.monotonic() + self.timeout_s
        ended = False
        while not ended and time.monotonic() < deadline:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            time.sleep(0 if ended else 0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # and whatever it left behind
        if not ended:
            os.waitpid(pid, 0)
            return None
        if not report.is_file():  # it ended before its report: by a signal, or by itself
            return {"passed": [], "failed": {}, "modules": []}
        told: dict[str, Any] = json.loads(report.read_text())
        return told

    def _child(self, report: Path, tell_modules: bool) -> None:
        os.setsid()
        resource = importlib.import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN_BYTES, _WRITTEN_BYTES))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.chdir(self.folder)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self.folder)}
        sys.path[:0] = [str(self.folder / root) for root in self.package.roots]
        before = set(sys.modules)
        found = _Listener()
        self._pytest.main([*PYTEST_ARGS, *tested(self.package.tests)], plugins=[found])
        told = {"passed": found.passed, "failed": found.failed}
        if tell_modules:
            ours = str(self.folder)
            told["modules"] = [
                name
                for name in set(sys.modules) - before
                if not str(getattr(sys.modules[name], "__file__", ours)).startswith(ours)
            ]
        partial = report.with_suffix(".partial")
        partial.write_text(json.dumps(told))
        partial.rename(report)


def tested(paths: Sequence[str]) -> list[str]:
    """Those of the test files that pytest is to collect."""
    return [path for path in paths if re.fullmatch(r"test.*\.py|.*_test\.py", Path(path).name)]


class _Listener:
    """A plugin of pytest that remembers how every test ended."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = str(getattr(crash, "message", report.longrepr))
            if report.nodeid in self.passed:  # its end was not clean
                self.passed.remove(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def statement(package: str, said: str) -> str:
    """The problem in words, from what the first failing test said, without its name or place."""
    lines = [line.rstrip() for line in said.strip().splitlines() if not re.search(r"test_\w+|\.py:\d+", line)]
    seen = "\n".join(f"    {line[:200]}" for line in lines[:_STATEMENT_LINES])
    what = f"This was seen, where it should hold or not be raised:\n\n{seen}" if seen else "A part of it gives wrong results."
    return f"The package {package} does not behave as it should. {what}\n\nFind the fault in its source and repair it there."


def row_of(package: Package, path: str, mutant: Mutant, outcomes: Outcomes, stable: set[str]) -> dict[str, Any]:
    """A row of the task file."""
    right = package.files[path]
    wrong = mutant.apply(right.encode()).decode()
    tree = {name: text for name, text in package.files.items() if name not in package.tests} | {path: wrong}
    digest = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=20).hexdigest()
    fails, passes = sorted(stable - outcomes.passed), sorted(stable & outcomes.passed)
    told = next((outcomes.failed[name] for name in fails if name in outcomes.failed), "")
    return {
        "instance_id": f"{package.name}__{digest[:12]}",
        "repo": package.name,
        "base_commit": digest,
        "problem_statement": statement(package.name, told),
        "hints_text": "",
        "patch": patch(path, wrong, right),
        "test_patch": "",
        "FAIL_TO_PASS": json.dumps(fails),
        "PASS_TO_PASS": json.dumps(passes),
        "kind": mutant.kind,
        "files": tree,
        "test_files": {name: package.files[name] for name in package.tests},
        "roots": list(package.roots),
        "sources": list(package.sources),
    }


def kept(outcomes: Outcomes | None, stable: set[str]) -> bool:
    """Whether a bug makes a task: some tests fail by it and most do not."""
    if outcomes is None:
        return False
    fails = len(stable - outcomes.passed)
    return 0 < fails <= len(stable) / 2 and len(stable) - fails > 0


def swe(source: str, to: str, count: int, seed: int, timeout_s: float) -> int:
    """The command. Raises ValueError for a source that has no tests, or none that pass."""
    package = read_package(Path(source))
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(package, Path(folder, "tree"), timeout_s)
        runner.warm()
        first, second = runner.outcomes(), runner.outcomes()
        stable = first.passed & second.passed if first and second else set()
        if not stable:
            raise ValueError(
                f"{source}: no test passes here twice within {timeout_s:g} s; are the package's dependencies installed?"
            )
        print(f"{package.name}: {len(stable)} tests that pass, in {len(package.tests)} files", flush=True)
        chosen = [(path, one) for path in package.sources for one in mutants(package.files[path].encode())]
        random.Random(seed).shuffle(chosen)
        made, tried = 0, 0
        with Path(to).open("w", encoding="utf-8") as rows:
            for path, mutant in chosen:
                if made == count:
                    break
                tried += 1
                runner.write(path, mutant.apply(package.files[path].encode()).decode())
                outcomes = runner.outcomes()
                again = runner.outcomes() if kept(outcomes, stable) else None
                runner.write(path, package.files[path])
                if outcomes and again and outcomes.passed == again.passed:
                    rows.write(json.dumps(row_of(package, path, mutant, outcomes, stable)) + "\n")
                    made += 1
        print(f"{made} tasks of {tried} bugs tried, {len(chosen)} there are: {to}", flush=True)
    return 0
