"""Who goes first where places are scarce: those of an earlier call, then the first of an unknown group, then the long ones."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from clocked import Clock

from jaxagent.engine.slots import SlotTable
from jaxagent.lengths import RERANK_S, Gate, Lengths, Member, Ranked, Siblings
from jaxagent.types import Rank, Sample, SampleRequest, Sampling


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def family(lengths: Lengths, task: str, count: int = 3, wave: int = 1) -> list[Member]:
    siblings = Siblings(lengths, task, wave)
    return [Member(siblings) for _ in range(count)]


def play(time: Time, member: Member, seconds: float, counts: bool = True) -> None:
    member.begin()
    time.now += seconds
    member.end(counts)
    member.leave()


def test_the_first_of_an_unknown_group_goes_before_all_others_and_tells_of_its_siblings() -> None:
    time = Time()
    lengths = Lengths(time)
    one, other = family(lengths, "one"), family(lengths, "other")
    assert [member.rank()[1] for member in one] == [float("inf"), 0.0, 0.0]
    play(time, one[0], 5.0)
    assert [member.rank()[1] for member in one[1:]] == [5.0, 5.0]
    assert [member.rank()[1] for member in other] == [float("inf"), 5.0, 5.0]  # no more than the mean of all is known
    play(time, other[0], 9.0)
    assert max([*one[1:], *other[1:]], key=Member.rank) is other[1]


def test_who_has_not_ended_yet_is_taken_for_twice_as_long_as_it_has_run() -> None:
    time = Time()
    lengths = Lengths(time)
    short, long = family(lengths, "short"), family(lengths, "long")
    long[0].begin()
    play(time, short[0], 10.0)
    assert short[1].rank() == (-1, 10.0)
    assert long[1].rank() == (-1, 20.0)
    time.now = 30.0
    assert long[1].rank() == (-1, 60.0)
    assert long[0].rank() == (-1, 30.0)  # of which half is over
    long[0].end(counts=True)
    assert long[1].rank() == (-1, 30.0)


def test_earlier_visits_of_a_task_count_as_one_sibling_and_what_was_broken_as_none() -> None:
    time = Time()
    lengths = Lengths(time)
    for seconds, member in zip((4.0, 8.0), family(lengths, "a", 2), strict=True):
        play(time, member, seconds)
    play(time, family(lengths, "b", 1)[0], 1.0, counts=False)
    again, unknown = family(lengths, "a", wave=2), family(lengths, "b", wave=2)
    assert again[0].rank() == (-2, 6.0)
    assert unknown[0].rank() == (-2, float("inf"))
    play(time, again[0], 12.0)
    assert again[1].rank() == (-2, 9.0)


def test_what_was_asked_for_earlier_goes_before_all_that_is_longer_but_wanted_later() -> None:
    time = Time()
    lengths = Lengths(time)
    play(time, family(lengths, "long", 1)[0], 100.0)
    play(time, family(lengths, "short", 1)[0], 1.0)
    now, later = family(lengths, "short", 1, wave=1)[0], family(lengths, "long", 1, wave=2)[0]
    assert now.rank() > later.rank()
    assert now.rank() > family(lengths, "unknown", 1, wave=2)[0].rank()


def test_an_attempt_that_broke_leaves_nothing_behind_and_the_next_one_counts() -> None:
    time = Time()
    member, sibling = family(Lengths(time), "a", 2)
    member.begin()
    time.now = 3.0
    member.end(counts=False)
    assert sibling.siblings.expected is None
    play(time, member, 7.0)
    assert sibling.rank() == (-1, 7.0)


class OneSlot:
    """A sampler with the engine's slots, one of them, and 5 s of decoding for every turn."""

    def __init__(self, time: Time):
        self.time, self.table, self.taken = time, SlotTable(1, 64, fork_min=32), asyncio.Lock()

    async def generate(self, request: SampleRequest) -> Sample:
        self.table.enqueue(request, None)
        async with self.taken:
            self.table.admit()
            await asyncio.sleep(0)
            self.time.now += 5.0
            row = self.table.rows[request.trajectory]
            self.table.end(row, self.time.now)
            return Sample([1], [0.0], [0], True, 0, [])

    def release(self, trajectory: str) -> None:
        self.table.release(trajectory)


def test_an_episode_of_one_turn_is_as_long_as_its_slot_was_held_and_not_as_it_waited() -> None:
    async def scene() -> None:
        time = Time()
        lengths, sampler = Lengths(time), OneSlot(time)
        members = family(lengths, "a", 3)

        async def play(number: int) -> None:
            turn = Ranked(sampler, members[number])
            await turn.generate(request(str(number), None))
            turn.release(str(number))
            members[number].end(counts=True)

        await asyncio.gather(play(0), play(1))
        assert members[2].rank() == (-1, 5.0)
        assert lengths.of_task("a") == lengths.mean == 5.0

    asyncio.run(scene())


def test_a_slot_that_comes_after_the_attempt_is_over_begins_nothing() -> None:
    time = Time()
    member, sibling = family(Lengths(time), "a", 2)
    late = Ranked(OneSlot(time), member)
    member.end(counts=False)
    late._begin()
    time.now = 50.0
    assert sibling.siblings.expected is None
    Ranked(OneSlot(time), member)._begin()  # the next attempt
    time.now = 53.0
    assert sibling.rank() == (-1, 6.0)


def request(name: str, rank: float | None) -> SampleRequest:
    return SampleRequest(name, (1, 2), 0, (0, 0), (), Sampling(max_tokens=2), rank=None if rank is None else lambda: (0, rank))


def test_free_slots_go_by_rank_and_among_equals_by_arrival() -> None:
    table = SlotTable(2, 64, fork_min=32)
    for name, rank in (("a", 1.0), ("b", 3.0), ("c", None), ("d", 3.0), ("e", 9.0), ("f", 0.0)):
        table.enqueue(request(name, rank), None)
    table.admit()
    served = [row.trajectory for row in table.rows.values()]
    while table.waiting:
        table.release(next(iter(table.rows)))
        table.admit()
        served.append(list(table.rows)[-1])
    assert served == ["e", "b", "d", "a", "c", "f"]


def test_a_gate_lets_so_many_in_the_highest_first_and_loses_no_place_when_who_waits_is_cancelled() -> None:
    async def scene(seed: int) -> tuple[list[int], int, int]:
        gate, luck, order, inside, most = Gate(2), random.Random(seed), list[int](), 0, 0
        ranks = [luck.random() for _ in range(12)]

        async def pass_through(i: int) -> None:
            nonlocal inside, most
            async with gate.place(lambda: (0, ranks[i])):
                order.append(i)
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(pass_through(i)) for i in range(12)]
        for _ in range(luck.randint(1, 6)):
            await asyncio.sleep(0)
        for task in luck.sample(tasks, 5):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order[:2] == [0, 1]
        assert order[2:] == sorted(order[2:], key=lambda i: -ranks[i])
        return order, most, gate.free

    for seed in range(200):
        _, most, free = asyncio.run(scene(seed))
        assert (most, free) == (2, 2)


def on_a_clock(work: Coroutine[Any, Any, None]) -> None:
    """Runs it where time goes on only when nothing is left to do."""
    clock = Clock()
    thread = threading.Thread(target=clock.run_forever)
    thread.start()
    try:
        done = asyncio.run_coroutine_threadsafe(work, clock)
        clock.go_on(done.done)
        done.result()
    finally:
        clock.call_soon_threadsafe(clock.stop)
        thread.join()
        clock.close()


def test_thousands_who_wait_are_asked_for_their_rank_now_and_then() -> None:
    """Every place is held for a tenth of RERANK_S: of every ten that are given, one is after all were asked again."""
    many, asked, order = 500, [0], list[int]()

    async def scene() -> None:
        gate = Gate(1)

        def rank(i: int) -> Rank:
            asked[0] += 1
            return 0, float(i if asyncio.get_running_loop().time() < 2.0 else -i)  # the ranks turn around

        async def pass_through(i: int) -> None:
            async with gate.place(lambda: rank(i)):
                order.append(i)
                await asyncio.sleep(RERANK_S / 10)

        await asyncio.gather(*map(pass_through, range(many)))
        assert gate.free == 1

    on_a_clock(scene())
    assert sorted(order) == list(range(many))
    turned = next(at for at, (i, after) in enumerate(itertools.pairwise(order)) if at and i < after)
    assert order[1 : turned + 1] == sorted(order[1 : turned + 1], reverse=True)
    assert order[turned + 1 :] == sorted(order[turned + 1 :])
    assert 2.0 <= turned * RERANK_S / 10 <= 2.0 + RERANK_S
    assert asked[0] < 1.1 * many * (1 + many / 10 / 2)


def test_of_thousands_who_are_cancelled_while_they_wait_none_takes_the_place() -> None:
    async def scene() -> None:
        gate, inside, over = Gate(1), list[int](), asyncio.Event()

        async def pass_through(i: int) -> None:
            async with gate.place(lambda: (0, float(i))):
                inside.append(i)
                await over.wait()

        tasks = [asyncio.create_task(pass_through(i)) for i in range(5000)]
        await asyncio.sleep(0)
        over.set()  # the place is passed on before any of them is told
        for task in tasks[2:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (inside, gate.free) == ([0, 1], 1)

    asyncio.run(scene())


@pytest.mark.parametrize("rank", [(0, 1.0), (-3, float("inf"))])
def test_a_rank_is_no_part_of_what_is_asked(rank: Rank) -> None:
    assert request("a", None) == SampleRequest("a", (1, 2), 0, (0, 0), (), Sampling(max_tokens=2), rank=lambda: rank)
