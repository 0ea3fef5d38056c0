"""Pure calls: one flight for all who ask, what is kept and what is not, and the check whether purity is true."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from conftest import Running
from faults import FaultServer

from sandbox_client import ExecResult, Outcome, PureCache, SandboxClient, Unknown
from sandbox_client.cache import key_of


def result(stdout: str = "1", outcome: Outcome = Outcome.OK) -> ExecResult:
    return ExecResult(outcome, stdout, "", 0, 0, 0.1)


def counted(*results: ExecResult | Exception, pause_s: float = 0.0) -> tuple[list[int], Callable[[], Awaitable[ExecResult]]]:
    calls: list[int] = []

    async def run() -> ExecResult:
        calls.append(1)
        await asyncio.sleep(pause_s)
        answer = results[min(len(calls), len(results)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return calls, run


def test_identical_calls_are_one_flight_and_then_a_memory() -> None:
    async def ask() -> None:
        cache = PureCache(verified_share=0.0)
        calls, run = counted(result(), pause_s=0.01)
        found = await asyncio.gather(*(cache.get("t", "k", run) for _ in range(10)))
        assert [one.stdout for one in found] == ["1"] * 10 and len(calls) == 1
        await cache.get("t", "k", run)
        await cache.get("t", "other", run)
        assert len(calls) == 2
        assert (cache.hits, cache.misses) == (10, 2)

    asyncio.run(ask())


@pytest.mark.parametrize("outcome", [Outcome.PROGRAM_TIMEOUT, Outcome.PROGRAM_OOM])
def test_what_depends_on_the_load_is_not_kept(outcome: Outcome) -> None:
    async def ask() -> None:
        calls, run = counted(result(outcome=outcome))
        cache = PureCache()
        for _ in range(3):
            assert (await cache.get("t", "k", run)).outcome is outcome
        assert len(calls) == 3

    asyncio.run(ask())


def test_an_infrastructure_failure_reaches_all_who_wait_and_is_forgotten() -> None:
    async def ask() -> None:
        calls, run = counted(Unknown("lost", 1, True), result(), pause_s=0.001)
        cache = PureCache()
        failures = await asyncio.gather(*(cache.get("t", "k", run) for _ in range(3)), return_exceptions=True)
        assert {type(failure) for failure in failures} == {Unknown} and len(calls) == 1
        assert (await cache.get("t", "k", run)).stdout == "1"

    asyncio.run(ask())


def test_a_tool_that_is_found_impure_is_cached_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        _, run = counted(result("1"), result("2"), result("3"))
        cache = PureCache(verified_share=1.0)
        assert (await cache.get("clock", "k", run)).stdout == "1"
        assert (await cache.get("clock", "k", run)).stdout == "2"
        assert (await cache.get("clock", "k", run)).stdout == "3"
        assert cache.impure == {"clock"} and cache.verified == 1

    asyncio.run(ask())
    assert "declared pure and is not" in caplog.text


def test_the_share_of_verified_hits_is_what_was_asked_for() -> None:
    async def ask() -> None:
        calls, run = counted(result())
        cache = PureCache(verified_share=0.1, seed=3)
        for _ in range(1000):
            await cache.get("t", "k", run)
        assert 60 < cache.verified < 140 and len(calls) == 1 + cache.verified

    asyncio.run(ask())


def test_the_flight_ends_when_the_last_who_waits_has_gone_and_not_before() -> None:
    async def ask() -> None:
        calls, run = counted(result(), pause_s=0.05)
        cache = PureCache()
        first, second = (asyncio.create_task(cache.get("t", "k", run)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        assert (await second).stdout == "1" and len(calls) == 1
        third = asyncio.create_task(cache.get("t", "new", run))
        await asyncio.sleep(0.01)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1
        assert not cache._flights and not cache._waiting

    asyncio.run(ask())


def test_old_entries_make_room() -> None:
    async def ask() -> None:
        calls, run = counted(result())
        cache = PureCache(max_entries=2, verified_share=0.0)
        for key in ("a", "b", "a", "c", "a", "b"):
            await cache.get("t", key, run)
        assert len(calls) == 4

    asyncio.run(ask())


def test_a_key_is_all_that_a_result_may_depend_on() -> None:
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert len({key_of({"a": 1}), key_of({"a": 2}), key_of({"a": "1"}), key_of({"b": 1})}) == 4


def test_only_what_is_declared_pure_is_cached_by_a_client() -> None:
    async def ask() -> None:
        server = FaultServer()
        async with server.serving() as url, SandboxClient(url, "t", cache=PureCache(verified_share=0.0)) as client:
            for _ in range(3):
                await client.run_code("1", pure="tool")
            assert len(server.executions) == 1
            for different in ({"stdin": "x"}, {"files": {"a": b"1"}}, {"files": {"a": b"2"}}, {"timeout_s": 3.0}):
                await client.run_code("1", pure="tool", **different)  # type: ignore[arg-type]
            assert len(server.executions) == 5
            await client.run_code("1")
            await client.run_code("1")
            assert len(server.executions) == 7

    asyncio.run(ask())


def test_a_real_server_s_pure_result_is_the_same_from_memory(server: Running) -> None:
    async def ask() -> None:
        cache = PureCache(verified_share=1.0)
        async with SandboxClient(server.url, server.token, cache=cache) as client:
            found = [await client.run_code("print({'b', 'a', 'c'})", pure="python") for _ in range(3)]
        assert len({one.stdout for one in found}) in (1, 2)
        if len({one.stdout for one in found}) == 2:
            assert cache.impure == {"python"}  # a set's order is drawn per process, and the check has found it out

    asyncio.run(ask())
