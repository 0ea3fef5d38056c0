"""What known models would need on known machines: `python benchmarks/plans.py`, with the extras `tpu` and `gpu`.

A row is one run: `configs/questions.py` (Python in the sandbox) for a model and a machine, on a mesh that was chosen by hand. It is
what `jaxagent plan --topology` tells of it: the bytes of a chip, the programs really compiled for the machine, their collectives, and the
least times by the data sheet. The learner's programs are compiled as they are; the engine's at two depths (`--layers`), since their
layers stand one by one. Nothing runs. Programs that were compiled are kept in a file (`--kept`), so that a table can be gone on with.

How an iteration divides into rollouts and training is told by the scheduler on a virtual clock (benchmarks/scheduling.py): one replica
with its share of the episodes, on a device as fast as the replica's chips, at shares of their data sheets that are assumed.
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
from jaxagent.plan import Shapes, does_not_fit, forecast, judged, measures
from jaxagent.topology import Chip, active_weights, linked_bytes, size_bytes, uncached

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
    Job("Qwen3-30B-A3B", "v6e:16x16", {"fsdp": 8, "expert": 8, "tensor": 4}, slots=16),
    Job("Qwen2.5-32B", "v6e:16x16", {"fsdp": 64, "tensor": 4}, slots=16),
    Job("Qwen2.5-1.5B", "H200:8", {"fsdp": 8}, slots=128),
    Job("Qwen2.5-7B", "H200:8", {"fsdp": 8}, slots=128),
    Job("Qwen3-30B-A3B", "H200:8", {"expert": 2, "tensor": 4}, slots=128),
    Job("Qwen2.5-32B", "H200:8", {"fsdp": 2, "tensor": 4}, slots=64),
)
PROGRAMS = ("gradient", "update", "decode", "append", "publish")


def main() -> None:
    """Prints the rows as they are known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(dict.fromkeys(job.model for job in JOBS)))
    parser.add_argument("--topologies", nargs="*", default=list(dict.fromkeys(job.topology for job in JOBS)))
    parser.add_argument("--programs", nargs="*", default=["gradient", "update", "decode", "append"], choices=PROGRAMS)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="depths at which the engine is compiled")
    parser.add_argument("--kept", type=Path, default=Path("plans.json"), help="what was compiled before, and is now")
    options = parser.parse_args()
    kept = json.loads(options.kept.read_text()) if options.kept.is_file() else {}
    for job in JOBS:
        if job.model not in options.models or job.topology not in options.topologies:
            continue
        run = shapes(job)
        told = forecast(run, 60.0)
        if not sum(told["held_bytes"].values()) > told["memory_bytes"]:  # else nothing can help
            compile_some(job, run, options, kept)
        print(job, flush=True)


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
