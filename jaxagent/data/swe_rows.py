"""Rows of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym, with clones of their repositories, become tasks that `swe` plays.

    jaxagent swe --rows=instances.jsonl --repositories=CLONES --to=tasks.jsonl

| | the tree with its bug | the fix | the tests |
|---|---|---|---|
| SWE-bench, SWE-Gym | `base_commit` | `patch` | those of `base_commit` with `test_patch` |
| SWE-smith | with `patch`, which is the bug | without it | as they are |
| R2E-Gym | the parent of `commit_hash` | the commit | its tests, and `test_file_codes` in the folder r2e_tests |

SWE-smith's rows name no commit: theirs is the one whose beginning ends the name in `repo`, else HEAD of the clone of that
name. R2E-Gym's tests to pass are those of `expected_output_json`; `old_commit_res_stdout` tells which did before, and where
it is missing all of them are FAIL_TO_PASS: the reward wants both kinds.

Repositories and rows are hostile. Nothing of them runs here, and no file of theirs is written: git reads the clone's objects
from a store of ours, so that its settings, hooks and filters are never seen, and patches change an index, which has no place
outside the tree. What a task cannot hold, links, submodules, what is not text, is left out of trees, and refused where a
patch touches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxagent.data.packages import ASIDE, BUILDS, MAX_FILE_BYTES, is_test, largest, tested
from jaxagent.data.records import read_records

_GIT_S = 120.0
_TREE_BYTES = 8 << 20  # the sandbox takes 16 MiB for a grading, as base64 of JSON
_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
_PLAIN = ("000000", "100644", "100755")  # modes: not there, a file, a program
_R2E_TESTS = "r2e_tests"


class Store:
    """The objects of a clone, behind a bare repository of ours with nothing set."""

    def __init__(self, clone: Path, home: Path):
        self.clone, self.home = clone, home
        self.place = clone / ".git" if (clone / ".git").is_dir() else clone
        home.mkdir(exist_ok=True)
        self.git("init", "--quiet", "--bare", "--template=", str(home))
        (home / "objects" / "info").mkdir(exist_ok=True)
        (home / "objects" / "info" / "alternates").write_text(f"{(self.place / 'objects').resolve()}\n")

    def git(self, *arguments: str, given: bytes = b"") -> bytes:
        """What git says. Raises ValueError with its complaint."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.home), **_SETTINGS}
        command = ["git", f"--git-dir={self.home}", "--literal-pathspecs", *arguments]
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, timeout=_GIT_S, check=False, env=environment, cwd=self.home
            )
        except FileNotFoundError:
            raise ValueError("git is needed to read repositories, and there is none on the path") from None
        except subprocess.TimeoutExpired:
            raise ValueError(f"git {arguments[0]} took more than {_GIT_S:g} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise ValueError(f"git {arguments[0]}: {'; '.join(said[:3])}")
        return done.stdout

    def commit(self, name: str) -> str:
        """The whole name of a commit. Raises ValueError where the clone has none of that name."""
        try:
            return self.git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
        except ValueError:
            raise ValueError(f"no commit {name} in {self.clone}; fetch the clone's whole history") from None

    def head(self) -> str:
        """The commit that the clone's HEAD names."""
        said = (self.place / "HEAD").read_text(errors="replace").strip()
        name = said
        if said.startswith("ref: "):
            loose, packed = self.place / said[5:], self.place / "packed-refs"
            lines = packed.read_text(errors="replace").splitlines() if packed.is_file() else []
            named = [line.split(" ")[0] for line in lines if line.endswith(f" {said[5:]}")]
            name = loose.read_text(errors="replace").strip() if ".." not in said and loose.is_file() else "".join(named[:1])
        return self.commit(name if re.fullmatch("[0-9a-f]{40}", name) else "HEAD")

    def tree(self, commit: str) -> str:
        """A commit's tree, whose paths git has looked at. Raises ValueError for one that leaves the tree or enters .git."""
        self.git("read-tree", commit)
        return self.git("write-tree").decode().strip()

    def patched(self, tree: str, patch: str) -> str:
        """The tree that a patch makes of another. Raises ValueError where it does not apply."""
        if not patch.strip():
            return tree
        self.git("read-tree", tree)
        whole = patch if patch.endswith("\n") else f"{patch}\n"
        self.git("apply", "--cached", "--whitespace=nowarn", "-", given=whole.encode())
        return self.git("write-tree").decode().strip()

    def changed(self, before: str, after: str) -> list[str]:
        """The paths of files that differ. Raises ValueError where one is no text that a task can hold."""
        told = self.git("diff-tree", "-r", "--raw", "--no-renames", "-z", before, after).decode(errors="replace").split("\0")
        paths = told[1::2]
        for about, path in zip(told[::2], paths, strict=False):
            if not {about[1:7], about[8:14]} <= set(_PLAIN):
                raise ValueError(f"{path} is a link or a submodule, which tasks do not hold")
        if lost := {p for a, p in zip(told[::2], paths, strict=False) if a[8:14] != "000000"} - set(self.texts(after, paths)):
            raise ValueError(f"{min(lost)} is not UTF-8 text of at most {MAX_FILE_BYTES} bytes")
        return paths

    def texts(self, tree: str, paths: Iterable[str] = ()) -> dict[str, str]:
        """The files of a tree (or some of them) that are text and not too large."""
        rows = self.git("ls-tree", "-r", "-z", "-l", tree, "--", *paths).split(b"\0")[:-1]
        found = []
        for row in rows:
            about, _, path = row.partition(b"\t")
            mode, _, name, told_size = about.split()
            if mode.decode() in _PLAIN and int(told_size) <= MAX_FILE_BYTES:
                found.append((path, name, int(told_size)))
        told = self.git("cat-file", "--batch", given=b"".join(name + b"\n" for _, name, _ in found))
        texts, at = {}, 0
        for path, _, size in found:
            at = told.index(b"\n", at) + 1
            with contextlib.suppress(UnicodeDecodeError):
                texts[path.decode()] = told[at : at + size].decode()
            at += size + 1
        return texts


@dataclass(frozen=True)
class Case:
    """What all schemas tell: three trees, which paths are the tests' and the fix's, and which tests shall pass."""

    name: str
    commit: str
    broken: str
    fixed: str
    tests: str
    tests_own: Collection[str]  # paths that the tests' part of the row changes
    fails: list[str]
    passes: list[str]
    more_tests: Mapping[str, str]


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(value := row.get(key), str):
        raise ValueError(f"{key}: a text is wanted, got {type(value).__name__ if key in row else 'nothing'}")
    return value


def _json(row: dict[str, Any], key: str, kind: Any) -> Any:
    """A list or object, given as such or as a JSON text."""
    value: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(row[key]) if isinstance(row.get(key), str) else row.get(key)
    if not isinstance(value, kind) or not all(isinstance(one, str) for one in (value if kind is list else ())):
        raise ValueError(f"{key}: {'a list of names' if kind is list else 'an object'} is wanted, or its JSON text")
    return value


def _in(field: str, work: Any, *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _bench(row: dict[str, Any], store: Store) -> Case:
    commit = _in("base_commit", store.commit, _hash(row, "base_commit"))
    broken = store.tree(commit)
    fixed = _in("patch", store.patched, broken, _text(row, "patch"))
    tests = _in("test_patch", store.patched, broken, _text(row, "test_patch"))
    own = _in("test_patch", store.changed, broken, tests)
    fails, passes = (_json(row, key, list) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    return Case(_text(row, "instance_id"), commit, broken, fixed, tests, own, fails, passes, {})


def _smith(row: dict[str, Any], store: Store) -> Case:
    short = _text(row, "repo").rpartition(".")[2]
    try:
        commit = store.commit(short if re.fullmatch("[0-9a-f]{7,40}", short) else "HEAD")
    except ValueError:
        if store.clone.name.removesuffix(".git") != row["repo"].rpartition("/")[2]:
            raise
        commit = _in("repo", store.head)
    fixed = store.tree(commit)
    broken = _in("patch", store.patched, fixed, _text(row, "patch"))
    fails, passes = (_json(row, key, list) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    return Case(_text(row, "instance_id"), commit, broken, fixed, fixed, (), fails, passes, {})


def _gym(row: dict[str, Any], store: Store) -> Case:
    right = _hash(row, "commit_hash")
    commit = _in("commit_hash", store.commit, f"{right}^")
    broken, fixed = store.tree(commit), store.tree(_in("commit_hash", store.commit, right))
    own = [path for path in _in("commit_hash", store.changed, broken, fixed) if is_test(path)]
    ran = _json(row, "execution_result_content", dict) if row.get("execution_result_content") else {}
    names, codes = (_json({key: ran.get(key) or []}, key, list) for key in ("test_file_names", "test_file_codes"))
    if len(names) != len(codes) or (strange := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]):
        said = f"{strange[0]!r:.100}" if len(names) == len(codes) else f"{len(names)} names of {len(codes)} files"
        raise ValueError(f"execution_result_content: names of test files are wanted, got {said}")
    wanted = [test.split(" - ")[0] for test, said in _json(row, "expected_output_json", dict).items() if said == "PASSED"]
    passed = re.findall(r"^PASSED [^:\s]+::(.+?)\s*$", str(ran.get("old_commit_res_stdout") or ""), re.MULTILINE)
    before = {test.replace("::", ".") for test in passed}
    fails, passes = [test for test in wanted if test not in before], [test for test in wanted if test in before]
    tests = {f"{_R2E_TESTS}/{name}": code for name, code in zip(names, codes, strict=True)}
    return Case(f"{_text(row, 'repo_name')}__{right[:12]}", commit, broken, fixed, fixed, own, fails, passes, tests)


def _hash(row: dict[str, Any], key: str) -> str:
    if not re.fullmatch("[0-9a-f]{7,40}", value := _text(row, key)):
        raise ValueError(f"{key}: a commit's name of 7 to 40 hexadecimal digits is wanted, got {value!r:.100}")
    return value


def _located(names: Iterable[str], tests: Mapping[str, str], near: Collection[str], field: str) -> list[str]:
    """Names of tests as pytest says them. Those without a file (`Class.test`) are looked for in `near`."""
    found = []
    for name in names:
        path, known, _ = name.partition("::")
        if not known:
            parts, bracket, case = name.partition("[")
            first, *_ = steps = parts.split(".")
            define = re.compile(rf"^(?:class|(?:async )?def) {re.escape(first)}\b", re.MULTILINE)
            homes = [place for place in near if define.search(tests.get(place, ""))]
            if len(homes) != 1:
                raise ValueError(
                    f"{field}: {name!r:.100} is defined in {len(homes)} test files; file::test, as pytest says it, is wanted"
                )
            path, name = homes[0], f"{homes[0]}::{'::'.join(steps)}{bracket}{case}"
        if path not in tests:
            raise ValueError(f"{field}: {name!r:.100} is in no test file of the tree")
        found.append(name)
    return found


def played(row: dict[str, Any], store: Store) -> dict[str, Any]:
    """The row that `swe` plays. Raises ValueError naming the field that is wrong."""
    case = (_gym if "commit_hash" in row else _bench if {"base_commit", "test_patch"} & set(row) else _smith)(row, store)
    field = "commit_hash" if "commit_hash" in row else "patch"
    fix = sorted(set(_in(field, store.changed, case.broken, case.fixed)) - set(case.tests_own))
    if not fix or (own := [path for path in fix if is_test(path)]):
        raise ValueError(
            f"{field}: changes of sources, and of these alone, are wanted, got {', '.join(own[:3]) if fix else 'none'}"
        )
    kept = {*fix, *case.tests_own}
    broken, after = (
        {path: text for path, text in store.texts(tree).items() if path in kept or not _aside(path)}
        for tree in (case.broken, case.tests)
    )
    tests = {path: text for path, text in after.items() if path in case.tests_own or (path.endswith(".py") and is_test(path))}
    tests |= case.more_tests
    near = sorted(case.more_tests) or tested(sorted(set(case.tests_own) & set(tests))) or tested(sorted(tests))
    fails = _located(case.fails, tests, near, "FAIL_TO_PASS")
    if not fails:
        raise ValueError("FAIL_TO_PASS: nothing in it: nothing could be repaired")
    files = {path: text for path, text in broken.items() if path not in tests and path not in case.tests_own}
    if (size := sum(len(text.encode()) for text in (*files.values(), *tests.values()))) > _TREE_BYTES:
        raise ValueError(f"{field}: the tree holds {size >> 20} MiB of text; at most {_TREE_BYTES >> 20} MiB can be graded")
    sources = [p for p in files if p.endswith(".py") and not is_test(p) and Path(p).name not in BUILDS]
    difference = store.git("diff-tree", "-p", "--no-renames", "--text", case.broken, case.fixed, "--", *fix)
    return {
        "instance_id": case.name,
        "repo": largest(sources),
        "base_commit": case.commit,
        "problem_statement": _text(row, "problem_statement"),
        "hints_text": "",
        "patch": difference.decode(errors="replace"),
        "test_patch": "",
        "FAIL_TO_PASS": json.dumps(fails),
        "PASS_TO_PASS": json.dumps(_located(case.passes, tests, near, "PASS_TO_PASS")),
        "files": files,
        "test_files": tests,
        "roots": ["src", "."] if any(path.startswith("src/") for path in sources) else ["."],
        "sources": sorted({*sources, *fix}),
    }


def _aside(path: str) -> bool:
    parts = path.split("/")
    return parts[0] in ASIDE or any(part.startswith(".") for part in parts)


def clone_of(row: dict[str, Any], folder: Path) -> Path:
    """Where the clone of a row's repository is: owner/name, owner__name or name, with .git or without."""
    key = "repo_name" if "repo_name" in row else "repo"
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name := _text(row, key)):
        raise ValueError(f"{key}: owner/name is wanted, got {name!r:.100}")
    names = [name, name.replace("/", "__"), name.rpartition("/")[2]]
    if smith := re.fullmatch(r"(.+)\.[0-9a-f]{7,40}", names[-1]):
        names += [smith[1], smith[1].replace("__", "/", 1), smith[1].rpartition("__")[2]]
    for place in (folder / f"{one}{end}" for one in names for end in ("", ".git")):
        if (place / "objects").is_dir() or (place / ".git" / "objects").is_dir():
            return place
    raise ValueError(f"{key}: no clone of {name} in {folder}: {', '.join(names)}, with or without .git, are looked for")


def convert(rows: str, repositories: str, to: str) -> int:
    """The command. Rows that make no task are told and left out. Raises ValueError where none makes one."""
    written, faults = 0, []
    with Path(to).open("w", encoding="utf-8") as file, tempfile.TemporaryDirectory() as home:
        stores: dict[Path, Store] = {}
        for where, row in read_records(rows):
            try:
                clone = clone_of(row, Path(repositories))
                if clone not in stores:
                    stores[clone] = Store(clone, Path(home, str(len(stores))))
                file.write(json.dumps(played(row, stores[clone])) + "\n")
                written += 1
            except ValueError as error:
                faults.append(f"{rows}, {where}: {error}")
                print(f"left out: {faults[-1]}", file=sys.stderr, flush=True)
    if not written:
        raise ValueError(f"no row of {rows} makes a task; the first: {faults[0]}")
    print(f"{written} tasks of {written + len(faults)} rows: {to}")
    return 0
