"""How the learner's weights become an engine's: a layer at a time, so that beside both there is never more than one part.

A part is one weight that is in no layer, as the embedding, or a layer: {"blocks": {name: [1, ...]}}, still stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxagent.models.adapters import merged
from jaxagent.models.transformer import DecoderConfig, Params, experts_output_first, heads_first, joined, output_first
from jaxagent.sharding import DeviceMesh, layer_of, layers_of

# A TPU would bring a small stack into fast memory whole before a program that takes one layer of it.
COMPILE: dict[str, dict[str, bool | int | str]] = {"tpu": {"xla_max_cross_program_prefetches": 0}}
LANES = 128  # of a TPU's registers


def takes_output_first(config: DecoderConfig, mesh: DeviceMesh) -> bool:
    """Whether the sampler's copy holds linear maps as [out, in]: on a CPU, and not of experts, whose products are others."""
    return mesh.platform == "cpu" and not config.experts


def takes_experts_output_first(config: DecoderConfig, mesh: DeviceMesh) -> bool:
    """Whether the sampler's copy holds gate and up of experts as [E, F, D].

    On TPUs whose part of F ends within the lanes of a register: the loop over tokens would bring all experts into that order, a
    copy of them, padded.
    """
    return mesh.platform == "tpu" and bool(config.experts) and bool(config.ffn_width // mesh.size["tensor"] % LANES)


def takes_joined(mesh: DeviceMesh) -> bool:
    """Whether the sampler's copy holds maps of one input as one matrix: on a GPU that has all of the heads."""
    return mesh.platform == "gpu" and mesh.size["tensor"] == 1


class Publish:
    """Makes the weights of an engine on one replica, cast and laid out as its programs read them.

    Adapters are merged here, so that decoding costs what it does without them.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, mesh: DeviceMesh):
        form: Callable[[Params], Params] = lambda layer: layer  # noqa: E731
        if takes_experts_output_first(config, mesh):
            form = lambda layer: heads_first(experts_output_first(layer))  # noqa: E731
        elif mesh.platform == "tpu":
            form = heads_first
        elif takes_joined(mesh):
            form = joined
        elif takes_output_first(config, mesh):
            form = output_first

        # Real copies: an output that is its own input would die when the learner donates its weights.
        def single(weight: Array) -> Array:
            return jnp.array(weight, dtype, copy=True)

        def layer(blocks: Params, at: Int[Array, ""]) -> Params:
            one = merged({"blocks": layer_of(blocks, at)}, config)["blocks"]
            return form({name: jnp.array(w[0], dtype, copy=True) for name, w in one.items()})

        self.single: Any = jax.jit(single)
        self.layer: Any = jax.jit(layer, compiler_options=COMPILE.get(mesh.platform))

    def __call__(self, params: Params) -> Params:
        """All at once, of weights that lie on the replica."""
        incoming = Incoming(self)
        incoming.add(params)
        return incoming.whole()

    def shapes(self, params: Params) -> Params:
        """The same of shapes."""
        singles = {name: self.single.eval_shape(w) for name, w in params.items() if name != "blocks"}
        layer = self.layer.eval_shape(params["blocks"], np.int32(0))
        return {**singles, "blocks": (layer,) * layers_of(params["blocks"])}


class Incoming:
    """An engine's weights while they come in."""

    def __init__(self, publish: Publish):
        self._publish = publish
        self._singles: Params = {}
        self._layers: list[Params] = []

    def add(self, part: Params) -> None:
        """Takes a part, or several in one; layers come in their order."""
        self._singles |= {name: self._publish.single(w) for name, w in part.items() if name != "blocks"}
        blocks = part.get("blocks", {})
        self._layers += [self._publish.layer(blocks, np.int32(at)) for at in range(layers_of(blocks))]

    def whole(self) -> Params:
        return {**self._singles, "blocks": tuple(self._layers)}
