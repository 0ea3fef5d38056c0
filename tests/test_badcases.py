"""Kinds of bad cases by hand-made episodes, and the facts that separate winners from losers."""

from __future__ import annotations

import pytest

from jaxagent.badcases import KINDS, kinds, separated
from jaxagent.types import StopReason, ToolRecord, Trajectory, Turn


def made(
    *calls: tuple[str, str, str], reward: float = 0.0, stop: StopReason = StopReason.ANSWERED, text: str = ""
) -> Trajectory:
    """Calls as (name, outcome, result), one a turn, and a last turn without."""
    t = Trajectory("toy", 0, "g", 0, stop=stop)
    for n, (name, outcome, result) in enumerate(calls):
        t.turns.append(Turn(n, n, n + 1, "", text=text, tools=[ToolRecord(name, {"a": 1}, outcome, result)]))
    t.turns.append(Turn(9, 9, 10, "", text=text, reward=reward))
    return t


OK = ("look", "ok", "x")


@pytest.mark.parametrize(
    ("t", "found"),
    [
        (made(OK), []),
        (made(OK, ("find", "ok", "y"), OK), []),
        (made(OK, OK), ["repeated call"]),
        (made(OK, ("find", "ok", "y"), OK, ("find", "ok", "z"), OK), ["loop"]),
        (made(OK, ("look", "ok", "y"), ("look", "ok", "z")), ["repeated call"]),  # its results differ: it waits, maybe
        (made(OK, ("find", "ok", "y"), text="again"), ["loop"]),
        (made(("look", "error", "")), ["failed call"]),
        (made(("look", "timeout", "")), ["timeout"]),
        (made(stop=StopReason.POLICY_TIMEOUT), ["timeout"]),
        (made(), ["no call"]),
        (made(OK, stop=StopReason.MAX_TOKENS), ["truncated"]),
        (made(OK, stop=StopReason.INFRA_FAILURE), ["broken"]),
    ],
)
def test_a_bad_case_is_named(t: Trajectory, found: list[str]) -> None:
    assert kinds(t, has_tools=True) == found
    assert set(found) <= set(KINDS)


def test_an_answer_without_a_call_is_none_where_there_are_no_tools() -> None:
    assert kinds(made(), has_tools=False) == []


def test_a_turn_that_could_not_be_parsed_is_one() -> None:
    t = made(OK)
    t.turns[0].error = "no closing tag"
    assert kinds(t, has_tools=True) == ["unreadable turn"]


def test_winners_are_told_from_losers_by_what_they_did_more_or_less() -> None:
    group = [made(OK, ("find", "ok", "y"), reward=1.0), made(OK, OK, ("find", "ok", "y"), reward=1.0), made(OK), made(OK, OK)]
    facts = {one["fact"]: one for one in separated(group)}
    assert facts["calls of find"] == {"fact": "calls of find", "winners": 1.0, "losers": 0.0, "chance": 1.0}
    assert facts["calls"]["chance"] == 7 / 8  # (2, 3) against (1, 2): three pairs above, one tied
    assert "calls of look" not in facts


def test_groups_that_fared_alike_and_broken_rollouts_tell_nothing() -> None:
    assert separated([made(OK), made()]) == []
    assert separated([made(OK, reward=1.0), made(stop=StopReason.INFRA_FAILURE)]) == []
    assert separated([]) == []
