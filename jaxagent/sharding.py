"""Meshes, and the one table from the names of dimensions to mesh axes. Also how weights reach the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "expert", "context", "tensor")  # outermost first: what talks most lies nearest together

# Every logical dimension of weights, activations and caches, and the mesh axes that cut it.
RULES: dict[str | None, Any] = {
    "rows": ("data", "fsdp", "expert"),  # packed training rows
    "length": "context",  # positions of a row
    "vocab": "tensor",
    "embed": ("fsdp", "expert", "context"),  # of weights: where tokens are cut, weights are cut too
    "heads": "tensor",
    "kv_heads": "tensor",  # replicated where there are fewer of them than the axis is long
    "ffn": "tensor",
    "experts": "expert",
    "expert_embed": ("fsdp", "context"),
    "head": None,
    "vector": None,  # of norms and of biases of the residual stream: too small to be worth cutting
    "rank": None,  # of a low-rank adapter
    "layers": None,
    None: None,
}


# Without these the compiler computes nothing while it gathers weights on v5p and v6e; on v5e it needs no telling.
OVERLAP = dict.fromkeys(
    (
        "xla_enable_async_all_gather",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
    ),
    "true",
)
CUT_FOR_STORAGE = ("embed", "expert_embed")  # dimensions of weights that are put together again to be computed with


class DeviceMesh:
    """A mesh with the axes of `AXES` and the placements that follow from `RULES`."""

    def __init__(self, devices: np.ndarray):
        """Args: devices: an array with one dimension per axis of `AXES`."""
        self.mesh = Mesh(devices, AXES)
        self.size = dict(zip(AXES, devices.shape, strict=True))

    @property
    def platform(self) -> str:
        """Of its devices, cpu, gpu or tpu: what is compiled for, which need not be what compiles."""
        return self.mesh.devices.flat[0].platform

    @property
    def compiler_options(self) -> dict[str, str] | None:
        """What a jit over the mesh is to be compiled with."""
        return OVERLAP if self.platform == "tpu" and self.mesh.size > 1 else None

    @classmethod
    def build(
        cls,
        data: int = 0,
        fsdp: int = 1,
        tensor: int = 1,
        expert: int = 1,
        context: int = 1,
        devices: Sequence[jax.Device] | None = None,
    ) -> DeviceMesh:
        """A mesh over `devices`, or over all there are; data = 0 takes the devices that the other axes leave."""
        if devices is None:  # those of a process follow each other, so that it holds whole rows and whole replicas
            devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        asked = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert, "context": context}
        cut = fsdp * tensor * expert * context
        if data < 0 or min(fsdp, tensor, expert, context) < 1:
            named = ", ".join(f"{name}={size}" for name, size in asked.items())
            raise ValueError(f"mesh axes are at least 1 (data may be 0 for what is left), got {named}")
        if len(devices) % cut or (data and data * cut > len(devices)):
            named = " x ".join(
                f"{name}={size}" for name, size in asked.items() if size != 1 or name in ("data", "fsdp", "tensor")
            )
            raise ValueError(
                f"mesh {named} does not fit {len(devices)} devices: the axes but data must divide their number, and the "
                "product may not exceed it (data=0 takes what is left)"
            )
        asked["data"] = data or len(devices) // cut
        shape = tuple(asked[name] for name in AXES)
        return cls(np.asarray(devices[: math.prod(shape)]).reshape(shape))

    def replicas(self) -> Iterator[DeviceMesh]:
        """One mesh per place that holds a whole copy of the weights: only `tensor` cuts a replica."""
        for row in self.mesh.devices.reshape(-1, self.size["tensor"]):
            yield DeviceMesh(row.reshape(1, 1, 1, 1, -1))

    def parts(self, axis: str | None) -> int:
        """Into how many parts the table cuts a logical dimension."""
        cut = RULES[axis] or ()
        return math.prod(self.size[name] for name in ((cut,) if isinstance(cut, str) else cut))

    def spec(self, axes: tuple[str | None, ...] = (), shape: tuple[int, ...] | None = None) -> PartitionSpec:
        """How the mesh cuts an array whose dimensions have these logical names; () replicates.

        Args:
          shape: of the array, where it has key heads: fewer of them than the tensor axis is long are replicated.
        """
        lengths = shape or (None,) * len(axes)
        return PartitionSpec(*(None if self._whole(a, n) else RULES[a] for a, n in zip(axes, lengths, strict=False)))

    def _whole(self, axis: str | None, length: int | None) -> bool:
        return axis == "kv_heads" and length is not None and self.size["tensor"] % length == 0 and length < self.size["tensor"]

    def sharding(self, axes: tuple[str | None, ...] = (), shape: tuple[int, ...] | None = None) -> NamedSharding:
        """The placement of an array by `spec`."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Says inside a jit how an activation is cut; of a mesh of one device, nothing."""
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def gather(self, weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Inside a jit: a weight with the dimensions whole that are cut for storage only; its gradient is cut as it is.

        Said once for all uses of a weight; otherwise XLA gathers it for every product again, forward and backward.
        """
        if self.mesh.size == 1 or not set(axes) & set(CUT_FOR_STORAGE):
            return weight
        whole = tuple(None if axis in CUT_FOR_STORAGE else axis for axis in axes)
        return _gather(weight, self.sharding(whole, weight.shape), self.sharding(axes, weight.shape))

    def per_device(self, f: Callable[..., Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Callable[..., Any]:
        """`f` on every device's own parts of its arguments. Inside, collectives name the mesh axes.

        Args:
          inputs: the logical names of each argument's dimensions.
          outputs: of each result's; or of the only result's.
        """
        several = bool(outputs) and isinstance(outputs[0], tuple)
        results = tuple(self.spec(axes) for axes in outputs) if several else self.spec(outputs)
        specs = tuple(self.spec(axes) for axes in inputs)
        # Its check of replication knows no collective over several axes, and what comes of them here is by construction.
        return jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)

    def place(self, tree: Any, axes: tuple[str | None, ...] = ()) -> Any:
        """Puts every array of a tree onto the mesh, all by the same axes."""
        return jax.tree.map(lambda x: jax.device_put(x, self.sharding(axes, x.shape)), tree)

    def check(self, tree: Any, axes_tree: Any) -> None:
        """Raises ValueError where the mesh cuts a dimension of a tree's arrays into unequal parts."""

        def check_one(path: tuple[Any, ...], x: Any, axes: tuple[str | None, ...]) -> None:
            for axis, length in zip(axes, x.shape, strict=True):
                parts = 1 if self._whole(axis, length) else self.parts(axis)
                if length % parts:
                    name, cut = ".".join(str(entry.key) for entry in path), RULES[axis]
                    cut = cut if isinstance(cut, str) else " x ".join(c for c in cut if self.size[c] > 1)
                    raise ValueError(f"{name}: dimension {axis!r} of {length} cannot be cut by mesh {cut}={parts}")

        jax.tree_util.tree_map_with_path(check_one, tree, axes_tree)

    def shardings(self, axes_tree: Any, shapes: Any) -> Any:
        """A tree of placements from a tree of axis names, as `models.transformer.logical_axes` gives it, and its arrays."""
        return jax.tree.map(lambda x, axes: self.sharding(axes, x.shape), shapes, axes_tree)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, whole: NamedSharding, cut: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, whole)


def _gather_forward(x: jax.Array, whole: NamedSharding, cut: NamedSharding) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(x, whole), None


def _gather_backward(whole: NamedSharding, cut: NamedSharding, _: None, ct: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(ct, cut),)


_gather.defvjp(_gather_forward, _gather_backward)


def layers_of(blocks: dict[str, Any]) -> int:
    """How many layers are stacked."""
    return next(iter(blocks.values())).shape[0] if blocks else 0


def layer_of(blocks: dict[str, Any], at: jax.Array) -> dict[str, Any]:
    """One of stacked layers, still stacked: [1, ...].

    Args:
        at: which; as data, so that what is done to the slice is not done to all layers first.
    """
    return {name: jax.lax.dynamic_slice_in_dim(w, at, 1) for name, w in blocks.items()}
