"""Results of calls that their tool declares pure: run once for all who ask, and now and then once more to see if it is true.

Only outcomes of the program itself are kept, and of those no timeout and no shortage of memory: they depend on the load.
"""

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from . import wire
from .journal import digest
from .wire import ExecResult, Outcome

log = logging.getLogger("sandbox_client")

Run = Callable[[], Awaitable[ExecResult]]


def key_of(parts: dict[str, Any]) -> str:
    """Returns the name of a call: a hash of all that its result may depend on."""
    return hashlib.blake2b(wire.encode(sorted(parts.items())), digest_size=16).hexdigest()


class PureCache:
    """Least recently used results, by key; identical calls in flight are one call."""

    def __init__(self, max_entries: int = 4096, verified_share: float = 0.01, seed: int | None = None) -> None:
        """Args: verified_share: of the hits that are run again; a difference ends the tool's caching for good."""
        self._max_entries, self._share = max_entries, verified_share
        self._luck = random.Random(seed)
        self._kept: OrderedDict[str, ExecResult] = OrderedDict()
        self._flights: dict[str, asyncio.Task[ExecResult]] = {}
        self._waiting: dict[str, int] = {}
        self.impure: set[str] = set()
        self.hits = self.misses = self.verified = 0

    async def get(self, tool: str, key: str, run: Run) -> ExecResult:
        """Returns the result of `run`, or that of another call under the same key. Raises what `run` raises."""
        if tool in self.impure:
            return await run()
        kept = self._kept.get(key)
        if kept is None:
            return await self._fly(tool, key, run)
        self._kept.move_to_end(key)
        self.hits += 1
        if self._luck.random() < self._share:
            return await self._verify(tool, key, kept, run)
        return kept

    async def _verify(self, tool: str, key: str, kept: ExecResult, run: Run) -> ExecResult:
        self.verified += 1
        again = await run()
        if _keepable(again) and digest(again) != digest(kept):
            log.warning("tool %r is declared pure and is not: the same call gave two results; it is cached no more", tool)
            self.impure.add(tool)
            self._kept.clear()  # entries do not know their tool: all are doubtful, and cheap to have again
            return again
        return kept

    async def _fly(self, tool: str, key: str, run: Run) -> ExecResult:
        """One flight for all who ask; it ends when the last of them has gone."""
        flight = self._flights.get(key)
        if flight is None:
            self.misses += 1
            flight = self._flights[key] = asyncio.ensure_future(self._flown(tool, key, run))
            self._waiting[key] = 0
        else:
            self.hits += 1
        self._waiting[key] += 1
        try:
            return await asyncio.shield(flight)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                if self._flights.get(key) is flight:
                    del self._flights[key]
                if not flight.done():
                    flight.cancel()
                    await asyncio.gather(flight, return_exceptions=True)

    async def _flown(self, tool: str, key: str, run: Run) -> ExecResult:
        result = await run()
        if _keepable(result) and tool not in self.impure:
            self._kept[key] = result
            while len(self._kept) > self._max_entries:
                self._kept.popitem(last=False)
        return result


def _keepable(result: ExecResult) -> bool:
    return result.outcome in (Outcome.OK, Outcome.PROGRAM_ERROR) and not result.session_lost
