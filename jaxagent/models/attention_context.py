"""Attention over a mesh: each device attends with its own heads and rows, and where rows are cut, with its own queries.

Rows of 100,000 tokens are cut by the axis `context`. Keys and values are then gathered whole and queries stay apart: with
few key heads that is the smaller half (8 heads of width 128 in bf16: 400 MB of a layer for 100,000 tokens, while it runs),
it is one collective instead of a ring of `context` dependent ones, any kernel that knows where its queries stand can follow
it, and packed segments need no care at the borders. Its backward pass is a reduce-scatter. A ring (Liu et al. 2023) would
hold 1 / context of that, and is worth its steps only where gathered keys do not fit.

A causal row gives its last shard most of the work. So queries are exchanged before and after (Llama 3, section 3.3.2, cuts
the row this way from the start): of 2 C pieces, shard i attends for pieces i and 2 C - 1 - i.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxagent.models.attention import Attend
from jaxagent.models.attention_blocked import Kernel, Rows
from jaxagent.sharding import DeviceMesh


def over_mesh(kernel: Kernel, mesh: DeviceMesh) -> Callable[[Int[Array, "B T"]], Attend]:
    """The back end that runs a one-device kernel on every device of a mesh."""

    def of_segments(segment_BT: Int[Array, "B T"]) -> Attend:
        def attend(q: Array, k: Array, v: Array, cache: None, sliding: bool | Array) -> tuple[Array, None]:
            if mesh.mesh.size == 1:
                rows = Rows(jnp.arange(q.shape[1]), segment_BT, segment_BT)
                return kernel(q, k, v, rows, sliding), cache
            return _on_devices(kernel, mesh, q, k, v, segment_BT, sliding), cache

        return attend

    return of_segments


def _on_devices(
    kernel: Kernel, mesh: DeviceMesh, q: Array, k: Array, v: Array, segment_BT: Array, sliding: bool | Array
) -> Array:
    q_axes, kv_axes = (("rows", "length", name, None) for name in ("heads", "kv_heads"))
    of_q, of_kv, of_segment = mesh.spec(q_axes), mesh.spec(kv_axes, k.shape), mesh.spec(("rows", "length"))
    static = isinstance(sliding, bool)
    sharers = mesh.size["tensor"] // k.shape[2]  # devices that share a key head

    def local(q: Array, k: Array, v: Array, segment: Array, *told: Array) -> Array:
        slides = sliding if static else told[0]
        if sharers > 1:
            own = jax.lax.axis_index("tensor") // sharers
            k, v = (jax.lax.dynamic_slice_in_dim(x, own, 1, 2) for x in (k, v))
        if mesh.size["context"] == 1:
            return kernel(q, k, v, Rows(jnp.arange(q.shape[1]), segment, segment), slides)
        return _attend_cut_rows(kernel, mesh.size["context"], q, k, v, segment, slides)

    told = () if static else (sliding,)
    specs = (of_q, of_kv, of_kv, of_segment, *(mesh.spec() for _ in told))
    # check_vma: the kernels' custom backward passes and Pallas calls do not say over which axes their outputs vary.
    return jax.shard_map(local, mesh=mesh.mesh, in_specs=specs, out_specs=of_q, check_vma=False)(q, k, v, segment_BT, *told)


def _attend_cut_rows(kernel: Kernel, shards: int, q: Array, k: Array, v: Array, segment: Array, sliding: bool | Array) -> Array:
    k, v, whole = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v, segment))
    here, length = jax.lax.axis_index("context"), q.shape[1]

    def piece(q: Array, segment: Array, number: Array | int) -> Array:
        pos = number * q.shape[1] + jnp.arange(q.shape[1])
        return kernel(q, k, v, Rows(pos, segment, whole), sliding)

    if length % 2 or shards % 2:
        return piece(q, segment, here)
    half = length // 2
    even, odd = _exchange(shards)
    outs = []
    for number, route, part in ((0, even, slice(0, half)), (1, odd, slice(half, length))):
        there = [(target, source) for source, target in route]
        moved, its_segment = (jax.lax.ppermute(x[:, part], "context", route) for x in (q, segment))
        came = jnp.asarray([2 * source + number for source, _ in sorted(route, key=lambda pair: pair[1])])[here]
        outs.append(jax.lax.ppermute(piece(moved, its_segment, came), "context", there))
    return jnp.concatenate(outs, axis=1)


def _exchange(shards: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Who sends its first half to whom, and its second: pieces i and 2 C - 1 - i meet on shard i, for an even C."""
    home = [min(number, 2 * shards - 1 - number) for number in range(2 * shards)]
    return tuple([(number // 2, home[number]) for number in range(first, 2 * shards, 2)] for first in (0, 1))  # type: ignore[return-value]
