"""What a step of RL costs beside google-tunix and TRL: `python benchmarks/peers/compare.py --work agentic single`.

The same model of random weights, the same prompts, and the same number of sampled tokens in every turn of every episode, on a
CPU in float32. "agentic" are episodes of three turns with a tool between them that sleeps, "single" is one turn of 128 tokens.
Every runner is a process of its own, one after the other, `--rounds` times in turns; theirs run in the environments of
install.py. A process's first step, in which programs are compiled, counts only where there is no other of that tool, and then
has a star. Useful tokens are those that the policy samples. Memory is the largest of a process, with that of what it started.

Prints tables in Markdown; `--out FILE` appends a JSON line for each process, and `--table FILE` prints them again. Run it on an
idle machine; TRL's tools and google-tunix's compilations take most of the time. `--list` says what would run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from install import default_place, interpreter, standing
from workload import add_sizes

HERE = Path(__file__).resolve().parent
OURS, LOCK_STEP = "jaxagent", "jaxagent, lock-step"
# Script, environment ("" is the one that runs this), further arguments.
RUNNERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    OURS: ("with_jaxagent.py", "", ()),
    "trl": ("with_trl.py", "trl", ()),
    LOCK_STEP: ("with_jaxagent.py", "", ("--lock-step",)),
    "tunix": ("with_tunix.py", "tunix", ()),
}
SIZES = ("prompts", "group", "turns", "turn_tokens", "budget", "new_tokens", "beta", "micro")
UNTOLD = {"beta": 0.04, "micro": 4, "set": []}  # of files that do not say it
FIRST = 1  # steps of a process before those that count


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("agentic", "single"), nargs="+", default=["agentic"])
    parser.add_argument("--model", choices=("small", "base"), default="small")
    parser.add_argument("--tool-ms", type=float, nargs="+", default=[50.0, 2000.0])
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 2], help="of ours after the first, for each tool")
    parser.add_argument("--trl-steps", type=int, nargs="+", default=[1, 1])
    parser.add_argument(
        "--tunix-steps", type=int, nargs="+", default=[0, 1], help="it compiles anew in every step: minutes each"
    )
    parser.add_argument("--single-steps", type=int, default=2, help="of everybody after the first, of single turns")
    parser.add_argument("--runners", choices=RUNNERS, nargs="+", default=list(RUNNERS))
    parser.add_argument("--rounds", type=int, default=1, help="how often each runs")
    parser.add_argument("--venvs", type=Path, default=default_place(), help="where install.py made them; default: %(default)s")
    parser.add_argument("--out", type=Path, help="what was measured, a JSON line for each process, is appended")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of our config, instead of the workload's"
    )
    parser.add_argument("--table", type=Path, nargs="+", help="only prints what these files hold")
    parser.add_argument("--list", action="store_true", help="only says what would run")
    add_sizes(parser)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for path in options.table for line in path.read_text().splitlines()]))
        return
    plans = [(work, name, steps_of(options, work, name)) for work in options.work for name in order(options, work)]
    if options.list:
        print("\n".join(f"{work}: {name}, tool of ms {', '.join(f'{ms:g}' for ms in steps)}" for work, name, steps in plans))
        return
    model, failed = prepared(options), list[str]()
    for work in options.work:
        found: list[dict[str, Any]] = []
        for _, name, steps in (plan for plan in plans if plan[0] == work):
            run, fault = measured(options, work, name, steps, model)
            if fault:  # what the others take is told all the same
                failed.append(f"{work}, {fault}")
                print(failed[-1], file=sys.stderr, flush=True)
            found += [run] if run else []
            if run and options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(run) + "\n")
        print(table(found), flush=True)
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def order(options: argparse.Namespace, work: str) -> list[str]:
    """Who runs in turn."""
    return [name for name in options.runners if work == "agentic" or name != LOCK_STEP] * options.rounds


def steps_of(options: argparse.Namespace, work: str, name: str) -> list[float]:
    """What the tool takes in every step of a process, the first one included."""
    if work == "single":
        return [0.0] * (FIRST + options.single_steps)
    counts = {"trl": options.trl_steps, "tunix": options.tunix_steps}.get(name, options.steps)
    if len(counts) != len(options.tool_ms):
        raise SystemExit(f"as many numbers of steps are wanted as tools ({len(options.tool_ms)}), {name} has {counts}")
    counted = [ms for ms, count in zip(options.tool_ms, counts, strict=True) for _ in range(count)]
    return [options.tool_ms[0]] * FIRST + counted


def prepared(options: argparse.Namespace) -> Path:
    """The model's folder, made if it is not there. Raises SystemExit where an environment is missing."""
    needed = {RUNNERS[name][1] for name in options.runners} - {""} | {"trl"}  # the model is made with TRL's torch
    if missing := sorted(name for name in needed if not standing(options.venvs / name, name)):
        raise SystemExit(f"{options.venvs}: no environment of {missing[0]}; python benchmarks/peers/install.py makes it")
    model = options.venvs / "models" / options.model
    if (model / "prompts.json").exists():
        return model
    command = [interpreter(options.venvs, "trl"), HERE / "model.py", "--size", options.model, "--out", model]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    return model


def measured(
    options: argparse.Namespace, work: str, name: str, steps: list[float], model: Path
) -> tuple[dict[str, Any] | None, str]:
    """Runs one process. Returns what it printed last, which is nothing where it failed before its first step was over or
    sampled other than it should; and what was wrong."""
    script, venv, more = RUNNERS[name]
    python = interpreter(options.venvs, venv) if venv else Path(sys.executable)
    command = [str(python), str(HERE / script), "--model", str(model), "--work", work, *more]
    command += ["--tool-ms", *map(str, steps)]
    for size in SIZES:
        command += [f"--{size.replace('_', '-')}", str(getattr(options, size))]
    command += ["--even"] if options.even else []
    command += ["--set", *options.set] if script == RUNNERS[OURS][0] else []
    began, load = time.monotonic(), os.getloadavg()[0]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(f"{work}, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    wrong = f"{name} ended with exit code {ran.returncode}: {' '.join(command)}" if ran.returncode else ""
    said = [line for line in ran.stdout.splitlines() if line.startswith('{"runner"')]
    if not said:
        return None, wrong or f"{name} told nothing: {' '.join(command)}"
    found: dict[str, Any] = json.loads(said[-1])
    if fault := next((step for step in found["steps"] if step["tokens"] != step["tokens_wanted"]), None):
        return None, f"{name} sampled {fault['tokens']} tokens in a step that has {fault['tokens_wanted']}"
    sizes = {size: getattr(options, size) for size in (*SIZES, "even")} | {"set": list(options.set)}
    found |= {"work": work, "model": model.name, "load_before": round(load, 1), "sizes": sizes}
    return found, wrong


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a part for every work, model and tool, a row for every runner; medians of its steps over all processes.

    What was measured at several sizes stands in several parts, which say in what they differ.
    """
    parts: dict[tuple[str, str, str, float], None] = {}
    for run in found:
        parts |= {(run["work"], run["model"], _sizes(run), step["tool_ms"]): None for step in run["steps"]}
    told = []
    for part in parts:
        work, model, sizes, tool_ms = part
        others = [json.loads(other) for of, name, other, _ in parts if (of, name) == (work, model)]
        differ = {size: value for size, value in json.loads(sizes).items() if any(other.get(size) != value for other in others)}
        runs = [run for run in found if (run["work"], run["model"], _sizes(run)) == part[:3]]
        told.append(_part(runs, work, model, tool_ms, "".join(f", {size} {value}" for size, value in differ.items())))
    return "\n\n".join(told)


def _sizes(run: dict[str, Any]) -> str:
    """What a process was asked for, as a key."""
    return json.dumps(UNTOLD | run.get("sizes", {}), sort_keys=True)


def counted(runs: list[dict[str, Any]], tool_ms: float) -> tuple[list[dict[str, Any]], bool]:
    """The steps of a runner with this tool that count, and whether they are first ones."""
    with_tool = [(number, step) for run in runs for number, step in enumerate(run["steps"]) if step["tool_ms"] == tool_ms]
    warm = [step for number, step in with_tool if number >= FIRST]
    return (warm, False) if warm else ([step for _, step in with_tool], True)


def _part(found: list[dict[str, Any]], work: str, model: str, tool_ms: float, sizes: str) -> str:
    names = [name for name in RUNNERS if any(run["runner"] == name for run in found)]
    rows = {}
    for name in names:
        runs = [run for run in found if run["runner"] == name]
        steps, first = counted(runs, tool_ms)
        if not steps:
            continue
        wall, cpu = (statistics.median(step[key] for step in steps) for key in ("wall_s", "cpu_s"))
        rates = statistics.median(step["tokens"] / step["wall_s"] for step in steps)
        rows[name] = (f"{len(steps)}{'*' * first}", wall, rates, cpu, max(run["peak_mib"] for run in runs))
    title = f"{work}, {model}" + (f", tool of {tool_ms:g} ms" if work == "agentic" else "") + sizes
    columns = ("steps", "s per step", "of ours", "useful tokens/s", "CPU s per step", "of ours", "peak MiB", "of ours")
    lines = [f"| {title} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    ours = rows.get(OURS)
    for name, (count, wall, rate, cpu, peak) in rows.items():
        ratio = [f"{mine / theirs:.2f}" if theirs else "" for mine, theirs in _beside((wall, cpu, peak), ours)]
        cells = (count, f"{wall:.2f}", ratio[0], f"{rate:.0f}", f"{cpu:.2f}", ratio[1], f"{peak}", ratio[2])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _beside(mine: tuple[float, float, float], ours: Any) -> list[tuple[float, float]]:
    return list(zip(mine, (ours[1], ours[3], ours[4]) if ours else (0.0, 0.0, 0.0), strict=True))


if __name__ == "__main__":
    main()
