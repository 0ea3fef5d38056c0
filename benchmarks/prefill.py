"""What held keys and values spare: `python benchmarks/prefill.py`, ratios of CPU seconds of the engine's own programs.

- group: prompts of whole groups prefilled row by row, to one prefill of each prompt and copies of it.
- append: a trajectory prefilled again from its first token, to the new tokens appended to what its slot holds.
- read: a decode call over slots of `--held` positions of which few are filled, to the same over short slots; as fast as it is
  (`engine.exact=False`) and in exact mode.

Random weights, float32, everything in turns in one process, the best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decode import SHAPES, best_of

from jaxagent.heap import keep_freed_memory


def main() -> None:
    """Measures and prints a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=4, help="rows of an append call, and groups")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--held", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--decode-rows", type=int, default=32)
    parser.add_argument("--decode-tokens", type=int, default=8)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    bench = Bench(options)
    pairs = {
        "group": bench.group(),
        "append": bench.append(),
        "read": bench.read(exact=False),
        "read, exact": bench.read(exact=True),
    }
    works = {
        f"{name}: {side}": work for name, pair in pairs.items() for side, work in zip(("long", "short"), pair, strict=True)
    }
    seconds = best_of(options.repeats, works)  # all in turns: rows are compared with each other, too
    found = {}
    for name in pairs:
        long, short = seconds[f"{name}: long"], seconds[f"{name}: short"]
        found[name] = {"long_s": long, "short_s": short, "ratio": long / short}
    if options.json:
        print(json.dumps({"options": vars(options), "ratios": found}))
        return
    print("| | one, CPU ms | other, CPU ms | ratio |\n|---|---:|---:|---:|")
    for name, row in found.items():
        print(f"| {name} | {row['long_s'] * 1e3:.0f} | {row['short_s'] * 1e3:.0f} | {row['ratio']:.2f} |")


class Bench:
    """The programs of an engine, driven by hand. What is compared comes as a pair of functions."""

    def __init__(self, options: argparse.Namespace):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from jaxagent.engine.steps import make_steps
        from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
        from jaxagent.sharding import DeviceMesh

        self.options = options
        self.config = DecoderConfig(**SHAPES[options.model])
        shape: dict[str, Any] = {"chunk": options.chunk, "decode_tokens": options.decode_tokens}
        self.steps = make_steps(self.config, dtype=jnp.dtype("float32"), mesh=DeviceMesh.build(1), **shape)
        self.params = self.steps.publish(jax.jit(lambda: params_of(Decoder(self.config, nnx.Rngs(0)))[1])())

    def slots(self, count: int, length: int) -> Any:
        import jax.numpy as jnp

        from jaxagent.engine.cache import new_cache

        whole = -(-length // self.options.chunk) * self.options.chunk
        return new_cache(self.config, count, whole, jnp.dtype("float32"))

    def feed(self, cache: Any, slots: list[int], start: int, count: int, bucket: int) -> Any:
        """Appends `count` tokens to some slots in one call."""
        import numpy as np

        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, (len(slots), bucket)).astype(np.int32)
        state = np.asarray(slots, np.int32), tokens, np.full(len(slots), start, np.int32), np.full(len(slots), count, np.int32)
        return self.steps.append(self.params, cache, *state)[0]

    def group(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """All rows of some groups prefilled, against the first of each group prefilled and copied."""
        import jax
        import numpy as np

        o = self.options
        cache = self.slots(o.rows * o.group, o.prompt_tokens)
        calls = [list(range(i * o.rows, (i + 1) * o.rows)) for i in range(o.group)]

        def every() -> None:
            nonlocal cache
            for slots in calls:
                cache = self.feed(cache, slots, 0, o.prompt_tokens, o.prompt_tokens)
            jax.block_until_ready(cache)

        def forked() -> None:
            nonlocal cache
            cache = self.feed(cache, calls[0], 0, o.prompt_tokens, o.prompt_tokens)
            for slots in calls[1:]:
                cache = self.steps.fork(cache, np.asarray(calls[0]), np.asarray(slots), o.prompt_tokens)
            jax.block_until_ready(cache)

        return every, forked

    def append(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """One trajectory prefilled from its first token, against what is new appended."""
        import jax

        o = self.options
        cache = self.slots(1, o.held + o.new_tokens)

        def new() -> None:
            nonlocal cache
            cache = jax.block_until_ready(self.feed(cache, [0], o.held, o.new_tokens, o.new_tokens))

        def again() -> None:
            nonlocal cache
            for start in range(0, o.held, o.prompt_tokens):
                count = min(o.prompt_tokens, o.held - start)
                cache = self.feed(cache, [0], start, count, o.prompt_tokens)
            new()

        return again, new

    def read(self, exact: bool) -> tuple[Callable[[], None], Callable[[], None]]:
        """A decode call that fills a chunk to its end, in long slots and in slots of two chunks."""
        return self._decode(self.options.held, exact), self._decode(2 * self.options.chunk, exact)

    def _decode(self, length: int, exact: bool) -> Callable[[], None]:
        import jax
        import numpy as np

        from jaxagent.engine.steps import new_rows

        o = self.options
        cache, rows = self.slots(o.decode_rows, length), new_rows(o.decode_rows, 1)
        armed = {name: np.ones(old.shape, old.dtype) for name, old in rows.items()}
        armed |= {"mask": np.ones(o.decode_rows, bool), "top_k": armed["top_k"] * 0, "stop": armed["stop"] * -1}
        armed |= {"pos": armed["pos"] * (o.chunk - o.decode_tokens - 1), "left": armed["left"] * 10 * o.decode_tokens}
        which = (None, 0) if exact else (np.arange(o.decode_rows, dtype=np.int32), o.chunk)

        def run() -> None:
            nonlocal cache, rows
            cache, rows, *out = self.steps.decode(self.params, cache, rows, armed, None, *which)
            jax.block_until_ready((cache, out))

        return run


if __name__ == "__main__":
    main()
