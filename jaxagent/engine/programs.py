"""Compiles programs side by side before they are needed, and counts what a thread compiles."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Call:
    """A jitted program with arguments as they will be; `keep` takes the result, since arguments may be donated."""

    program: Any
    arguments: Callable[[], tuple[Any, ...]]
    keep: Callable[[Any], None]

    def compile(self) -> None:
        """Nothing is run; a call with such arguments then finds the program in JAX's own cache."""
        self.program.lower(*self.arguments()).compile()


# Of all engines together: a program under way takes 150 MB, and more of them than cores are done no sooner.
_threads = ThreadPoolExecutor(os.cpu_count(), "compile")


def prepare(calls: Iterable[Call]) -> None:
    """Compiles all calls in threads, XLA holding no lock, and then makes them, one by one, in this one."""
    every = list(calls)
    for done in [_threads.submit(call.compile) for call in every]:
        done.result()
    for call in every:
        call.keep(call.program(*call.arguments()))


_compiled: Counter[int] = Counter()


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled[threading.get_ident()] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiled_here() -> int:
    """How many programs this thread has compiled, or read from disk, so far."""
    return _compiled[threading.get_ident()]
