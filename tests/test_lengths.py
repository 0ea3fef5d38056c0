"""Who goes first where places are scarce: those of an earlier call, then the first of an unknown group, then the long ones."""

from __future__ import annotations

import asyncio
import random

import pytest

from jaxagent.engine.slots import SlotTable
from jaxagent.lengths import Gate, Lengths, Member, Siblings
from jaxagent.types import Rank, SampleRequest, Sampling


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


@pytest.mark.parametrize("rank", [(0, 1.0), (-3, float("inf"))])
def test_a_rank_is_no_part_of_what_is_asked(rank: Rank) -> None:
    assert request("a", None) == SampleRequest("a", (1, 2), 0, (0, 0), (), Sampling(max_tokens=2), rank=lambda: rank)
