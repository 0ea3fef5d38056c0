"""The pools of a server, one per set of modules imported beforehand, and which of them suits a program.

Importing numpy takes longer than a hundred forks: so a zygote imports it once, and its children have it. Another set of
modules is another zygote, for every page that a zygote holds is paid again by each of its children.
"""

import asyncio
import re
from collections.abc import Callable, Sequence

from .groups import Limits
from .line import Child
from .pool import Pool


class Pools:
    """One plain pool, and more whose children have modules imported."""

    def __init__(self, plain: Pool, others: Sequence[Pool] = (), graders: Pool | None = None) -> None:
        self._plain, self._others, self.graders = plain, tuple(others), graders
        self.level = plain.level
        self._wanted = [
            (re.compile(rf"^[ \t]*(?:import|from)[ \t]+(?:[\w.]+[ \t]*,[ \t]*)*(?:{_either(pool.imports)})\b", re.M), pool)
            for pool in others
        ]

    @property
    def all(self) -> tuple[Pool, ...]:
        return self._plain, *self._others, *([self.graders] if self.graders else [])

    @property
    def dead(self) -> bool:
        return any(pool.dead for pool in self.all)

    @property
    def limits(self) -> Limits:
        return self._plain.limits

    @property
    def imports(self) -> list[str]:
        """Returns the names of the sets, as a session may ask for them."""
        return [",".join(pool.imports) for pool in self._others]

    def pool_for(self, imports: str | None = None, code: str = "") -> Pool:
        """Returns the pool of a named set; without a name, of the first set of which `code` imports a module.

        Raises KeyError for a set that there is not.
        """
        if imports:
            return dict(zip(self.imports, self._others, strict=True))[imports]
        return next((pool for pattern, pool in self._wanted if pattern.search(code)), self._plain)

    async def take(self, imports: str | None = None, code: str = "", branching: bool = False) -> Child:
        """Returns a locked child that nobody has used. Raises ChildDied when it cannot be had, KeyError as pool_for."""
        pool = self.pool_for(imports, code)
        return await (pool.take_stem() if branching else pool.take())

    def on_death(self, tell: Callable[[], None]) -> None:
        """Has `tell` called when a zygote dies."""
        for pool in self.all:
            pool.on_death = tell

    def on_end(self, tell: Callable[[float], None]) -> None:
        """Has `tell` called with the seconds from the order that ended a child to the word that it and its own are dead."""
        for pool in self.all:
            pool.on_end = tell

    def give_way_to(self, busy: Callable[[], int]) -> None:
        """Has the pools fork ahead of need only on the cores that `busy` leaves."""
        for pool in self.all:
            pool.busy = busy

    def poke(self) -> None:
        """Says that a program has ended."""
        for pool in self.all:
            pool.poke()

    def gauges(self) -> dict[str, float]:
        """Returns what /metrics says of the children."""
        return {
            "children": sum(pool.live for pool in self.all),
            "children_ordered_dead": sum(pool.dying for pool in self.all),
            "killed_from_outside_total": sum(pool.killed for pool in self.all),
            "forks_total": sum(pool.forks for pool in self.all),
            "takes_total": sum(pool.takes for pool in self.all),
            "cold_takes_total": sum(pool.cold_takes for pool in self.all),
        }

    async def close(self) -> None:
        """Ends every zygote, which first ends and reaps its children."""
        await asyncio.gather(*(pool.close() for pool in self.all))


def _either(modules: Sequence[str]) -> str:
    return "|".join(re.escape(module.partition(".")[0]) for module in modules)
