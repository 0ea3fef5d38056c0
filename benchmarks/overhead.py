"""What the host costs the device: `python benchmarks/overhead.py` compares the engine in steady decode with its program alone.

All slots sample for many calls and nobody stops, arrives or leaves. "alone" is the decode program called again and again with
nothing between, two calls deep; the engine adds its bookkeeping, either between two calls ("in turns") or while the next one
runs ("overlapped"). Overhead is 1 - alone / engine, of wall seconds a call: the share of the time in which the device waits.
On a CPU the device is the first core given to this process and the host the second, so that they disturb each other as little
as an accelerator and its host. The ways are taken in turns in one process by one engine, the best of the repeats. One token a
call makes of model small a program of about 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decode import SHAPES

from jaxagent.heap import keep_freed_memory


def main() -> None:
    """Measures and prints a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--calls", type=int, nargs="+", default=[60, 12], help="for each of --decode-tokens")
    parser.add_argument("--decode-tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    part_device_and_host()
    sizes = zip(options.decode_tokens, options.calls, strict=True)
    found = {f"{tokens} tokens a call": measured(options, tokens, calls) for tokens, calls in sizes}
    if options.json:
        print(json.dumps({"options": vars(options), "calls": found}))
        return
    names = list(next(iter(found.values())))
    print(f"| | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for name, row in found.items():
        print(f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in names)} |")


def part_device_and_host() -> None:
    """Gives JAX's threads a core and all threads to come another, where there are two and JAX computes on a CPU."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:1])
    import jax

    on_cpu = jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512)))).device.platform == "cpu"
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:2] if on_cpu else cores)


def measured(options: argparse.Namespace, tokens: int, calls: int) -> dict[str, float]:
    """Wall ms a call of the program alone and of the engine in both ways, overheads, and CPU time of the engine's thread."""
    import jax
    from flax import nnx

    from jaxagent.engine.engine import Engine, EngineOptions
    from jaxagent.engine.flight import Pace
    from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
    from jaxagent.sharding import DeviceMesh

    config = DecoderConfig(**SHAPES[options.model])
    prompt, steps = 16, calls * tokens
    length = -(-(prompt + steps) // 64) * 64
    shape: dict[str, Any] = {"slots": options.rows, "slot_tokens": length, "chunk": length, "decode_tokens": tokens}
    engine = Engine(config, EngineOptions(**shape, append_tokens=(prompt,), exact=options.exact), DeviceMesh.build(1))
    engine.publish(jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])(), version=0)
    engine.warm_up().result()

    def sampled(overlap: bool) -> tuple[float, float]:
        engine.run(lambda: setattr(engine, "pace", Pace(overlap)))
        return steady(engine, calls, prompt, config.vocab_size)

    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "alone": lambda: alone(engine, calls),
        "in turns": lambda: sampled(overlap=False),
        "overlapped": lambda: sampled(overlap=True),
    }
    best = dict.fromkeys(ways, (float("inf"), float("inf")))
    for repeat in range(options.repeats + 1):
        for name, way in ways.items():
            found = way()
            if repeat:
                best[name] = min(best[name][0], found[0]), min(best[name][1], found[1])
    engine.close()
    ms = {f"{name}, ms": wall * 1e3 for name, (wall, _) in best.items()}
    host = {f"host's CPU ms, {name}": best[name][1] * 1e3 for name in ("in turns", "overlapped")}
    return {**ms, **{f"overhead {name}": 1 - best["alone"][0] / best[name][0] for name in ("in turns", "overlapped")}, **host}


def alone(engine: Any, calls: int) -> tuple[float, float]:
    """Wall and thread seconds a call of the decode program, called from the engine's thread as fast as it takes calls.

    All rows are frozen, which changes nothing of what is computed.
    """
    import jax
    import numpy as np

    took: list[float] = []

    def work() -> None:
        o = engine.options
        which = (None, 0) if o.exact else (np.arange(o.slots, dtype=np.int32), o.slot_tokens)
        before, began = engine._memory.cache, (0.0, 0.0)
        for call in range(-2, calls):
            if call == 0:
                jax.block_until_ready(before)
                began = time.perf_counter(), time.thread_time()
            state = engine._params, engine._memory.cache, engine._rows, engine._arming.take(), engine.controls.grammars
            engine._memory.cache, engine._rows, tokens, *_ = engine._steps.decode(*state, *which)
            if call > -2:
                jax.block_until_ready(before)
            before = tokens
        jax.block_until_ready(before)
        took.extend((time.perf_counter() - began[0], time.thread_time() - began[1]))

    engine.run(work)
    return took[0] / calls, took[1] / calls


def steady(engine: Any, calls: int, prompt: int, vocab: int) -> tuple[float, float]:
    """Wall and thread seconds a call of the engine between the first tokens that are heard and the last."""
    from jaxagent.types import SampleRequest, Sampling, sampling_key

    o = engine.options
    sampling = Sampling(temperature=1.0, max_tokens=calls * o.decode_tokens)
    heard: list[float] = []
    worked: list[float] = []

    def hear(tokens: list[int]) -> None:
        heard.append(time.perf_counter())
        if len(heard) == 1:
            engine._hand_in(lambda: worked.append(time.thread_time()))

    async def rows() -> None:
        asked = [
            SampleRequest(
                str(row), tuple((row + i) % vocab for i in range(prompt)), 0, sampling_key(0, str(row), 0), (), sampling,
                hear=None if row else hear,
            )
            for row in range(o.slots)
        ]  # fmt: skip
        await asyncio.gather(*map(engine.generate, asked))
        for one in asked:
            engine.release(one.trajectory)

    asyncio.run(rows())
    engine.run(lambda: worked.append(time.thread_time()))
    return (heard[-1] - heard[0]) / (len(heard) - 1), (worked[1] - worked[0]) / (len(heard) - 1)


if __name__ == "__main__":
    main()
