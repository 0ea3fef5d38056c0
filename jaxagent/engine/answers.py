"""How the engine's thread answers those who wait on their own asyncio loops. No JAX."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from jaxagent.types import Sample


def tell(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *args: object) -> None:
    """Calls back into a caller's loop; a loop that was closed meanwhile has nobody left who waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *args)


def resolve(batch: list[tuple[asyncio.Future, Sample]]) -> None:
    for future, sample in batch:
        if not future.done():
            future.set_result(sample)


def fail(future: asyncio.Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def ended(closed: str, failure: BaseException | None) -> RuntimeError:
    """Why nothing is sampled any more: `closed`, or what stopped the engine's thread."""
    if failure is None:
        return RuntimeError(closed)
    error = RuntimeError(f"the engine stopped: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error
