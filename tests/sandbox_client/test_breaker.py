"""Breakers and hedges, on a clock that the test turns; and the choice among endpoints."""

import pytest

from sandbox_client.breaker import Breaker, Hedges
from sandbox_client.endpoints import Endpoint, choose, ranked


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_after_failures_in_a_row_lets_one_probe_pass_and_closes_when_it_is_answered() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(4):
        breaker.failed()
    breaker.succeeded(0.1)
    for _ in range(4):
        breaker.failed()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open" and 0.1 < breaker.admits_in_s() <= 0.25
    clock.now += breaker.admits_in_s()
    assert (breaker.state, breaker.admits_in_s()) == ("half-open", 0.0)
    probe = breaker.begin()
    assert probe and breaker.admits_in_s() > 0  # nobody else while it is under way
    breaker.failed()
    breaker.end(probe)
    assert breaker.state == "open" and breaker.admits_in_s() <= 0.5
    waits = []
    for _ in range(8):
        waits.append(breaker.admits_in_s())
        clock.now += breaker.admits_in_s()
        probe = breaker.begin()
        breaker.failed()
        breaker.end(probe)
    assert max(waits) <= 8.0 and waits[-1] > 2.0
    clock.now += 8.0
    probe = breaker.begin()
    breaker.succeeded(0.1)
    breaker.end(probe)
    assert breaker.state == "closed"


def test_a_probe_that_is_cancelled_leaves_the_way_open_for_the_next() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(5):
        breaker.failed()
    clock.now += 1
    breaker.end(breaker.begin())
    assert breaker.admits_in_s() == 0.0


def test_an_endpoint_that_fails_half_the_time_is_opened_too() -> None:
    breaker = Breaker(Clock())
    count = 0
    while breaker.state == "closed" and count < 60:
        count += 1
        breaker.succeeded(0.1) if count % 3 == 0 else breaker.failed()
    assert 20 <= count < 40


def test_latency_is_a_moving_average() -> None:
    breaker = Breaker(Clock())
    breaker.succeeded(1.0)
    assert breaker.latency_s == 1.0
    breaker.succeeded(2.0)
    assert breaker.latency_s == pytest.approx(1.1)


def test_hedges_start_after_the_95th_percentile_and_stay_within_two_per_cent() -> None:
    hedges = Hedges()
    for i in range(100):
        assert hedges.begin() is None or i >= 50
        hedges.answered((i + 1) / 100)
    for _ in range(28):
        delay_s = hedges.begin()
    assert delay_s is not None and 0.93 <= delay_s <= 0.97
    taken = 0
    for _ in range(1000):
        if hedges.begin() is not None:
            taken += hedges.take()
    assert taken == hedges.sent == int(0.02 * hedges.calls)


def test_rendezvous_hashing_moves_only_the_share_of_the_endpoint_that_goes() -> None:
    endpoints = [Endpoint(f"http://host-{i}:80", 8) for i in range(5)]
    keys = [f"trajectory/{i}" for i in range(1000)]
    before = {key: ranked(key, endpoints)[0] for key in keys}
    after = {key: ranked(key, endpoints[1:])[0] for key in keys}
    assert all(after[key] is before[key] for key in keys if before[key] is not endpoints[0])
    shares = [sum(home is endpoint for home in before.values()) for endpoint in endpoints]
    assert all(140 < share < 260 for share in shares)


def test_a_choice_passes_over_the_open_the_tried_and_the_far_slower_and_comes_back() -> None:
    endpoints = [Endpoint(f"http://host-{i}:80", 8) for i in range(3)]
    first, second, third = ranked("key", endpoints)
    assert choose("key", endpoints) is first
    assert choose("key", endpoints, [first]) is second
    for endpoint, latency_s in ((first, 1.0), (second, 0.01), (third, 0.02)):
        endpoint.breaker.succeeded(latency_s)
    assert choose("key", endpoints) is second
    for _ in range(5):
        second.breaker.failed()
    assert choose("key", endpoints) is third
    for _ in range(600):
        choose("key", endpoints)
    assert choose("key", endpoints) is first  # its slowness is forgotten in time, and measured again
