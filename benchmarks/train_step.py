"""What one training step costs: `python benchmarks/train_step.py --model A` times it against PyTorch, where torch is installed.

One step is the learner's own: the gradient of all micro-batches, the division, AdamW. PyTorch's is that of the same model in
transformers (scaled-dot-product attention, cross entropy over all logits, torch.optim.AdamW). Both run in turns in one process
that has one core to itself, and CPU seconds are compared, the best of the repeats. Achieved FLOP/s stand beside the rate of a
large matmul of the same library in the same run. `--remat` and `--attention` take several names, a row of the table each. On
an accelerator, where this has not been run yet, wall seconds are taken.

Without more, one micro-batch of full rows. With `--episodes 64` the step is over so many trajectories of unequal length
(log-normal, a quarter of a row in the middle, none longer than a row): the learner packs them, PyTorch pads micro-batches of as
many trajectories to the longest of each. FLOPs and tokens are those of the trajectories, never of padding.
"""

import argparse
import gc
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxagent.heap import keep_freed_memory

SHAPES: dict[str, dict[str, Any]] = {
    "A": {"vocab_size": 4096, "width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_width": 64, "ffn_width": 768},
    "B": {"vocab_size": 8192, "width": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_width": 64, "ffn_width": 2304},
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "width": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "head_width": 64,
        "ffn_width": 4864,
        "qkv_bias": True,
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151936,
        "width": 1536,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "head_width": 128,
        "ffn_width": 8960,
        "qkv_bias": True,
    },
}


def main() -> None:
    """Measures and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="A")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--episodes", type=int, default=0, help="trajectories of unequal length in a step; 0 for full rows")
    parser.add_argument("--padded-episodes", type=int, default=0, help="of them in a padded micro-batch; 0 for as many as rows")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--remat", nargs="+", default=["none"])
    parser.add_argument("--attention", nargs="+", default=["auto"])
    parser.add_argument("--head-chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before any library counts the cores
    lengths = episode_lengths(options)
    steps = {f"jaxagent, remat {r}, {a}": ours(options, lengths, r, a) for r in options.remat for a in options.attention}
    if importlib.util.find_spec("torch"):
        steps["torch"] = theirs(options, lengths)
    seconds = best_of(options.repeats, {name: step["run"] for name, step in steps.items()})
    flops, tokens = step_flops(options, lengths), sum(lengths)
    print("| step | s | tokens/s | GFLOP/s | of its matmul rate | not padding | temporaries of gradient + update, MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, step in steps.items():
        s, rate = seconds[name], step["matmul"]
        columns = (
            f"{s:.3f}",
            f"{tokens / s:.0f}",
            f"{flops / s / 1e9:.1f}",
            f"{flops / s / rate:.0%} of {rate / 1e9:.0f}",
            f"{step['fill']:.0%}",
        )
        print(f"| {name} | {' | '.join(columns)} | {step['temp_mib']} |")
    if "torch" in seconds:
        print(
            f"\nratio to torch: {json.dumps({n: round(seconds['torch'] / s, 2) for n, s in seconds.items() if n != 'torch'})}"
        )


def episode_lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of each trajectory of the step, drawn by a fixed seed."""
    if not options.episodes:
        return [options.row_tokens] * options.rows
    rng = random.Random(0)
    return [
        max(2, min(options.row_tokens, int(rng.lognormvariate(0, 1) * options.row_tokens / 4))) for _ in range(options.episodes)
    ]


def step_flops(options: argparse.Namespace, lengths: list[int]) -> float:
    """FLOPs that a step needs: 6 per weight and token, 12 N H per visible pair of positions; recomputation is not counted."""
    s = SHAPES[options.model]
    width, heads = s["width"], s["heads"] * s["head_width"]
    layer = 2 * width * heads + 2 * width * s["kv_heads"] * s["head_width"] + 3 * width * s["ffn_width"]
    weights = s["layers"] * layer + s["vocab_size"] * width
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 6.0 * weights * sum(lengths) + 12.0 * s["layers"] * heads * pairs


def best_of(repeats: int, steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The least seconds of each step, all run in turns."""
    clock = time.process_time if cpu_only() else time.perf_counter
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in steps.items():
            gc.collect()
            began = clock()
            step()
            best[name] = min(best[name], clock() - began)
    return best


def cpu_only() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def ours(options: argparse.Namespace, lengths: list[int], remat: str, attention: str) -> dict[str, Any]:
    """The learner's step on random weights and tokens."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from jaxagent.algos.table import choose
    from jaxagent.data.pack import Row, fill, pack
    from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
    from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
    from jaxagent.sharding import DeviceMesh

    config = DecoderConfig(**SHAPES[options.model])
    params = jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])()
    knobs = {"batch_rows": options.rows, "row_tokens": options.row_tokens, "head_chunk": options.head_chunk}
    learner_options = LearnerOptions(**knobs, remat=remat, dtype=options.dtype, attention=attention)
    learner = Learner(config, params, DeviceMesh.build(1), choose(name="reinforce"), learner_options)
    learner.begin(OptimizerOptions(), steps=100)
    rng, rows = np.random.default_rng(0), []
    for n in lengths:
        ones = [1.0] * n
        rows.append(Row(rng.integers(0, config.vocab_size, n), [False] + [True] * (n - 1), [0.0] * n, ones, ones, ones))
    batches = pack(rows, batch_rows=options.rows, row_tokens=options.row_tokens)

    def run() -> None:
        for batch in batches:
            learner.accumulate(batch, on_policy=True)
        learner.apply()
        jax.block_until_ready(learner.params)

    run()
    size, dtype = 2048 if cpu_only() else 8192, jnp.dtype(options.dtype)
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda a: a @ a)
    multiply(a).block_until_ready()
    matmul_s = best_of(3, {"matmul": lambda: multiply(a).block_until_ready()})["matmul"]
    temporaries = [program.compile().memory_analysis().temp_size_in_bytes >> 20 for program in learner.lower().values()]
    mib = " + ".join(map(str, temporaries))
    return {"run": run, "matmul": 2 * size**3 / matmul_s, "fill": fill(batches), "temp_mib": mib}


def theirs(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """The same model's step in transformers and torch."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    s = SHAPES[options.model]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make = Qwen2Config if s.get("qkv_bias") else Qwen3Config
    config = make(
        vocab_size=s["vocab_size"],
        hidden_size=s["width"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_width"],
        intermediate_size=s["ffn_width"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype), attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
    count = options.padded_episodes or options.rows
    batches = []
    for members in (lengths[i : i + count] for i in range(0, len(lengths), count)):
        mask = (torch.arange(max(members)) < torch.tensor(members)[:, None]).long()
        batches.append((torch.randint(0, s["vocab_size"], mask.shape), mask if options.episodes else None))

    def run() -> None:
        for tokens, mask in batches:
            logits = model(tokens, attention_mask=mask).logits[:, :-1].float()
            target = tokens[:, 1:] if mask is None else tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="sum")
            (loss / sum(lengths)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    run()
    a = torch.ones(2048, 2048, dtype=getattr(torch, options.dtype))
    matmul_s = best_of(3, {"matmul": lambda: a @ a})["matmul"]
    filled = sum(lengths) / sum(tokens.numel() for tokens, _ in batches)
    return {"run": run, "matmul": 2 * 2048**3 / matmul_s, "fill": filled, "temp_mib": "-"}


if __name__ == "__main__":
    main()
