"""How fast the engine decodes on a GPU, against what the GPU can do: `python benchmarks/gpu_engine.py`.

Measures copying, reading and a large product first. Then, for known models' shapes with random bf16 weights, one decode call of
16 tokens after the other: rows of equal length, all alive, sampled at temperature 1. "of roofline" is the least time of a step
(weights once, what the cache holds once, three passes over float32 logits, at the bandwidth found; or its arithmetic at the
rate found, whichever takes longer) over the time it took; "of parts" lets products, attention and the draw follow each other,
each with its own limit, since a product of hundreds of rows is bound by arithmetic and attention by bytes. Arms: `pages` is
attention by our kernel, `pages-xla` by gathering, `slots` copies what is in use for each call and reads it at once,
`slots-exact` reads slots in chunks.

`--attention` compares attention alone; `--profile` adds where a step's time goes, by kernels; `--layouts` tries shapes of ours.
`--compile H100` (or H200) needs no GPU, only JAX's plug-in for CUDA (the extra `gpu`): decoding as XLA compiles it for one, how
many kernels a step is, and what it needs beside its arguments.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tables import Tables, with_json

from jaxagent.compiled import kernels
from jaxagent.engine.cache import cache_of
from jaxagent.engine.options import EngineOptions, used_lengths
from jaxagent.engine.steps import make_steps, new_rows
from jaxagent.models.attention import AttentionSpec
from jaxagent.models.attention_choice import paged_attention
from jaxagent.models.attention_paged import PagedReference
from jaxagent.models.attention_triton import PagedGpu
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import EngineShapes, devices_of, kernels_for, size_bytes, uncached

QWEN = {"vocab_size": 151936, "kv_heads": 2, "family": "qwen2", "qkv_bias": True}
MODELS = {
    "tiny": {**QWEN, "vocab_size": 512, "width": 64, "layers": 2, "heads": 4, "head_width": 16, "ffn_width": 128},
    "0.5B": {**QWEN, "width": 896, "layers": 24, "heads": 14, "head_width": 64, "ffn_width": 4864},
    "1.5B": {**QWEN, "width": 1536, "layers": 28, "heads": 12, "head_width": 128, "ffn_width": 8960},
    "7B": QWEN
    | {"vocab_size": 152064, "width": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "head_width": 128}
    | {"ffn_width": 18944, "tied_head": False},
}
PAGE = 128  # tokens
ARMS = ("pages", "pages-xla", "slots", "slots-exact")


def main() -> None:
    """Prints rows of Markdown as they are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["0.5B", "1.5B", "7B"], choices=MODELS)
    parser.add_argument("--rows", nargs="*", type=int, default=[32, 256, 1024])
    parser.add_argument("--contexts", nargs="*", type=int, default=[512])
    parser.add_argument("--arms", nargs="*", default=["pages"], choices=ARMS)
    parser.add_argument("--tokens", type=int, default=16, help="of a decode call")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", choices=["H100", "H200"], help="for a GPU that need not be here")
    options = with_json(parser).parse_args()
    tables = Tables(options)
    if options.compile:
        compiled(options, tables)
        return
    device = jax.devices()[0]
    ceiling = ceilings()
    tables.note(f"{device.device_kind}, jax {jax.__version__}: " + ", ".join(f"{k} {v:.4g}" for k, v in ceiling.items()))
    if options.attention:
        attention(ceiling, options.layouts, tables)
    if options.models:
        measures = "ms a step", "tokens/s", "roofline", "of roofline", "of parts", "compile s"
        tables.begin("model", "rows", "context", "arm", *measures)
    for model in options.models:
        config = DecoderConfig(**MODELS[model])
        for rows in options.rows:
            for context in options.contexts:
                for arm in options.arms:
                    try:
                        told = decode(config, rows, context, arm, ceiling, options)
                    except Exception as error:  # a row that does not fit is a row
                        told = [f"{type(error).__name__}: {str(error).splitlines()[0][:90]}", *[""] * 5]
                    tables.row(model, rows, context, arm, *told)


# ---------------------------------------------------------------------- without a GPU


def compiled(options: argparse.Namespace, tables: Tables) -> None:
    """A row for each model and number of rows."""
    mesh = DeviceMesh.build(devices=devices_of(f"{options.compile}:1"))
    measures = "held GB", "temporary MB", "in place", "kernels a step", "to the host", "compile CPU s"
    tables.begin("model", "rows", "context", *measures)
    for model in options.models:
        config = DecoderConfig(**MODELS[model])
        trained = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]  # noqa: B023 (used at once)
        for rows, context in itertools.product(options.rows, options.contexts):
            engine = EngineShapes(config, shape_of(rows, context, options.tokens, paged=True), mesh, trained)
            began = time.process_time()
            with uncached(), kernels_for(mesh):
                program = engine.steps.decode.lower(*engine.arguments()["decode"]).compile()
            text, memory, cache = program.as_text(), program.memory_analysis(), size_bytes(engine.cache)
            told = [
                f"{(size_bytes(engine.weights) + cache) / 1e9:.1f}",
                f"{memory.temp_size_in_bytes / 1e6:.0f}",
                f"{memory.alias_size_in_bytes / (cache + size_bytes(engine.rows)):.2f}",
                f"{kernels(text) / options.tokens:.0f}",
                ", ".join(way for way in ("infeed", "outfeed", " send(", " recv(") if way in text) or "nothing",
                f"{time.process_time() - began:.0f}",
            ]
            tables.row(model, rows, context, *told)


def shape_of(rows: int, context: int, tokens: int, *, paged: bool) -> EngineOptions:
    """An engine with room for a decode call behind the context, all rows full."""
    room = -(-(context + tokens) // PAGE) * PAGE
    pages = rows * room // PAGE + 1 if paged else 0
    shape = EngineOptions(slots=rows, slot_tokens=room, chunk=PAGE, decode_tokens=tokens, append_tokens=(256,))
    return replace(shape, dtype="bfloat16", pages=pages)


# ---------------------------------------------------------------------- what the device can do


def seconds(call: Callable[[], Any], repeats: int = 5, ahead: int = 8) -> float:
    """Of one call, the median. `ahead` are under way at once: asking for one and hearing of it takes a tenth of 2 ms."""
    jax.block_until_ready(call())
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(ahead):
            out = call()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - began) / ahead)
    return float(np.median(found))


def ceilings() -> dict[str, float]:
    """GB/s of copying, scaled and as it is, and of reading; TFLOP/s of a bf16 product; microseconds of a small kernel."""
    on_cpu = jax.devices()[0].platform == "cpu"
    words, side = (1 << 20, 512) if on_cpu else (1 << 30, 8192)
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), (words,)))()
    scale, copy, read = jax.jit(lambda x: x * 1.5), jax.jit(jnp.copy), jax.jit(jnp.sum)
    a = jax.jit(lambda: jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16))()
    product = jax.jit(lambda a: a @ a)
    small = jnp.ones((8, 128))

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(300):
            x = jax.lax.optimization_barrier(x * 1.01)
        return x

    chained = jax.jit(chain)
    return {
        "scale_gbps": 8 * words / seconds(lambda: scale(x)) / 1e9,
        "copy_gbps": 8 * words / seconds(lambda: copy(x)) / 1e9,
        "read_gbps": 4 * words / seconds(lambda: read(x)) / 1e9,
        "tflops": 2 * side**3 / seconds(lambda: product(a)) / 1e12,
        "kernel_us": seconds(lambda: chained(small)) / 300 * 1e6,
    }


def bandwidth(ceiling: dict[str, float]) -> float:
    """The best of all ways, in GB/s."""
    return max(value for name, value in ceiling.items() if name.endswith("gbps"))


# ---------------------------------------------------------------------- decode


def decode(
    config: DecoderConfig, rows: int, context: int, arm: str, ceiling: dict[str, float], options: argparse.Namespace
) -> list[str]:
    """One row's cells from milliseconds on."""
    mesh, tokens, paged = DeviceMesh.build(1), options.tokens, arm.startswith("pages")
    shape = shape_of(rows, context, tokens, paged=paged)
    room = shape.slot_tokens
    form = {"pages": paged_attention(config.attention, mesh), "pages-xla": PagedReference(config.attention)}.get(arm)
    steps: Any = make_steps(config, dtype=jnp.bfloat16, chunk=PAGE, decode_tokens=tokens, mesh=mesh, pages=form)
    trained = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]
    weights = jax.tree.map(normal, steps.publish.shapes(trained))
    cache = jax.tree.map(normal, jax.eval_shape(lambda: cache_of(config, shape, form)))
    held = new_rows(rows, shape.stop_tokens)
    state = {"token": 5, "pos": context - tokens, "live": True, "left": 10**6, "temperature": 1.0, "top_p": 1.0, "stop": -1}
    armed = {name: jnp.full(x.shape, state.get(name, 0), x.dtype) for name, x in held.items()}
    armed |= {"mask": jnp.ones(rows, bool), "key": jax.random.bits(jax.random.key(2), (rows, 2))}
    table = jnp.asarray(np.random.default_rng(0).permutation(rows * room // PAGE).reshape(rows, -1)) if paged else None
    used = min(n for n in used_lengths(PAGE, room) if n >= context)
    subset = (jnp.arange(rows), used) if arm == "slots" else (None, 0)
    began = time.perf_counter()
    program = steps.decode.lower(weights, cache, held, armed, None, *subset, table).compile()
    compile_s = time.perf_counter() - began
    given = [each for each in subset if each is not None and each is not used] if arm == "slots" else [None]

    def calls(count: int) -> None:
        nonlocal cache, held
        for _ in range(count):
            out = program(weights, cache, held, armed, None, *given, table)
            cache, held = out[0], out[1]
        jax.block_until_ready(held)

    calls(2)
    began = time.perf_counter()
    calls(options.calls)
    took = (time.perf_counter() - began) / options.calls / tokens
    size = sum(w.size for w in jax.tree.leaves(weights))
    least, parts = roofline_s(config, rows, context - tokens / 2, size, ceiling)
    if options.profile:
        print(profile(lambda: calls(1), tokens), flush=True)
    shares = f"{least / took:.2f}", f"{parts / took:.2f}"
    return [f"{took * 1e3:.3f}", f"{rows / took:.0f}", f"{rows / least:.0f}", *shares, f"{compile_s:.0f}"]


def normal(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Small random numbers: zeros run faster than what is real."""
    return _normal(x.shape, jnp.dtype(x.dtype).name)


@partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: str) -> jax.Array:
    if len(shape) < 2 or np.prod(shape) < 2**20:
        return 0.02 * jax.random.normal(jax.random.key(3), shape).astype(dtype)
    # Drawn for a part and repeated: the whole in float32 may not fit.
    part = 0.02 * jax.random.normal(jax.random.key(3), (2**20,)).astype(dtype)
    count = int(np.prod(shape))
    return jnp.resize(part, (count,)).reshape(shape)


def roofline_s(config: DecoderConfig, rows: int, context: float, size: int, ceiling: dict[str, float]) -> tuple[float, float]:
    """Seconds of a step that neither memory nor arithmetic can spare: of all that it does at once, and one after the other.

    Args:
        size: numbers in the sampler's weights.
    """
    c = config
    size -= 0 if c.tied_head else c.vocab_size * c.width  # rows of the embedding that nobody looks up
    products = 2 * size, 2 * size * rows  # bytes, FLOP
    held, pairs = 2 * c.layers * c.kv_heads * c.head_width * 2 * context * rows, 4 * c.layers * c.heads * c.head_width * context
    parts = products, (held, pairs * rows), (3 * 4 * rows * c.vocab_size, 0)
    seconds_of = lambda moved, flop: max(moved / bandwidth(ceiling) / 1e9, flop / ceiling["tflops"] / 1e12)  # noqa: E731
    return seconds_of(*map(sum, zip(*parts, strict=True))), sum(seconds_of(*part) for part in parts)


def profile(call: Callable[[], None], tokens: int) -> str:
    """Microseconds and kernels of a step, by name, and for how long the device had none."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        with gzip.open(next(Path(folder).rglob("*.trace.json.gz"))) as file:
            events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    kernels = [
        e
        for e in events
        if e.get("ph") == "X"
        and "GPU" in processes.get(e["pid"], "")
        and threads.get((e["pid"], e["tid"]), "").startswith("Stream")
    ]
    if not kernels:
        return f"no kernels were traced; {sorted(set(processes.values()))}"
    spent: dict[str, list[float]] = defaultdict(list)
    for e in kernels:
        spent[e["name"]].append(e["dur"])
    wall = max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)
    busy = sum(e["dur"] for e in kernels)
    lines = [f"a step: {wall / tokens:.0f} us, kernels {busy / tokens:.0f} us, {len(kernels) / tokens:.0f} of them"]
    for name, each in sorted(spent.items(), key=lambda item: -sum(item[1]))[:24]:
        lines.append(f"  {sum(each) / tokens:8.1f} us {len(each) / tokens:6.1f} x {np.mean(each):7.2f} us  {name[:100]}")
    return "\n".join(lines)


# ---------------------------------------------------------------------- attention alone

SHAPES = ((32, 14, 2, 64, 512), (256, 14, 2, 64, 512), (256, 12, 2, 128, 512), (32, 12, 2, 128, 2048), (256, 28, 4, 128, 2048))


def attention(ceiling: dict[str, float], layouts: bool, tables: Tables) -> None:
    """A token's attention of one layer, by ours and by what JAX has: microseconds, and the share of the bandwidth."""
    tables.begin("rows, heads, key heads, width, context", "by", "us", "of bandwidth", words=2)
    for shape in SHAPES if jax.devices()[0].platform != "cpu" else ((2, 4, 2, 16, 128),):
        for name, us in attentions(*shape, layouts=layouts):
            batch, _, kv_heads, width, context = shape
            least = 4 * batch * kv_heads * width * context / bandwidth(ceiling) / 1e3
            told = (f"{us:.1f}", f"{least / us:.2f}") if isinstance(us, float) else (us, "")
            tables.row(", ".join(map(str, shape)), name, *told)


def attentions(batch: int, heads: int, kv_heads: int, width: int, context: int, layouts: bool) -> list[tuple[str, Any]]:
    spec, page, loops = AttentionSpec(width**-0.5), PAGE, 28
    interpret = jax.devices()[0].platform == "cpu"
    count = batch * context // page
    table = jnp.asarray(np.random.default_rng(0).permutation(count).reshape(batch, -1))
    # As many layers as a model has, or a small cache would stay in the GPU's own.
    pages = [tuple(normal(jax.ShapeDtypeStruct((count, kv_heads, page, width), jnp.bfloat16)) for _ in "kv") for _ in range(4)]
    flat = [
        tuple(normal(jax.ShapeDtypeStruct((batch, context, kv_heads, width), jnp.bfloat16)) for _ in "kv") for _ in range(4)
    ]
    q, k, v = (normal(jax.ShapeDtypeStruct((batch, 1, n, width), jnp.bfloat16)) * 50 for n in (heads, kv_heads, kv_heads))
    start, ones = jnp.full(batch, context - 1), jnp.ones(batch, jnp.int32)
    lengths, copied = jnp.full(batch, context, jnp.int32), partial(jax.tree.map, jnp.copy)  # a call takes what it is given

    def timed(one: Callable[..., tuple[jax.Array, Any]], held: Any) -> Any:
        def many(q: jax.Array, held: Any) -> tuple[jax.Array, Any]:
            def body(_: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                q, held = carry
                grown = []
                for layer in held:
                    out, layer = one(q, layer)
                    q = out.reshape(q.shape).astype(q.dtype)
                    grown.append(layer)
                return q, grown

            return jax.lax.fori_loop(0, loops // 4, body, (q, held))

        try:
            program = jax.jit(many, donate_argnums=1)

            def call() -> Any:
                nonlocal held
                out, held = program(q, held)
                return out

            return seconds(call) / (loops // 4 * 4) * 1e6
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"

    def by_jax(name: str) -> Callable[..., jax.Array]:
        attend = partial(jax.nn.dot_product_attention, implementation=name)
        return lambda q, held: (attend(q, *held, key_value_seq_lengths=lengths, query_seq_lengths=ones), held)

    def by_pallas(q: jax.Array, held: Any) -> tuple[jax.Array, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.pallas.ops.gpu.decode_attention import gqa
        out = gqa(q[:, 0], *held, kv_seq_len=lengths, k_splits=min(16, context // 16), interpret=interpret)
        return jnp.asarray(out), held

    def by_us(form: PagedGpu) -> Callable[..., tuple[jax.Array, Any]]:
        return lambda q, held: form.attend((q, k, v), held, (table, start, ones), False)

    ours = PagedGpu(spec, interpret=interpret)
    tried = {"ours": ours}
    if layouts:
        names = "programs", "warps", "stages", "keys"
        ways = [(p, w, s, k) for p in (256, 512) for w in (2, 4) for s in (2, 3) for k in (64, 128)]
        tried |= {
            "ours, {} programs, {} warps, {} stages, {} keys".format(*way): replace(ours, **dict(zip(names, way, strict=True)))
            for way in ways
        }
    found = [(name, timed(by_us(form), copied(pages))) for name, form in tried.items()]
    found += [("XLA", timed(by_jax("xla"), copied(flat))), ("cuDNN", timed(by_jax("cudnn"), copied(flat)))]
    return [*found, ("JAX's Pallas kernel", timed(by_pallas, copied(flat)))]


if __name__ == "__main__":
    main()
