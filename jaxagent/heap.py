"""What the C library keeps of freed memory, where CPUs compute: temporaries of a step, but not what compiling took."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import cache
from typing import Any

# malloc.h: one arena for all threads, since others cannot hold large blocks; no block mapped by itself; no trimming
_KEEP = {-8: 1, -4: 0, -1: -1}


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, where CPUs compute; call it before JAX has devices.

    XLA on CPU takes the temporaries of a program anew at every call. glibc gives so large a block back to the kernel each time,
    and touching its pages again costs a fifth of a training step (benchmarks/train_step.py).
    """
    set_option = getattr(_library(), "mallopt", None)
    for option, value in _KEEP.items() if set_option else ():
        set_option(option, value)


def give_back_freed_memory() -> None:
    """Gives the kernel what has been freed and kept so far: compiling needs much for once, in pieces that fit nothing later."""
    if give_back := getattr(_library(), "malloc_trim", None):
        give_back(0)


@cache
def _library() -> Any:
    """The C library where its heap matters, else None. musl's has none of the calls."""
    accelerated = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu"))
    if sys.platform != "linux" or (accelerated and os.environ.get("JAX_PLATFORMS") != "cpu"):
        return None
    return ctypes.CDLL(None)
