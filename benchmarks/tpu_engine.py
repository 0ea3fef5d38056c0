"""What the engine's programs move on TPUs, by the real compiler and without a TPU: `python benchmarks/tpu_engine.py`.

Compiles decode, append, fork and publish for a described topology with the true shapes of known models, over pages under the
TPU's kernel (or with --slots over slots), and verify of drafts of 8 tokens over slots; prints a table in Markdown. A row: bytes
that the compiled program moves to and from a chip's memory (`compiled.moved_bytes`), for decode per token of all slots, all of
them full; bytes that must be moved, which are the chip's share of the weights once and of the keys and values once, or what is
copied, read and written; and what the compiler needs beside its arguments, what it changes in place and what it sends to the
host. Nothing runs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

from tpu import decoder  # first: it keeps JAX from looking for devices

# isort: split
import numpy as np
from flax import nnx
from tables import Tables, with_json

from jaxagent.compiled import moved_bytes
from jaxagent.engine.options import EngineOptions
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import CHIPS, EngineShapes, devices_of, size_bytes

HOST = ("infeed", "outfeed", "send(", "recv(", "SendToHost", "RecvFromHost", "S(5)")  # as the text names ways to the host


@dataclass(frozen=True)
class Job:
    """An engine on the first `tensor` chips of a topology of 2 x 2."""

    model: str
    chip: str
    tensor: int
    slots: int = 32
    slot_tokens: int = 2048


JOBS = (
    Job("Qwen2.5-1.5B", "v5e", 1),
    Job("Qwen2.5-1.5B", "v6e", 1),
    Job("Qwen2.5-1.5B", "v5e", 4),
    Job("Qwen2.5-1.5B", "v6e", 4),
    Job("Llama-3.1-8B", "v6e", 1),
    Job("Llama-3.1-8B", "v5e", 4),
    Job("Llama-3.1-8B", "v6e", 4),
    Job("Llama-3.1-8B", "v5e", 1),
)
COLUMNS = (
    *("model", "chips", "program", "held GB", "must move MB", "moves MB", "ratio", "temporary MB", "of the cache"),
    *("in place", "to the host", "compile s"),
)
PROGRAMS = ("decode", "verify", "append", "fork", "publish")
DRAFT_TOKENS = 8


def main() -> None:
    """Compiles one program after the other, and prints a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[job.model for job in JOBS], choices=sorted({job.model for job in JOBS}))
    parser.add_argument("--chips", nargs="*", default=["v5e", "v6e"])
    parser.add_argument("--tensor", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's, which compile sooner")
    parser.add_argument("--slots", action="store_true", help="slots in place of pages")
    options = with_json(parser).parse_args()
    tables = Tables(options)
    tables.begin(*COLUMNS, words=len(COLUMNS))
    for job in JOBS:
        if job.model in options.models and job.chip in options.chips and job.tensor in options.tensor:
            for row in rows(job, options.layers, options.programs, options.slots):
                tables.row(*row)


def rows(job: Job, layers: int, programs: list[str], slots: bool) -> Any:
    """The rows of a job: one that says so where the chip cannot hold what stays on it."""
    config = decoder(job.model, layers)
    engine = shapes(config, job, slots)
    held, limit = size_bytes(engine.weights) + size_bytes(engine.cache), CHIPS[job.chip].memory_gb * 2**30
    told = [job.model, f"{job.tensor} {job.chip}"]
    if held > limit:
        yield [*told, "none", f"{held / 1e9:.2f}: does not fit {limit / 1e9:.1f}", *[""] * (len(COLUMNS) - 4)]
        return
    for name in programs:
        drafts = DRAFT_TOKENS if name == "verify" else 0
        yield [*told, name, *measure(shapes(config, job, slots=True, drafts=drafts) if drafts else engine, config, name)]


def shapes(config: DecoderConfig, job: Job, slots: bool = False, drafts: int = 0) -> EngineShapes:
    """An engine that holds no arrays, in bf16, with pages for all slots to be full."""
    options = EngineOptions(
        slots=job.slots, slot_tokens=job.slot_tokens, append_tokens=(256,), pages=job.slots * job.slot_tokens // 128 + 1
    )
    options = replace(options, dtype="bfloat16", pages=0 if slots else options.pages, draft_tokens=drafts, exact=not drafts)
    mesh = DeviceMesh.build(devices=devices_of(f"{job.chip}:2x2")[: job.tensor], data=1, tensor=job.tensor)
    return EngineShapes(config, options, mesh, params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1])


def measure(engine: EngineShapes, config: DecoderConfig, name: str) -> list[str]:
    """The rest of a program's row."""
    began = time.monotonic()
    programs = [(lowered.compile(), times) for lowered, times in lower(engine, name)]
    text, cache, o = "\n".join(program.as_text() for program, _ in programs), size_bytes(engine.cache), engine.options
    temporary = max(program.memory_analysis().temp_size_in_bytes for program, _ in programs)
    in_place = programs[0][0].memory_analysis().alias_size_in_bytes
    # The compiler does not tell how often the loop over tokens runs, nor those over a slot's chunks: here both as often.
    assert o.decode_tokens == o.slot_tokens // o.chunk
    moved = sum(times * moved_bytes(program.as_text(), trips=o.decode_tokens) for program, times in programs)
    must = must_move(engine, config, name)
    if name == "decode":
        moved /= o.decode_tokens
    changed = {"publish": 0, **dict.fromkeys(("decode", "verify"), cache + size_bytes(engine.rows))}.get(name, cache)
    return [
        f"{(size_bytes(engine.weights) + cache) / 1e9:.2f}",
        f"{must / 1e6:.1f}",
        f"{moved / 1e6:.1f}",
        f"{moved / must:.2f}",
        f"{temporary / 1e6:.1f}",
        f"{temporary / cache:.3f}",
        f"{in_place / changed:.2f}" if changed else "",
        ", ".join(way for way in HOST if way in text) or "nothing",
        f"{time.monotonic() - began:.0f}",
    ]


def lower(engine: EngineShapes, name: str) -> list[tuple[Any, int]]:
    """A program and how often it runs, or those of which publishing consists; fork copies a page of each row, or a slot."""
    if name == "publish":
        singles = [engine.steps.publish.single.lower(w) for part, w in engine.given.items() if part != "blocks"]
        return [(engine.lower_one(name), engine.config.layers), *((one, 1) for one in singles)]
    if name != "fork":
        return [(engine.lower_one(name), 1)]
    o, none = engine.options, np.zeros(engine.options.append_rows, np.int32)
    return [(engine.steps.fork.lower(engine.cache, none, none, *(() if o.pages else (o.slot_tokens,))), 1)]


def must_move(engine: EngineShapes, config: DecoderConfig, name: str) -> float:
    """Bytes of a chip that a call of the program cannot spare, for decode a step of it."""
    o, cache, weights = engine.options, size_bytes(engine.cache), size_bytes(engine.weights)
    per_token = cache / ((o.pages or o.slots * o.slot_tokens // o.chunk) * o.chunk)
    if name == "publish":
        return size_bytes(engine.given) + weights
    if name == "fork":
        return 2 * o.append_rows * per_token * (o.chunk if o.pages else o.slot_tokens)
    read = weights if config.tied_head else weights - size_bytes(engine.weights["embed"])  # of which a row a token is looked up
    if name in ("decode", "verify"):
        return read + per_token * o.slots * o.slot_tokens
    last = engine.weights["blocks"][-1]  # of which keys and values are all that is wanted
    unused = size_bytes(
        {part: w for part, w in last.items() if part not in ("attn_norm", "k", "v", "k_bias", "v_bias", "k_norm")}
    )
    read -= unused + size_bytes(engine.weights["embed" if config.tied_head else "head"])
    return read + per_token * o.append_rows * o.slot_tokens * (1 - 1 / config.layers)


if __name__ == "__main__":
    main()
