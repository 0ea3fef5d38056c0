"""How a checkpoint lays a weight out and how we do: torch stores [out, in], we store [in, out] with the heads apart.

as_is         the same
transposed    [F, D] there, [D, F] here; of more dimensions the last two change places
into_heads    [N H, D] there, [D, N, H] here
out_of_heads  [D, N H] there, [N, H, D] here
heads         [N H] there, [N, H] here

Between the two lies the shape "apart": the checkpoint's order of dimensions with N and H apart. From the checkpoint it is a
reshape, which costs nothing and leaves every slice of ours a slice of theirs; from it to ours is a transposition, done on the
device. All shapes here are of one tensor, without the dimensions that we stack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """One of the layouts by its name, for a weight of `shape` in ours."""

    name: str
    shape: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """ours = transpose(apart, order)"""
        last = len(self.shape)
        return {
            "as_is": tuple(range(last)),
            "transposed": (*range(last - 2), last - 1, last - 2),
            "into_heads": (2, 0, 1),
            "out_of_heads": (1, 2, 0),
            "heads": (0, 1),
        }[self.name]

    @property
    def inverse(self) -> tuple[int, ...]:
        """apart = transpose(ours, inverse)"""
        return tuple(self.order.index(axis) for axis in range(len(self.shape)))

    @property
    def apart(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.inverse)

    @property
    def merged(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension of the checkpoint the dimensions of `apart` that it holds."""
        joined = {"into_heads": ((0, 1), (2,)), "out_of_heads": ((0,), (1, 2)), "heads": ((0, 1),)}
        return joined.get(self.name) or tuple((axis,) for axis in range(len(self.shape)))

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return tuple(math.prod(self.apart[axis] for axis in group) for group in self.merged)

    def cover(self, boxes: list[Box]) -> tuple[Box, Box]:
        """The least box of the checkpoint's tensor that holds `boxes` of `apart`: in the checkpoint, and in `apart`."""
        apart, stored = [slice(0, n) for n in self.apart], []
        for first, *within in self.merged:
            low, high = min(box[first].start for box in boxes), max(box[first].stop for box in boxes)
            each = math.prod(self.apart[axis] for axis in within)
            apart[first] = slice(low, high)
            stored.append(slice(low * each, high * each))
        return tuple(stored), tuple(apart)
