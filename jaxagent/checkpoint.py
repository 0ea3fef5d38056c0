"""One atomic Orbax checkpoint: weights, moments, and everything a resumed run must know. All or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of a workdir. Saving is asynchronous; a killed save leaves the one before loadable."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, trees: dict[str, Any], facts: dict[str, Any]) -> None:
        """Saves named trees of arrays and a JSON object under `step`, in the background."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items, facts=ocp.args.JsonSave(facts)))

    def facts(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint, without its arrays."""
        return self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore())).facts

    def trees(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The named trees with the shapes and placements of `like`, on whatever mesh that is."""
        targets = {name: ocp.args.StandardRestore(jax.tree.map(_abstract, tree)) for name, tree in like.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**targets))
        return {name: restored[name] for name in like}

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _abstract(x: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
    if isinstance(x, np.ndarray):
        return x  # restored as numpy too
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
