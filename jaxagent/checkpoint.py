"""One atomic Orbax checkpoint: weights, moments, and everything a resumed run must know. All or nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of a workdir. Saving is asynchronous; a killed save leaves the one before loadable."""

    def __init__(self, folder: Path, keep: int):
        _tell_faults_once()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, trees: dict[str, Any], facts: dict[str, Any]) -> None:
        """Saves named trees of arrays and a JSON object under `step`, in the background."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        with self._told():
            self._manager.save(step, args=ocp.args.Composite(**items, facts=ocp.args.JsonSave(facts)))

    def facts(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint, without its arrays. Raises ValueError where it cannot be read."""
        with self._readable(step):
            return self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore())).facts

    def trees(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The named trees with the shapes and placements of `like`, on whatever mesh that is. Raises as `facts` does."""
        targets = {name: ocp.args.StandardRestore(jax.tree.map(_abstract, tree)) for name, tree in like.items()}
        with self._readable(step):
            restored = self._manager.restore(step, args=ocp.args.Composite(**targets))
        return {name: restored[name] for name in like}

    def wait(self) -> None:
        with self._told():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Ends the writing in the background. What it could not write was told by `save` or `wait`, or nobody asked for it."""
        with contextlib.suppress(OSError), self._told():
            self._manager.close()
        gc.collect()  # what a fault left half done in Orbax's threads ends here, and not with a word at the exit

    def whole(self) -> int | None:
        """The last step of which all is on disk, whatever has become of later saves."""
        return max((int(path.name) for path in self._folder.glob("*") if path.name.isdecimal()), default=None)

    @contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Has what a damaged file leads to, in whichever library, be one line that says what to do."""
        try:
            yield
        except (RuntimeError, MemoryError):  # of the machine
            raise
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__:
                cause = cause.__cause__
            why = str(cause).partition("\n")[0].rstrip(".") or type(cause).__name__
        else:
            return
        here, before = self._folder / str(step), max((at for at in self.steps() if at < step), default=None)
        then = "begins anew" if before is None else f"goes on from {self._folder / str(before)}"
        text = f"{here} cannot be read: {why}; if a file there was lost or changed, move the folder away: the run then {then}"
        raise ValueError(text)  # outside, so that nothing holds the frames of reads that have not ended

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Has a fault of the disk, which arrives as words from a library, be the OSError that it is."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            if not (found := re.search(r"os_error_code='(\d+)'", str(error))):
                raise
            code = int(found[1])
            raise OSError(code, os.strerror(code), str(self._folder)) from None


@functools.cache
def _tell_faults_once() -> None:
    """Each thread of Orbax that a fault meets writes a traceback of it too; `save` and `wait` raise it, and that is enough.

    Nor is it news that what a killed run had half written is written anew, or that two files of a checkpoint cannot be read.
    """
    raised = ("futures/future.py", "checkpointers/async_checkpointer.py", "metadata/checkpoint.py", "checkpoint_manager.py")

    def tells(record: logging.LogRecord) -> bool:
        again = str(record.msg).startswith("Attempted to create temporary directory")
        return not (again or (record.exc_info and record.pathname.endswith(raised)))

    logging.getLogger("absl").addFilter(tells)
    before = sys.unraisablehook

    def hook(told: sys.UnraisableHookArgs) -> None:
        unwaited = told.object is None and str(told.exc_value) == "Event loop is closed"  # of a write that nobody waits for
        another = inspect.iscoroutine(told.object) and "orbax" in told.object.cr_code.co_filename  # of reads, one was told
        if not (unwaited or another):
            before(told)

    sys.unraisablehook = hook


def _abstract(x: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct | np.ndarray:
    if isinstance(x, np.ndarray):
        return x  # restored as numpy too
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
