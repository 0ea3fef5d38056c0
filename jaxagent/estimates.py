"""What programs need beside their arguments while they run, estimated without a compiler; plan.py adds it up.

How many of which arrays exist at once is the compiler's choice. The factors are fitted to what it said (docs/BENCHMARKS.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from jaxagent.learner import Learner
from jaxagent.models.attention_cudnn import SHORT
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import EngineShapes, size_bytes


@dataclass(frozen=True)
class _Sizes:
    """A learner's sizes on one device. Letters as in docs/HOUSE.md, section 6, after the mesh has cut them."""

    tokens: int  # of a micro-batch
    rows: int
    row_tokens: int
    D: int
    F: int
    N: int
    K: int
    H: int
    L: int
    V: int
    width_bytes: int  # of a number of the pass

    @classmethod
    def of(cls, learner: Learner) -> _Sizes:
        c, o, mesh = learner.config, learner.options, learner.mesh
        tensor = mesh.size["tensor"]
        rows, row_tokens = o.batch_rows // mesh.parts("rows"), o.row_tokens // mesh.parts("length")
        ffn = c.ffn_width * max(1, c.experts_per_token)
        sizes = c.width, ffn // tensor, c.heads // tensor, max(1, c.kv_heads // tensor), c.head_width, c.layers
        return cls(rows * row_tokens, rows, row_tokens, *sizes, c.vocab_size // tensor, width_bytes(o.dtype))


def width_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def gradient_temporaries(learner: Learner) -> int:
    """Bytes that the gradient of a micro-batch needs beside its arguments, estimated.

    They are a gradient as large as the trained weights; a copy of all weights in the pass's precision where that is not
    float32; what each layer keeps for its backward pass; the work of one layer, its weights put together; and of a chunk of
    the head. How many of each exist at once is fitted to XLA's own count for a few models (docs/BENCHMARKS.md).
    """
    s, o = _Sizes.of(learner), learner.options
    kept = {
        "none": 12 * s.D + 4 * s.F + 3 * s.N * s.H + 4 * s.K * s.H,
        "dots": 3 * s.D + 2 * s.F + s.N * s.H + 2 * s.K * s.H,
        "attention": s.D + s.N * s.H,
        "full": s.D,
    }[o.remat]
    square = learner.attention.name == "xla" and s.row_tokens == o.row_tokens <= 4096
    scores = (3 if o.remat == "full" else 2) * s.rows * s.N * s.row_tokens**2 * 4 if square else 0
    layer = s.tokens * (2 * s.F + 2 * s.D) * s.width_bytes
    if learner.config.experts and learner.mesh.mesh.size > 1:  # of a mixture, every pair of a token and an expert, of all rows
        pairs = s.tokens * learner.mesh.size["expert"] * learner.config.experts_per_token
        layer = int(pairs * (3.5 * s.D + 9 * s.F / learner.config.experts_per_token) * s.width_bytes)
    head = 2 * min(o.head_chunk, s.tokens) * s.V * 4
    weights, cudnn = size_bytes(learner.trained), learner.attention.name == "cudnn"
    short = 0
    if cudnn:  # it leaves short segments to XLA: their scores and the gradient of these, in float32 and in bfloat16
        short = s.tokens * s.N * 2 * min(SHORT, s.row_tokens) * 2 * (4 + 2)
        layers = size_bytes(learner.trained.get("blocks", {}))  # gradients in bfloat16 until they are summed, tables' are not
        weights = layers // 2 + (weights - layers) * (2 if learner.config.tied_head else 1)  # of head and embedding apart
    wide = [w for w in jax.tree.leaves(learner.params) if w.dtype.itemsize == 4]
    narrowed = size_bytes(wide) // 2 if o.dtype == "bfloat16" else 0
    kept_all = s.L * s.tokens * kept * s.width_bytes
    whole = table = 0
    if learner.mesh.size["fsdp"] * learner.mesh.size["expert"] > 1:
        each = sum(x.size for x in jax.tree.leaves(learner.params["blocks"])) / (s.L * learner.mesh.size["tensor"])
        each /= learner.mesh.size["expert"] if learner.config.experts else 1
        whole, table = int(_layers_whole(learner.mesh) * each * s.width_bytes), s.V * s.D * (s.width_bytes + 4)
    in_layers, in_head = weights + scores + short + layer + whole, head + table
    # For GPUs the head's work is over before the layers' gradients are there; for others, they are counted side by side.
    both = max(in_layers, in_head) if learner.mesh.platform == "gpu" else in_layers + in_head
    return narrowed + kept_all + both


def _layers_whole(mesh: DeviceMesh) -> float:
    """Of how many layers weights or their gradients are whole at once: TPUs have several on the way while they compute."""
    if mesh.platform != "tpu":
        return 2
    return 5 if "v5 lite" in mesh.mesh.devices.flat[0].device_kind else 8.6  # a v5e reduces gradients within products


def update_temporaries(learner: Learner) -> int:
    """Bytes of an update beside its arguments, estimated: on CPUs the gradient, the step and new weights, else fused."""
    trained = size_bytes(learner.trained)
    return 3 * trained if learner.mesh.platform == "cpu" else trained // 2


def decode_temporaries(engine: EngineShapes) -> int:
    """Bytes of a decode call beside its arguments, estimated: logits, also of drafts, scores of what is read, what it copies.

    A TPU copies slots for the loop in any case, with the width of heads, innermost in values, up to 128; nothing copies pages.
    """
    o, c, tensor, cache = engine.options, engine.config, engine.mesh.size["tensor"], size_bytes(engine.cache)
    arrays = 3 if engine.mesh.platform == "cpu" else 6  # of the branch that truncates and masks
    logits = arrays * o.slots * (1 + o.draft_tokens) * c.vocab_size // tensor * 4
    read = o.chunk if o.exact or o.pages else o.slot_tokens + o.decode_tokens
    scores = 2 * o.slots * max(1, c.heads // tensor) * read * 4
    copied = 0 if o.exact or o.pages else cache
    if engine.mesh.platform == "tpu" and not o.pages:
        copied = int(cache / 2 * (1 + math.ceil(c.head_width / 128) * 128 / c.head_width))
    return logits + scores + copied


def append_temporaries(engine: EngineShapes) -> int:
    """Bytes of the longest prefill beside its arguments, estimated: the residual stream, and of one layer the larger of its
    attention, which are scores, gathered keys and values, and of its feed-forward part.

    Kernels over pages hold neither scores nor what they gather. Of the last layer only keys and values are wanted, where nobody
    asks for log-probs of what is fed.
    """
    o, c, tensor = engine.options, engine.config, engine.mesh.size["tensor"]
    tokens, width = o.append_rows * o.append_tokens[-1], width_bytes(o.dtype)
    held, feed_forward = 2 * tokens * c.width, 2 * tokens * c.ffn_width * max(1, c.experts_per_token) // tensor
    if o.pages and engine.mesh.platform != "cpu":
        return (2 * held + feed_forward) * width
    if c.layers == 1 and not o.prompt_logprobs:
        return (held + 2 * tokens * max(1, c.kv_heads // tensor) * c.head_width) * width
    scores = tokens * max(1, c.heads // tensor) * o.chunk * 4
    gathered = 2 * o.append_rows * max(1, c.kv_heads // tensor) * c.head_width * o.chunk * width
    return held * width + max(scores + gathered, feed_forward * width)
