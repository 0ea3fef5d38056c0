"""The engine's programs: publish, append, fork, stash, restore and decode. Pure functions of pytrees, all jitted once.

Whatever they change is donated to them.

`append` is pure prefill and samples nothing. The last token fed to a row is left pending: `decode` feeds it and draws the
next one, so the first sampled token of a turn takes the same path as all others, whoever its neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxagent.engine.cache import (
    Cache,
    attend_slots,
    attend_working_copy,
    copy_prefix,
    keep_new,
    read_slot,
    working_copy,
    write_slot,
)
from jaxagent.engine.sampling import sample, uniforms
from jaxagent.models.adapters import merged, unadapted
from jaxagent.models.attention import Attend
from jaxagent.models.layers import rms_norm
from jaxagent.models.moe import mix_experts
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, embed, head_logits, head_table, unstack
from jaxagent.sharding import DeviceMesh

Rows = dict[str, Array]


def new_rows(slots: int, stops: int) -> Rows:
    """Per-slot state: the pending token and its position, what is left of the budget, and how to sample."""
    return {
        "token": jnp.zeros(slots, jnp.int32),
        "pos": jnp.zeros(slots, jnp.int32),
        "live": jnp.zeros(slots, bool),
        "left": jnp.zeros(slots, jnp.int32),
        "key": jnp.zeros((slots, 2), jnp.uint32),
        "temperature": jnp.ones(slots, jnp.float32),
        "top_k": jnp.zeros(slots, jnp.int32),
        "top_p": jnp.ones(slots, jnp.float32),
        "stop": jnp.full((slots, stops), -1, jnp.int32),
    }


@dataclass(frozen=True)
class Steps:
    """The jitted programs of one engine; shapes are fixed by the arguments they are first called with."""

    publish: Callable[..., Params]
    append: Callable[..., tuple[Cache, Array | None]]
    fork: Callable[..., Cache]
    stash: Callable[..., Cache]
    restore: Callable[..., Cache]
    decode: Callable[..., tuple[Cache, Rows, Array, Array, Array | None]]


def make_steps(
    config: DecoderConfig, *, dtype: jnp.dtype, chunk: int, decode_tokens: int, mesh: DeviceMesh, record_routing: bool = False
) -> Steps:
    """Builds the programs for a decoder on one replica. `chunk` and `decode_tokens` are static; every other choice is data.

    `decode` steps all slots and reads chunks, so that no row's bits depend on its neighbours; or it is told which slots to
    step, and how many positions of them are in use, and reads these in one pass.

    Adapters are merged when weights are published: decoding costs what it does without them. With `record_routing`, append
    and decode also return the experts of every fed token, int16 [..., L, k].
    """
    block_graph = nnx.split(nnx.eval_shape(lambda: Decoder(unadapted(config), nnx.Rngs(0)).blocks))[0]

    mix = partial(mix_experts, spec=config.mixture, mesh=mesh) if config.experts else None

    def forward(
        params: Params, cache: Cache, token_BT: Array, pos_BT: Array, attend: Attend
    ) -> tuple[Array, Cache, Array | None]:
        ropes = config.rotations(pos_BT)
        x, grown, chosen = embed(params["embed"], token_BT, config), [], []
        for i, (weights, layer) in enumerate(zip(params["blocks"], cache, strict=True)):
            x, layer, routing = nnx.merge(block_graph, weights)(x, ropes, attend, layer, config.slides(i), mix)
            # Said here, or XLA cuts replicated key heads for the loop and gathers the whole cache after every call.
            keys, values = (mesh.constrain(part, (None, "kv_heads", None, None)) for part in layer)
            grown.append((keys, values))
            if record_routing and routing is not None:
                chosen.append(routing.experts_BTk.astype(jnp.int16))
        return x, tuple(grown), jnp.stack(chosen, axis=2) if chosen else None

    def publish(params: Params) -> Params:
        # A real copy: an output that is its own input would die when the learner donates its weights.
        return unstack(jax.tree.map(lambda w: jnp.array(w, dtype, copy=True), merged(params, config)), config.layers)

    def append(
        params: Params,
        cache: Cache,
        slot_R: Int[Array, "R"],
        token_RA: Int[Array, "R A"],
        start_R: Int[Array, "R"],
        count_R: Int[Array, "R"],
    ) -> tuple[Cache, Array | None]:
        ahead = jnp.arange(token_RA.shape[1])
        valid_RA = ahead < count_R[:, None]
        pos_RA = jnp.where(valid_RA, start_R[:, None] + ahead, 0)
        attend = attend_slots(slot_R, pos_RA, valid_RA, chunk, config.attention)
        return forward(params, cache, token_RA, pos_RA, attend)[1:]

    def decode(
        params: Params, cache: Cache, rows: Rows, armed: Rows, slot_W: Int[Array, "W"] | None = None, used: int = 0
    ) -> tuple[Cache, Rows, Array, Array, Array | None]:
        all_rows = arm(rows, armed)
        rows = all_rows if slot_W is None else pick(all_rows, slot_W)
        width, start_W = rows["token"].shape[0], rows["pos"]
        u_WN = uniforms(rows["key"], start_W[:, None] + 1 + jnp.arange(decode_tokens))
        shape = width, decode_tokens
        routed = jnp.zeros((*shape, config.layers, config.experts_per_token), jnp.int16) if record_routing else None
        emitted = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32), routed

        def step(i: Array, carry: tuple[Cache, Rows, Array, Array, Any]) -> tuple[Cache, Rows, Array, Array, Any]:
            cache, rows, tokens, logprobs, routed = carry
            live = rows["live"]
            pos = jnp.where(live, rows["pos"], 0)[:, None]
            if slot_W is None:
                attend = attend_slots(None, pos, live[:, None], chunk, config.attention)
            else:
                attend = attend_working_copy(start_W, i, used, decode_tokens, config.attention)
            x, cache, routing = forward(params, cache, rows["token"][:, None], pos, attend)
            hidden = rms_norm(x[:, 0], params["norm"], config.norm_eps, config.plus_one_norms)
            logits = head_logits(head_table(params, config), hidden, config)
            token, logprob = sample(logits, u_WN[:, i], rows["temperature"], rows["top_k"], rows["top_p"])
            tokens = tokens.at[:, i].set(jnp.where(live, token, -1))
            logprobs = logprobs.at[:, i].set(jnp.where(live, logprob, 0.0))
            if routing is not None:
                routed = routed.at[:, i].set(routing[:, 0])
            return cache, advance(rows, token), tokens, logprobs, routed

        if slot_W is None:
            return jax.lax.fori_loop(0, decode_tokens, step, (cache, rows, *emitted))
        copy = working_copy(cache, slot_W, used, decode_tokens)
        copy, rows, *out = jax.lax.fori_loop(0, decode_tokens, step, (copy, rows, *emitted))
        cache = keep_new(cache, copy, slot_W, used, start_W, rows["pos"] - start_W)
        return cache, put_back(all_rows, rows, slot_W), *out

    return Steps(
        publish=jax.jit(publish),
        append=jax.jit(append, donate_argnums=1),
        fork=jax.jit(copy_prefix, static_argnums=3, donate_argnums=0),
        stash=jax.jit(read_slot, static_argnums=2),
        restore=jax.jit(write_slot, donate_argnums=0),
        decode=jax.jit(decode, static_argnums=5, donate_argnums=(1, 2)),
    )


def arm(rows: Rows, armed: Rows) -> Rows:
    """Overwrites the rows that `armed["mask"]` marks: a turn begins, or a released row is frozen."""
    pick = armed["mask"]
    return {name: jnp.where(pick.reshape(pick.shape + (1,) * (old.ndim - 1)), armed[name], old) for name, old in rows.items()}


def pick(rows: Rows, slot_W: Int[Array, "W"]) -> Rows:
    """The state of some slots; one beyond the last is frozen."""
    picked = {name: jnp.take(state, slot_W, axis=0, mode="clip") for name, state in rows.items()}
    return {**picked, "live": picked["live"] & (slot_W < rows["live"].shape[0])}


def put_back(rows: Rows, picked: Rows, slot_W: Int[Array, "W"]) -> Rows:
    """All slots, with the picked ones as they are now."""
    return {name: state.at[slot_W].set(picked[name], mode="drop") for name, state in rows.items()}


def advance(rows: Rows, token: Int[Array, "C"]) -> Rows:
    """Live rows take the drawn token as pending; a stop token or an empty budget freezes them."""
    live = rows["live"]
    left = rows["left"] - live
    stopped = jnp.any(token[:, None] == rows["stop"], axis=-1) | (left <= 0)
    return {
        **rows,
        "token": jnp.where(live, token, rows["token"]),
        "pos": rows["pos"] + live,
        "left": left,
        "live": live & ~stopped,
    }
