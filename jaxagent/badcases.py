"""What went wrong in episodes, by kinds that can be counted, and what separated a group's winners from its losers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from jaxagent.types import StopReason, Trajectory

KINDS = {
    "unreadable turn": "a turn that could not be parsed",
    "repeated call": "a call, and the same once more right after it",
    "loop": "the same call with the same result, or the same turn, three times or more",
    "failed call": "a tool that did not answer ok",
    "timeout": "a tool, or the policy's own program, that missed its deadline",
    "no call": "an answer without any call, in a run whose episodes have tools",
    "truncated": "the turns or the tokens ended before the episode",
    "broken": "lost to the infrastructure, not counted",
}
_LOOP = 3
_SEPARATING = 3  # facts that are told of a group
_LEAST = 0.75  # chance that a winner's fact is above a loser's, or below it, from which on it is told


def kinds(t: Trajectory, has_tools: bool) -> list[str]:
    """The bad cases that an episode's row is, in the order of KINDS."""
    calls = [(tool.name, json.dumps(tool.arguments, sort_keys=True)) for turn in t.turns for tool in turn.tools]
    answers = Counter((*call, tool.result) for call, tool in zip(calls, _tools(t), strict=True))
    said = Counter(turn.text for turn in t.turns if turn.text)
    outcomes = {tool.outcome for tool in _tools(t)}
    found = {
        "unreadable turn": any(turn.error for turn in t.turns),
        "repeated call": any(one == other for one, other in pairwise(calls)),
        "loop": max([0, *answers.values(), *said.values()]) >= _LOOP,
        "failed call": bool(outcomes - {"ok", "timeout"}),
        "timeout": "timeout" in outcomes or t.stop is StopReason.POLICY_TIMEOUT,
        "no call": has_tools and not calls and t.stop is StopReason.ANSWERED,
        "truncated": t.stop in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS),
        "broken": not t.stop.counts,
    }
    return [name for name in KINDS if found[name]]


def _tools(t: Trajectory) -> list[Any]:
    return [tool for turn in t.turns for tool in turn.tools]


def separated(group: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Facts by which the winners of a group can be told from its losers, the clearest first; none where all fared alike.

    A fact's `chance` is that of a winner being above a loser, ties counting half: 1 and 0 separate them wholly, 0.5 not at all.
    Winners are those whose reward is above the group's mean.
    """
    counted = [t for t in group if t.stop.counts]
    mean = fmean(t.reward for t in counted) if counted else 0.0
    sides = [[t for t in counted if t.reward > mean + 1e-9], [t for t in counted if t.reward <= mean + 1e-9]]
    if not all(sides):
        return []
    facts = [[_facts(t) for t in side] for side in sides]
    names = dict.fromkeys(name for side in facts for one in side for name in one)
    found: list[dict[str, Any]] = []
    for name in names:
        won, lost = ([one.get(name, 0.0) for one in side] for side in facts)
        chance = fmean((a > b) + 0.5 * (a == b) for a in won for b in lost)
        if max(chance, 1 - chance) >= _LEAST:
            found.append({"fact": name, "winners": fmean(won), "losers": fmean(lost), "chance": chance})
    found.sort(key=lambda one: -abs(one["chance"] - 0.5))
    return found[:_SEPARATING]


def _facts(t: Trajectory) -> dict[str, float]:
    tools = _tools(t)
    facts: dict[str, float] = {f"calls of {name}": float(n) for name, n in Counter(tool.name for tool in tools).items()}
    facts |= {f"is a {name}": 1.0 for name in kinds(t, bool(tools)) if name not in ("no call", "failed call")}
    facts |= {"calls": float(len(tools)), "failed calls": float(sum(tool.outcome != "ok" for tool in tools))}
    return facts | {"turns": float(len(t.turns)), "sampled tokens": float(sum(t.mask))}
