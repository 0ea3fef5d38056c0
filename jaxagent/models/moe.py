"""A mixture of experts in the place of a feed-forward layer: router, grouped matmuls, expert parallelism, balance losses.

Pure functions of arrays, apart from the decoder: which weights exist and how they are named is the decoder's affair. Letters
beside the house's: `k` experts per token, `M` pairs of a token and one of its experts, `F` the width of one expert.

Dropless: an expert computes every token that chose it, however many they are (Gale et al. 2022, MegaBlocks). Nothing
here has a capacity. A token's result depends on its neighbours in no way; `mix_experts` says where its bits do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.attention import dot
from jaxagent.sharding import AXES, DeviceMesh

MAX_BLOCK = 64  # rows of one matmul of `grouped_dot`; more leave more of each expert's last block empty
DENSE_TOKENS = 64  # so few tokens leave an accelerator waiting for weights, whichever way they are multiplied

ROWS = ("rows", "length", None)  # how the mesh cuts tokens
AXES_OF = {  # and the weights; the decoder names its own by this
    "router_DE": ("embed", None),
    "gate_EDF": ("experts", "expert_embed", "ffn"),
    "up_EDF": ("experts", "expert_embed", "ffn"),
    "down_EFD": ("experts", "ffn", "expert_embed"),
}


@dataclass(frozen=True)
class MixtureSpec:
    """What is static of a mixture."""

    experts: int  # E
    per_token: int  # k
    normalise: bool  # do the weights of the chosen sum to one (norm_topk_prob in transformers)

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.experts:
            raise ValueError(f"per_token must be from 1 to experts, got per_token={self.per_token}, experts={self.experts}")


class ExpertWeights(NamedTuple):
    """The weights of one mixture. An engine's copy may hold gate and up as [E, F, D] (`mix_experts`, output_first)."""

    router_DE: Float[Array, "D E"]
    gate_EDF: Float[Array, "E D F"]
    up_EDF: Float[Array, "E D F"]
    down_EFD: Float[Array, "E F D"]


class Routing(NamedTuple):
    """What leaves the layer beside its output.

    experts_BTk: the chosen experts, -1 at padding: what a sampler records and a trainer replays.
    stats: float32 sums over the valid tokens, so that micro-batches, layers and hosts add up exactly: `tokens`, `load` [E]
      (choices of each expert), `mass` [E] (its router probability), `z` (squared log-sum-exp), `entropy` (nats).
    """

    experts_BTk: Int[Array, "B T k"]
    stats: dict[str, Array]


def mix_experts(
    x_BTD: Float[Array, "B T D"],
    weights: ExpertWeights,
    spec: MixtureSpec,
    mesh: DeviceMesh | None,
    *,
    valid_BT: Bool[Array, "B T"] | None = None,
    replay_BTk: Int[Array, "B T k"] | None = None,
    dense: bool | None = None,
    output_first: bool = False,
) -> tuple[Float[Array, "B T D"], Routing]:
    """sum_e g_e(x) down_e(silu(x gate_e) * (x up_e)) over the k experts of largest g = softmax(x router).

    As Qwen3-MoE has it (transformers' Qwen3MoeSparseMoeBlock), but that the router runs in float32 whatever x is, and that
    the experts' outputs are summed in float32.

    With experts given (Ma et al. 2025, Rollout Routing Replay), trainer and sampler send a token through the same experts
    though their rounding differs; the weights g are those of the current router at these experts.

    Over a mesh, tokens are cut by the expert axis as well: they are all-gathered over it, each shard runs its own experts for
    all of them, and the sums are scattered back. Per layer and direction that moves (e - 1) x D numbers per token, where a
    ragged all-to-all moves about k x D x (e - 1) / e and is cheaper if k < e; the FLOPs are the same, since a pair is computed
    once in both, and both need static room for the case that every token chooses the same shard. Weights are gathered over
    fsdp and context at use, never over expert.

    Two forms give the same numbers up to rounding. "Grouped" sorts pairs by expert (`grouped_dot`). "Dense" runs all experts
    for all tokens one after another: E / k times the FLOPs, but no more bytes of weights than many tokens cause anyway, and a
    token keeps its place in every matmul: in calls of the same shape its bits do not depend on its neighbours. The grouped form
    moves a token to another row of a matmul when its neighbours choose otherwise; XLA on CPU computes the same bits in every
    row (a test holds it to that), which no other platform promises. An engine that promises bits asks for dense there.

    Args:
        mesh: None, or of one device: everything is here.
        valid_BT: false at padding, which no expert computes, whose output is zero, and which no sum counts.
        replay_BTk: the experts of each token, distinct, from 0 to E - 1; a token with a negative one chooses itself.
        dense: None takes dense for at most DENSE_TOKENS tokens on an accelerator, and on CPU if E <= 2 k besides.
        output_first: gate and up are [E, F, D].
    """
    if valid_BT is None:
        valid_BT = jnp.ones(x_BTD.shape[:2], bool)
    else:
        x_BTD = jnp.where(valid_BT[..., None], x_BTD, 0)  # whatever padding holds, it reaches no sum and no gradient
    if replay_BTk is None:
        replay_BTk = jnp.full((*x_BTD.shape[:2], spec.per_token), -1, jnp.int32)
    form = _Form(spec, dense, mesh.platform if mesh else jax.default_backend(), output_first)
    if mesh is None or mesh.mesh.size == 1:
        return _mix_local(x_BTD, weights, valid_BT, replay_BTk, form)
    rows: Any = mesh.spec(ROWS)
    uncut: Any = PartitionSpec()
    turned = {name: (AXES_OF[name][0], *AXES_OF[name][:0:-1]) for name in ("gate_EDF", "up_EDF") if output_first}
    placed: dict[str, Any] = {name: mesh.spec(axes) for name, axes in (AXES_OF | turned).items()}
    run = jax.shard_map(
        partial(_mix_shard, form=form),
        mesh=mesh.mesh,
        in_specs=(rows, ExpertWeights(**placed), mesh.spec(ROWS[:2]), rows),
        out_specs=(rows, Routing(rows, dict.fromkeys(STATS, uncut))),
    )
    return run(x_BTD, weights, valid_BT, replay_BTk)


@dataclass(frozen=True)
class _Form:
    """How experts are run: what `mix_experts` was told."""

    spec: MixtureSpec
    dense: bool | None
    platform: str
    output_first: bool


def _mix_local(x_BTD: Array, weights: ExpertWeights, valid_BT: Array, replay_BTk: Array, form: _Form) -> tuple[Array, Routing]:
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    gates_Tk, chosen_Tk, stats = route(x_TD, weights.router_DE, form.spec, valid_BT.reshape(-1), _flat(replay_BTk))
    out_TD = _run_experts(x_TD, gates_Tk, chosen_Tk, weights, form)
    return out_TD.astype(x_BTD.dtype).reshape(x_BTD.shape), Routing(chosen_Tk.reshape(replay_BTk.shape), stats)


def _mix_shard(x_BTD: Array, weights: ExpertWeights, valid_BT: Array, replay_BTk: Array, form: _Form) -> tuple[Array, Routing]:
    """What one device of a mesh does, with its own part of everything."""
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    router_DE = jax.lax.all_gather(weights.router_DE, ("fsdp", "expert", "context"), tiled=True)
    gates_Tk, chosen_Tk, stats = route(x_TD, router_DE, form.spec, valid_BT.reshape(-1), _flat(replay_BTk))
    stats = jax.lax.psum(stats, ("data", "fsdp", "expert", "context"))

    def everyone(x: Array) -> Array:
        return _vary(jax.lax.all_gather(x, "expert", tiled=True), AXES)

    def whole(w: Array, axis: int) -> Array:
        w = jax.lax.all_gather(w.astype(x_TD.dtype), ("fsdp", "context"), axis=axis, tiled=True)
        return _vary(w, AXES)

    of_input = 2 if form.output_first else 1
    gate, up = (whole(w, of_input) for w in (weights.gate_EDF, weights.up_EDF))
    here = ExpertWeights(router_DE, gate, up, whole(weights.down_EFD, 2))
    first = jax.lax.axis_index("expert") * here.gate_EDF.shape[0]
    # Experts of other shards become numbers out of range, which `_run_experts` skips.
    out_TD = _run_experts(everyone(x_TD), everyone(gates_Tk), everyone(chosen_Tk) - first, here, form)
    out_TD = jax.lax.psum(jax.lax.psum_scatter(out_TD, "expert", tiled=True), "tensor")
    return out_TD.astype(x_BTD.dtype).reshape(x_BTD.shape), Routing(chosen_Tk.reshape(replay_BTk.shape), stats)


def _flat(x_BTk: Array) -> Array:
    return x_BTk.reshape(-1, x_BTk.shape[-1])


def _vary(x: Array, axes: Iterable[str]) -> Array:
    """Says inside a shard_map that x may differ along these axes; its gradient is then summed over those that are new."""
    new = tuple(sorted(set(axes) - _varies(x)))
    return jax.lax.pcast(x, new, to="varying") if new else x


def _varies(x: Array) -> set[str]:
    """The mesh axes along which x may differ; none outside a shard_map."""
    return set(jax.typeof(x).manual_axis_type.varying)


# --- the router, and what is measured of it

STATS = ("tokens", "load", "mass", "z", "entropy")


def route(
    x_TD: Float[Array, "T D"],
    router_DE: Float[Array, "D E"],
    spec: MixtureSpec,
    valid_T: Bool[Array, "T"],
    replay_Tk: Int[Array, "T k"],
) -> tuple[Float[Array, "T k"], Int[Array, "T k"], dict[str, Array]]:
    """Weight and number of each token's experts (0 and -1 at padding), and the sums of `Routing`; see `mix_experts`.

    Of equal probabilities the expert of the lower number is chosen.
    """
    # An accelerator's default would round float32 inputs to bfloat16 and choose other experts than a CPU.
    wide = x_TD.astype(jnp.float32), router_DE.astype(jnp.float32)
    logits_TE = jnp.einsum("TD,DE->TE", *wide, precision=jax.lax.Precision.HIGHEST)
    lse_T = jax.nn.logsumexp(logits_TE, axis=-1)
    probs_TE = jnp.exp(logits_TE - lse_T[:, None])
    own_Tk = jax.lax.top_k(probs_TE, spec.per_token)[1]
    chosen_Tk = jnp.where(jnp.all(replay_Tk >= 0, axis=-1, keepdims=True), replay_Tk, own_Tk)
    gates_Tk = jnp.take_along_axis(probs_TE, chosen_Tk, axis=-1)
    if spec.normalise:
        gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdims=True)
    hits_TkE = (chosen_Tk[..., None] == jnp.arange(spec.experts)) & valid_T[:, None, None]
    weight_T = valid_T.astype(jnp.float32)
    stats = {
        "tokens": weight_T.sum(),
        "load": hits_TkE.sum((0, 1)).astype(jnp.float32),
        "mass": jnp.where(valid_T[:, None], probs_TE, 0).sum(0),
        "z": (lse_T**2 * weight_T).sum(),
        "entropy": ((lse_T - (probs_TE * logits_TE).sum(-1)) * weight_T).sum(),
    }
    return jnp.where(valid_T[:, None], gates_Tk, 0), jnp.where(valid_T[:, None], chosen_Tk, -1).astype(jnp.int32), stats


def aux_loss(stats: Mapping[str, Array], spec: MixtureSpec) -> Float[Array, "..."]:
    """E sum_e f_e P_e, with f_e the choices of expert e per token and P_e its mean router probability.

    Fedus et al. 2021 (Switch Transformer), eq. 4-6, for k choices per token as transformers' load_balancing_loss_func has it:
    k when perfectly balanced. Stats summed over layers give that function's loss over these layers; stats stacked by layer
    give one loss per layer. The gradient flows through P alone. It is linear in `mass`, so with `load` and `tokens` of the
    whole batch and `mass` of one micro-batch, the losses of all micro-batches sum to that of the batch.
    """
    tokens = jnp.maximum(jax.lax.stop_gradient(stats["tokens"]), 1)
    load = jax.lax.stop_gradient(stats["load"])
    return spec.experts * jnp.sum(load * stats["mass"], axis=-1) / tokens**2


def z_loss(stats: Mapping[str, Array]) -> Float[Array, "..."]:
    """The mean over tokens of (log sum_e exp logit_e)^2, which keeps logits small (Zoph et al. 2022, ST-MoE, eq. 5)."""
    return stats["z"] / jnp.maximum(jax.lax.stop_gradient(stats["tokens"]), 1)


def balance(stats: Mapping[str, Any]) -> dict[str, float]:
    """Host-side metrics of stats, which may be stacked by layer; all zero where there were no tokens.

    router/max_load: of the busiest expert over the mean, in the worst layer; 1 is perfect balance, E / k all on the same.
    router/dead_frac: share of the experts that nobody chose.    router/entropy: per token, in nats; ln E is uniform.
    """
    load, tokens = np.asarray(stats["load"], np.float64), float(np.sum(stats["tokens"]))
    if not tokens:
        return {"router/max_load": 0.0, "router/dead_frac": 0.0, "router/entropy": 0.0}
    return {
        "router/max_load": float((load.max(-1) / np.maximum(load.mean(-1), 1e-9)).max()),
        "router/dead_frac": float((load == 0).mean()),
        "router/entropy": float(np.sum(stats["entropy"])) / tokens,
    }


# --- the experts


def _run_experts(x_TD: Array, gates_Tk: Array, chosen_Tk: Array, weights: ExpertWeights, form: _Form) -> Float[Array, "T D"]:
    """The weighted sum of the experts that are here, in float32; a number out of their range belongs to nobody here."""
    dense = form.dense
    if dense is None:
        waits = form.platform != "cpu" or form.spec.experts <= 2 * form.spec.per_token
        dense = waits and x_TD.shape[0] <= DENSE_TOKENS
    gate, up, down = (w.astype(x_TD.dtype) for w in weights[1:])
    if dense:
        return _run_dense(x_TD, gates_Tk, chosen_Tk, gate, up, down, "TD,FD->TF" if form.output_first else "TD,DF->TF")
    if form.output_first:
        gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    experts = gate.shape[0]
    owner_M = jnp.where((chosen_Tk >= 0) & (chosen_Tk < experts), chosen_Tk, experts).reshape(-1)
    order_M = jnp.argsort(owner_M, stable=True)
    place_Tk = jnp.argsort(order_M).reshape(chosen_Tk.shape)
    sizes_E = jnp.sum(owner_M[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    pairs_MD = _sort_pairs(x_TD, order_M, place_Tk)
    grouped = partial(grouped_dot, sizes_E=sizes_E, native=form.platform == "tpu")
    hidden_MF = jax.nn.silu(grouped(pairs_MD, gate)) * grouped(pairs_MD, up)
    out_TkD = _unsort_pairs(grouped(hidden_MF, down), order_M, place_Tk)
    return jnp.sum(out_TkD.astype(jnp.float32) * gates_Tk[..., None], axis=1)


def _run_dense(x_TD: Array, gates_Tk: Array, chosen_Tk: Array, gate: Array, up: Array, down: Array, into: str) -> Array:
    """All experts for all tokens, in the order of their numbers; a token that did not choose one adds an exact zero."""

    def add_expert(total_TD: Array, expert: tuple[Array, ...]) -> tuple[Array, None]:
        number, gate, up, down = expert
        share_T = jnp.sum(jnp.where(chosen_Tk == number, gates_Tk, 0), axis=1)
        hidden = jax.nn.silu(dot(into, x_TD, gate)) * dot(into, x_TD, up)
        return total_TD + share_T[:, None] * dot("TF,FD->TD", hidden.astype(x_TD.dtype), down), None

    start = _vary(jnp.zeros(x_TD.shape, jnp.float32), _varies(x_TD))
    return jax.lax.scan(add_expert, start, (jnp.arange(gate.shape[0]), gate, up, down))[0]


@jax.custom_vjp
def _sort_pairs(x_TD: Array, order_M: Array, place_Tk: Array) -> Array:
    """The token of each pair, in the order of experts. Backwards a gather and a sum: a scatter's order is not fixed on GPU."""
    return x_TD[order_M // place_Tk.shape[1]]


def _sort_forward(x_TD: Array, order_M: Array, place_Tk: Array) -> tuple[Array, Array]:
    return _sort_pairs(x_TD, order_M, place_Tk), place_Tk


def _sort_backward(place_Tk: Array, ct_MD: Array) -> tuple[Array, None, None]:
    return jnp.sum(ct_MD[place_Tk], axis=1, dtype=jnp.float32).astype(ct_MD.dtype), None, None


_sort_pairs.defvjp(_sort_forward, _sort_backward)


@jax.custom_vjp
def _unsort_pairs(y_MD: Array, order_M: Array, place_Tk: Array) -> Array:
    """The pairs of each token, from the order of experts; backwards the inverse permutation, again a gather."""
    return y_MD[place_Tk]


def _unsort_forward(y_MD: Array, order_M: Array, place_Tk: Array) -> tuple[Array, Array]:
    return y_MD[place_Tk], order_M


def _unsort_backward(order_M: Array, ct_TkD: Array) -> tuple[Array, None, None]:
    return ct_TkD.reshape(-1, ct_TkD.shape[-1])[order_M], None, None


_unsort_pairs.defvjp(_unsort_forward, _unsort_backward)


def grouped_dot(
    x_MD: Float[Array, "M D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, "E"], native: bool | None = None
) -> Float[Array, "M F"]:
    """Each row times the matrix of its group: the first sizes[0] rows times w[0], and so on; zero in rows of no group.

    Native is `jax.lax.ragged_dot`, a kernel of its own on TPU. On CPU, and on GPU unless flags that are still experimental
    find a cuDNN plan, XLA rewrites it into a masked product over all E groups, with E copies of x: for M = 8192, D = 512,
    F = 256, E = 64 that took 1.4 s and 1 GiB on two CPU cores, where one matmul of that size takes 15 ms. Elsewhere than on
    TPU rows are therefore multiplied in blocks, at most MAX_BLOCK rows of one group at a time: 50 ms and 24 MiB.
    """
    if jax.default_backend() == "tpu" if native is None else native:
        # What a kernel leaves in rows of no group is nobody's promise: zero, both ways.
        live_M1 = (jnp.arange(x_MD.shape[0]) < jnp.sum(sizes_E))[:, None]
        return jnp.where(live_M1, jax.lax.ragged_dot(jnp.where(live_M1, x_MD, 0), w_EDF, sizes_E), 0)
    return _block_dot(x_MD, w_EDF, sizes_E)


class _Blocks(NamedTuple):
    """Where blocks of rows lie: block i has up to `rows` rows of group[i] from start[i], and ends with the group at end[i]."""

    rows: int
    used: Array  # how many blocks the sizes need; the entries of others mean nothing
    group: Array
    start: Array
    end: Array


def _blocks(rows: int, sizes_E: Array) -> _Blocks:
    experts = sizes_E.shape[0]
    block = min(MAX_BLOCK, max(8, 1 << (max(rows // experts, 1) - 1).bit_length()))
    ends, counts = jnp.cumsum(sizes_E), -(-sizes_E // block)
    last = jnp.cumsum(counts)
    i = jnp.arange(rows // block + experts)
    group = jnp.minimum(jnp.sum(last <= i[:, None], axis=1), experts - 1)
    start = (ends - sizes_E)[group] + (i - (last - counts)[group]) * block
    return _Blocks(block, last[-1], group, start, ends[group])


@jax.custom_vjp
def _block_dot(x_MD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    return _multiply_blocks("MD,DF->MF", x_MD, w_EDF, sizes_E, w_EDF.shape[2])


def _block_forward(x_MD: Array, w_EDF: Array, sizes_E: Array) -> tuple[Array, tuple[Array, ...]]:
    return _block_dot(x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


def _block_backward(saved: tuple[Array, ...], ct_MF: Array) -> tuple[Array, Array, None]:
    x_MD, w_EDF, sizes_E = saved
    d_x = _multiply_blocks("MF,DF->MD", ct_MF, w_EDF, sizes_E, x_MD.shape[1])
    blocks = _blocks(x_MD.shape[0], sizes_E)
    x, ct = (jnp.pad(a, ((0, blocks.rows), (0, 0))) for a in (x_MD, ct_MF))

    def add_block(i: Array, d_w: Array) -> Array:
        start = blocks.start[i]
        own = (start + jnp.arange(blocks.rows) < blocks.end[i])[:, None]  # the block may reach into the next group
        x_i = jnp.where(own, jax.lax.dynamic_slice_in_dim(x, start, blocks.rows), 0)
        ct_i = jnp.where(own, jax.lax.dynamic_slice_in_dim(ct, start, blocks.rows), 0)
        return d_w.at[blocks.group[i]].add(dot("MD,MF->DF", x_i, ct_i))

    zero = _vary(jnp.zeros(w_EDF.shape, jnp.float32), _varies(w_EDF))
    return d_x, jax.lax.fori_loop(0, blocks.used, add_block, zero).astype(w_EDF.dtype), None


_block_dot.defvjp(_block_forward, _block_backward)


def _multiply_blocks(equation: str, x: Array, w: Array, sizes_E: Array, width: int) -> Array:
    """All blocks from the first to the last: what one writes beyond its group's end, the next group overwrites."""
    blocks, rows = _blocks(x.shape[0], sizes_E), x.shape[0]
    padded = jnp.pad(x, ((0, blocks.rows), (0, 0)))

    def multiply(i: Array, out: Array) -> Array:
        start, w_i = blocks.start[i], w[blocks.group[i]]
        out_i = dot(equation, jax.lax.dynamic_slice_in_dim(padded, start, blocks.rows), w_i)
        return jax.lax.dynamic_update_slice_in_dim(out, out_i.astype(out.dtype), start, 0)

    zero = _vary(jnp.zeros((rows + blocks.rows, width), x.dtype), _varies(x))
    out = jax.lax.fori_loop(0, blocks.used, multiply, zero)[:rows]
    return jnp.where((jnp.arange(rows) < jnp.sum(sizes_E))[:, None], out, 0)
