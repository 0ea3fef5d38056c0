"""When drafts from a group's own tokens pay: `python benchmarks/speculation.py` samples with and without them, in turns.

One model of random weights, float32, and groups of 8 that share a prompt, play some turns and are fed something between them;
a quarter of a group has slots at a time, so that the others come when there is something to draw on.
The lower the temperature, the more a trajectory repeats its siblings and itself; where the repetition comes from makes no
difference to what it spares. One engine samples all of it three times: without drafts, with them as it decides by what it
measures, and `forced`, verifying whatever there is. The draws are the same: the last column counts the turns whose tokens are
not, by rounding. One process that has `--cores` to itself; CPU seconds are compared, the least of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decode import SHAPES
from tables import Tables, with_json

from jaxagent.heap import keep_freed_memory

MODES = ("without", "drafts", "forced")


def main() -> None:
    """Measures and prints a table in Markdown; with --json it is in a file too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--fed-tokens", type=int, default=16)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 1.0])
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = with_json(parser).parse_args()
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])  # before any library counts them
    engine = engine_of(options)
    measured = engine.speculation.costs
    tables = Tables(options)
    tables.note(f"{options.model}, {options.rows} rows in {options.slots} slots, drafts of {options.draft_tokens}\n")
    drafts, forced = (
        ("accepted per verification", "share of tokens", "CPU s, of without"),
        ("forced: accepted", "CPU s", "differ"),
    )
    tables.begin("temperature", *drafts, *forced, words=0)
    for temperature in options.temperatures:
        seconds, stats, said = compare(options, engine, temperature)
        cells = [f"{temperature}"]
        for name in MODES[1:]:
            found = stats[name]
            cells.append(f"{found.accepted / found.verified:.2f}" if found.verified else "none verified")
            cells += [f"{found.accepted / found.sampled:.2f}"] if name == "drafts" else []
            cells.append(f"{seconds[name] / seconds['without']:.2f}")
        differ = sum(a != b for a, b in zip(said["without"], said["forced"], strict=True))
        tables.row(*cells, f"{differ} of {len(said['without'])}")
    for width in engine.widths:
        decode, verify = measured.known(False, width), measured.known(True, width)
        if decode and verify:
            steps = verify / decode * options.decode_tokens
            tables.note(f"\n{width} rows: a verification takes as long as {steps:.1f} decode steps")
    engine.close()


def engine_of(options: argparse.Namespace) -> Any:
    import jax
    from flax import nnx

    from jaxagent.engine.engine import Engine, EngineOptions
    from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
    from jaxagent.sharding import DeviceMesh

    config = DecoderConfig(**SHAPES[options.model])
    length = options.prompt_tokens + options.turns * (options.turn_tokens + options.fed_tokens)
    length = -(-length // 32) * 32
    shape: dict[str, Any] = {"slots": options.slots, "slot_tokens": length, "chunk": length, "append_rows": 4, "exact": False}
    shape |= {"decode_tokens": options.decode_tokens, "draft_tokens": options.draft_tokens}
    lengths = tuple(sorted({options.fed_tokens, options.prompt_tokens}))
    engine = Engine(config, EngineOptions(**shape, append_tokens=lengths), DeviceMesh.build(1))
    engine.publish(jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])(), version=0)
    engine.warm_up().result()
    return engine


def compare(
    options: argparse.Namespace, engine: Any, temperature: float
) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """The least CPU seconds of each mode, its counters of the last repeat, and what was said in it."""
    from jaxagent.engine.speculation import Costs

    class Cheap(Costs):
        """By which every draft pays."""

        def of(self, verified: bool, width: int) -> float | None:
            return 1e-6 if verified else 1.0

    costs = {"without": Costs(), "drafts": engine.speculation.costs, "forced": Cheap()}
    seconds, stats, said = dict.fromkeys(MODES, float("inf")), {}, {}
    for repeat in range(options.repeats + 1):
        for mode in MODES:
            engine.speculation.draft_tokens = 0 if mode == "without" else options.draft_tokens
            engine.speculation.costs = costs[mode]
            engine.take_stats()
            began = time.process_time()
            said[mode] = asyncio.run(play(options, engine, temperature, f"{mode}/{repeat}"))
            if repeat:  # the first warms up
                seconds[mode] = min(seconds[mode], time.process_time() - began)
            stats[mode] = engine.take_stats()
    engine.speculation.costs = costs["drafts"]
    return seconds, stats, said


async def play(options: argparse.Namespace, engine: Any, temperature: float, run: str) -> list[list[int]]:
    """All turns of all rows; the prompt of a group, what a row is fed and its key are the same in every run."""
    import numpy as np

    from jaxagent.types import SampleRequest, Sampling, sampling_key

    vocab = SHAPES[options.model]["vocab_size"]
    sampling = Sampling(temperature=temperature, max_tokens=options.turn_tokens)

    groups = options.rows // options.group

    async def row(i: int) -> list[list[int]]:
        mates = np.random.default_rng(i % groups)
        unfed = mates.integers(0, vocab, options.prompt_tokens).tolist()
        fed = mates.integers(0, vocab, (options.turns, options.fed_tokens)).tolist()
        name, group, held, said = f"{temperature}/{run}/{i}", f"{temperature}/{run}/{i % groups}", 0, []
        for turn in range(options.turns):
            key = sampling_key(0, str(i), turn)
            sample = await engine.generate(SampleRequest(name, tuple(unfed), held, key, (), sampling, group=group))
            said.append(sample.tokens)
            held += len(unfed) + len(sample.tokens)
            unfed = fed[turn]
        engine.release(name)
        return said

    return [turn for turns in await asyncio.gather(*(row(i) for i in range(options.rows))) for turn in turns]


if __name__ == "__main__":
    main()
