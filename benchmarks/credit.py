"""Which credit learns soonest: `python benchmarks/credit.py --out=DIR`, a corridor without a network, then mazes with one.

What is compared stands in credit_corridor.py and credit_maze.py. A line of DIR/runs.jsonl is a run of one method with one
seed; what is there is not run again, and `--table` only prints. `until` a level is until the mean of five steps reaches it; a
seed that never arrives counts as all steps, with a >. Intervals are 95 % over the seeds. CPU-s are this process's. Methods of a
seed share its world and its start, so that their differences are less noisy than they are: these are told too, to GRPO and to
the turns' PPO.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import credit_corridor
import credit_maze
import numpy as np

from jaxagent.metrics import read

WINDOW = 5
T_95 = (  # of Student's distribution, for 1 to 30 degrees of freedom
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
WORLDS = ("corridor", *credit_maze.MAZES)
KNOWN = tuple(dict.fromkeys([*credit_corridor.ROWS, *credit_maze.METHODS, "credit"]))
Run = dict[str, Any]


def interval(values: Sequence[float], digits: int, most: float = float("inf")) -> str:
    """Mean and half of the 95 % interval, if there are two; what was never reached counts as `most`.

    Of more than 31 values it is a little too wide.
    """
    capped = np.minimum(values, most)
    told = f"{'> ' * bool(np.isinf(values).any())}{capped.mean():.{digits}f}"
    if len(values) < 2:
        return told
    t = T_95[min(len(values) - 1, len(T_95)) - 1]
    return f"{told} ± {t * capped.std(ddof=1) / len(values) ** 0.5:.{digits}f}"


def until(success: Sequence[float], spent: np.ndarray, level: float) -> float:
    """What is spent when the mean of WINDOW steps reaches a level; infinite if it never does."""
    reached = np.nonzero(np.convolve(success, np.ones(WINDOW) / WINDOW, "valid") >= level)[0]
    return float(spent[reached[0] + WINDOW - 1]) if len(reached) else float("inf")


def learning(runs: Sequence[Run], unit: str) -> list[str]:
    """The cells of a method's trainings: what was spent until 50 and 90 %, and the area under the curve."""
    cells = [str(len(runs))]
    for key, scale, digits in (("", 1, 0), (unit, 1000, 1), ("cpu_s", 1, 1)):
        spent = [np.cumsum(run[key]) / scale if key else np.arange(1.0, len(run["success"]) + 1) for run in runs]
        most = float(np.mean([each[-1] for each in spent]))
        for level in (0.5, 0.9):
            cells += [
                interval([until(run["success"], each, level) for run, each in zip(runs, spent, strict=True)], digits, most)
            ]
    return [*cells, interval([float(np.mean(run["success"])) for run in runs], 3)]


def print_differences(title: str, runs: Sequence[Run], unit: str) -> None:
    """What every method spends until 90 % less what GRPO, or the turns' PPO, spends with the same seed, and so for the area."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for run in runs:
        spent = np.cumsum(run[unit]) / 1000
        both = np.asarray([min(until(run["success"], spent, 0.9), float(spent[-1])), np.mean(run["success"])])
        found.setdefault(run["method"], {})[run["seed"]] = both
    against = [method for method in ("grpo", "ppo_turn") if len(found.get(method, {})) > 1]
    names = [cell for method in against for cell in (f"1000 {unit} to 90 %, less {method}'s", f"area, less {method}'s")]
    if names:
        print(f"\n| {title} | seeds | " + " | ".join(names) + " |\n|---|" + "---:|" * (1 + len(names)))
    for method, of in found.items():
        shared = [seed for seed in of if all(seed in found[base] for base in against)]
        if len(shared) > 1 and against:
            pairs = [np.asarray([of[seed] - found[base][seed] for seed in shared]) for base in against]
            cells = [interval(difference[:, i], 3 if i else 1) for difference in pairs for i in range(2)]
            print(f"| {method} | {len(shared)} | " + " | ".join(cells) + " |")


def header(title: str, unit: str, *more: str) -> str:
    """The first two lines of a table."""
    spent = [f"{what} to {level} %" for what in ("steps", f"1000 {unit}", "CPU-s") for level in (50, 90)]
    names = ["seeds", *spent, "area", *more]
    return f"\n| {title} | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names)


def print_corridor(runs: Sequence[Run], rollouts: int) -> None:
    """Tables per distance, of the runs with so many rollouts in a group; branched ones have their own number.

    Where no episode of the steps that are looked at succeeds, there is no credit to compare: such seeds are left out of it.
    """
    runs = [run for run in runs if branched(run["method"]) or run["rollouts"] == rollouts]
    for distance in sorted({run["distance"] for run in runs}):
        print(header(f"corridor, distance {distance}", "turns", "correlation", "blame", "noise"))
        for method in credit_corridor.ROWS:
            of = [run for run in runs if (run["distance"], run["method"]) == (distance, method)]
            if of:
                told = [run for run in of if np.isfinite(run["correlation"])] or of
                more = [interval([run[key] for run in told], 2) for key in ("correlation", "blame")]
                noise = f"{np.median([run['noise'] for run in told]):.1f}"
                print(f"| {method} | " + " | ".join([*learning(of, "turns"), *more, noise]) + " |")
        print_differences(f"corridor, distance {distance}", [run for run in runs if run["distance"] == distance], "turns")


def print_maze(world: str, runs: Sequence[Run]) -> None:
    """The trainings, and the estimators compared on the same rollouts."""
    trained = [run for run in runs if run["method"] != "credit"]
    if trained:
        print(header(f"{world}, {credit_maze.STEPS[world]} steps", "tokens", "after"))
    for method in credit_maze.METHODS:
        if of := [run for run in trained if run["method"] == method]:
            print(f"| {method} | " + " | ".join([*learning(of, "tokens"), interval([run["after"] for run in of], 3)]) + " |")
    print_differences(f"{world}, {credit_maze.STEPS[world]} steps", trained, "tokens")
    if compared := [run for run in runs if run["method"] == "credit"]:
        success = interval([run["success"] for run in compared], 2)
        print(f"\n| {world}, success {success}, {len(compared)} seeds | correlation | blame | noise |\n|---|---:|---:|---:|")
        print(f"| all alike | | {interval([run['mistakes'] for run in compared], 2)} | |")
        for name in credit_maze.estimators():
            cells = [interval([credit_maze.correlation(run, name) for run in compared], 2)]
            cells += [interval([run[name][key] for run in compared], digits) for key, digits in (("blame", 2), ("noise", 1))]
            print(f"| {name} | " + " | ".join(cells) + " |")


def branched(method: str) -> bool:
    return method.endswith("branched")


def wanted(options: argparse.Namespace) -> Iterator[Run]:
    """What names a run, for all runs, the most important ones first."""
    for seed in range(options.seeds if "corridor" in options.worlds else 0):
        for distance in options.distances:
            rows = [row for row in credit_corridor.ROWS if row in (options.methods or credit_corridor.ROWS)]
            for row in rows:
                groups = {} if branched(row) else {"rollouts": options.rollouts}
                yield {"world": "corridor", "distance": distance, "method": row, "seed": seed, **groups}
    methods = [method for method in (*credit_maze.METHODS, "credit") if method in (options.methods or KNOWN)]
    for world in (world for world in credit_maze.MAZES if world in options.worlds):
        yield from credit_maze.ordered(world, methods, options.seeds)


def played(run: Run, options: argparse.Namespace) -> Run:
    """What a run told."""
    if run["world"] == "corridor":
        return credit_corridor.learn(run["method"], run["distance"], run["seed"], options.rollouts)
    if run["method"] == "credit":
        return credit_maze.compare(run["world"], run["seed"], options.out)
    return credit_maze.learn(run["world"], run["method"], run["seed"], options.out)


def stored(path: Path) -> list[Run]:
    """The runs of a file. Those of the corridor that do not say how many rollouts a group has are of the default."""
    return [{"rollouts": credit_corridor.ROLLOUTS, **run} if run["world"] == "corridor" else run for run in read(path)]


def trim(path: Path) -> None:
    """Takes a torn last line away, to which the next would be appended."""
    if path.exists() and not (text := path.read_text()).endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of what was measured; it resumes")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=WORLDS)
    parser.add_argument("--methods", nargs="+", choices=KNOWN, help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--distances", type=int, nargs="+", default=credit_corridor.DISTANCES)
    parser.add_argument(
        "--rollouts", type=int, default=credit_corridor.ROLLOUTS, help="of a group of the corridor without branches"
    )
    parser.add_argument("--table", action="store_true", help="prints what there is")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.jsonl"
    if not options.table:
        trim(path)
    for run in () if options.table else wanted(options):
        if any(run.items() <= there.items() for there in stored(path)):
            continue
        began = time.process_time()
        told = {**run, **played(run, options), "all_cpu_s": time.process_time() - began}
        with path.open("a") as file:
            file.write(json.dumps(told, default=float) + "\n")
        print(f"{' '.join(map(str, run.values()))}: {told['all_cpu_s']:.1f} CPU-s", file=sys.stderr, flush=True)
    runs = stored(path)
    print_corridor([run for run in runs if run["world"] == "corridor"], options.rollouts)
    for world in credit_maze.MAZES:
        if of := [run for run in runs if run["world"] == world]:
            print_maze(world, of)
    print(f"\n{sum(run['all_cpu_s'] for run in runs):.0f} CPU-s")


if __name__ == "__main__":
    main()
