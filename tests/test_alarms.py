"""Alarms: each is raised by what it is for, by nothing else, and once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxagent.alarms import NAMES, NO_TOOL, WINDOW, Alarms

WELL = {
    "policy/kl": 0.01,
    "policy/skipped": 0.0,
    "rollout/entropy": 1.0,
    "rollout/parse_errors": 0.05,
    "rollout/tools_reached": 40.0,
    "reward/informative_groups": 0.5,
    "reward/outcome": 0.4,
    "reward/gap_looked_up": 0.02,
}


def raised(alarms: Alarms, steps: int, **changes: float | None) -> list[str]:
    """The names of the alarms of some equal steps; `policy__kl` stands for `policy/kl`."""
    values = {**WELL, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return [name for _ in range(steps) for name in alarms.look(values)]


def test_a_run_that_goes_well_raises_none() -> None:
    alarms = Alarms()
    for step in range(60):
        assert raised(alarms, 1, reward__outcome=0.4 + step / 100, rollout__entropy=1 - step / 100) == []
        if step % 20 == 19:
            assert raised(alarms, 1, eval__success=0.3 + step / 100) == []


def test_a_large_step_is_told_at_once_and_again_only_after_a_window_without_one() -> None:
    alarms = Alarms({"kl": 0.1})
    assert raised(alarms, 1, policy__kl=0.1) == []
    assert raised(alarms, 3, policy__kl=0.11) == ["kl"]
    assert raised(alarms, WINDOW - 1) == []
    assert raised(alarms, 1, policy__kl=0.2) == []
    assert raised(alarms, WINDOW) == []
    assert raised(alarms, 1, policy__kl=0.2) == ["kl"]
    assert "a KL of 0.3 in one step (the limit is 0.1)" in Alarms().look({"policy/kl": 0.3})["kl"]


@pytest.mark.parametrize(
    ("name", "metric"), [("kl", "policy/kl"), ("gradient", "policy/skipped"), ("compiled", "engine/compiled")]
)
def test_steps_without_the_metric_are_not_steps_in_which_it_was_well(name: str, metric: str) -> None:
    alarms = Alarms()
    look = lambda value: list(alarms.look({} if value is None else {metric: value}))  # noqa: E731
    assert look(1.0) == [name]
    for absent in (None, None, None, None, None, None):
        assert look(absent) == []
    assert look(1.0) == []  # it has gone on
    for _ in range(WINDOW):
        assert look(0.0) == []
    assert look(1.0) == [name]


def test_entropy_is_measured_against_the_first_step_and_over_a_window() -> None:
    alarms = Alarms({"entropy": 0.05})
    assert raised(alarms, 1, rollout__entropy=2.0) == []
    assert raised(alarms, WINDOW, rollout__entropy=0.11) == []
    assert raised(alarms, 1, rollout__entropy=0.02) == ["entropy"]
    assert "the entropy fell from 2 to 0.092" in _told({"entropy": 0.05}, [2.0, 0.11, 0.11, 0.11, 0.11, 0.02])


def _told(limits: dict[str, float], entropies: list[float], **more: float) -> str:
    alarms = Alarms(limits)
    return [alarms.look({"rollout/entropy": entropy, **more}) for entropy in entropies][-1].get("entropy", "")


def test_a_noisy_entropy_around_its_limit_is_told_once() -> None:
    alarms = Alarms({"entropy": 0.05})
    raised(alarms, 1, rollout__entropy=1.0)
    raised(alarms, WINDOW, rollout__entropy=0.05)
    told = [name for step in range(60) for name in raised(alarms, 1, rollout__entropy=0.03 + 0.04 * (step % 3 == 0))]
    assert told == ["entropy"]


@pytest.mark.parametrize(("success", "told"), [(0.4, ["entropy"]), (0.89, ["entropy"]), (0.9, []), (1.0, [])])
def test_a_policy_that_solves_its_tasks_may_be_sure_of_itself(success: float, told: list[str]) -> None:
    alarms = Alarms()
    raised(alarms, 1, rollout__entropy=1.0, reward__success=0.1)
    raised(alarms, WINDOW, rollout__entropy=0.5, reward__success=success)
    assert raised(alarms, 60, rollout__entropy=0.001, reward__success=success) == told


def test_a_policy_that_was_sure_and_fails_again_is_told() -> None:
    alarms = Alarms()
    raised(alarms, 1, rollout__entropy=1.0)
    assert raised(alarms, WINDOW, rollout__entropy=0.001, reward__success=0.95) == []
    assert raised(alarms, WINDOW, rollout__entropy=0.001, reward__success=0.5) == ["entropy"]


def test_groups_without_variance_are_told_after_a_window_of_them() -> None:
    alarms = Alarms({"zero_variance": 0.9})
    assert raised(alarms, WINDOW - 1, reward__informative_groups=0.05) == []
    assert raised(alarms, 1, reward__informative_groups=0.05) == ["zero_variance"]
    assert raised(alarms, 1, reward__informative_groups=0.9) == []


@pytest.mark.parametrize(
    ("success", "why"),
    [(0.97, "97% of the episodes succeed, the tasks are too easy"), (0.02, "2% of .* too hard"), (0.5, "too hard or too easy")],
)
def test_groups_without_variance_are_of_tasks_that_are_too_easy_or_too_hard(success: float, why: str) -> None:
    alarms = Alarms()
    told = [alarms.look({**WELL, "reward/informative_groups": 0.0, "reward/success": success}) for _ in range(WINDOW)]
    assert re.search(why, told[-1]["zero_variance"])


def test_parse_errors_that_rise_are_told_and_those_that_were_always_there_are_not() -> None:
    alarms = Alarms()
    assert raised(alarms, 20, rollout__parse_errors=0.6) == []
    assert raised(alarms, 20, rollout__parse_errors=0.1) == []
    assert raised(alarms, WINDOW, rollout__parse_errors=0.25) == ["parse_errors"]


def test_held_out_success_that_falls_while_the_outcome_in_training_rises_is_told() -> None:
    alarms = Alarms()
    raised(alarms, WINDOW, reward__outcome=0.5)
    assert raised(alarms, 1, eval__success=0.6, reward__outcome=0.5) == []
    assert raised(alarms, WINDOW, reward__outcome=0.8) == []
    assert raised(alarms, 1, eval__success=0.45, reward__outcome=0.8) == ["held_out"]


def test_held_out_success_that_falls_with_the_outcome_in_training_is_not_a_gamed_reward() -> None:
    alarms = Alarms()
    raised(alarms, WINDOW, reward__outcome=0.5)
    raised(alarms, 1, eval__success=0.6, reward__outcome=0.5)
    raised(alarms, WINDOW, reward__outcome=0.2)
    assert raised(alarms, 1, eval__success=0.2, reward__outcome=0.2) == []


def test_steps_without_an_evaluation_do_not_end_the_alarm_of_the_evaluations() -> None:
    alarms = Alarms()
    raised(alarms, WINDOW, reward__outcome=0.5)
    raised(alarms, 1, eval__success=0.6, reward__outcome=0.5)
    raised(alarms, WINDOW, reward__outcome=0.8)
    told = [raised(alarms, 1, eval__success=0.45, reward__outcome=0.8) + raised(alarms, 20, reward__outcome=0.8) for _ in "abc"]
    assert told == [["held_out"], [], []]


def test_a_gap_to_a_scorer_that_is_not_trained_on_is_told_when_it_grows() -> None:
    alarms = Alarms()
    assert raised(alarms, 10, reward__gap_looked_up=0.3) == []
    assert raised(alarms, WINDOW, reward__gap_looked_up=0.45) == ["gap"]


def test_a_run_whose_policy_never_reaches_a_tool_stops_by_itself() -> None:
    alarms = Alarms()
    assert "tools" in alarms.stop
    assert raised(alarms, NO_TOOL - 1, rollout__tools_reached=0.0) == []
    assert raised(alarms, 1, rollout__tools_reached=0.0) == ["tools"]
    assert raised(Alarms(), NO_TOOL, rollout__tools_reached=0.1) == []
    assert raised(Alarms(tools=False), 2 * NO_TOOL, rollout__tools_reached=0.0) == []


def test_programs_compiled_while_turns_wait_are_told() -> None:
    assert Alarms().look({"engine/compiled": 0.0}) == {}
    assert "turns waited for 2 programs" in Alarms().look({"engine/compiled": 2.0})["compiled"]


def test_a_gradient_that_is_not_finite_is_told() -> None:
    assert "a gradient was not finite, 2 updates skipped" in Alarms().look({"policy/skipped": 2.0})["gradient"]
    assert "a gradient was not finite, 1 updates skipped" in Alarms().look({"critic/skipped": 1.0})["gradient"]


def test_numbers_that_are_missing_or_none_raise_nothing() -> None:
    """As in metrics.jsonl, from which a resumed run learns what was seen."""
    alarms = Alarms()
    for _ in range(20):
        assert alarms.look(dict.fromkeys(WELL)) == {}
        assert alarms.look({"step": 3, "sft/nll": 0.1}) == {}


def test_alarms_that_were_shown_the_same_steps_say_the_same_next() -> None:
    steps: list[dict[str, Any]] = [{**WELL, "rollout/parse_errors": 0.02 * i, "eval/success": 1 - 0.02 * i} for i in range(30)]
    one = Alarms()
    told = [one.look(values) for values in steps]
    other = Alarms()
    for values in steps[:17]:
        other.look(values)
    assert [other.look(values) for values in steps[17:]] == told[17:]
    assert any(told[17:]) or any(told[:17])


@pytest.mark.parametrize(("stop", "wanted"), [("", set()), ("kl, entropy", {"kl", "entropy"}), ("all", set(NAMES))])
def test_the_alarms_that_stop_a_run_are_named(stop: str, wanted: set[str]) -> None:
    assert Alarms(stop=stop).stop == wanted


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"stop": "kl,entropi"}, "alarms.stop must name some of kl, entropy, .* got 'entropi'"),
        ({"limits": {"kl": 0.0}}, "alarms.limits must be positive, got kl=0.0"),
        ({"limits": {"entropi": 1.0}}, "alarms.limits must be of kl, entropy, zero_variance; got 'entropi'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Alarms(**options)
