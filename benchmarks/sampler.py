"""What drawing a token costs beside the LM head: `python benchmarks/sampler.py` prints JSON, one row per kind of request.

`head` is the matrix product that makes the logits, `plain` a draw at temperature 1, the others a draw where every row has that
setting. On a CPU all take turns in one process that has one core, and the best CPU seconds of the repeats are taken; on an
accelerator wall seconds of many calls behind each other.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxagent.heap import keep_freed_memory


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--slot-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    keep_freed_memory()
    print(
        json.dumps(sampler_to_head(options.vocab, options.rows, options.width, options.slot_tokens, options.repeats), indent=2)
    )


def sampler_to_head(vocab: int, rows: int, width: int, slot_tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the head and of a draw per kind of request, and their ratios to the head."""
    # JAX reads the environment when it is imported.
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxagent.engine.controls import ControlSizes, Grammars, new_controls
    from jaxagent.engine.sampling import sample
    from jaxagent.engine.steps import new_rows

    rng = np.random.default_rng(0)
    accelerated = jax.default_backend() != "cpu"
    dtype = jnp.bfloat16 if accelerated else jnp.float32
    table = jnp.asarray(rng.standard_normal((vocab, width), np.float32) * 0.05, dtype)
    hidden = jnp.asarray(rng.standard_normal((rows, width), np.float32), dtype)
    head = jax.jit(lambda h, w: jnp.einsum("RD,VD->RV", h, w, preferred_element_type=jnp.float32))
    logits, u = head(hidden, table), jnp.asarray(rng.random(rows, np.float32))
    grammars = Grammars(
        jnp.asarray(rng.integers(0, 2**32, (64, -(-vocab // 32)), np.uint32)),
        jnp.zeros((64, 512), jnp.int32),
        jnp.zeros((vocab, 16), jnp.int16),
    )
    plain = {**new_rows(rows, 4), **new_controls(rows, ControlSizes(slot_tokens, 16, 8, 12))}
    full = {"pos": jnp.full(rows, slot_tokens - 1), "history": jnp.asarray(rng.integers(0, vocab, (rows, slot_tokens)))}
    on = {"controlled": jnp.ones(rows, bool)}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "greedy": {"temperature": jnp.zeros(rows)},
        "top_k 50": {"top_k": jnp.full(rows, 50)},
        "top_p 0.9": {"top_p": jnp.full(rows, 0.9)},
        "min_p 0.1": {**on, "min_p": jnp.full(rows, 0.1)},
        "bias": {**on, "bias": jnp.ones((rows, 16)), "bias_id": jnp.tile(jnp.arange(16), (rows, 1))},
        "penalties": {**on, **full, "repetition": jnp.full(rows, 1.1), "frequency": jnp.full(rows, 0.1)},
        "constraint": {**on, "state": jnp.zeros(rows, jnp.int32)},
    }
    draw = jax.jit(sample)
    works: dict[str, Callable[[], Any]] = {"head": lambda: head(hidden, table)}
    for name, setting in kinds.items():
        state = {key: jnp.asarray(setting.get(key, value), value.dtype) for key, value in plain.items()}
        works[name] = lambda state=state: draw(logits, u, state, grammars)  # type: ignore[misc]
    best = dict.fromkeys(works, float("inf"))
    clock, calls = (time.perf_counter, 50) if accelerated else (time.process_time, 1)
    for name, work in [*works.items(), *list(works.items()) * repeats]:
        jax.block_until_ready(work())
        began = clock()
        results = [work() for _ in range(calls)]
        jax.block_until_ready(results[-1])
        best[name] = min(best[name], (clock() - began) / calls * 1e3)
    kind = jax.devices()[0].device_kind
    about = {"device": kind, "jax": jax.__version__, "vocab": vocab, "rows": rows, "width": width, "slot_tokens": slot_tokens}
    ratios = {name: round(ms / best["head"], 3) for name, ms in best.items() if name != "head"}
    return {**about, "ms": {name: round(ms, 3) for name, ms in best.items()}, "ratio_to_head": ratios}


if __name__ == "__main__":
    main()
