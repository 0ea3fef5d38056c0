"""Packages that ship their tests: read from a directory or an sdist, or fetched; told apart into sources and tests."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_BYTES = 256 << 10
_FETCH_S = 600.0
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[^\s/]+")
ASIDE = ("docs", "doc", "benchmarks", "examples")  # folders at the top that neither tests nor repairs need
BUILDS = ("setup.py", "noxfile.py", "conf.py")  # programs that are no part of a package


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


def listed(sources: Sequence[str]) -> list[str]:
    """The sources, where a .txt file stands for those on its lines; # begins a comment.

    Raises ValueError for a list that is not there.
    """
    found = []
    for source in sources:
        if not source.endswith(".txt"):
            found.append(source)
            continue
        try:
            lines = Path(source).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{source}: a list of sources, one a line, is wanted ({error})") from None
        found += [kept for line in lines if (kept := line.partition("#")[0].strip())]
    return found


def fetch(source: str, folder: Path) -> Path:
    """Where a source is: NAME==VERSION is fetched as an sdist into `folder` by pip, which runs the package's build program.

    Raises ValueError where pip finds none.
    """
    if Path(source).exists() or not _PINNED.fullmatch(source):
        return Path(source)
    home = folder / source.replace("==", "-")
    if not (there := sorted(home.glob("*.tar.gz"))):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", f"--dest={home}", source]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=_FETCH_S, check=False)
            said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        except subprocess.TimeoutExpired:
            said = [f"nothing within {_FETCH_S:g} s"]
        if not (there := sorted(home.glob("*.tar.gz"))):
            raise ValueError(f"{source}: no sdist to be had by {' '.join(pip[1:4])}: {said[0]}")
    return there[0]


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
        raise ValueError(f"{source}: no such directory or archive, and no NAME==VERSION")
    files = _texts(source)
    python = [path for path in files if path.endswith(".py")]
    tests = tuple(path for path in python if is_test(path))
    if not any(Path(path).name.startswith("test") or path.endswith("_test.py") for path in tests):
        raise ValueError(f"{source}: no tests in it (test_*.py, or a folder tests); take the sdist, not the wheel")
    top = [path for path in python if path not in tests and Path(path).name not in BUILDS]
    if not (name := largest(top)):
        raise ValueError(f"{source}: no package and no module in it")
    own = tuple(p for p in top if p.removeprefix("src/").startswith(f"{name}/") or p.removeprefix("src/") == f"{name}.py")
    return Package(name, files, tests, own)


def largest(paths: Sequence[str]) -> str:
    """The name of the package, or else the module, that most of the sources belong to; empty where there is none."""
    homes = {path.removeprefix("src/").partition("/")[0] for path in paths if path.endswith("/__init__.py")}
    single = {Path(path).stem for path in paths if "/" not in path.removeprefix("src/")}
    return min(
        sorted(homes or single), key=lambda name: -sum(p.removeprefix("src/").startswith(name) for p in paths), default=""
    )


def _texts(source: Path) -> dict[str, str]:
    """The text files of a tree, without what was built, hidden, or stands aside."""
    prefix = f"{source.name}/" if (source / "__init__.py").is_file() else ""  # the package itself: its parent is the tree
    files = {}
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        if not path.is_file() or any(part.startswith(".") or part in ("__pycache__", "build", "dist") for part in parts):
            continue
        if path.stat().st_size <= MAX_FILE_BYTES and (prefix or parts[0] not in ASIDE):
            with contextlib.suppress(UnicodeDecodeError):
                files[prefix + "/".join(parts)] = path.read_bytes().decode()
    return files


def is_test(path: str) -> bool:
    """Whether a path is a test's or what tests need beside them."""
    *folders, name = path.split("/")
    return bool({"tests", "test", "testing"} & set(folders)) or bool(
        re.fullmatch(r"test_.*\.py|.*_test\.py|tests?\.py|conftest\.py", name)
    )


def tested(paths: Sequence[str]) -> list[str]:
    """Those of the test files that pytest is to collect."""
    return [path for path in paths if re.fullmatch(r"test.*\.py|.*_test\.py", Path(path).name)]
