"""A mixture of experts, every expert computed for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclass(frozen=True)
class MixtureSpec:
    experts: int
    per_token: int
    normalise: bool


class ExpertWeights(NamedTuple):
    router_DE: Array
    gate_EDF: Array
    up_EDF: Array
    down_EFD: Array


class Routing(NamedTuple):
    experts_BTk: Array
    stats: dict[str, Array]


def mix_experts(
    x_BTD: Array, weights: ExpertWeights, spec: MixtureSpec, mesh: Any = None, *, valid_BT: Any = None, replay_BTk: Any = None
) -> tuple[Array, Routing]:
    probs = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x_BTD, weights.router_DE).astype(jnp.float32))
    chosen = jax.lax.top_k(probs, spec.per_token)[1] if replay_BTk is None else replay_BTk
    share = jnp.take_along_axis(probs, chosen, -1)
    share = share / share.sum(-1, keepdims=True) if spec.normalise else share
    combine = jnp.sum(jax.nn.one_hot(chosen, spec.experts) * share[..., None], -2)
    h = jax.nn.silu(jnp.einsum("BTD,EDF->BTEF", x_BTD, weights.gate_EDF)) * jnp.einsum("BTD,EDF->BTEF", x_BTD, weights.up_EDF)
    return jnp.einsum("BTEF,EFD,BTE->BTD", h, weights.down_EFD, combine.astype(x_BTD.dtype)), Routing(chosen, {})
