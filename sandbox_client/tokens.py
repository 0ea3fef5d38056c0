"""Bearer tokens: fixed, or asked for again when a server no longer takes the old one, once for all who wait."""

import asyncio
from collections.abc import Awaitable, Callable

Provider = Callable[[], Awaitable[str]]


class Token:
    """A token and how a fresh one is had."""

    def __init__(self, source: str | Provider) -> None:
        self._value = source if isinstance(source, str) else ""
        self._provider = None if isinstance(source, str) else source
        self._generation = 0
        self._turn = asyncio.Lock()

    @property
    def known(self) -> str | None:
        """The token where it is fixed."""
        return self._value if self._provider is None else None

    async def get(self, stale: int = -1) -> tuple[str, int]:
        """Returns the token and its generation, a fresh one where generation `stale` is still the newest.

        A fixed token has generation 0 for ever.
        """
        if self._provider is not None and self._generation in (0, stale):
            async with self._turn:
                if self._generation in (0, stale):
                    self._value = await self._provider()
                    self._generation += 1
        return self._value, self._generation
