"""What a training step needs on TPUs, by the real compiler and without a TPU: `python benchmarks/tpu.py`.

Compiles the learner's own programs for a described topology (`pip install -e ".[tpu]"` brings the compiler) with the true
shapes of known models, and prints a table in Markdown: bytes per chip, whether they fit, and the collectives inside the loop
over layers. Nothing is allocated and nothing runs, so it says nothing of seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs here
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # which cannot be read for devices that are not here

import jax
from flax import nnx

from jaxagent.algos.table import TABLE
from jaxagent.compiled import collectives, summary
from jaxagent.learner import Learner, LearnerOptions
from jaxagent.models.hf import FAMILIES
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import CHIPS, active_weights, by_place, devices_of, size_bytes

# config.json of each, as far as shapes go.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Gemma 3 4B": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen2.5-32B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 5e5,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True)
class Job:
    """A step to compile: a micro-batch has a row for each part into which the mesh cuts rows."""

    model: str
    topology: str
    axes: dict[str, int]
    row_tokens: int = 8192


JOBS = (
    Job("Qwen2.5-1.5B", "v5e:4x4", {"fsdp": 8, "tensor": 2}),
    Job("Qwen2.5-7B", "v5e:4x4", {"fsdp": 4, "tensor": 4}),
    Job("Gemma 3 4B", "v5e:4x4", {"fsdp": 8, "tensor": 2}),
    Job("Qwen2.5-7B", "v5p:4x4x4", {"fsdp": 32, "tensor": 2}),
    Job("Qwen2.5-7B", "v5e:16x16", {"fsdp": 8, "context": 8, "tensor": 4}, row_tokens=102400),
    Job("Llama-3.1-8B", "v6e:16x16", {"fsdp": 64, "tensor": 4}),
    Job("Qwen2.5-7B", "v5e:16x16", {"fsdp": 64, "tensor": 4}),
    Job("Qwen3-30B-A3B", "v5p:4x4x4", {"fsdp": 4, "expert": 8, "tensor": 2}),
    Job("Llama-3.1-8B", "v5e:4x4", {"fsdp": 4, "tensor": 4}),
    Job("Llama-3.1-8B", "v5p:4x4x4", {"fsdp": 32, "tensor": 2}),
    Job("Qwen2.5-1.5B", "v5e:16x16", {"fsdp": 128, "tensor": 2}),
    Job("Gemma 3 4B", "v6e:16x16", {"fsdp": 64, "tensor": 4}),
    Job("Qwen3-30B-A3B", "v6e:16x16", {"fsdp": 8, "expert": 8, "tensor": 4}),
    Job("Qwen3-30B-A3B", "v5e:16x16", {"fsdp": 8, "expert": 8, "tensor": 4}),
)
COLUMNS = (
    *("model", "chips", "mesh", "row tokens", "state GB", "step GB", "fits", "TFLOP", "forward layer", "backward layer"),
    *("outside", "compile s"),
)


def main() -> None:
    """Compiles the jobs one after the other, and prints a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--topologies", nargs="*", help="such as v5e:4x4; all by default")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's, to look at its loop sooner")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for job in JOBS:
        if job.model in options.models and (not options.topologies or job.topology in options.topologies):
            print("| " + " | ".join(measure(job, options.layers)) + " |", flush=True)


def measure(job: Job, layers: int = 0) -> list[str]:
    """The row of a job."""
    config = decoder(job.model, layers)
    mesh = DeviceMesh.build(devices=devices_of(job.topology), **job.axes)
    learner = step(config, mesh, job.row_tokens)
    chips = mesh.mesh.size
    # Float32 weights, two moments, and the gradient's sum.
    state_gb = 4 * size_bytes(learner.params) / 1e9
    flop = 8 * active_weights(config, learner.params) * mesh.parts("rows") * job.row_tokens / chips
    told = [
        job.model,
        f"{chips} {job.topology.partition(':')[0]}",
        " x ".join(f"{name} {size}" for name, size in job.axes.items()),
        f"{job.row_tokens}",
        f"{state_gb:.2f}",
    ]
    start = time.monotonic()
    limit = round(CHIPS[job.topology.partition(":")[0]].memory_gb * 2**30 / 1e9, 1)
    try:
        programs = {name: lowered.compile() for name, lowered in learner.lower().items()}
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", str(error))
        if not used:
            raise
        return [*told, used[1], f"no, of {limit}", f"{flop / 1e12:.0f}", "", "", "", f"{time.monotonic() - start:.0f}"]
    temporary_gb = max(program.memory_analysis().temp_size_in_bytes for program in programs.values()) / 1e9
    found = collectives(programs["accumulate"].as_text())
    return [
        *told,
        f"{temporary_gb:.2f}",
        f"{'yes' if state_gb + temporary_gb < limit else 'no'}, {state_gb + temporary_gb:.1f} of {limit}",
        f"{flop / 1e12:.0f}",
        *(summary(part, smallest_bytes=100_000) for part in by_place(found)),
        f"{time.monotonic() - start:.0f}",
    ]


def decoder(model: str, layers: int = 0) -> DecoderConfig:
    given = MODELS[model]
    return FAMILIES[given["model_type"]].from_hf({**given, **({"num_hidden_layers": layers} if layers else {})})


def step(config: DecoderConfig, mesh: DeviceMesh, row_tokens: int) -> Learner:
    """A learner that holds no arrays: bf16 passes over f32 weights, every layer computed again."""
    shapes = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]
    options = LearnerOptions(mesh.parts("rows"), row_tokens, 1024, remat="full", dtype="bfloat16")
    return Learner(config, shapes, mesh, TABLE["grpo"], options)


if __name__ == "__main__":
    main()
