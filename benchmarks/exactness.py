"""What it costs that no bit depends on neighbours, and what happens where it may: `python benchmarks/exactness.py`.

Rows of random weights sample the same turns, with the same seeds, in a full batch, and some of them alone; in exact mode and in
the other (`engine.exact=False`). Prints, of each mode:

- flips: of the tokens up to and with the first that differs between the two, the share that differs; and the trajectories
  in which one does. Behind it two trajectories are not comparable.
- log-probs: the share of those tokens whose log-prob has the same bits, and the largest difference.
- forced: the same after the sampled tokens were fed again, call by call, to the same program: nothing may differ.
- price: CPU seconds of exact decoding to those of the other where so many of the slots sample and the others are empty.

One process, one core; the modes in turns, the best of the repeats. Half of the time is XLA's: the other mode has a program for
each length that may be in use, two here, and for each of two widths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decode import SHAPES, best_of

from jaxagent.heap import keep_freed_memory

Found = dict[str, tuple[list[int], list[float]]]  # tokens and log-probs of trajectories


def main() -> None:
    """Measures and prints tables in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--alone", type=int, default=4, help="rows that are sampled alone, too")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--slot-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fills", type=float, nargs="+", default=[0.03, 0.25, 1.0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    engines = {name: make_engine(options, exact=name == "exact") for name in ("exact", "fast")}
    modes = {}
    for name, engine in engines.items():
        crowd, again = rollout(engine, options, range(options.rows)), {}
        for row in range(options.alone):
            again |= rollout(engine, options, [row])
        modes[name] = compared(again, crowd, "flips") | compared(*forced(engine, options), "forced")
    price = {}
    for fill in options.fills:
        rows = range(max(1, round(fill * options.rows)))
        seconds = best_of(options.repeats, {name: partial(rollout, engines[name], options, rows) for name in engines})
        price[f"{len(rows)} of {options.rows} rows"] = {**seconds, "exact to fast": seconds["exact"] / seconds["fast"]}
    for engine in engines.values():
        engine.close()
    if options.json:
        print(json.dumps({"options": vars(options), "modes": modes, "price": price}))
        return
    for table in (modes, price):
        names = list(next(iter(table.values())))
        print(f"| | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
        for name, row in table.items():
            print(f"| {name} | {' | '.join(f'{row[column]:.4g}' for column in names)} |")
        print()


def make_engine(options: argparse.Namespace, exact: bool) -> Any:
    import jax
    from flax import nnx

    from jaxagent.engine.engine import Engine, EngineOptions
    from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
    from jaxagent.sharding import DeviceMesh

    config = DecoderConfig(**SHAPES[options.model])
    shape: dict[str, Any] = {name: getattr(options, name) for name in ("slot_tokens", "chunk", "decode_tokens", "dtype")}
    shape |= {"slots": options.rows, "append_rows": 4, "append_tokens": (options.prompt_tokens,), "exact": exact}
    engine = Engine(config, EngineOptions(**shape), DeviceMesh.build(1))
    engine.publish(jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])(), version=0)
    engine.warm_up().result()
    return engine


def rollout(engine: Any, options: argparse.Namespace, rows: Sequence[int]) -> Found:
    """One turn of each of these rows, all at once."""
    from jaxagent.types import SampleRequest, Sampling, sampling_key

    vocab, sampling = SHAPES[options.model]["vocab_size"], Sampling(max_tokens=options.new_tokens)

    async def play(row: int) -> tuple[str, tuple[list[int], list[float]]]:
        name = str(row)
        prompt = tuple((7 * row + 3 * i * i) % vocab for i in range(options.prompt_tokens))
        sample = await engine.generate(SampleRequest(name, prompt, 0, sampling_key(0, name, 0), (), sampling))
        engine.release(name)
        return name, (sample.tokens, sample.logprobs)

    async def all_rows() -> Found:
        return dict(await asyncio.gather(*map(play, rows)))

    return asyncio.run(all_rows())


def forced(engine: Any, options: argparse.Namespace) -> tuple[Found, Found]:
    """What the program says of rows whose tokens it sampled, when they are fed again at every call; and what it had said."""
    found: list[list[tuple[list[int], list[float]]]] = []
    engine.run(lambda: found.append(_calls(engine, options, [])))
    told = [tokens for tokens, _ in found[0]]
    engine.run(lambda: found.append(_calls(engine, options, told)))
    again, first = ({str(row): pair for row, pair in enumerate(rows)} for rows in reversed(found))
    return again, first


def _calls(engine: Any, options: argparse.Namespace, told: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of all slots; with `told`, every call begins with the token that is told, and else with its own."""
    import numpy as np

    o, steps, rows = engine.options, options.decode_tokens, range(engine.options.slots)
    which = (None, 0) if o.exact else (np.arange(o.slots, dtype=np.int32), engine._lengths[-1])
    drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
    for call in range(options.new_tokens // steps):
        armed = {name: np.array(value) for name, value in engine._arming.nothing.items()}
        if told or not call:
            armed["mask"][:] = armed["live"][:] = True
            armed["temperature"][:], armed["top_p"][:], armed["stop"][:] = 1.0, 1.0, -1
            armed["pos"][:], armed["left"][:] = call * steps, options.new_tokens - call * steps
            for row in rows:
                armed["token"][row] = told[row][call * steps - 1] if call else row
                armed["key"][row] = row, 1
        state = engine._params, engine._memory.cache, engine._rows, engine._arming.place(armed), engine.controls.grammars
        engine._memory.cache, engine._rows, tokens, logprobs, *_ = engine._steps.decode(*state, *which)
        for row, new, new_logprobs in zip(rows, np.asarray(tokens), np.asarray(logprobs), strict=True):
            drawn[row][0].extend(new.tolist())
            drawn[row][1].extend(new_logprobs.tolist())
    return drawn


def compared(found: Found, wanted: Found, prefix: str) -> dict[str, float]:
    """How trajectories differ from the same ones elsewhere, up to the first token that does."""
    flips = count = equal = 0
    gap = 0.0
    for name, (tokens, logprobs) in found.items():
        want, want_logprobs = wanted[name]
        at = next((i for i, pair in enumerate(zip(tokens, want, strict=True)) if pair[0] != pair[1]), len(tokens))
        flips += at < len(tokens)
        count += min(at + 1, len(tokens))
        equal += sum(a == b for a, b in zip(logprobs[:at], want_logprobs[:at], strict=True))
        gap = max([gap, *(abs(a - b) for a, b in zip(logprobs[:at], want_logprobs[:at], strict=True))])
    return {
        f"{prefix}: trajectories": float(len(found)),
        f"{prefix}: that differ": float(flips),
        f"{prefix}: share of tokens": flips / count,
        f"{prefix}: log-probs of equal bits": equal / count,
        f"{prefix}: largest gap": gap,
    }


if __name__ == "__main__":
    main()
