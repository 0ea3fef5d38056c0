"""When a pool forks ahead of need: on cores that programs leave, for callers who wait at once, and never not at all."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from launching import PATIENCE_S

from sandbox_client.groups import Limits
from sandbox_client.line import ChildDied
from sandbox_client.pool import Pool
from sandbox_client.sessions import Gate

CORES = os.cpu_count() or 1
LATER_S = 60.0


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 (the pool tells nobody)
            await asyncio.sleep(0.002)


def _with_pool(warm: int, work: Callable[[Pool], Awaitable[None]]) -> None:
    """Runs `work` with a pool whose children are real, and not locked, for no program runs in them."""

    async def main() -> None:
        pool = Pool("L0", (), None, Limits(), warm)
        assert await pool.start() == {}
        try:
            await _until(lambda: pool.warm == warm)
            await work(pool)
        finally:
            await pool.close()

    asyncio.run(main())


def test_while_programs_want_every_core_nothing_is_forked_but_the_last_two() -> None:
    async def work(pool: Pool) -> None:
        pool.busy = lambda: CORES
        for _ in range(4):
            await pool.take()
        await asyncio.sleep(0.05)
        assert (pool.warm, pool.forks, pool.cold_takes) == (2, 6, 0)
        await pool.take()
        await _until(lambda: pool.warm == 2)
        await asyncio.sleep(0.05)
        assert (pool.warm, pool.forks, pool.cold_takes) == (2, 7, 0)
        pool.busy = lambda: 0  # nobody says so: it asks by itself
        await _until(lambda: pool.warm == 6)
        assert pool.forks == 11

    _with_pool(6, work)


def test_for_callers_who_wait_as_many_forks_begin_at_once_as_there_are_cores() -> None:
    async def work(pool: Pool) -> None:
        pool.busy = lambda: 10 * CORES
        callers = [asyncio.create_task(pool.take()) for _ in range(2 * CORES)]
        await asyncio.sleep(0)
        assert pool.forks == CORES
        children = await asyncio.gather(*callers)
        assert len({child.number for child in children}) == len(children) == pool.forks == pool.cold_takes

    _with_pool(0, work)


def test_a_child_that_dies_while_it_waits_is_replaced() -> None:
    async def work(pool: Pool) -> None:
        child = pool._warm[0]
        child.kill("closed")
        await child.ended
        await _until(lambda: pool.warm == 1)
        assert pool.forks == 2 and pool._warm[0] is not child

    _with_pool(1, work)


def test_where_nothing_can_be_forked_everybody_who_waits_is_told() -> None:
    async def work(pool: Pool) -> None:
        home = Path(tempfile.gettempdir(), f"sandbox-{pool.process_ids()[0]}")
        home.rmdir()
        home.write_text("no directory of a child can be made here")
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*(pool.take() for _ in range(3 * CORES)), return_exceptions=True)
        assert {type(end) for end in ends} == {ChildDied}

    _with_pool(0, work)


def test_a_gate_counts_who_waits_and_who_is_young_and_says_when_one_leaves() -> None:
    async def main() -> None:
        loop, now, left = asyncio.get_running_loop(), [0.0], list[int]()
        gate = Gate(2, 8, clock=lambda: now[0])
        gate.on_leave = lambda: left.append(gate.inside)
        over = asyncio.Event()

        async def program() -> None:
            async with gate.enter(loop.time() + LATER_S):
                await over.wait()

        programs = [asyncio.create_task(program()) for _ in range(3)]
        await asyncio.sleep(0)
        assert (gate.inside, gate.busy()) == (2, 3)
        now[0] = 60.0
        assert gate.busy() == 1  # two have run for a while, and may well sleep; one waits for its turn
        over.set()
        await asyncio.gather(*programs)
        await asyncio.sleep(0)
        assert (gate.inside, gate.busy(), len(left)) == (0, 0, 3)

    asyncio.run(main())
