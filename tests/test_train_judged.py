"""What a story judges before it trains: all hosts alike, by what all of them have played."""

from __future__ import annotations

from typing import Any

from test_hosts import on_each

from jaxagent.hosts import Hosts
from jaxagent.rewards.shaping import components
from jaxagent.train import Broken, sound, want_states
from jaxagent.types import Sample, StopReason, Trajectory, Turn


def played(stop: StopReason = StopReason.ANSWERED, error: str = "", paid: float = 0.0) -> Trajectory:
    made = Trajectory("t", 0, "g", 0, stop=stop, error=error)
    made.feed([1])
    turn = made.sampled(Sample([2], [0.0], [0], True, 0, [1]), "", "")
    turn.parts = {"style": paid}
    return made


def told(work: Any) -> Any:
    """What `work` says where it refuses, or gives."""
    try:
        return work()
    except (Broken, ValueError) as error:
        return str(error)


def test_too_many_lost_episodes_of_one_host_are_judged_by_those_of_all() -> None:
    lost = [played(StopReason.INFRA_FAILURE, "the cable was cut") for _ in range(2)]
    rows = {0: lost, 1: [played(), played()]}

    def judged(allowed: float) -> list[Any]:
        return on_each(2, lambda hosts: told(lambda: sound(rows[hosts.index], allowed, hosts)))

    assert judged(0.5) == [[], rows[1]]
    one, other = judged(0.4)
    assert one == other
    assert one.startswith("50% of the episodes") and "the cable was cut" in one


def test_a_row_of_one_host_that_is_not_what_was_sampled_stops_all() -> None:
    strange = played()
    strange.tokens[0] = 7
    rows = {0: [played()], 1: [strange]}
    one, other = on_each(2, lambda hosts: told(lambda: sound(rows[hosts.index], 0.5, hosts)))
    assert one == other and "t: turn 0, position 0: the sampler was fed 1" in one


def test_a_world_names_its_states_if_any_turn_of_any_host_is_taken_in_one() -> None:
    turns = {0: [Turn(0, 0, 1, "")], 1: [Turn(0, 0, 1, "s")]}
    assert on_each(2, lambda hosts: told(lambda: want_states(turns[hosts.index], hosts))) == [None, None]
    one, other = on_each(2, lambda hosts: told(lambda: want_states(turns[0], hosts)))
    assert one == other and "this world names no states" in one


def test_what_a_reward_is_made_of_is_the_mean_over_the_episodes_of_all_hosts() -> None:
    rows = {0: [played(paid=1.0)], 1: [played(paid=0.0), played(paid=0.0), played(paid=0.5)]}

    def combined(hosts: Hosts) -> dict[str, float]:
        return hosts.combined(components(rows[hosts.index]))

    assert on_each(2, combined) == [{"part_style": 0.375}] * 2
