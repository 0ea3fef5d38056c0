"""The one decoder, in Flax NNX. A family differs by its `DecoderConfig` only.

NNX defines, initialises, loads and saves. Every hot jit takes the pure dict of weights (`params_of`) and merges the module
inside the trace, which costs nothing at run time. Weights of all layers are stacked in the first dimension: training scans
over them, the engine has each by itself (engine/publish.py), since slicing inside a token loop would copy for every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxagent.models.attention import Attend, AttentionSpec, dot, packed, soft_cap
from jaxagent.models.layers import ACTIVATIONS, constant, look_up, project, rms_norm, weight
from jaxagent.models.lora import LoraSpec
from jaxagent.models.moe import ExpertWeights, MixtureSpec, Routing, mix_experts
from jaxagent.models.rope import PLAIN, RopeScaling, Rotation, rotary, rotate
from jaxagent.sharding import DeviceMesh

Params = dict[str, Any]
Mix = Callable[..., tuple[Array, Routing]]  # of states and an ExpertWeights


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A layer's weights are put together again backwards: kept whole for all layers, they are the whole model."""
    return primitive.name not in ("sharding_constraint", "all_gather")


# What a layer keeps for its backward pass; the rest is computed again. Least memory last.
REMAT: dict[str, Any] = {
    "none": _all_but_gathered,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the output of every projection
    "attention": jax.checkpoint_policies.save_only_these_names("attention"),  # what attention needs
    "full": jax.checkpoint_policies.nothing_saveable,  # its input only
}

# The linear maps of a layer: what a low-rank adapter may be put on.
LINEARS = {
    "q": "BTD,DNH->BTNH",
    "k": "BTD,DNH->BTNH",
    "v": "BTD,DNH->BTNH",
    "o": "BTNH,NHD->BTD",
    "gate": "BTD,DF->BTF",
    "up": "BTD,DF->BTF",
    "down": "BTF,FD->BTD",
}
MLP_LINEARS = ("gate", "up", "down")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder. Letters as in docs/HOUSE.md, section 6."""

    vocab_size: int  # V
    width: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_width: int  # H
    ffn_width: int  # F, of an expert where there are experts
    rope_theta: float = 1e6
    rope_scaling: RopeScaling = PLAIN
    norm_eps: float = 1e-6
    tied_head: bool = True
    value_head: bool = False  # a critic: one number per token in place of logits
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    sliding: tuple[bool, ...] = ()  # which layers see only the window; () is none
    window: int = 0
    local_rope_theta: float = 0.0  # of sliding layers, without scaling; 0 is as all others
    attn_scale: float = 0.0  # of the scores; 0 is H ** -0.5
    attn_softcap: float = 0.0  # 0 is off
    logit_softcap: float = 0.0
    plus_one_norms: bool = False  # norms store their distance from one
    post_norms: bool = False  # attention and feed-forward are normed again before they are added
    scaled_embed: bool = False  # the embedding is multiplied by sqrt(D)
    experts: int = 0  # E; 0 is a dense feed-forward
    experts_per_token: int = 0
    normalised_experts: bool = False  # the weights of a token's experts sum to one
    max_positions: int = 32768
    lora: LoraSpec | None = None
    family: str = "qwen3"  # which file of models/ reads and writes its checkpoints

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for the rotary embedding, got {self.head_width}")
        if self.sliding and len(self.sliding) != self.layers:
            raise ValueError(f"sliding must name every one of the {self.layers} layers, got {len(self.sliding)}")
        if any(self.sliding) and self.window < 1:
            raise ValueError(f"sliding layers need a window of at least 1, got {self.window}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token must be between 1 and experts={self.experts}, got {self.experts_per_token}")
        if self.experts and self.lora and (refused := [name for name in MLP_LINEARS if name in self.lora.targets]):
            raise ValueError(
                f"lora.targets: {', '.join(refused)} are the experts of a mixture here, and adapters go on attention only "
                "(q_proj, k_proj, v_proj, o_proj)"
            )

    @property
    def attention(self) -> AttentionSpec:
        window = self.window if any(self.sliding) else 0
        return AttentionSpec(self.attn_scale or self.head_width**-0.5, self.attn_softcap, window)

    @property
    def mixture(self) -> MixtureSpec:
        return MixtureSpec(self.experts, self.experts_per_token, self.normalised_experts)

    def slides(self, layer: int) -> bool:
        return bool(self.sliding) and self.sliding[layer]

    def rotations(self, pos_BT: Int[Array, "B T"]) -> tuple[Rotation, Rotation]:
        """Those of full and of sliding layers, which are the same array where the model has one base."""
        full = rotary(pos_BT, self.head_width, self.rope_theta, self.rope_scaling)
        return full, rotary(pos_BT, self.head_width, self.local_rope_theta) if self.local_rope_theta else full


class Block(nnx.Module):
    """One layer, or with `stack=(L,)` the weights of all layers, to be scanned or sliced."""

    qkv: nnx.Param  # of an engine's copy whose maps are `joined`, as are the next two
    qkv_bias: nnx.Param
    gate_up: nnx.Param

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        c = config
        self.config = config
        # The engine's copy may hold linear maps as these functions lay them.
        self.output_first = self.heads_first = self.experts_output_first = self.joined = False
        ax = ("layers",) * len(stack)
        shrink = (2 * c.layers) ** -0.5  # keeps the residual stream's variance bounded at any depth
        into, out_of, norm = c.width**-0.5, (c.heads * c.head_width) ** -0.5 * shrink, 1.0 - c.plus_one_norms
        heads, kv_heads = (c.width, c.heads, c.head_width), (c.width, c.kv_heads, c.head_width)
        self.attn_norm = constant((*stack, c.width), (*ax, "vector"), norm)
        self.q = weight(rngs, (*stack, *heads), (*ax, "embed", "heads", "head"), into)
        self.k = weight(rngs, (*stack, *kv_heads), (*ax, "embed", "kv_heads", "head"), into)
        self.v = weight(rngs, (*stack, *kv_heads), (*ax, "embed", "kv_heads", "head"), into)
        self.o = weight(rngs, (*stack, *heads[1:], c.width), (*ax, "heads", "head", "embed"), out_of)
        if c.qkv_bias:
            self.q_bias = constant((*stack, *heads[1:]), (*ax, "heads", "head"), 0.0)
            self.k_bias = constant((*stack, *kv_heads[1:]), (*ax, "kv_heads", "head"), 0.0)
            self.v_bias = constant((*stack, *kv_heads[1:]), (*ax, "kv_heads", "head"), 0.0)
        if c.o_bias:
            self.o_bias = constant((*stack, c.width), (*ax, "vector"), 0.0)
        if c.qk_norm:
            self.q_norm = constant((*stack, c.head_width), (*ax, "head"), norm)
            self.k_norm = constant((*stack, c.head_width), (*ax, "head"), norm)
        self.mlp_norm = constant((*stack, c.width), (*ax, "vector"), norm)
        if c.post_norms:
            self.post_attn_norm = constant((*stack, c.width), (*ax, "vector"), norm)
            self.post_mlp_norm = constant((*stack, c.width), (*ax, "vector"), norm)
        of_all = (c.experts,) if c.experts else ()
        names = ("experts", "expert_embed") if c.experts else ("embed",)
        if c.experts:
            self.router = weight(rngs, (*stack, c.width, c.experts), (*ax, "embed", None), into)
        self.gate = weight(rngs, (*stack, *of_all, c.width, c.ffn_width), (*ax, *names, "ffn"), into)
        self.up = weight(rngs, (*stack, *of_all, c.width, c.ffn_width), (*ax, *names, "ffn"), into)
        down = (*ax, *names[:-1], "ffn", names[-1])
        self.down = weight(rngs, (*stack, *of_all, c.ffn_width, c.width), down, c.ffn_width**-0.5 * shrink)
        if c.lora:
            self._add_adapters(c.lora, rngs, len(stack))

    def _add_adapters(self, lora: LoraSpec, rngs: nnx.Rngs, stacked: int) -> None:
        """Low-rank factors beside every target: `a` small and random, `b` zero, so that they change nothing at first."""
        for name in lora.targets:
            kernel = getattr(self, name)
            shape, axes, inputs = kernel[...].shape, kernel.get_metadata()["axes"], stacked + input_dimensions(name)
            fan_in = 1
            for length in shape[stacked:inputs]:
                fan_in *= length
            a, b = (*shape[:inputs], lora.rank), (*shape[:stacked], lora.rank, *shape[inputs:])
            setattr(self, f"{name}_lora_a", weight(rngs, a, (*axes[:inputs], "rank"), (3 * fan_in) ** -0.5))
            setattr(self, f"{name}_lora_b", constant(b, (*axes[:stacked], "rank", *axes[inputs:]), 0.0))

    def _linear(self, name: str, x: Array) -> Array:
        if self.output_first:
            y = jnp.einsum("BTI,OI->BTO", x.reshape(*x.shape[:2], -1), getattr(self, name)[...])
            return y.reshape(*x.shape[:2], -1, self.config.head_width) if name in "qkv" else y
        if self.heads_first and name == "o":
            return project("BTI,IO->BTO", x.reshape(*x.shape[:2], -1), self.o[...])
        if self.heads_first and name in "qkv":
            return project("BTI,OI->BTO", x, getattr(self, name)[...]).reshape(*x.shape[:2], -1, self.config.head_width)
        equation, lora = LINEARS[name], self.config.lora
        y = project(equation, x, getattr(self, name)[...])
        if lora is None or name not in lora.targets:
            return y
        left, right, out = equation.replace("->", ",").split(",")
        inputs = right[: input_dimensions(name)]
        low = project(f"{left},{inputs}R->BTR", x, getattr(self, f"{name}_lora_a")[...])
        return y + lora.scale * project(f"BTR,R{right[len(inputs) :]}->{out}", low, getattr(self, f"{name}_lora_b")[...])

    def _qkv(self, h: Array) -> tuple[Array, ...]:
        c = self.config
        if not self.joined:
            q, k, v = (self._linear(name, h) for name in "qkv")
            return (q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]) if c.qkv_bias else (q, k, v)
        heads = project("BTI,IO->BTO", h, self.qkv[...]) + (self.qkv_bias[...] if c.qkv_bias else 0)
        return tuple(jnp.split(heads.reshape(*h.shape[:2], -1, c.head_width), (c.heads, c.heads + c.kv_heads), axis=2))

    def _norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, getattr(self, name)[...], self.config.norm_eps, self.config.plus_one_norms)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        ropes: tuple[Rotation, Rotation],
        attend: Attend,
        cache: Any,
        sliding: bool | Array = False,
        mix: Mix | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Routing | None]:
        """Returns the layer's output, its cache extended by `attend`, and where its tokens were routed to.

        Args:
            ropes: rotations of full and of sliding layers.
            sliding: whether this layer is a sliding one; data in a scan over mixed layers.
            mix: `mix_experts` with all but its input and its weights; None is one device.
        """
        c = self.config
        h = self._norm("attn_norm", x_BTD)
        q, k, v = self._qkv(h)
        if c.qk_norm:
            q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        if isinstance(sliding, bool):
            rope = ropes[sliding]
        else:
            rope = jax.tree.map(lambda full, local: jnp.where(sliding, local, full), *ropes) if c.local_rope_theta else ropes[0]
        late: tuple[Any, ...] = (rope,) if getattr(attend, "rotates", False) else ()
        if not late:
            q, k = rotate(q, *rope), rotate(k, *rope)
        out, cache = attend(q, k, v, cache, sliding, *late)
        out = self._linear("o", out)
        if c.o_bias:
            out = out + self.o_bias[...]
        x_BTD = x_BTD + (self._norm("post_attn_norm", out) if c.post_norms else out)
        out, routing = self._feed_forward(self._norm("mlp_norm", x_BTD), mix)
        return x_BTD + (self._norm("post_mlp_norm", out) if c.post_norms else out), cache, routing

    def _feed_forward(self, h: Array, mix: Mix | None) -> tuple[Array, Routing | None]:
        if self.config.experts:
            weights = ExpertWeights(self.router[...], self.gate[...], self.up[...], self.down[...])
            mix = mix or partial(mix_experts, spec=self.config.mixture, mesh=None)
            return mix(h, weights, output_first=self.experts_output_first)
        if self.joined:
            gate, up = jnp.split(project("BTI,IO->BTO", h, self.gate_up[...]), 2, axis=-1)
        else:
            gate, up = self._linear("gate", h), self._linear("up", h)
        return self._linear("down", ACTIVATIONS[self.config.activation](gate) * up), None


def input_dimensions(name: str) -> int:
    """How many dimensions of a layer's weight are summed over."""
    operands, out = LINEARS[name].split("->")
    return sum(letter not in out for letter in operands.split(",")[1])


class Decoder(nnx.Module):
    """Token embedding, `layers` blocks, final norm, and a head that may be the embedding itself."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        table = (config.vocab_size, config.width)
        self.embed = weight(rngs, table, ("vocab", "embed"), config.width**-0.5 if config.tied_head else 1.0)
        self.blocks = Block(config, rngs, stack=(config.layers,))
        self.norm = constant((config.width,), ("vector",), 1.0 - config.plus_one_norms)
        if config.value_head:
            self.value = constant((config.width,), ("vector",), 0.0)
        elif not config.tied_head:
            self.head = weight(rngs, table, ("vocab", "embed"), config.width**-0.5)

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        pos_BT: Int[Array, "B T"],
        attend: Attend,
        *,
        remat: str = "none",
        mesh: DeviceMesh | None = None,
        valid: Bool[Array, "B T"] | None = None,
        replay: Int[Array, "L B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """The normed output of the last layer, by a scan over the layers, and the routing of all layers; no cache is kept.

        Args:
            remat: a name of REMAT.
            mesh: over which activations are cut; None is one device.
            valid: false at padding, which no expert need compute.
            replay: the experts to use instead of the router's choice; -1 leaves it the choice.
        """
        c = self.config
        ropes = c.rotations(pos_BT)
        (graph, stacked), axes = params_of(self.blocks), logical_axes(self.blocks)
        own = {"router", "gate", "up", "down"} if c.experts else set()  # what mix_experts gathers itself
        mixed = any(c.sliding) and not all(c.sliding)
        mesh = mesh if mesh and mesh.mesh.size > 1 else None
        cut = mesh.constrain if mesh else lambda x, axes: x

        def layer(x: Array, given: tuple[Any, Array | None, Array | None]) -> tuple[Array, Routing | None]:
            weights, slides, chosen = given
            if mesh:
                weights = {name: w if name in own else mesh.gather(w, axes[name][1:]) for name, w in weights.items()}
            sliding = any(c.sliding) if slides is None else slides
            mix = partial(mix_experts, spec=c.mixture, mesh=mesh, valid_BT=valid, replay_BTk=chosen) if c.experts else None
            x, _, routing = nnx.merge(graph, weights)(x, ropes, attend, None, sliding, mix)
            return cut(x, ("rows", "length", None)), routing

        step = layer if remat == "none" and not mesh else jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
        x = cut(embed(self.embed[...], tokens_BT, c, mesh), ("rows", "length", None))
        with jax.named_scope("layers"):
            x, routing = jax.lax.scan(step, x, (stacked, jnp.asarray(c.sliding) if mixed else None, replay))
        return rms_norm(x, self.norm[...], c.norm_eps, c.plus_one_norms), routing

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in float32."""
        table = self.embed if self.config.tied_head else self.head
        return head_logits(table[...], hidden, self.config)

    def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of whole rows without padding: the plain forward that everything else must equal."""
        pos = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        attend = packed(jnp.ones_like(tokens_BT), self.config.attention)
        return self.logits(self.hidden(tokens_BT, pos, attend)[0])


def embed(
    table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], config: DecoderConfig, mesh: DeviceMesh | None = None
) -> Float[Array, "B T D"]:
    """The input of the first layer. Gemma's factor is rounded to the embedding's precision, as in transformers."""
    x = look_up(table_VD, tokens_BT, mesh if mesh and mesh.mesh.size > 1 else None)
    return x * jnp.asarray(config.width**0.5, x.dtype) if config.scaled_embed else x


def head_logits(table_VD: Float[Array, "V D"], hidden: Float[Array, "... D"], config: DecoderConfig) -> Float[Array, "... V"]:
    return soft_cap(dot("...D,VD->...V", hidden, table_VD), config.logit_softcap)


Policy = Decoder


def params_of(policy: nnx.Module) -> tuple[Any, Params]:
    """Splits a policy into its static graph and the pure dict of its weights; `nnx.merge` undoes it."""
    graph, state = nnx.split(policy)
    return graph, nnx.to_pure_dict(state)


def logical_axes(policy: nnx.Module) -> Params:
    """The names of every weight's dimensions, in the structure of its params."""
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()["axes"], nnx.state(policy), is_leaf=_is_variable))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def head_table(params: Params, config: DecoderConfig) -> Float[Array, "V D"]:
    """The weights of the output head, which may be the embedding."""
    return params["embed"] if config.tied_head else params["head"]


def output_first(layer: Params) -> Params:
    """A layer's linear maps as matrices [out, in]: from memory, a CPU multiplies a few dozen rows with these fastest."""
    inside = {name: math.prod(layer[name].shape[: input_dimensions(name)]) for name in LINEARS}
    return {**layer, **{name: layer[name].reshape(inside[name], -1).T for name in LINEARS}}


def heads_first(layer: Params) -> Params:
    """A layer's maps of attention as matrices [heads, width], into which a TPU's loop over tokens would copy them."""
    q, k, v = (layer[name].reshape(layer[name].shape[0], -1).T for name in "qkv")
    return {**layer, "q": q, "k": k, "v": v, "o": layer["o"].reshape(-1, layer["o"].shape[-1])}


def experts_output_first(layer: Params) -> Params:
    """Gate and up of a layer's experts as [E, F, D]."""
    return {**layer, **{name: layer[name].swapaxes(1, 2) for name in ("gate", "up")}}


def joined(layer: Params) -> Params:
    """A layer's maps with the same input as one matrix: queries, keys and values, and gate and up unless experts have them.

    XLA for GPUs makes one product of several by joining their weights within it, which takes twice the time.
    """
    rest = dict(layer)
    parts = {"qkv": [rest.pop(name) for name in "qkv"]}
    parts["qkv"] = [w.reshape(w.shape[0], -1) for w in parts["qkv"]]
    if "q_bias" in rest:
        parts["qkv_bias"] = [rest.pop(f"{name}_bias").reshape(-1) for name in "qkv"]
    if rest["gate"].ndim == 2:
        parts["gate_up"] = [rest.pop(name) for name in ("gate", "up")]
    return {**rest, **{name: jnp.concatenate(each, axis=-1) for name, each in parts.items()}}


def join(block: Block) -> None:
    """Makes an abstract block take the weights that `joined` gives."""
    block.joined, block.qkv = True, block.q
    del block.q, block.k, block.v
    if block.config.qkv_bias:
        block.qkv_bias = block.q_bias
        del block.q_bias, block.k_bias, block.v_bias
    if not block.config.experts:
        block.gate_up = block.gate
        del block.gate, block.up
