"""Windows, pace and the count of files: how much is asked at once."""

import asyncio
import random

import pytest

from sandbox_client.limits import Pacer, Window, affordable_connections


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_window_shrinks_once_per_storm_and_grows_by_one_per_round() -> None:
    clock = Clock()
    window = Window(100, clock)
    for _ in range(50):
        window.refused()
    assert window.limit == pytest.approx(70)
    clock.now += 0.2
    window.refused()
    assert window.limit == pytest.approx(49)
    window.in_flight = 49
    for _ in range(49):
        window.succeeded()
    assert 49.5 < window.limit < 50.01
    window.in_flight = 3
    window.succeeded()
    assert window.limit < 50.01  # a window that is not full learns nothing
    for _ in range(40):
        clock.now += 1
        window.refused()
    assert window.limit == 1


def test_a_window_lets_in_no_more_than_its_limit_in_order_and_loses_no_place_to_the_cancelled() -> None:
    async def crowd() -> None:
        window, inside, most, order = Window(3), 0, 0, []
        luck = random.Random(5)

        async def one(number: int) -> None:
            nonlocal inside, most
            async with window.enter(5.0):
                inside += 1
                order.append(number)
                most = max(most, inside)
                try:
                    await asyncio.sleep(0.0005)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(one(i)) for i in range(60)]
        await asyncio.sleep(0)
        for task in luck.sample(tasks, 20):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, window.in_flight) == (3, 0)
        assert order == sorted(order) and len(order) >= 40
        await one(99)

    asyncio.run(crowd())


def test_who_waits_too_long_for_a_window_is_told_so_and_takes_no_place() -> None:
    async def wait() -> None:
        window = Window(1)
        async with window.enter(1.0):
            with pytest.raises(TimeoutError):
                async with window.enter(0.01):
                    raise AssertionError("never inside")
        assert window.in_flight == 0
        async with window.enter(0.01):
            assert window.in_flight == 1

    asyncio.run(wait())


def test_a_pacer_spreads_what_comes_at_once() -> None:
    clock = Clock()
    pacer = Pacer(10.0, clock)
    assert [round(pacer.due_in_s(), 3) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    clock.now += 10
    assert pacer.due_in_s() == pytest.approx(0.0)


def test_connections_are_bounded_by_the_files_that_may_be_open(caplog: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert affordable_connections(4, lambda: 10) == 4
    assert affordable_connections(10 * most, lambda: 10) < most
    assert "ulimit -n" in caplog.text
    with pytest.raises(OSError, match="raise ulimit -n"):
        affordable_connections(4, lambda: most)
