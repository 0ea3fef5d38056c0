"""A trace file as a viewer reads it: complete events by the row that they are shown in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def lanes_of(path: Path) -> dict[str, list[Event]]:
    """The complete events of every row, by its name, in the order of time. Every row must have one name and one process."""
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    named: dict[tuple[int, int], str] = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"], event
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert named.setdefault((event["pid"], event["tid"]), event["args"]["name"]) == event["args"]["name"]
    assert len(set(named.values())) == len(named) == len({tid for _, tid in named})
    found: dict[str, list[Event]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        assert event["ts"] > 0 and event["dur"] >= 0
        found.setdefault(named[event["pid"], event["tid"]], []).append(event)
    return {name: sorted(own, key=lambda event: (event["ts"], -event["dur"])) for name, own in found.items()}


def wrongly_nested(events: list[Event]) -> list[tuple[str, str]]:
    """Neighbours of one row that overlap though neither is within the other: no viewer can draw them."""
    wrong: list[tuple[str, str]] = []
    open_: list[Event] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
            open_.pop()
        if open_ and event["ts"] + event["dur"] > open_[-1]["ts"] + open_[-1]["dur"]:
            wrong.append((open_[-1]["name"], event["name"]))
        open_.append(event)
    return wrong


def within(event: Event, whole: Event, slack_us: int = 0) -> bool:
    begins = event["ts"] >= whole["ts"] - slack_us
    return begins and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + slack_us
