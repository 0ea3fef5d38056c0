"""How fast tokens are sampled: `python benchmarks/decode.py` runs the engine, transformers and CTranslate2 in turns.

One model of random weights, float32, one workload: groups that share a prompt, every row samples the same number of tokens at
temperature 1. Ours goes through the engine's door, prefill and the copies of the groups' prompt included, as it is fastest and
in exact mode, where no bit of a row depends on its neighbours; theirs is `generate` of transformers with a dynamic and a static
cache, and `generate_batch` of CTranslate2, where those are installed. All run in one process that has `--cores` to itself, and
tokens per CPU second are compared, the best of the repeats.

`roofline` is what the engine's matrix products of one decode step would take at the rates that such products reach alone, at
these shapes, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxagent.heap import keep_freed_memory

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 32, "ffn_width": 192},
    "small": {"vocab_size": 4096, "width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_width": 64, "ffn_width": 768},
    "base": {"vocab_size": 8192, "width": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_width": 64, "ffn_width": 2048},
}


def main() -> None:
    """Measures and prints a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])  # before any library counts them
    prompts = make_prompts(options)
    runs: dict[str, Callable[[], None]] = {}
    engine, runs["jaxagent"] = ours(options, prompts, exact=False)
    exact, runs["jaxagent, exact"] = ours(options, prompts, exact=True)
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("torch"):
            model = hf_model(options, folder)
            runs |= {f"transformers, {cache} cache": hf(options, model, prompts, cache) for cache in ("dynamic", "static")}
            if importlib.util.find_spec("ctranslate2"):
                runs["CTranslate2"] = ctranslate2(options, folder, prompts)
        seconds = best_of(options.repeats, runs)
    engine.close()
    exact.close()
    tokens = options.rows * options.new_tokens
    ceiling = roofline(options)
    found = {name: {"tokens_per_cpu_s": tokens / s, "ours_to_it": s / seconds["jaxagent"]} for name, s in seconds.items()}
    found["jaxagent"]["of_roofline"] = ceiling * options.new_tokens / seconds["jaxagent"]
    if options.json:
        print(json.dumps({"options": vars(options), "roofline_step_ms": ceiling * 1e3, "engines": found}))
        return
    print("| engine | tokens per CPU s | ours to it |\n|---|---:|---:|")
    for name, row in found.items():
        print(f"| {name} | {row['tokens_per_cpu_s']:.0f} | {row['ours_to_it']:.2f} |")
    print(
        f"\nroofline: {ceiling * 1e3:.2f} ms a step, {tokens / (ceiling * options.new_tokens):.0f} tokens/s; "
        f"reached {found['jaxagent']['of_roofline']:.2f} of it"
    )


def best_of(repeats: int, runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The least CPU seconds of each, all run in turns, once before to warm up."""
    best = dict.fromkeys(runs, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repeat:
                best[name] = min(best[name], time.process_time() - began)
    return best


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """One prompt a row, the same within a group."""
    import numpy as np

    rng, vocab = np.random.default_rng(0), SHAPES[options.model]["vocab_size"]
    groups = rng.integers(0, vocab, (-(-options.rows // options.group), options.prompt_tokens)).tolist()
    return [groups[i // options.group] for i in range(options.rows)]


def ours(options: argparse.Namespace, prompts: list[list[int]], exact: bool) -> tuple[Any, Callable[[], None]]:
    """The engine, and a run of all rows through its door."""
    import jax
    from flax import nnx

    from jaxagent.engine.engine import Engine, EngineOptions
    from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
    from jaxagent.sharding import DeviceMesh
    from jaxagent.types import SampleRequest, Sampling, sampling_key

    config = DecoderConfig(**SHAPES[options.model])
    length = -(-(options.prompt_tokens + options.new_tokens) // options.chunk) * options.chunk
    shape: dict[str, Any] = {
        "slots": options.rows,
        "slot_tokens": length,
        "chunk": options.chunk,
        "decode_tokens": options.decode_tokens,
    }
    shape |= {"append_rows": 4, "exact": exact}
    engine = Engine(config, EngineOptions(**shape, append_tokens=(options.prompt_tokens,)), DeviceMesh.build(1))
    engine.publish(jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])(), version=0)
    engine.warm_up().result()
    sampling, count = Sampling(temperature=1.0, max_tokens=options.new_tokens), 0

    async def rollout(name: str, row: int) -> None:
        request = SampleRequest(
            name, tuple(prompts[row]), 0, sampling_key(0, name, row), (), sampling, group=f"{name}/{row // options.group}"
        )
        sample = await engine.generate(request)
        assert len(sample.tokens) == options.new_tokens
        engine.release(name)

    async def all_rows() -> None:
        await asyncio.gather(*(rollout(f"{count}/{row}", row) for row in range(options.rows)))

    def run() -> None:
        nonlocal count
        count += 1
        asyncio.run(all_rows())

    return engine, run


def hf_model(options: argparse.Namespace, folder: str) -> Any:
    """A model of the same shape in transformers, saved for who converts it, with a tokenizer of one word an id."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(options.cores)
    torch.manual_seed(0)
    s = SHAPES[options.model]
    config = Qwen3Config(
        vocab_size=s["vocab_size"],
        hidden_size=s["width"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_width"],
        intermediate_size=s["ffn_width"],
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(s["vocab_size"])}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="0", bos_token="0").save_pretrained(folder)
    return model


def hf(options: argparse.Namespace, model: Any, prompts: list[list[int]], cache: str) -> Callable[[], None]:
    import torch

    ids = torch.tensor(prompts)
    knobs: dict[str, Any] = {"disable_compile": True, "cache_implementation": "static"} if cache == "static" else {}
    knobs |= {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens, "do_sample": True, "top_k": 0}

    def run() -> None:
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), temperature=1.0, top_p=1.0, **knobs)
        assert out.shape[1] == options.prompt_tokens + options.new_tokens

    return run


def ctranslate2(options: argparse.Namespace, folder: str, prompts: list[list[int]]) -> Callable[[], None]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    converted = str(Path(folder) / "converted")
    TransformersConverter(folder).convert(converted)
    generator = ctranslate2.Generator(
        converted, device="cpu", compute_type="float32", inter_threads=1, intra_threads=options.cores
    )
    words = [[str(token) for token in prompt] for prompt in prompts]
    knobs = {"max_length": options.new_tokens, "min_length": options.new_tokens, "sampling_topk": 0}

    def run() -> None:
        found = generator.generate_batch(words, max_batch_size=len(words), include_prompt_in_result=False, **knobs)
        assert all(len(one.sequences_ids[0]) == options.new_tokens for one in found)

    return run


def roofline(options: argparse.Namespace) -> float:
    """CPU seconds of a decode step's products with weights alone, each at the rate that it reaches by itself in a loop."""
    import jax
    import jax.numpy as jnp

    s = SHAPES[options.model]
    heads, kv = s["heads"] * s["head_width"], s["kv_heads"] * s["head_width"]
    shapes = {
        (s["width"], heads): s["layers"],
        (s["width"], kv): 2 * s["layers"],
        (heads, s["width"]): s["layers"],
        (s["width"], s["ffn_width"]): 2 * s["layers"],
        (s["ffn_width"], s["width"]): s["layers"],
        (s["width"], s["vocab_size"]): 1,
    }
    total = 0.0
    for (inside, outside), count in shapes.items():
        x, table = jnp.ones((options.rows, inside)), jnp.ones((outside, inside))
        multiply = jax.jit(lambda x, w: x @ w.T).lower(x, table).compile()
        best = float("inf")
        for _ in range(30):
            began = time.process_time()
            for _ in range(10):
                out = multiply(x, table)
            out.block_until_ready()
            best = min(best, (time.process_time() - began) / 10)
        total += count * best
    return total


if __name__ == "__main__":
    main()
