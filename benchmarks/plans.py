"""What known models would need on known machines: `python benchmarks/plans.py`, with the extras `tpu` and `gpu`.

A row is one run of `configs/questions.py` (Python in the sandbox), for a model, a machine and a mesh that was chosen by hand:
what `jaxagent plan --topology` tells of it. The learner's programs are compiled as they are; the engine's at two depths
(`--layers`), since their layers stand one by one. Nothing runs. What was compiled is kept in a file (`--kept`), from which a
table is gone on with, also by an environment that has the other compiler; `--programs` with nothing prints what is there.

`--forecast` prints instead, for jobs to which nothing of the forecast was fitted, what it tells of each program and of the most
that a chip holds in each phase, against the same with the compiler's figures in place of its own.

How an iteration divides into rollouts and training is told by the scheduler on a virtual clock (benchmarks/scheduling.py): one
replica with its share of the episodes, on a device as fast as the replica's chips, at assumed shares of their data sheets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs here

from clocked import Device
from scheduling import Run, Shape
from tpu import MODELS

from jaxagent import config as configs
from jaxagent.plan import Shapes, at_least, does_not_fit, forecast, judged, measures
from jaxagent.topology import active_weights, roofline_s, size_bytes, uncached

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "questions.py"
ROW_TOKENS = 8192
EPISODES = 1024  # 64 groups of 16
COMMON = {
    "algo.name": "grpo",
    "agent.max_turns": 10,
    "agent.max_tokens": ROW_TOKENS,
    "sampling.max_tokens": 1024,
    "feed.prompts": 64,
    "feed.rollouts": EPISODES // 64,
    "engine.slot_tokens": ROW_TOKENS,
    "engine.append_tokens": "(64,512)",
    "engine.dtype": "bfloat16",
    "learner.dtype": "bfloat16",
    "learner.row_tokens": ROW_TOKENS,
    "learner.remat": "full",
}
PAGE = 128  # engine.chunk
PARTS = ("weights", "moments", "gradient sum", "sampler copy", "key-value cache")
STEPS = 2  # on the virtual clock
STEP_S = 0.4e-3  # of a decoded token, for launches and the draw
PROGRAM_S = 0.1  # CPU of a program that the policy writes: its own, beside the sandbox's
# The shares of the data sheet that programs are assumed to reach on the virtual clock; nothing was measured on these machines.
MEMORY, PREFILL, TRAIN = 0.9, 0.44, 0.36
TURNS = Shape(turns=(5, 10), turn_tokens=200, answer_tokens=300, prompt_tokens=1000, tool_s=2.0, tool_sigma=1.0)


@dataclass(frozen=True)
class Job:
    """A model on a machine.

    Args:
        slots: of each replica; pages hold `filled` of their longest trajectories at once.
        more: other keys of the config.
    """

    model: str
    topology: str
    mesh: dict[str, int]
    slots: int
    filled: float = 0.5
    more: tuple[tuple[str, Any], ...] = ()

    def overrides(self, checkpoint: str) -> list[str]:
        chips = math.prod(int(n) for n in self.topology.partition(":")[2].split("x"))
        pages = math.ceil(self.filled * self.slots * ROW_TOKENS / PAGE) + 1
        keys = {f"mesh.{axis}": size for axis, size in self.mesh.items()} | {
            "mesh.data": 0,
            "init_from": checkpoint,
            "engine.slots": self.slots,
            "engine.pages": pages,
            "learner.batch_rows": chips // self.mesh.get("tensor", 1),
        }
        return [f"{key}={value}" for key, value in (COMMON | keys | dict(self.more)).items()]


ADAPTERS = (("lora.rank", 32), ("learner.frozen_dtype", "bfloat16"))
JOBS = (
    Job("Qwen2.5-1.5B", "v5e:4x4", {"fsdp": 16}, slots=32),
    Job("Qwen2.5-7B", "v5e:4x4", {"fsdp": 4, "tensor": 4}, slots=32),
    Job("Qwen2.5-7B", "v5e:4x4", {"fsdp": 4, "tensor": 4}, slots=64, more=ADAPTERS),
    Job("Qwen3-30B-A3B", "v5e:4x4", {"fsdp": 4, "tensor": 4}, slots=32),
    Job("Qwen2.5-32B", "v5e:4x4", {"fsdp": 4, "tensor": 4}, slots=16),
    Job("Qwen2.5-1.5B", "v5p:4x4x4", {"fsdp": 64}, slots=16),
    Job("Qwen2.5-7B", "v5p:4x4x4", {"fsdp": 32, "tensor": 2}, slots=32),
    Job("Qwen3-30B-A3B", "v5p:4x4x4", {"fsdp": 4, "expert": 8, "tensor": 2}, slots=32),
    Job("Qwen2.5-32B", "v5p:4x4x4", {"fsdp": 16, "tensor": 4}, slots=64),
    Job("Qwen2.5-1.5B", "v6e:16x16", {"fsdp": 256}, slots=4),
    Job("Qwen2.5-7B", "v6e:16x16", {"fsdp": 64, "tensor": 4}, slots=16),
    Job("Qwen3-30B-A3B", "v6e:16x16", {"fsdp": 8, "expert": 8, "tensor": 4}, slots=8),
    Job("Qwen2.5-32B", "v6e:16x16", {"fsdp": 64, "tensor": 4}, slots=16),
    Job("Qwen2.5-1.5B", "H200:8", {"fsdp": 8}, slots=128),
    Job("Qwen2.5-7B", "H200:8", {"fsdp": 8}, slots=128),
    Job("Qwen3-30B-A3B", "H200:8", {"expert": 2, "tensor": 4}, slots=128),
    Job("Qwen2.5-32B", "H200:8", {"fsdp": 2, "tensor": 4}, slots=64),
)
UNFITTED = (
    Job("Qwen2.5-0.5B", "v5e:2x2", {"fsdp": 4}, slots=64),
    Job("Llama-3.1-8B", "v5e:4x4", {"fsdp": 4, "tensor": 4}, slots=32, more=ADAPTERS),
)
PROGRAMS = ("gradient", "update", "decode", "append", "publish")


COLUMNS = (
    *(
        "model",
        "machine",
        "mesh",
        "replicas x slots",
        "weights, moments, sum, sampler, cache GB",
        "gradient GB: told / compiled",
    ),
    *(
        "most at once GB, told / compiled",
        "fits",
        "collectives of a micro-batch",
        "ms a micro-batch",
        "ms a token of all slots",
    ),
    *("s an iteration: rollouts + training", "sandbox cores"),
)


def main() -> None:
    """Prints the rows as they are known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--topologies", nargs="*", default=list(dict.fromkeys(job.topology for job in (*JOBS, *UNFITTED))))
    parser.add_argument("--forecast", action="store_true", help="the second table")
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="depths at which the engine is compiled")
    parser.add_argument("--kept", type=Path, default=Path("plans.json"), help="what was compiled before, and is now")
    options = parser.parse_args()
    kept = json.loads(options.kept.read_text()) if options.kept.is_file() else {}
    if options.forecast:
        print("| model | machine | mesh | of | told GB | compiled GB | told / compiled |\n|---|---|---|---|---:|---:|---:|")
        for job in UNFITTED:
            if job.model in options.models and job.topology in options.topologies:
                tell(job, options, kept)
        return
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for job in JOBS:
        if job.model in options.models and job.topology in options.topologies:
            print("| " + " | ".join(row(job, options, kept)) + " |", flush=True)


def row(job: Job, options: argparse.Namespace, kept: dict[str, Any]) -> list[str]:
    """A job's row; where what stays is more than a chip has, nothing is compiled."""
    run = shapes(job)
    told = forecast(run, 60.0)
    held, limit = told["held_bytes"], told["memory_bytes"]
    stays = ", ".join(f"{held[part] / 1e9:.1f}" for part in PARTS)
    mesh = " x ".join(f"{axis} {size}" for axis, size in job.mesh.items()) + (", adapters of rank 32" if job.more else "")
    cells = [job.model, f"{len(run.devices)} {told['chip']}", mesh, f"{len(run.replicas)} x {job.slots}", stays]
    if sum(held.values()) > limit:
        return [*cells, "", "", f"does not fit: {sum(held.values()) / 1e9:.1f} stay, of {limit / 1e9:.1f}", *[""] * 5]
    found = judged(run, told, compile_some(job, run, options, kept))
    told["compiled"] = found
    phase = max(found["peak_bytes"], key=lambda name: found["peak_bytes"][name])
    most = f"{phase}: {told['peak_bytes'][phase] / 1e9:.1f}"
    if phase in ("gradient", "publish") and phase in found["programs"]:
        most += f" / {found['peak_bytes'][phase] / 1e9:.1f}"
    gradient, decode = found["programs"].get("gradient", {}), found["programs"].get("decode", {})
    memory = f"{told['temporary_bytes']['gradient'] / 1e9:.2f}"
    if gradient:
        memory += f" / {gradient['temporary_bytes'] / 1e9:.2f}" if "temporary_bytes" in gradient else " / refused"
    runs = ", ".join(f"{n['runs']} {kind} {n['bytes'] / 1e9:.2f} GB" for kind, n in gradient.get("runs", {}).items())
    refusal = does_not_fit(told)
    fits = f"{'does not fit' if refusal else 'yes'}, of {limit / 1e9:.1f}"
    rollouts_s, training_s, wall_s = split(job, run, decode)
    calls, cpu_s = told["iteration"]["sandbox_calls"], told["iteration"]["sandbox_cpu_s"]
    cores = f"{cpu_s / wall_s:.2f} + {calls * PROGRAM_S / wall_s:.1f}"
    least = [bound(run, found, name) for name in ("gradient", "decode")]
    return [*cells, memory, most, fits, runs, *least, f"{wall_s:.0f}: {rollouts_s:.0f} + {training_s:.0f}", cores]


def tell(job: Job, options: argparse.Namespace, kept: dict[str, Any]) -> None:
    """The rows of a job in the second table."""
    run = shapes(job)
    told = forecast(run, 60.0)
    found = judged(run, told, compile_some(job, run, options, kept))
    mesh = " x ".join(f"{axis} {size}" for axis, size in job.mesh.items()) + (", adapters of rank 32" if job.more else "")
    rows = {
        f"temporaries of {name}": (told["temporary_bytes"][name], one["temporary_bytes"])
        for name, one in found["programs"].items()
        if "temporary_bytes" in one
    }
    known = {"gradient": ("gradient",), "update": ("update",), "sampling": ("append", "decode"), "publish": ("publish",)}
    for phase, most in found["peak_bytes"].items():
        if all("temporary_bytes" in found["programs"].get(name, {}) for name in known[phase]):
            rows[f"the most at once, {phase}"] = told["peak_bytes"][phase], most
    for name, (ours, theirs) in rows.items():
        cells = f"{ours / 1e9:.3f} | {theirs / 1e9:.3f} | {ours / theirs:.2f}" if theirs else f"{ours / 1e9:.3f} | 0 |"
        print(f"| {job.model} | {len(run.devices)} {told['chip']} | {mesh} | {name} | {cells} |", flush=True)


def bound(run: Shapes, found: dict[str, Any], name: str) -> str:
    """The least milliseconds of a program by its chip's data sheet, of decode for one token, and what bounds it."""
    assert run.chip
    links = found["programs"].get(name, {}).get("linked_bytes")
    least = roofline_s(run.chip, **at_least(run)[name], linked_bytes=links or 0)
    limit = max(least, key=lambda part: least[part])
    tokens = run.engine_options.decode_tokens if name == "decode" else 1
    return f"{1e3 * least[limit] / tokens:.3g} {limit.removesuffix('_s')}" + (
        "" if links is not None else ", links not counted"
    )


def split(job: Job, run: Shapes, decode: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of an iteration's rollouts beside training, of training, and of both, on the virtual clock."""
    assert run.chip
    c, chips, replicas = run.decoder, run.mesh.size["tensor"], len(run.replicas)
    cached = size_bytes(run.engine.cache) * chips / (run.engine_options.pages * PAGE)
    links_s = decode.get("linked_bytes", 0) / (run.chip.link_gbps * 1e9) / run.engine_options.decode_tokens
    device = Device(
        params=active_weights(c, run.learner.params),
        read_bytes=size_bytes(run.engine.weights) * chips,
        cached_bytes=cached,
        attention=4 * c.layers * c.heads * c.head_width,
        bandwidth=MEMORY * run.chip.memory_gbps * 1e9 * chips,
        prefill_flops=PREFILL * run.chip.tflops * 1e12 * chips,
        train_flops=TRAIN * run.chip.tflops * 1e12 * len(run.devices) / replicas,
        step_s=STEP_S + links_s,
    )
    share = max(1, EPISODES // replicas)
    shape = replace(TURNS, groups=max(1, share // 16), rollouts=min(16, share))
    clocked = Run(shape, job.slots, device=device)
    steps = [clocked.step(number, STEPS - 1 - number) for number in range(STEPS)]
    wall_s = clocked.clock.time() / STEPS
    clocked.close()
    training_s = sum(device.train([len(one.tokens) for one in group.trajectories]) for step in steps for group in step) / STEPS
    return wall_s - training_s, training_s, wall_s


def shapes(job: Job) -> Shapes:
    """The run of a job, from the model's config.json."""
    with tempfile.TemporaryDirectory() as checkpoint:
        Path(checkpoint, "config.json").write_text(json.dumps(MODELS[job.model]))
        config, faults = configs.load(str(CONFIG), job.overrides(checkpoint))
        assert not faults, faults
        return Shapes(config, job.topology)


def compile_some(job: Job, run: Shapes, options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """What the job's programs need, by name: those that are kept, and those that are asked for."""
    here = kept.setdefault(str(job), {})
    with uncached():
        for name, measure in measures(run, options.layers).items():
            if name in options.programs and name not in here:
                here[name] = measure()
                print(f"{name}: {here[name]}", file=sys.stderr, flush=True)
                options.kept.write_text(json.dumps(kept, indent=1))
    return here


if __name__ == "__main__":
    main()
