"""Meshes, and the one table from the names of dimensions to mesh axes. Also how weights reach the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

# Every logical dimension of weights, activations and caches, and the mesh axes that cut it.
RULES: dict[str | None, Any] = {
    "rows": ("data", "fsdp"),  # packed training rows
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "head": None,
    "layers": None,
    None: None,
}


class DeviceMesh:
    """A mesh with the axes of `AXES` and the placements that follow from `RULES`."""

    def __init__(self, devices: np.ndarray):
        """Args: devices: an array of shape [data, fsdp, tensor]."""
        self.mesh = Mesh(devices, AXES)
        self.size = dict(zip(AXES, devices.shape, strict=True))

    @classmethod
    def build(cls, data: int = 0, fsdp: int = 1, tensor: int = 1) -> DeviceMesh:
        """A mesh over this process's devices; data = 0 takes the devices that the other axes leave."""
        devices = jax.devices()
        if data < 0 or fsdp < 1 or tensor < 1:
            raise ValueError(f"mesh axes are at least 1 (data may be 0 for what is left), got {data=}, {fsdp=}, {tensor=}")
        if len(devices) % (fsdp * tensor) or (data and data * fsdp * tensor > len(devices)):
            raise ValueError(
                f"mesh data={data} x fsdp={fsdp} x tensor={tensor} does not fit {len(devices)} devices: fsdp x tensor must "
                "divide their number, and the product may not exceed it (data=0 takes what is left)"
            )
        data = data or len(devices) // (fsdp * tensor)
        shape = (data, fsdp, tensor)
        return cls(np.asarray(devices[: data * fsdp * tensor]).reshape(shape))

    def replicas(self) -> Iterator[DeviceMesh]:
        """One mesh per place that holds a whole copy of the weights: only `tensor` cuts a replica."""
        for row in self.mesh.devices.reshape(-1, self.size["tensor"]):
            yield DeviceMesh(row.reshape(1, 1, -1))

    def sharding(self, axes: tuple[str | None, ...] = ()) -> NamedSharding:
        """The placement of an array whose dimensions have these logical names; () replicates."""
        return NamedSharding(self.mesh, PartitionSpec(*(RULES[axis] for axis in axes)))

    def place(self, tree: Any, axes: tuple[str | None, ...] = ()) -> Any:
        """Puts every array of a tree onto the mesh, all by the same axes."""
        return jax.device_put(tree, self.sharding(axes))

    def check(self, tree: Any, axes_tree: Any) -> None:
        """Raises ValueError where the mesh cuts a dimension of a tree's arrays into unequal parts."""

        def check_one(path: tuple[Any, ...], x: Any, axes: tuple[str | None, ...]) -> None:
            for axis, length in zip(axes, x.shape, strict=True):
                cut = RULES[axis] or ()
                parts = math.prod(self.size[name] for name in ((cut,) if isinstance(cut, str) else cut))
                if length % parts:
                    name = ".".join(str(entry.key) for entry in path)
                    raise ValueError(f"{name}: dimension {axis!r} of {length} cannot be cut by mesh {cut}={parts}")

        jax.tree_util.tree_map_with_path(check_one, tree, axes_tree)

    def shardings(self, axes_tree: Any) -> Any:
        """A tree of placements from a tree of axis names, as `models.transformer.logical_axes` gives it."""
        return jax.tree.map(self.sharding, axes_tree, is_leaf=lambda x: isinstance(x, tuple))
