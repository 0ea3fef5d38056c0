"""The bookkeeping of slots, without a device: who holds what, what is still to be prefilled, and what is refused."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from jaxagent.engine.pages import PageTable
from jaxagent.engine.slots import AWAY, SlotTable
from jaxagent.types import SampleRequest, Sampling


def ask(name: str, tokens: tuple[int, ...] = (1, 2, 3), start: int = 0, group: str = "", budget: int = 4) -> SampleRequest:
    return SampleRequest(name, tokens, start, (0, 0), (), Sampling(max_tokens=budget), group)


def enter(table: SlotTable, *requests: SampleRequest) -> None:
    for request in requests:
        assert table.check(request) == ""
        table.enqueue(request, request.trajectory)
    table.admit()


def end_turn(table: SlotTable, name: str, sampled: list[int]) -> None:
    """What the engine does when a turn is over."""
    row = table.rows[name]
    row.tokens = sampled
    table.end(row, now=0.0)


Call = tuple[int, list[tuple[str, int, list[int]]]]


def prefill(table: SlotTable, buckets: tuple[int, ...] = (4, 8), rows: int = 2, budget: float = math.inf) -> list[Call]:
    """Prefill calls as (bucket, [(trajectory, position, tokens)])."""
    calls = [
        (bucket, [(row.trajectory, row.cached, tokens) for row, tokens in work])
        for bucket, work in table.chunks(buckets, rows, budget)
    ]
    table.take_begun()
    return calls


def test_all_but_the_last_fed_token_are_prefilled_and_the_last_is_pending() -> None:
    table = SlotTable(2, 32, 99)
    enter(table, ask("a", (5, 6, 7)))
    row = table.rows["a"]
    assert (row.known, row.pending, row.backlog) == (3, 7, [5, 6])
    assert prefill(table) == [(4, [("a", 0, [5, 6])])]
    assert (row.cached, row.backlog) == (2, [])


def test_a_second_turn_prefills_the_last_sampled_token_and_the_new_ones_only() -> None:
    table = SlotTable(2, 32, 99)
    enter(table, ask("a", (5, 6, 7)))
    prefill(table)
    end_turn(table, "a", [8, 9])
    enter(table, ask("a", (10, 11), start=5))
    assert prefill(table) == [(4, [("a", 4, [9, 10])])]
    assert table.rows["a"].pending == 11


def test_a_turn_of_one_fed_token_prefills_the_pending_one() -> None:
    table = SlotTable(2, 32, 99)
    enter(table, ask("a", (5,)))
    assert prefill(table) == []
    end_turn(table, "a", [6])
    enter(table, ask("a", (7,), start=2))
    assert prefill(table) == [(4, [("a", 1, [6])])]


def test_a_long_prompt_is_cut_by_the_largest_bucket_and_its_rest_takes_the_smallest_that_fits() -> None:
    table = SlotTable(1, 64, 99)
    enter(table, ask("a", tuple(range(20))))
    assert [(bucket, work[0][1], len(work[0][2])) for bucket, work in prefill(table)] == [(8, 0, 8), (8, 8, 8), (4, 16, 3)]


def test_the_cut_of_a_row_does_not_depend_on_its_neighbours() -> None:
    def cuts(*others: SampleRequest) -> list[tuple[int, int, list[int]]]:
        table = SlotTable(4, 64, 99)
        enter(table, *others, ask("a", tuple(range(11))))
        return [(bucket, at, tokens) for bucket, work in prefill(table) for name, at, tokens in work if name == "a"]

    assert cuts() == cuts(ask("b", tuple(range(30))), ask("c", (1,)), ask("d", (1, 2, 3)))


def test_a_call_holds_no_more_rows_than_it_is_compiled_for() -> None:
    table = SlotTable(5, 32, 99)
    enter(table, *(ask(name) for name in "abcde"))
    assert [len(work) for _, work in prefill(table, rows=2)] == [2, 2, 1]


def test_a_budget_cuts_the_calls_off_and_they_go_on_where_they_stopped_with_the_eldest_turn_first() -> None:
    def entered() -> SlotTable:
        table = SlotTable(3, 64, 99)
        enter(table, ask("short", (1, 2)), ask("a", tuple(range(30))), ask("b", tuple(range(17))))
        return table

    cut, whole = entered(), prefill(entered())
    found = [call for budget in (1, 17, 16) for call in prefill(cut, budget=budget)]
    assert len(found) == 1 + 2 + 1  # a call is not cut: one of two rows of 8 may go beyond what is left
    assert [work[0][0] for _, work in whole] == ["short", "a", "a", "a", "a"]
    assert found == whole[:4]
    assert [row.trajectory for row in cut.begun] == ["a"]  # the others can be decoded
    assert prefill(cut) == whole[4:]
    assert not cut.begun


def test_who_asks_later_is_not_prefilled_before_who_waits() -> None:
    table = SlotTable(3, 64, 99)
    enter(table, ask("a", (1, 2)), ask("b", tuple(range(40))))
    prefill(table, budget=1)
    end_turn(table, "a", [3])
    for _ in range(3):
        prefill(table, budget=1)
    enter(table, ask("a", tuple(range(20)), start=3))
    order = [name for _, work in prefill(table, rows=1) for name, _, _ in work]
    assert order == ["b", "b", "a", "a", "a"]


def test_a_turn_whose_prompt_is_not_whole_yet_is_not_decoded_and_nobody_forks_it() -> None:
    table = SlotTable(3, 32, 3)
    enter(table, *(ask(name, tuple(range(13)), group="g") for name in "ab"))
    a, b = table.rows.values()
    assert prefill(table, budget=1) == [(8, [("a", 0, list(range(8)))])]
    assert (a.filled, a.fed, b.fed, table.begun) == (8, False, False, [a, b])
    prefill(table, budget=1)
    assert (a.filled, a.fed, b.fed, table.begun) == (12, True, True, [])


def test_a_turn_under_way_whose_cache_is_forgotten_begins_again_when_all_of_it_is_there() -> None:
    table = SlotTable(2, 64, 99)
    enter(table, ask("a", tuple(range(6)), budget=20))
    prefill(table)
    table.rows["a"].tokens = list(range(10))
    table.forget()
    table.forget()  # twice before anything is computed
    assert table.begun == [table.rows["a"]]
    prefill(table, budget=1)
    assert (table.rows["a"].filled, table.begun) == (8, [table.rows["a"]])
    prefill(table)
    assert (table.rows["a"].filled, table.begun) == (15, [])


def test_a_call_is_sent_before_the_last_is_read_only_where_both_find_pages_that_nobody_has() -> None:
    table = SlotTable(2, 32, 99, PageTable(2, 32, 4, 9), ahead=4)  # eight pages
    enter(table, ask("elder", tuple(range(10)), budget=20), ask("younger", tuple(range(5)), budget=20))
    elder, younger = table.rows.values()
    assert list(table.fit()) == []  # four pages, and two
    assert table.ample()
    elder.ahead = younger.ahead = 4
    assert table.ample()  # one more for each
    elder.tokens = [1] * 4
    assert not table.ample()  # two and one
    younger.ahead = 0  # it begins: it may have to wait, and gives up what no call writes to
    assert table.ample()
    younger.ahead, elder.request = 4, None
    assert table.ample()
    younger.tokens = [1] * 12
    assert not table.ample()
    younger.request = ask("younger", tuple(range(5)), budget=16)  # nothing behind the call under way
    assert not table.ample()
    younger.tokens = [1] * 4
    assert table.ample()


def test_whoever_comes_back_to_a_slot_may_take_the_pages_that_were_ample_for_a_call_under_way() -> None:
    table = SlotTable(3, 32, 99, PageTable(3, 32, 4, 18), ahead=4)  # seventeen pages
    enter(table, ask("back", tuple(range(20))), ask("idle", tuple(range(12))))
    assert list(table.fit()) == []
    prefill(table)
    for name in ("back", "idle"):
        end_turn(table, name, [1, 2, 3])
    table.vacate(table.rows["back"])
    enter(table, ask("younger", tuple(range(16)), budget=16), ask("other", tuple(range(9)), budget=20))
    younger, other = table.rows["younger"], table.rows["other"]
    prefill(table)
    assert list(table.fit()) == []
    younger.ahead = other.ahead = 4
    enter(table, ask("back", tuple(range(4)), start=23))  # eight pages, and no slot
    assert table.ample()
    assert table.idle_longest() is table.rows["idle"]
    table.vacate(table.rows["idle"])
    table.admit()
    assert not table.ample()  # asked again, it says that they are to be read first
    assert next(table.fit()).ahead


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (ask("a", start=6), "holds 5 tokens, the request starts at 6"),
        (ask("a", start=4), "holds 5 tokens, the request starts at 4"),
        (ask("a", start=0), "holds 5 tokens, the request starts at 0"),
        (ask("new", start=2), "holds 0 tokens, the request starts at 2"),
        (ask("a", (), start=5), "must feed at least one token"),
        (ask("a", start=5, budget=0), "max_tokens must be at least 1"),
        (ask("a", (1,) * 8, start=5, budget=4), "5 held + 8 fed + 4 to sample do not fit a slot of 16 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(request_: SampleRequest, told: str) -> None:
    table = SlotTable(2, 16, 99)
    enter(table, ask("a", (5, 6, 7)))
    end_turn(table, "a", [8, 9])
    assert told in table.check(request_)
    assert repr(request_.trajectory) in table.check(request_)


def test_a_request_that_fills_its_slot_to_the_last_token_is_served() -> None:
    assert SlotTable(1, 16, 99).check(ask("a", (1,) * 12, budget=4)) == ""


def test_a_second_request_during_a_turn_is_refused() -> None:
    table = SlotTable(2, 32, 99)
    enter(table, ask("a"))
    assert "already sampling" in table.check(ask("a", start=3))


def test_trajectories_beyond_the_slots_wait_in_order_of_arrival() -> None:
    table = SlotTable(2, 32, 99)
    enter(table, *(ask(name) for name in "abcd"))
    assert list(table.rows) == ["a", "b"]
    table.release("b")
    table.admit()
    assert list(table.rows) == ["a", "c"]
    assert [request.trajectory for request, _ in table.waiting] == ["d"]


def test_releasing_gives_the_ticket_of_whoever_still_waits_for_an_answer() -> None:
    table = SlotTable(1, 32, 99)
    enter(table, ask("a"), ask("b"))
    assert table.release("b") == "b"  # out of the queue
    assert table.release("a") == "a"  # in the middle of its turn
    assert table.release("a") is None  # a second time
    enter(table, ask("c"))
    end_turn(table, "c", [1])
    assert table.release("c") is None  # between two turns
    assert list(table.free) == [0]


def test_group_mates_fork_the_prompt_of_the_first_and_prefill_nothing() -> None:
    table = SlotTable(3, 32, 3)
    enter(table, *(ask(name, (1, 2, 3, 4), group="g") for name in "abc"))
    assert [row.source.trajectory if row.source else None for row in table.rows.values()] == [None, "a", "a"]
    assert prefill(table) == [(4, [("a", 0, [1, 2, 3])])]
    assert [row.cached for row in table.rows.values()] == [3, 3, 3]


@pytest.mark.parametrize(
    "second",
    [ask("b", (1, 2, 3, 5), group="g"), ask("b", (1, 2, 3, 4), group="h"), ask("b", (1, 2, 3, 4))],
    ids=["another prompt", "another group", "no group"],
)
def test_only_group_mates_with_the_same_prompt_fork(second: SampleRequest) -> None:
    table = SlotTable(3, 32, 3)
    enter(table, ask("a", (1, 2, 3, 4), group="g"), second)
    assert table.rows["b"].source is None
    assert table.rows["b"].backlog == [1, 2, 3]


def test_short_prompts_are_not_forked() -> None:
    table = SlotTable(2, 32, 5)
    enter(table, *(ask(name, (1, 2, 3, 4), group="g") for name in "ab"))
    assert table.rows["b"].source is None


def test_a_fork_whose_source_is_released_first_prefills_the_prompt_itself() -> None:
    table = SlotTable(2, 32, 3)
    enter(table, *(ask(name, (1, 2, 3, 4), group="g") for name in "ab"))
    table.release("a")
    assert prefill(table) == [(4, [("b", 0, [1, 2, 3])])]


def test_after_its_leader_left_a_group_gets_another_one() -> None:
    table = SlotTable(2, 32, 3)
    enter(table, ask("a", (1, 2, 3, 4), group="g"))
    table.release("a")
    enter(table, *(ask(name, (1, 2, 3, 4), group="g") for name in "bc"))
    assert table.rows["b"].source is None
    assert table.rows["c"].source is table.rows["b"]


def test_through_any_history_slots_have_one_owner_and_every_token_is_prefilled_once() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        table = SlotTable(3, 200, 4)
        fed: dict[str, list[int]] = {}  # what each resident trajectory consists of
        cache: dict[int, list[int]] = {}  # what a slot holds
        waiting: dict[str, SampleRequest] = {}
        for _ in range(80):
            step(rng, table, fed, cache, waiting)
            owners = [row.slot for row in table.rows.values()]
            assert len(set(owners)) == len(owners)
            assert sorted([*owners, *table.free]) == [0, 1, 2]
            for name, row in table.rows.items():
                assert cache[row.slot][: row.cached] == fed[name][: row.cached]
                assert row.known == len(fed[name])


def step(
    rng: random.Random, table: SlotTable, fed: dict[str, list[int]], cache: dict[int, list[int]], asked: dict[str, Any]
) -> None:
    """One thing happens: a trajectory begins, goes on or leaves; then everything is prefilled as the engine does it."""
    idle = [name for name, row in table.rows.items() if row.request is None]
    leaving = [*table.rows, *(request.trajectory for request, _ in table.waiting)]
    kind = rng.choice(("begin", "go on", "end", "leave"))
    if kind == "begin":
        group = rng.choice(("", "g", "h"))
        prompt = tuple(range(rng.randrange(1, 9))) if group else tuple(rng.randrange(99) for _ in range(rng.randrange(1, 9)))
        name = f"{len(asked)}"
        asked[name] = ask(name, prompt, group=group)
        fed[name] = list(prompt)
        table.enqueue(asked[name], name)
    elif kind == "go on" and idle:
        name = rng.choice(idle)
        more = tuple(rng.randrange(99) for _ in range(rng.randrange(1, 6)))
        enter(table, ask(name, more, start=len(fed[name])))
        fed[name] += more
    elif kind == "end" and (busy := [name for name, row in table.rows.items() if row.request]):
        name = rng.choice(busy)
        row, sampled = table.rows[name], [rng.randrange(99) for _ in range(3)]
        cache[row.slot][row.cached :] = [row.pending, *sampled[:-1]]
        fed[name] += sampled
        end_turn(table, name, sampled)
    elif kind == "leave" and leaving:
        table.release(rng.choice(leaving))
    table.admit()
    for row in table.begun:
        cache.setdefault(row.slot, [])
    for _, work in table.chunks((2, 4), 2):
        for row, tokens in work:
            cache[row.slot][row.cached :] = tokens
    for row in table.take_begun():
        if row.source:
            cache[row.slot] = cache[row.source.slot][: row.cached]
            row.source = None


def test_the_slot_of_the_slowest_tool_goes_to_who_waits_and_its_owner_comes_back() -> None:
    table = SlotTable(2, 32, 99)
    enter(table, ask("a", (5, 6)), ask("b", (7,)))
    prefill(table)
    assert table.idle_longest() is None  # nobody waits
    for name, now in (("b", 1.0), ("a", 2.0)):
        table.rows[name].tokens = [8, 9]
        table.end(table.rows[name], now)
    enter(table, ask("c", (1, 2, 3)))
    slowest = table.idle_longest()
    assert slowest is table.rows["b"]
    table.vacate(slowest)
    assert (slowest.slot, slowest.cached) == (AWAY, 2)
    enter(table, ask("b", (4,), start=3))  # its tool has answered, but there is no slot
    assert table.rows["c"].slot == 1
    assert "already sampling" in table.check(ask("b", (4,), start=3))
    assert table.take_returned() == []
    assert table.idle_longest() is table.rows["a"]
    table.release("a")
    table.admit()
    assert table.take_returned() == [slowest]
    assert (slowest.slot, slowest.backlog, slowest.pending) == (0, [9], 4)


def test_a_trajectory_whose_slot_was_taken_can_be_released_and_its_request_is_answered() -> None:
    table = SlotTable(1, 32, 99)
    enter(table, ask("a"))
    prefill(table)
    end_turn(table, "a", [8])
    enter(table, ask("b"))
    table.vacate(table.rows["a"])
    enter(table, ask("a", (4,), start=4))
    assert table.release("a") == "a"  # the ticket
    assert not table.waiting
    assert list(table.free) == []
    assert set(table.rows) == {"b"}


def test_what_is_forgotten_is_prefilled_whole() -> None:
    table = SlotTable(3, 32, 2)
    enter(table, ask("a", (5, 6, 7), group="g"), ask("idle", (1, 2)))
    prefill(table)
    end_turn(table, "idle", [3, 4])
    table.rows["a"].tokens = [8, 9]  # in the middle of a turn
    table.forget()
    assert prefill(table) == [(4, [("a", 0, [5, 6, 7, 8])])]
    enter(table, ask("idle", (9,), start=4), ask("mate", (5, 6, 7), group="g"))
    assert prefill(table) == [(4, [("idle", 0, [1, 2, 3, 4]), ("mate", 0, [5, 6])])]  # no fork of what is gone


def test_slots_that_are_taken_given_back_and_forgotten_between_calls_hold_what_their_owners_sampled() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        table, cache = SlotTable(rng.randrange(1, 4), 64, 3), dict[int, list[int]]()
        for _ in range(60):
            ask_or_leave(rng, table)
            table.admit()
            while rng.random() < 0.6 and (row := table.idle_longest()):
                row.stash = cache[row.slot][: row.cached] if row.cached else None
                table.vacate(row)
                table.admit()
            resident = [row for row in table.rows.values() if row.slot != AWAY]
            assert sorted([*table.free, *(row.slot for row in resident)]) == list(range(len(table.by_slot)))
            assert all(leader in resident for leader in table.leaders.values())
            if rng.random() < 0.5:
                decode(rng, table, cache)


def ask_or_leave(rng: random.Random, table: SlotTable) -> None:
    """Something arrives: a turn, a release, or new weights under which nothing that is cached counts."""
    name, what = rng.choice("abcde"), rng.random()
    row = table.rows.get(name)
    held = len(row.held) if row else 0
    if what < 0.6:
        group = "g" if name in "abc" else ""
        fed = (7, 8, 9, 10) if group and not held else tuple(rng.randrange(99) for _ in range(rng.randrange(1, 5)))
        request = ask(name, fed, start=held, group=group)
        if held < 40 and not table.check(request):
            table.enqueue(request, name)
    elif what < 0.8:
        table.release(name)
    elif what < 0.9:
        table.forget()


def decode(rng: random.Random, table: SlotTable, cache: dict[int, list[int]]) -> None:
    """What the engine does between two arrivals; every row samples a token, and some end their turn."""
    for row in table.take_returned():
        if row.stash is not None:
            cache[row.slot], row.stash = row.stash, None
    for _, work in table.chunks((2, 4), 2, budget=rng.choice((1, 9, math.inf))):
        for row, tokens in work:
            cache.setdefault(row.slot, [])[row.cached :] = tokens
    for row in table.take_begun():
        if row.source:
            assert table.by_slot[row.source.slot] is row.source
            cache[row.slot], row.source = cache[row.source.slot][: row.cached], None
    for row in [row for row in table.by_slot if row and row.request and row.fed]:
        tokens = [*row.held, *row.tokens]
        there = cache.setdefault(row.slot, [])
        del there[len(tokens) - 1 :]
        assert there == tokens[:-1]
        there.append(tokens[-1])
        row.tokens.append(rng.randrange(99))
        if len(row.tokens) == 4 or rng.random() < 0.4:
            table.end(row, now=rng.random())
