"""What the next decode call tells the device of its rows: which turns begin, and which rows are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxagent.engine.control_table import wants_controls
from jaxagent.engine.controls import HostRows, Rows
from jaxagent.engine.slots import Row
from jaxagent.sharding import DeviceMesh


class Arming:
    """Collects what is to be told, and lies on the device already where that is nothing, as in most calls."""

    def __init__(self, rows: Mapping[str, Any], mesh: DeviceMesh):
        slots = rows["live"].shape[0]
        self._shapes = {name: (old.shape, old.dtype) for name, old in rows.items()}
        self._shapes |= {"controlled": ((slots,), bool), "mask": ((slots,), bool)}
        self._shardings = {name: mesh.sharding((), shape) for name, (shape, _) in self._shapes.items()}
        self.nothing = self.place(self._blank())
        self._told: HostRows | None = None

    def arm(self, row: Row) -> None:
        """The row's turn begins, or goes on."""
        request = row.request
        assert request is not None
        told = self._told = self._told or self._blank()
        state = {
            "mask": True,
            "token": row.pending,
            "pos": row.known - 1 + len(row.tokens),
            "live": True,
            "left": request.sampling.max_tokens - len(row.tokens),
            "key": request.key,
            "temperature": request.sampling.temperature,
            "top_k": request.sampling.top_k,
            "top_p": request.sampling.top_p,
            "controlled": wants_controls(request.sampling),
        }
        for name, value in state.items():
            told[name][row.slot] = value
        told["stop"][row.slot] = -1
        told["stop"][row.slot, : len(request.stop)] = request.stop

    def freeze(self, slot: int) -> None:
        """Nothing more is sampled in a slot until it is armed again."""
        told = self._told = self._told or self._blank()
        told["mask"][slot], told["live"][slot] = True, False
        # Zeros would be read as greedy and as a nucleus, and all rows would pay for these.
        told["temperature"][slot] = told["top_p"][slot] = 1.0

    def take(self) -> Rows:
        """What has been told since the last call. It must not be written to: the device may read it where it lies."""
        told, self._told = self._told, None
        return self.nothing if told is None else self.place(told)

    def place(self, told: HostRows) -> Rows:
        """What a decode call takes."""
        return jax.device_put(told, self._shardings)

    def _blank(self) -> HostRows:
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}
