"""What a config learns and costs: `python benchmarks/learning.py configs/quickstart.py` trains it with several seeds.

Each seed is a process of its own with an empty cache of compiled programs, one after the other. Prints a table in Markdown:
held-out success by step, wall seconds by part, CPU seconds (with the sandbox's), peak memory, tokens and tool calls per second
of rollout. Run it on an idle machine.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    """Trains and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workdir", help="keeps the runs there; a temporary folder by default")
    parser.add_argument(
        "--intervals", action="store_true", help="95 %% intervals of held-out success, and success by difficulty"
    )
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(options.workdir or temporary)
        runs = []
        for seed in options.seeds:
            runs.append(train(options.config, place / f"seed-{seed}", [f"--config.seed={seed}", *overrides]))
            if options.intervals:
                runs[-1] = {**intervals(place / f"seed-{seed}"), **runs[-1]}
    rows = {name: [run.get(name, "") for run in runs] for run in runs for name in run}
    print(f"| {Path(options.config).stem} | " + " | ".join(f"seed {seed}" for seed in options.seeds) + " |")
    print("|---|" + "---:|" * len(runs))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(map(str, values)) + " |")


def train(config: str, workdir: Path, overrides: list[str]) -> dict[str, Any]:
    """Trains once; returns what the table says of it."""
    command = [sys.executable, "-m", "jaxagent", "train", f"--config={config}", f"--workdir={workdir}", *overrides]
    with tempfile.TemporaryDirectory() as cache:
        before, began = cpu_s(), time.monotonic()
        subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}, check=True, stdout=sys.stderr
        )
        wall, cpu = time.monotonic() - began, cpu_s() - before
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    table = json.loads((workdir / "eval.json").read_text())
    warmup = json.loads((workdir / "config.json").read_text())["warmup"]["steps"]
    held_out = {r["step"] - warmup: r["eval/success"] for r in records if "eval/success" in r}

    def total(name: str) -> float:
        return sum(record.get(name, 0.0) for record in records)

    rollout = total("time/rollout_s")
    tokens = sum(r["engine/tokens_per_s"] * r["time/rollout_s"] for r in records if "engine/tokens_per_s" in r)
    parts = sorted({name for record in records for name in record if name.startswith("time/") and name != "time/cpu_s"})
    return {
        **{f"success, {name}": f"{table[name]['success']:.3f}" for name in ("before",)},
        **{f"success, step {step}": f"{success:.3f}" for step, success in sorted(held_out.items())},
        **{f"success, {name}": f"{table[name]['success']:.3f}" for name in ("after", "ablated") if name in table},
        "wall s, all": f"{wall:.0f}",
        **{f"wall s, {name[5:-2]}": f"{total(name):.1f}" for name in parts},
        "CPU s, all": f"{cpu:.0f}",
        "CPU s, trainer": f"{total('time/cpu_s'):.0f}",
        "peak memory up to here, GiB": f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f}",
        "sampled tokens / s of rollout": f"{tokens / rollout:.0f}",
        "tool calls / s of rollout": f"{total('rollout/tool_calls') / rollout:.0f}",
    }


def intervals(workdir: Path) -> dict[str, str]:
    """Held-out success of the evaluations with their 95 % intervals, of all tasks and by difficulty."""
    rows = {}
    for name, table in json.loads((workdir / "eval.json").read_text()).items():
        rows[f"{name}, all"] = shown(table["success"], table["ci95"])
        for difficulty, success in table["by_difficulty"].items():
            rows[f"{name}, {difficulty}"] = shown(success, table["ci95_by_difficulty"][difficulty])
    return rows


def shown(success: float, ends: list[float]) -> str:
    return f"{success:.3f} ({ends[0]:.2f} to {ends[1]:.2f})"


def cpu_s() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
