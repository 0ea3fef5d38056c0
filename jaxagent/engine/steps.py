"""The engine's programs: publish, append, fork, stash, restore, decode and verify. Pure functions of pytrees, all jitted once.

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
from jaxtyping import Array, Float, Int

from jaxagent.engine.cache import (
    AttendPages,
    Cache,
    PageForm,
    attend_slots,
    attend_working_copy,
    copy_pages,
    copy_prefix,
    keep_new,
    put_pages,
    read_pages,
    read_slot,
    working_copy,
    write_slot,
)
from jaxagent.engine.controls import Grammars, Rows, effective_temperature, follow, settle
from jaxagent.engine.publish import Publish, takes_experts_output_first, takes_joined, takes_output_first
from jaxagent.engine.sampling import likeliest, sample, uniforms
from jaxagent.models.adapters import unadapted
from jaxagent.models.attention import Attend
from jaxagent.models.layers import rms_norm
from jaxagent.models.moe import mix_experts
from jaxagent.models.transformer import (
    Decoder,
    DecoderConfig,
    Params,
    embed,
    head_logits,
    head_table,
    join,
)
from jaxagent.sharding import DeviceMesh

Forward = Callable[..., tuple[Array, Cache, Array | None]]

# Products of a few rows are faster by cuBLAS than as XLA would fuse them, and it adds biases and the residual stream itself. A
# command buffer that holds the whole loop over tokens, and the branches of a draw, leaves the host nothing to do in between.
COMPILE: dict[str, dict[str, bool | int | str]] = {
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    }
}
SCORED = 64  # fed tokens whose logits exist at once where their log-probs are asked for


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

    publish: Publish
    append: Callable[..., tuple[Cache, Array | None, Array | None]]
    fork: Callable[..., Cache]
    stash: Callable[..., Cache]
    restore: Callable[..., Cache]
    decode: Callable[..., tuple[Cache, Rows, Array, Array, Array | None, tuple[Array, Array] | None]]
    verify: Callable[..., tuple[Cache, Rows, Array, Array, Array | None, tuple[Array, Array] | None]]
    settle: Callable[..., Rows]


def make_steps(
    config: DecoderConfig,
    *,
    dtype: jnp.dtype,
    chunk: int,
    decode_tokens: int,
    mesh: DeviceMesh,
    record_routing: bool = False,
    top_logprobs: int = 0,
    pages: PageForm | None = None,
) -> Steps:
    """Builds the programs for a decoder on one replica. `chunk` and `decode_tokens` are static; every other choice is data.

    `decode` steps all slots and reads chunks, so that no row's bits depend on its neighbours; or it is told which slots to
    step, and how many positions of them are in use, and reads these in one pass.

    With `pages` the cache is pages, append and decode are told which are whose (`table_CM`), and attention has the same bits in
    either way, products of fewer rows may not; fork, stash and restore are told pages in place of slots and lengths.

    With `record_routing`, append and decode also return the experts of every fed token, int16 [..., L, k]. With `top_logprobs`
    = n, rows need controls, and decode also returns the n likeliest tokens and their log-probs, [C, N, n], of the rows that ask
    for them.
    """
    forward = forward_fn(config, mesh, record_routing)

    def append(
        params: Params,
        cache: Cache,
        slot_R: Int[Array, "R"],
        token_RA: Int[Array, "R A"],
        start_R: Int[Array, "R"],
        count_R: Int[Array, "R"],
        score: tuple[Array, Array] | None = None,
        table_CM: Int[Array, "C M"] | None = None,
    ) -> tuple[Cache, Array | None, Array | None]:
        """`score`: int32 [R], the token that follows each row's; and f32 [R], the temperature of the log-probs, 0 for none."""
        ahead = jnp.arange(token_RA.shape[1])
        valid_RA = ahead < count_R[:, None]
        pos_RA = jnp.where(valid_RA, start_R[:, None] + ahead, 0)
        if pages is None or table_CM is None:
            attend = attend_slots(slot_R, pos_RA, valid_RA, chunk, config.attention)
        else:
            attend = AttendPages(pages, (jnp.take(table_CM, slot_R, axis=0, mode="clip"), start_R, count_R))
        x, cache, routing = forward(params, cache, token_RA, pos_RA, attend)
        if score is None:
            return cache, routing, None
        next_R, temperature_R = score
        next_RA = jnp.where(ahead == count_R[:, None] - 1, next_R[:, None], jnp.roll(token_RA, -1, axis=1))
        return cache, routing, fed_logprobs(params, x, next_RA, temperature_R, config)

    compiled = partial(jax.jit, compiler_options=COMPILE.get(mesh.platform))
    return Steps(
        publish=Publish(config, dtype, mesh),
        append=compiled(append, donate_argnums=1),
        fork=jax.jit(copy_pages if pages else copy_prefix, static_argnums=() if pages else 3, donate_argnums=0),
        stash=jax.jit(read_pages if pages else read_slot, static_argnums=() if pages else 2),
        restore=jax.jit(put_pages if pages else write_slot, donate_argnums=0),
        decode=compiled(
            decode_fn(config, forward, chunk, Emits(decode_tokens, record_routing, top_logprobs), pages),
            static_argnums=6,
            donate_argnums=(1, 2),
        ),
        verify=compiled(verify_fn(config, forward, chunk, top_logprobs), donate_argnums=(1, 2)),
        settle=jax.jit(settle, donate_argnums=0),
    )


def forward_fn(config: DecoderConfig, mesh: DeviceMesh, record_routing: bool) -> Forward:
    """The decoder up to its last hidden state: (params, cache, token_BT, pos_BT, attend) -> (x, cache, experts or None)."""
    blocks = nnx.eval_shape(lambda: Decoder(unadapted(config), nnx.Rngs(0)).blocks)
    blocks.output_first, blocks.heads_first = takes_output_first(config, mesh), mesh.platform == "tpu"
    blocks.experts_output_first = takes_experts_output_first(config, mesh)
    if takes_joined(mesh):
        join(blocks)
    block_graph = nnx.split(blocks)[0]

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

    return forward


@dataclass(frozen=True)
class Emits:
    """What a decode call gives for each row."""

    tokens: int
    routing: bool = False
    top_logprobs: int = 0


def decode_fn(
    config: DecoderConfig, forward: Forward, chunk: int, emits: Emits, pages: PageForm | None = None
) -> Callable[..., Any]:
    """A segment of `emits.tokens` tokens for all rows, or for those of some slots; frozen ones emit -1."""
    decode_tokens, record_routing, top_logprobs = emits.tokens, emits.routing, emits.top_logprobs

    def decode(
        params: Params,
        cache: Cache,
        rows: Rows,
        armed: Rows,
        grammars: Grammars | None = None,
        slot_W: Int[Array, "W"] | None = None,
        used: int = 0,
        table_CM: Int[Array, "C M"] | None = None,
    ) -> tuple[Cache, Rows, Array, Array, Array | None, tuple[Array, Array] | None]:
        all_rows = arm(rows, armed)
        rows = all_rows if slot_W is None else pick(all_rows, slot_W)
        table = table_CM if slot_W is None or table_CM is None else jnp.take(table_CM, slot_W, axis=0, mode="clip")
        width, start_W = rows["token"].shape[0], rows["pos"]
        u_WN = uniforms(rows["key"], start_W[:, None] + 1 + jnp.arange(decode_tokens))
        shape = width, decode_tokens
        routed = jnp.zeros((*shape, config.layers, config.experts_per_token), jnp.int16) if record_routing else None
        tokens, logprobs, top = nothing_drawn(*shape, top_logprobs)
        emitted = tokens, logprobs, routed, top

        def step(i: Array, carry: tuple[Cache, Rows, Array, Array, Any, Any]) -> tuple[Cache, Rows, Array, Array, Any, Any]:
            cache, rows, tokens, logprobs, routed, top = carry
            live = rows["live"]
            pos = jnp.where(live, rows["pos"], 0)[:, None]
            if pages is not None and table is not None:
                attend: Attend = AttendPages(pages, (table, pos[:, 0], live.astype(jnp.int32)))
            elif slot_W is None:
                attend = attend_slots(None, pos, live[:, None], chunk, config.attention)
            else:
                attend = attend_working_copy(start_W, i, used, decode_tokens, config.attention)
            x, cache, routing = forward(params, cache, rows["token"][:, None], pos, attend)
            hidden = rms_norm(x[:, 0], params["norm"], config.norm_eps, config.plus_one_norms)
            logits = head_logits(head_table(params, config), hidden, config)
            token, (tokens, logprobs, top) = draw((tokens, logprobs, top), i, logits, u_WN[:, i], rows, grammars)
            if routing is not None:
                routed = routed.at[:, i].set(routing[:, 0])
            return cache, advance(rows, token, grammars), tokens, logprobs, routed, top

        if slot_W is None or pages is not None:
            cache, rows, *out = jax.lax.fori_loop(0, decode_tokens, step, (cache, rows, *emitted))
            return cache, rows if slot_W is None else put_back(all_rows, rows, slot_W), *out
        copy = working_copy(cache, slot_W, used, decode_tokens)
        copy, rows, *out = jax.lax.fori_loop(0, decode_tokens, step, (copy, rows, *emitted))
        cache = keep_new(cache, copy, slot_W, used, start_W, rows["pos"] - start_W)
        return cache, put_back(all_rows, rows, slot_W), *out

    return decode


def verify_fn(config: DecoderConfig, forward: Forward, chunk: int, top_logprobs: int) -> Callable[..., Any]:
    """One forward of some rows over their pending token and a draft behind it; emits as `decode` does, T = K + 1 at most.

    A row emits up to the first token that is not its draft's, at least one. What was written behind it is written anew before
    it is read. Logits exist for all T positions at once: the head's weights are read once, as those of the layers.
    """

    def verify(
        params: Params,
        cache: Cache,
        rows: Rows,
        armed: Rows,
        grammars: Grammars | None,
        slot_W: Int[Array, "W"],
        draft_WK: Int[Array, "W K"],
    ) -> tuple[Cache, Rows, Array, Array, Array | None, tuple[Array, Array] | None]:
        """`draft_WK`: -1 behind the end of a draft, which may be empty."""
        all_rows = arm(rows, armed)
        rows = pick(all_rows, slot_W)
        width, length = draft_WK.shape[0], draft_WK.shape[1] + 1
        ahead = jnp.arange(length)
        valid_WT = rows["live"][:, None] & (ahead <= jnp.sum(draft_WK >= 0, axis=1)[:, None])
        pos_WT = jnp.where(valid_WT, rows["pos"][:, None] + ahead, 0)
        token_WT = jnp.where(valid_WT, jnp.concatenate([rows["token"][:, None], draft_WK], axis=1), 0)
        attend = attend_slots(slot_W, pos_WT, valid_WT, chunk, config.attention)
        x, cache, routing = forward(params, cache, token_WT, pos_WT, attend)
        hidden = rms_norm(x, params["norm"], config.norm_eps, config.plus_one_norms)
        logits_WTV = head_logits(head_table(params, config), hidden, config)
        u_WT = uniforms(rows["key"], rows["pos"][:, None] + 1 + ahead)
        next_WT = jnp.pad(draft_WK, ((0, 0), (0, 1)), constant_values=-1)

        def going_on(carry: tuple[Array, Array, Rows, Any]) -> Array:
            i, going, _, _ = carry
            return (i < length) & jnp.any(going)

        def step(carry: tuple[Array, Array, Rows, Any]) -> tuple[Array, Array, Rows, Any]:
            i, going, rows, emitted = carry
            here = {**rows, "live": going}
            token, emitted = draw(emitted, i, logits_WTV[:, i], u_WT[:, i], here, grammars)
            after = advance(here, token, grammars)
            live = jnp.where(going, after["live"], rows["live"])
            return i + 1, after["live"] & (token == next_WT[:, i]), {**after, "live": live}, emitted

        start = jnp.int32(0), rows["live"], rows, nothing_drawn(width, length, top_logprobs)
        _, _, rows, (tokens, logprobs, top) = jax.lax.while_loop(going_on, step, start)
        return cache, put_back(all_rows, rows, slot_W), tokens, logprobs, routing, top

    return verify


Drawn = tuple[Array, Array, tuple[Array, Array] | None]  # tokens [W, N], log-probs, and the likeliest tokens and theirs


def nothing_drawn(rows: int, length: int, top_logprobs: int) -> Drawn:
    ranked = rows, length, top_logprobs
    top = (jnp.zeros(ranked, jnp.int32), jnp.zeros(ranked, jnp.float32)) if top_logprobs else None
    return jnp.full(ranked[:2], -1, jnp.int32), jnp.zeros(ranked[:2], jnp.float32), top


def draw(
    drawn: Drawn, i: Array, logits_WV: Float[Array, "W V"], u_W: Float[Array, "W"], rows: Rows, grammars: Grammars | None
) -> tuple[Int[Array, "W"], Drawn]:
    """Draws a token for every row, and writes those of live rows at place i."""
    tokens, logprobs, top = drawn
    token, logprob = sample(logits_WV, u_W, rows, grammars)
    tokens = tokens.at[:, i].set(jnp.where(rows["live"], token, -1))
    logprobs = logprobs.at[:, i].set(jnp.where(rows["live"], logprob, 0.0))
    if top is not None:
        best = likeliest(logits_WV, rows, grammars, top[0].shape[2])
        top = top[0].at[:, i].set(best[0]), top[1].at[:, i].set(best[1])
    return token, (tokens, logprobs, top)


def fed_logprobs(
    params: Params,
    x_RAD: Float[Array, "R A D"],
    next_RA: Int[Array, "R A"],
    temperature_R: Float[Array, "R"],
    config: DecoderConfig,
) -> Float[Array, "R A"]:
    """log p(next) under softmax(logits / temperature) after every fed token, as the learner computes it.

    Zeros where no row of the call has a temperature above 0. Logits exist for SCORED tokens at a time.
    """
    temperature_RA = jnp.broadcast_to(effective_temperature(temperature_R)[:, None], next_RA.shape)

    def one(work: tuple[Array, Array, Array]) -> Array:
        x, token, temperature = work
        hidden = rms_norm(x, params["norm"], config.norm_eps, config.plus_one_norms)
        z = head_logits(head_table(params, config), hidden, config) / temperature
        return z[token] - jax.nn.logsumexp(z)

    def all_of(x: Array) -> Array:
        flat = x.reshape(-1, x.shape[-1]), next_RA.reshape(-1), temperature_RA.reshape(-1)
        return jax.lax.map(one, flat, batch_size=SCORED).reshape(next_RA.shape)

    return jax.lax.cond(jnp.any(temperature_R > 0), all_of, lambda x: jnp.zeros(next_RA.shape, jnp.float32), x_RAD)


def arm(rows: Rows, armed: Rows) -> Rows:
    """Overwrites the rows that `armed["mask"]` marks: a turn begins, or a released row is frozen. What it lacks, stays."""
    pick = armed["mask"]
    new = {name: value for name, value in armed.items() if name != "mask"}
    return rows | {name: jnp.where(pick.reshape(pick.shape + (1,) * (x.ndim - 1)), x, rows[name]) for name, x in new.items()}


def pick(rows: Rows, slot_W: Int[Array, "W"]) -> Rows:
    """The state of some slots; one beyond the last is frozen."""
    picked = {name: jnp.take(state, slot_W, axis=0, mode="clip") for name, state in rows.items()}
    return {**picked, "live": picked["live"] & (slot_W < rows["live"].shape[0])}


def put_back(rows: Rows, picked: Rows, slot_W: Int[Array, "W"]) -> Rows:
    """All slots, with the picked ones as they are now."""
    return {name: state.at[slot_W].set(picked[name], mode="drop") for name, state in rows.items()}


def advance(rows: Rows, token: Int[Array, "C"], grammars: Grammars | None = None) -> Rows:
    """Live rows take the drawn token as pending; a stop token, a stop sequence or an empty budget freezes them."""
    live = rows["live"]
    left = rows["left"] - live
    stopped = jnp.any(token[:, None] == rows["stop"], axis=-1) | (left <= 0)
    if "controlled" in rows:
        rows, done = follow(rows, token, grammars)
        stopped |= done
    return {
        **rows,
        "token": jnp.where(live, token, rows["token"]),
        "pos": rows["pos"] + live,
        "left": left,
        "live": live & ~stopped,
    }
