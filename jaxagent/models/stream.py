"""Weights between the files of a checkpoint and the devices that hold them, a few tensors at a time.

A tensor crosses in the dtype it is stored in (on its way out: will be stored in) and is transposed and cast on the device. All
programs are over the whole mesh, so that several hosts run the same ones; none of them moves weights between devices.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxagent.models.layouts import Box, Layout
from jaxagent.models.tensor_files import CODES, DTYPES, TensorFiles

_FLIGHT_BYTES = 512 * 2**20  # of tensors read and not yet on their devices; a larger tensor travels alone
_SMALL_BYTES = 256 * 2**10  # of a whole weight: up to here the host does it faster than a program is compiled


@dataclass(frozen=True)
class Weight:
    """A weight of ours and the names of the tensors that fill it, in the shape of what is stacked: (), (L,) or (L, E)."""

    names: np.ndarray
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.names.shape, *self.layout.shape)

    def table(self, parts: int) -> np.ndarray:
        """The names as [rows, parts, each]: layers, and experts by the devices that hold them."""
        rows = self.names.shape[0] if self.names.ndim else 1
        return self.names.reshape(rows, parts, -1)

    @property
    def small(self) -> bool:
        return 4 * math.prod(self.shape) <= _SMALL_BYTES

    def parts(self, sharding: Any) -> int:
        """Into how many parts a placement cuts the experts."""
        if self.names.ndim < 2 or sharding is None:
            return 1
        return self.shape[1] // sharding.shard_shape(self.shape)[1]


class Stream:
    """Fills weights from files, tensor by tensor, and bounds what is on its way."""

    def __init__(self, files: TensorFiles, found: Mapping[str, str]):
        """Args: found: the name in the files of every tensor that a weight names."""
        self._files, self._found = files, found
        self._limit = min(_FLIGHT_BYTES, files.largest_file_bytes // 2)
        self._flying = 0
        self._filling: list[jax.Array] = []  # weights that something may still be on its way to
        self._buffers: list[weakref.ref[np.ndarray]] = []  # of what is on its way

    def fill(self, weight: Weight, sharding: NamedSharding | None, dtype: Any) -> jax.Array:
        """A weight on its devices, read as many experts at a time as the bound allows."""
        if weight.small:
            return self._fill_small(weight, sharding, dtype)
        parts = weight.parts(sharding)
        table = weight.table(parts)
        rows, _, each = table.shape
        bytes_one = 4 * math.prod(weight.layout.shape) * parts
        some = max(n for n in range(1, each + 1) if each % n == 0 and (n == 1 or (n + 1) * bytes_one <= self._limit))
        static = {"layout": weight.layout, "stacked": weight.names.ndim, "parts": parts, "sharding": sharding}
        filled = _zeros(weight.shape, dtype, sharding)
        for row in range(rows):
            for start in range(0, each, some):
                names = [self._found[name] for name in table[row, :, start : start + some].flat]
                sizes = [self._size(name) for name in names]
                self._wait_for(sum(sizes) + (max(sizes) if some * parts > 1 else 0), filled)  # one is copied into its place
                filled = _write(filled, self._read(names, weight, sharding), np.array([row, start], np.int32), **static)
        self._filling.append(filled)
        return filled

    def _fill_small(self, weight: Weight, sharding: NamedSharding | None, dtype: Any) -> jax.Array:
        whole = np.empty(weight.shape, dtype)
        for at in np.ndindex(weight.names.shape):
            tensor = self._files.read(self._found[str(weight.names[at])], (slice(None),) * len(weight.layout.stored))
            whole[at] = tensor.reshape(weight.layout.apart).transpose(weight.layout.order)
        if sharding is None:
            return jax.device_put(whole)
        return jax.make_array_from_callback(weight.shape, sharding, lambda box: whole[box])

    def _wait_for(self, size: int, filled: jax.Array) -> None:
        """Returns when there is room for `size` more bytes."""
        if self._flying and self._flying + size > self._limit:
            jax.block_until_ready([*self._filling, filled])
            until = time.monotonic() + 1.0  # a wait, no promise: what JAX still holds then it holds for a reason of its own
            while any(buffer() is not None for buffer in self._buffers) and time.monotonic() < until:
                gc.collect(0)  # lets JAX drop host buffers that it is done with; it would at its next call
                time.sleep(1e-4)
            self._filling.clear()
            self._buffers.clear()
            self._flying = 0
        self._flying += size

    def _size(self, name: str) -> int:
        stored = self._files.tensors[name]
        return math.prod(stored.shape) * np.dtype(DTYPES[CODES[stored.code]]).itemsize

    def _read(self, names: list[str], weight: Weight, sharding: NamedSharding | None) -> jax.Array:
        """Tensors as one array [len(names), *apart] on the devices, in their stored dtype."""
        shape = (len(names), *weight.layout.apart)
        if sharding is None:
            (block,) = self._blocks(names, weight.layout, [tuple(slice(0, n) for n in shape)])
            return jax.device_put(block)
        placed = NamedSharding(sharding.mesh, _spec_apart(weight, sharding))
        boxes: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, box in placed.addressable_devices_indices_map(shape).items():
            # ends, as a slice has no hash before Python 3.12
            key = tuple(s.indices(n)[:2] for s, n in zip(box or (), shape, strict=True))
            boxes.setdefault(key, []).append(device)
        blocks = self._blocks(names, weight.layout, [tuple(slice(*ends) for ends in key) for key in boxes])
        puts = [jax.device_put(block, d) for block, devices in zip(blocks, boxes.values(), strict=True) for d in devices]
        return jax.make_array_from_single_device_arrays(shape, placed, puts)

    def _blocks(self, names: list[str], layout: Layout, boxes: list[Box]) -> list[np.ndarray]:
        """The boxes of the array that the tensors make, every tensor read once and no further than the boxes reach."""
        codes = {self._files.tensors[name].code for name in names}
        dtype = DTYPES[CODES[codes.pop()]] if len(codes) == 1 else np.float32  # holds all that we read
        blocks: dict[int, np.ndarray] = {}
        for slot, name in enumerate(names):
            wanted = {i: box for i, box in enumerate(boxes) if box[0].start <= slot < box[0].stop}
            if not wanted:
                continue  # another host's
            inner = [box[1:] for box in wanted.values()]
            stored, apart = layout.cover(inner)
            tensor = self._files.read(name, stored).reshape([s.stop - s.start for s in apart])
            for i, box in wanted.items():
                cut = tensor[tuple(slice(s.start - a.start, s.stop - a.start) for s, a in zip(box[1:], apart, strict=True))]
                cut = cut.astype(dtype, copy=False)
                if box[0].stop - box[0].start == 1:
                    blocks[i] = cut[None]
                else:
                    blocks.setdefault(i, np.empty([s.stop - s.start for s in box], dtype))[slot - box[0].start] = cut
        self._buffers += [weakref.ref(_owner(block)) for block in blocks.values()]
        return [blocks[i] for i in range(len(boxes))]


def _owner(x: np.ndarray) -> np.ndarray:
    """The array that a view looks at; views of it keep it alive."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _spec_apart(weight: Weight, sharding: NamedSharding) -> PartitionSpec:
    """How [experts, *apart] is cut where the weight is cut by `sharding`."""
    spec = (*sharding.spec, *(None,) * len(weight.shape))[: len(weight.shape)]
    stacked = weight.names.ndim
    return PartitionSpec(spec[1] if stacked == 2 else None, *(spec[stacked + axis] for axis in weight.layout.inverse))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> jax.Array:
    return _held(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, donate_argnums=0, static_argnames=("layout", "stacked", "parts", "sharding"))
def _write(
    weight: jax.Array,
    tensors: jax.Array,
    at: jax.Array,
    *,
    layout: Layout,
    stacked: int,
    parts: int,
    sharding: NamedSharding | None,
) -> jax.Array:
    """The weight with tensors [parts x some, *apart] at (layer, first expert of each part)."""
    rows = weight.shape[0] if stacked else 1
    ours = tensors.transpose(0, *(1 + axis for axis in layout.order)).astype(weight.dtype)
    ours = ours.reshape(1, parts, -1, *layout.shape)
    start: list[Any] = [at[0], 0, at[1], *(0,) * len(layout.shape)]
    whole = weight.reshape(rows, parts, -1, *layout.shape)
    return _held(jax.lax.dynamic_update_slice(whole, ours, start).reshape(weight.shape), sharding)


def _held(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def pieces(weights: Mapping[str, Weight], parts: Mapping[str, int]) -> Iterator[tuple[str, int, int, list[str]]]:
    """Layer by layer what is fetched at once, the same in every process: (weight, layer, expert, names of the tensors)."""
    tables = {name: weight.table(parts[name]) for name, weight in weights.items()}
    for row in range(max(len(table) for table in tables.values())):
        for name, table in tables.items():
            for expert in range(table.shape[2] if row < len(table) else 0):
                yield name, row, expert, list(table[row, :, expert])


def fetched(
    params: Mapping[str, Any], weights: Mapping[str, Weight], parts: Mapping[str, int], dtype: str
) -> Iterator[np.ndarray]:
    """The tensors of `pieces` on the host, as they are stored."""
    for name, row, expert, _ in pieces(weights, parts):
        weight, x = weights[name], params[name]
        layout, spread = weight.layout, isinstance(x, jax.Array) and not x.is_fully_addressable
        if weight.small and not spread:
            ours = np.asarray(x).reshape(*weight.table(parts[name]).shape, *layout.shape)[row, :, expert]
            tensors = ours.astype(DTYPES[dtype]).transpose(0, *(1 + axis for axis in layout.inverse))
        else:
            everywhere = NamedSharding(x.sharding.mesh, PartitionSpec()) if spread else None
            static = {"layout": layout, "stacked": weight.names.ndim, "parts": parts[name], "sharding": everywhere}
            tensors = np.asarray(_take(x, np.array([row, expert], np.int32), **static, dtype=jnp.dtype(dtype)))
        yield from (np.ascontiguousarray(tensor).reshape(layout.stored) for tensor in tensors)


@partial(jax.jit, static_argnames=("layout", "stacked", "parts", "dtype", "sharding"))
def _take(
    weight: jax.Array, at: jax.Array, *, layout: Layout, stacked: int, parts: int, dtype: Any, sharding: NamedSharding | None
) -> jax.Array:
    """Tensors [parts, *apart] of a weight at (layer, expert of each part)."""
    whole = weight.reshape(weight.shape[0] if stacked else 1, parts, -1, *layout.shape)
    start: list[Any] = [at[0], 0, at[1], *(0,) * len(layout.shape)]
    ours = jax.lax.dynamic_slice(whole, start, (1, parts, 1, *layout.shape)).reshape(parts, *layout.shape)
    return _held(ours.astype(dtype).transpose(0, *(1 + axis for axis in layout.inverse)), sharding)
