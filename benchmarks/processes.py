"""One run in several processes, for real: `python benchmarks/processes.py --out=DIR`, the quickstart by one, two and four.

Every run is a short quickstart, with its tools and a sandbox of each process, in float32 on virtual CPU devices; two and four
processes are started by launch/local.sh and meet by `jax.distributed`. A process has two devices, and plays as many episodes
as any other: `--prompts` groups of 8 in a step. Beside two and beside four processes stands one process with as many devices
and episodes. DIR keeps what was run, and the same command prints it again. With `--warmup=350`, the quickstart's own, episodes
earn reward from the first step of training on.

First table: the same curve. Second: what an episode costs by the number of processes; CPU seconds are of all processes, with
their sandboxes, from the second step of training to the last; "tokens" are those that were sampled and trained on. Cores are
shared by all processes of a run, so that wall time shows what the machine has and CPU seconds what several processes cost.
Third: two processes, of which the second is stopped half of the time, its sandbox as well; who waited for whom where hosts tell
each other how their groups ended. Fourth: what the processes' devices tell each other in a step, by the compiled programs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from kills import arrays

from jaxagent import config as configs
from jaxagent.compiled import collectives, summary
from jaxagent.metrics import read
from jaxagent.plan import Shapes

ROOT = Path(__file__).resolve().parents[1]
EACH = 2  # devices of a process
HALT_S = 0.25  # the slow one stands still for so long, works for as long, and so on
POLL_S = 0.1
GROUP = 8
SETTINGS = (
    *("evaluate.every=0", "evaluate.tasks=8", "evaluate.final_tasks=32", "evaluate.ablate=False"),
    *("alarms.stop=", f"feed.rollouts={GROUP}"),
)


@dataclass(frozen=True)
class Kind:
    """A run. Args: share: how many processes' devices and episodes it has; halted: the process that is slow, -1 for none."""

    processes: int
    share: int
    halted: int = -1

    @property
    def name(self) -> str:
        return f"{self.processes}-of-{self.share}" + "-slow" * (self.halted >= 0)


ONE, TWO, FOUR = (Kind(count, count) for count in (1, 2, 4))
AS_TWO, AS_FOUR, SLOW = Kind(1, 2), Kind(1, 4), Kind(2, 2, halted=1)
KINDS = {kind.name: kind for kind in (ONE, TWO, FOUR, AS_TWO, AS_FOUR, SLOW)}


@dataclass(frozen=True)
class Size:
    """Args: prompts: groups of a process in a step. warmup, steps: supervised steps, and steps of training."""

    prompts: int
    warmup: int
    steps: int


def settings(kind: Kind, size: Size) -> list[str]:
    devices = EACH * kind.share
    sizes = {"feed.prompts": size.prompts * kind.share, "train.steps": size.steps, "mesh.fsdp": min(4, devices)}
    sizes |= {"warmup.steps": size.warmup, "warmup.demos": 32 * size.warmup}
    sizes["mesh.cpu_devices"] = devices // kind.processes
    return [*SETTINGS, *(f"{key}={value}" for key, value in sizes.items())]


# ---------------------------------------------------------------------- running


def tree_of(pid: int) -> Iterator[tuple[int, float]]:
    """A process and its descendants, each with its CPU seconds and those of children that have ended."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(stat.parent.name)
        parents[number] = int(fields[1])
        seconds[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if one in seconds:
            yield one, seconds[one]
        waiting += [child for child, parent in parents.items() if parent == one]


def halt(pid: int, over: threading.Event) -> None:
    """Stops a process and its descendants half of the time, until all is over."""
    while not over.wait(HALT_S):
        family = [one for one, _ in tree_of(pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for one in family:
                try:
                    os.kill(one, number)
                except ProcessLookupError:
                    continue
            if number == signal.SIGSTOP:
                time.sleep(HALT_S)


def trained(kind: Kind, out: Path, size: Size) -> None:
    """Runs it to its end, and writes down wall and CPU seconds as they are when a step is over."""
    workdir = out / kind.name
    ours = workdir / "processes.json"
    if ours.exists():
        return
    workdir.mkdir(parents=True, exist_ok=True)
    command = out / "jaxagent"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxagent "$@"\n')
    command.chmod(0o755)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    begin = [str(command), "train"]
    if kind.processes > 1:
        begin = [str(ROOT / "launch" / "local.sh"), f"--processes={kind.processes}", f"--port={port}", "--"]
    told = [f"--config={ROOT / 'configs' / 'quickstart.py'}", f"--workdir={workdir}"]
    told += [f"--config.{setting}" for setting in settings(kind, size)]
    env = {**os.environ, "JAXAGENT": str(command), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    records: list[dict[str, float]] = []
    over = threading.Event()
    with (out / f"{kind.name}.log").open("wb") as log:
        process = subprocess.Popen([*begin, *told], env=env, stdout=log, stderr=subprocess.STDOUT)
        slow: threading.Thread | None = None
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                done = len(read(workdir / "metrics.jsonl"))
                if done > len(records):
                    cpu_s = sum(seconds for _, seconds in tree_of(process.pid))
                    records += [{"wall_s": time.monotonic(), "cpu_s": cpu_s}] * (done - len(records))
                if kind.halted >= 0 and slow is None and done:
                    slow = threading.Thread(target=halt, args=(member(process.pid, kind.halted), over))
                    slow.start()
        finally:
            over.set()
            if slow:
                slow.join()
            if process.poll() is None:
                process.terminate()  # its run saves and ends, and launch/local.sh tells all of its processes
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{kind.name} ended with {process.returncode}: {out / f'{kind.name}.log'} says why")
    ours.write_text(json.dumps(records))


def member(pid: int, index: int) -> int:
    """Which descendant is the process of this number."""
    for one, _ in tree_of(pid):
        if f"--process={index}" in Path(f"/proc/{one}/cmdline").read_text().split("\0"):
            return one
    raise RuntimeError(f"no process under {pid} was started with --process={index}")


# ---------------------------------------------------------------------- telling


def rows(workdir: Path) -> dict[tuple[str, str, int], Any]:
    """Tokens of all trajectories that were trained on, by step, group and rollout."""
    found = {}
    for file in (workdir / "trajectories").rglob("train-*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[file.stem, row["group"], row["rollout"]] = row["tokens"]
    return found


def training(workdir: Path) -> list[dict[str, Any]]:
    return [record for record in read(workdir / "metrics.jsonl") if "reward/mean" in record]


def same(out: Path, one: Kind, many: Kind) -> None:
    """Prints how far two runs of the same are apart."""
    first, second = out / one.name, out / many.name
    alone, together = training(first), training(second)
    devices = EACH * many.share
    print(
        f"\n| {devices} devices, {len(rows(first)) // len(alone)} episodes a step | "
        + " | ".join(str(i + 1) for i in range(len(alone)))
    )
    print("|---|" + "---:|" * len(alone))
    for name, records in ((one, alone), (many, together)):
        print(
            f"| reward, {name.processes} process{'es' * (name.processes > 1)} | "
            + " | ".join(f"{r['reward/mean']:.4f}" for r in records)
        )
    steps = max(int(path.name) for path in (first / "checkpoints").iterdir() if path.name.isdecimal())
    want, got = arrays(first, steps), arrays(second, steps)
    weights = [name for name in want if name.startswith("params")]
    apart = max(float(np.abs(want[name] - got[name]).max()) for name in weights)
    largest = max(float(np.abs(want[name]).max()) for name in weights)
    a, b = rows(first), rows(second)
    alike = sum(a[key] == b.get(key) for key in a)
    print(f"\n{alike} of {len(a)} trajectories have equal tokens; weights differ by {apart:.1e} at most, of {largest:.2g}")


def weak(out: Path) -> None:
    """Prints what an episode costs by the number of processes."""
    named = ("processes x devices", "episodes a step", "CPU-s an episode", "over one process's", "tokens a CPU-s", "tokens a s")
    print(f"\n| {' | '.join(named)} |\n|---|" + "---:|" * 5)
    first = 0.0
    for kind in (ONE, TWO, FOUR, AS_TWO, AS_FOUR):
        if not (out / kind.name / "processes.json").exists():
            continue
        records, told = json.loads((out / kind.name / "processes.json").read_text()), training(out / kind.name)
        at = records[-len(told) :]
        cpu_s, wall_s = (at[-1][name] - at[0][name] for name in ("cpu_s", "wall_s"))
        episodes = len(rows(out / kind.name)) / len(told)
        tokens = sum(record.get("policy/tokens", 0) for record in told[1:])  # of a step in which all groups are alike, none
        each = cpu_s / episodes / (len(told) - 1)
        first = first or each
        cells = f"{episodes:.0f} | {each:.4f} | {each / first:.2f} | {tokens / cpu_s:.0f} | {tokens / wall_s:.0f}"
        print(f"| {kind.processes} x {EACH * kind.share // kind.processes} | {cells} |")


def moved(size: Size) -> None:
    """Prints the collectives of the learner's programs; several processes compile what one process with all devices does."""
    print("\n| devices | program | collectives of a device, each time |\n|---|---|---|")
    for kind in (TWO, FOUR):
        devices = EACH * kind.share
        tree, faults = configs.load(str(ROOT / "configs" / "quickstart.py"), settings(kind, size))
        assert not faults, faults
        tree.mesh.data = devices // tree.mesh.fsdp
        for name, lowered in Shapes(tree).learner.lower().items():
            print(f"| {devices} | {name} | {summary(collectives(lowered.compile().as_text()))} |")


def waited(out: Path) -> None:
    """Prints who waited for whom."""
    print("\n| two processes | s a step | waited the most, s | the least | slowest, of steps |\n|---|---:|---:|---:|---|")
    for kind in (TWO, SLOW):
        if not (out / kind.name / "processes.json").exists():
            continue
        told, at = training(out / kind.name)[1:], json.loads((out / kind.name / "processes.json").read_text())
        wall_s = (at[-1]["wall_s"] - at[-1 - len(told)]["wall_s"]) / len(told)
        most, least = (sum(r[f"hosts/waited_s_{which}"] for r in told) / len(told) for which in ("max", "min"))
        slowest = [int(r["hosts/slowest"]) for r in told]
        said = ", ".join(f"process {i}: {slowest.count(i)}" for i in range(kind.processes))
        name = "the second stopped half of the time" if kind.halted >= 0 else "alike"
        print(f"| {name} | {wall_s:.1f} | {most:.2f} | {least:.2f} | {said} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help="groups of 8 of each process")
    parser.add_argument("--warmup", type=int, default=40, help="supervised steps")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runs", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args(arguments)
    size = Size(options.prompts, options.warmup, options.steps)
    jax.config.update("jax_num_cpu_devices", EACH * FOUR.share)
    for name in options.runs:
        trained(KINDS[name], options.out, size)
    for one, many in ((AS_TWO, TWO), (AS_FOUR, FOUR)):
        if all((options.out / kind.name / "processes.json").exists() for kind in (one, many)):
            same(options.out, one, many)
    weak(options.out)
    waited(options.out)
    if set(options.runs) == set(KINDS):
        moved(size)


if __name__ == "__main__":
    main()
