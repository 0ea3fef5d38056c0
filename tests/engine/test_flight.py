"""When the next decode call is sent before the last one is read, and whose tokens a call still has when it is."""

from __future__ import annotations

import math

import pytest

from jaxagent.engine.flight import Flight, Pace, most_prefilled
from jaxagent.engine.slots import Row
from jaxagent.types import SampleRequest


def paced(host_s: float, device_s: float, ended: int, overlap: bool | None = None) -> bool:
    """What is decided after twenty calls of which each was like that, with 32 turns."""
    pace, now = Pace(overlap), 100.0
    for _ in range(20):
        pace.worked(host_s)
        pace.read(now, now + device_s)
        pace.ended(32, ended)
        now += device_s + host_s
    return pace.ahead


@pytest.mark.parametrize(
    ("host_s", "device_s", "ended", "ahead"),
    [
        (0.001, 0.010, 0, True),  # nobody stops: nothing is lost
        (0.001, 0.010, 2, True),  # a gap of 10 % against 6 % of the turns stepped once more
        (0.001, 0.010, 4, False),  # against 12 %
        (0.001, 0.100, 1, False),  # a slow device hides little
        (0.020, 0.010, 16, True),  # a slow host
    ],
)
def test_a_call_is_sent_ahead_where_the_gap_is_a_larger_share_than_the_turns_that_end(
    host_s: float, device_s: float, ended: int, ahead: bool
) -> None:
    assert paced(host_s, device_s, ended) is ahead
    assert paced(host_s, device_s, ended, overlap=True)
    assert not paced(host_s, device_s, ended, overlap=False)


def test_what_was_long_ago_does_not_count_for_ever() -> None:
    pace = Pace(None)
    for ended, calls in ((32, 5), (0, 200)):
        for i in range(calls):
            pace.worked(0.001)
            pace.read(float(i), i + 0.01)
            pace.ended(32, ended)
        assert pace.ahead is not bool(ended)


def test_a_call_that_was_sent_early_takes_the_device_from_when_the_one_before_was_read() -> None:
    pace = Pace(True)
    assert pace.read(sent=10.0, now=10.5) == 0.5
    assert pace.read(sent=10.1, now=10.75) == 0.25


def test_only_the_turns_that_were_stepped_are_told_and_not_what_came_to_their_rows_later() -> None:
    asked = [SampleRequest(name, (1,), 0, (0, 0), ()) for name in "abc"]
    rows = [Row(request.trajectory, "", slot, request=request) for slot, request in enumerate(asked)]
    flight = Flight(list(zip(rows, asked, strict=True)), [4, 5, 6], 0, 0.0, None, None, None, None)
    rows[0].request = None  # ended in the call before, or released
    rows[1].request = SampleRequest("b", (2,), 1, (0, 0), ())  # and began another turn
    assert flight.going_on() == [(rows[2], 6)]


def test_more_is_prefilled_before_a_call_the_fewer_rows_wait_for_it() -> None:
    assert most_prefilled(64, 16, decoding=64) == 2 * 64 * 16  # two tokens for each that the call has
    assert most_prefilled(64, 16, decoding=16) == 4 * 2 * 64 * 16
    assert most_prefilled(64, 16, decoding=0) == math.inf
