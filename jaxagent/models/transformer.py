"""The one decoder, in Flax NNX. A family differs by its `DecoderConfig` only.

NNX defines, initialises, loads and saves. Every hot jit takes the pure dict of weights (`params_of`) and merges the module
inside the trace, which costs nothing at run time. Weights of all layers are stacked in the first dimension: training scans
over them, the engine slices them once per publish (`unstack`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxagent.models.attention import Attend, dot, packed
from jaxagent.models.layers import constant, project, rms_norm, rotary, rotate, weight

Params = dict[str, Any]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder. Letters as in docs/HOUSE.md, section 6."""

    vocab_size: int  # V
    width: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_width: int  # H
    ffn_width: int  # F
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied_head: bool = True
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    max_positions: int = 32768
    family: str = "qwen3"  # which file of models/ reads and writes its checkpoints

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for the rotary embedding, got {self.head_width}")


class Block(nnx.Module):
    """One layer, or with `stack=(L,)` the weights of all layers, to be scanned or sliced."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        c = config
        self.config = config
        ax = ("layers",) * len(stack)
        shrink = (2 * c.layers) ** -0.5  # keeps the residual stream's variance bounded at any depth
        into, out_of = c.width**-0.5, (c.heads * c.head_width) ** -0.5 * shrink
        heads, kv_heads = (c.width, c.heads, c.head_width), (c.width, c.kv_heads, c.head_width)
        self.attn_norm = constant((*stack, c.width), (*ax, "embed"), 1.0)
        self.q = weight(rngs, (*stack, *heads), (*ax, "embed", "heads", "head"), into)
        self.k = weight(rngs, (*stack, *kv_heads), (*ax, "embed", "kv_heads", "head"), into)
        self.v = weight(rngs, (*stack, *kv_heads), (*ax, "embed", "kv_heads", "head"), into)
        self.o = weight(rngs, (*stack, *heads[1:], c.width), (*ax, "heads", "head", "embed"), out_of)
        if c.qkv_bias:
            self.q_bias = constant((*stack, *heads[1:]), (*ax, "heads", "head"), 0.0)
            self.k_bias = constant((*stack, *kv_heads[1:]), (*ax, "kv_heads", "head"), 0.0)
            self.v_bias = constant((*stack, *kv_heads[1:]), (*ax, "kv_heads", "head"), 0.0)
        if c.qk_norm:
            self.q_norm = constant((*stack, c.head_width), (*ax, "head"), 1.0)
            self.k_norm = constant((*stack, c.head_width), (*ax, "head"), 1.0)
        self.mlp_norm = constant((*stack, c.width), (*ax, "embed"), 1.0)
        self.gate = weight(rngs, (*stack, c.width, c.ffn_width), (*ax, "embed", "ffn"), into)
        self.up = weight(rngs, (*stack, c.width, c.ffn_width), (*ax, "embed", "ffn"), into)
        self.down = weight(rngs, (*stack, c.ffn_width, c.width), (*ax, "ffn", "embed"), c.ffn_width**-0.5 * shrink)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], rope: tuple[Array, Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the layer's output and its cache, extended by `attend`."""
        c = self.config
        h = rms_norm(x_BTD, self.attn_norm[...], c.norm_eps)
        q, k, v = (project("BTD,DNH->BTNH", h, w[...]) for w in (self.q, self.k, self.v))
        if c.qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        if c.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], c.norm_eps), rms_norm(k, self.k_norm[...], c.norm_eps)
        out, cache = attend(rotate(q, *rope), rotate(k, *rope), v, cache)
        x_BTD = x_BTD + project("BTNH,NHD->BTD", out, self.o[...])
        h = rms_norm(x_BTD, self.mlp_norm[...], c.norm_eps)
        gated = jax.nn.silu(project("BTD,DF->BTF", h, self.gate[...])) * project("BTD,DF->BTF", h, self.up[...])
        return x_BTD + project("BTF,FD->BTD", gated, self.down[...]), cache


class Decoder(nnx.Module):
    """Token embedding, `layers` blocks, final norm, and a head that may be the embedding itself."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        table = (config.vocab_size, config.width)
        self.embed = weight(rngs, table, ("vocab", "embed"), config.width**-0.5 if config.tied_head else 1.0)
        self.blocks = Block(config, rngs, stack=(config.layers,))
        self.norm = constant((config.width,), ("embed",), 1.0)
        if not config.tied_head:
            self.head = weight(rngs, table, ("vocab", "embed"), config.width**-0.5)

    def hidden(
        self, tokens_BT: Int[Array, "B T"], pos_BT: Int[Array, "B T"], attend: Attend, *, remat: bool = False
    ) -> Float[Array, "B T D"]:
        """The normed output of the last layer, by a scan over the layers; no cache is kept."""
        rope = rotary(pos_BT, self.config.head_width, self.config.rope_theta)
        graph, stacked = nnx.split(self.blocks)

        def layer(x: Array, weights: Any) -> tuple[Array, None]:
            return nnx.merge(graph, weights)(x, rope, attend, None)[0], None

        step = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(step, self.embed[...][tokens_BT], stacked)
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in float32."""
        table = self.embed if self.config.tied_head else self.head
        return dot("...D,VD->...V", hidden, table[...])

    def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of whole rows without padding: the plain forward that everything else must equal."""
        pos = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        return self.logits(self.hidden(tokens_BT, pos, packed(jnp.ones_like(tokens_BT))))


Policy = Decoder


def params_of(policy: Decoder) -> tuple[Any, Params]:
    """Splits a policy into its static graph and the pure dict of its weights; `nnx.merge` undoes it."""
    graph, state = nnx.split(policy)
    return graph, nnx.to_pure_dict(state)


def logical_axes(policy: Decoder) -> Params:
    """The names of every weight's dimensions, in the structure of its params."""
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()["axes"], nnx.state(policy), is_leaf=_is_variable))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def head_table(params: Params, config: DecoderConfig) -> Float[Array, "V D"]:
    """The weights of the output head, which may be the embedding."""
    return params["embed"] if config.tied_head else params["head"]


def unstack(params: Params, layers: int) -> Params:
    """Stacked weights as one entry per layer: slicing them inside a token loop would copy them for every token."""
    blocks = tuple(jax.tree.map(lambda w: w[i], params["blocks"]) for i in range(layers))  # noqa: B023 (used at once)
    return {**params, "blocks": blocks}
