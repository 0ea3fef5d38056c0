"""`jaxagent swe`: tasks of software engineering from packages that ship their tests, made offline by planting bugs.

    jaxagent swe --source inflection==0.5.1 semver-3.1.1.tar.gz --to=tasks.jsonl --count=50

Every row has SWE-bench's fields and is whole in itself: `files` is the tree with its bug, `test_files` are the tests that
grade it. `patch` is the fix. A bug is kept where at least one test fails by it (FAIL_TO_PASS) and one does not
(PASS_TO_PASS), where it does so twice, where no test fails that does not run its lines, and where at most half of the tests
fail. Tests that do not pass without a bug every time, in two interpreters, are left out of everything. Nothing of the past
is in a row: no history, no version control, and the fix nowhere but in `patch`.

The packages' own code runs here, with and without bugs, under limits of time, memory and file size: take those you trust.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxagent.data.mutants import Mutant, mutants, patch
from jaxagent.data.packages import Package, fetch, listed, read_package
from jaxagent.data.swe_rows import convert
from jaxagent.data.trials import Outcomes, Run, Runner, Seen, touching

_STATEMENT_LINES = 12
_STEADY_RUNS = 5  # in the other interpreter: with the first one, a test that fails half of the time is kept once in 64


def statement(package: str, said: str) -> str:
    """The problem in words, from what the first failing test said, without its name or place, or an address in memory."""
    said = re.sub(r" at 0x[0-9a-f]+", "", said)
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


@dataclass(frozen=True)
class Made:
    """What became of one package. `unseen` bugs stand where no test ran; `cpu_s` is of its process and all of its children."""

    name: str
    stable: int
    bugs: int
    unseen: int
    tried: int
    rows: list[str]
    cpu_s: float


def make(package: Package, count: int, seed: int, timeout_s: float) -> Made:
    """At most `count` rows from one package, in a process of its own. Raises ValueError where no test passes twice."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(package, Path(folder, "tree"), timeout_s)
        runner.warm()
        first = runner.outcomes()
        stable = first.passed & _passed_elsewhere(package, timeout_s) if first else set()
        if not stable:
            raise ValueError(f"no test passes here twice within {timeout_s:g} s; are the package's dependencies installed?")
        lines = runner.lines()
        seen = {path: Seen(package.files[path], lines[path]) for path in package.sources}
        chosen = [(path, one) for path in package.sources for one in mutants(package.files[path].encode())]
        random.Random(seed).shuffle(chosen)
        rows: list[str] = []
        tried = unseen = 0
        for path, mutant in chosen:
            if len(rows) == count:
                break
            if not (reached := touching(seen[path].by(mutant.line), stable)):
                unseen += 1
                continue
            tried += 1
            runner.write(path, mutant.apply(package.files[path].encode()).decode())
            if outcomes := _noticed(runner, reached, stable):
                rows.append(json.dumps(row_of(package, path, mutant, outcomes, stable)))
            runner.restore(path)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
    return Made(package.name, len(stable), len(chosen), unseen, tried, rows, cpu_s)


def _passed_elsewhere(package: Package, timeout_s: float) -> set[str]:
    """The tests that pass in another interpreter and place: names of some hang on the seed of hashes, or on addresses."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_passed, package, timeout_s).result()


def _passed(package: Package, timeout_s: float) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(package, Path(folder, "tree"), timeout_s)
        runner.warm()
        every = [runner.outcomes() for _ in range(_STEADY_RUNS)]
    return set.intersection(*(told.passed if told else set() for told in every))


def _noticed(runner: Runner, reached: frozenset[str], stable: set[str]) -> Outcomes | None:
    """What all tests say of a tree with a bug, if it makes a task, those that reach it say it twice, and the others pass."""
    first = runner.outcomes(Run(only=reached))
    if first is None or not reached - first.passed:
        return None
    outcomes = runner.outcomes()
    alike = outcomes is not None and outcomes.passed & stable == first.passed | stable - reached
    return outcomes if alike and kept(outcomes, stable) else None


def _made(source: str, folder: Path, count: int, seed: int, timeout_s: float) -> Made | str:
    """What became of a source, or why nothing did."""
    try:
        return make(read_package(fetch(source, folder)), count, seed, timeout_s)
    except ValueError as error:
        return str(error) if source in str(error) else f"{source}: {error}"


def _all(sources: Sequence[str], work: Any, processes: int) -> Iterator[Made | str]:
    """Every source in a new process, which holds only what its own tests import."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(sources)), context, max_tasks_per_child=1) as pool:
        try:
            yield from pool.map(work, sources)
        except BrokenProcessPool:
            raise ValueError("a package's process was killed, maybe for want of memory: fewer --processes need less") from None


def swe(
    source: Sequence[str], to: str, count: int, seed: int, timeout_s: float, processes: int, rows: str, repositories: str
) -> int:
    """The command. Its file is the same for any number of processes. Raises ValueError where no source or row makes a task."""
    if bool(rows) != bool(repositories):
        raise ValueError("--rows and --repositories belong together: rows name commits, which are read from clones")
    if rows:
        return convert(rows, repositories, to)
    work = partial(_made, folder=Path(to).parent / "sdists", count=count, seed=seed, timeout_s=timeout_s)
    done: list[Made] = []
    faults: list[str] = []
    if not (sources := listed(source)):
        raise ValueError(f"--source={' '.join(source)}: no source stands there")
    with Path(to).open("w", encoding="utf-8") as file:
        for made in _all(sources, work, processes):
            if isinstance(made, str):
                faults.append(made)
                print(f"left out: {made}", file=sys.stderr, flush=True)
                continue
            file.writelines(row + "\n" for row in made.rows)
            file.flush()
            done.append(made)
            print(
                f"{made.name}: {made.stable} tests that pass; {len(made.rows)} tasks of {made.tried} bugs tried, {made.unseen} "
                f"more where no test looks, {made.bugs} there are; {made.cpu_s:.0f} CPU-s",
                flush=True,
            )
    tasks, tried, cpu_s = (
        (sum(column) for column in zip(*((len(m.rows), m.tried, m.cpu_s) for m in done), strict=True)) if done else (0, 0, 0)
    )
    if not tasks:
        raise ValueError("; ".join(faults) or f"{to}: no bug makes a task")
    packages = sum(bool(made.rows) for made in done)
    print(
        f"{tasks} tasks of {packages} packages, {tasks / tried:.0%} of the bugs tried, {tasks / cpu_s:.2f} a CPU-second: {to}"
    )
    return 0
