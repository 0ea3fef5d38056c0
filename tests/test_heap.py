"""What is freed stays with the process, for the next step, until it is given back after compiling."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAP = Path(__file__).parents[1] / "jaxagent" / "heap.py"
# By its path: the package would bring JAX. 64 MiB in large blocks, 64 in small ones, and above them one that stays.
TOLD = """
import ctypes, runpy, sys
heap, c = runpy.run_path(sys.argv[1]), ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
heap["keep_freed_memory"]()
before = resident()
blocks = [c.malloc(8 << 20) for _ in range(8)] + [c.malloc(4 << 10) for _ in range(1 << 14)]
for i, block in enumerate(blocks):
    ctypes.memset(block, 1, 8 << 20 if i < 8 else 4 << 10)
stays = c.malloc(100)
for block in blocks:
    c.free(block)
kept = resident()
heap["give_back_freed_memory"]()
print(kept - before, resident() - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the heap of glibc is what is told"
)
def test_freed_memory_is_kept_whatever_its_size_until_it_is_given_back() -> None:
    said = subprocess.run(
        [sys.executable, "-c", TOLD, str(HEAP)], env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, check=True
    )
    kept, left = map(int, said.stdout.split())
    assert kept > 120  # of 128 MiB
    assert left < 8
