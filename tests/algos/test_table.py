"""The page of all algorithms: what each row says, how a column is replaced, and what contradicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxagent.algos import advantages, losses
from jaxagent.algos.table import TABLE, WORDS, Algorithm, Choice, choose, inert_columns

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("name", "advantage", "bound", "aggregate", "others"),
    [
        ("reinforce", "plain", "unbounded", "sequence_sum", {}),
        ("rloo", "leave_one_out", "unbounded", "sequence_sum", {"kl": "k1_reward"}),
        ("grpo", "normalised", "clipped", "sequence_mean", {**CLIP, "kl": "k3_loss"}),
        ("dr_grpo", "centred", "clipped", "sequence_sum_norm", CLIP),
        ("dapo", "normalised", "clipped", "token_mean", {"select": "mixed", "clip_low": 0.2, "clip_high": 0.28}),
        ("cispo", "normalised", "capped", "token_mean", {"clip_low": 1.0, "clip_high": 1.0}),
        ("gspo", "normalised", "clipped", "sequence_mean", {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("gspo_token", "normalised", "clipped", "sequence_mean", {"ratio": "sequence_token", "clip_high": 4e-4}),
        ("gdpo", "normalised", "clipped", "sequence_mean", {"separate": True, "whiten": True}),
        ("spiral", "plain", "unbounded", "sequence_sum", {"baseline_decay": 0.95}),
        ("reinforce_pp_baseline", "centred", "clipped", "token_mean", {"whiten": True, "kl": "k2_loss"}),
        ("reinforce_pp", "plain", "clipped", "token_mean", {"unit": "token", "whiten": True, "kl": "k1_reward"}),
        ("reinforce_to_go", "plain", "unbounded", "sequence_sum", {"unit": "turn", "critic": False, "gamma": 1.0}),
        ("turn_grpo", "normalised", "clipped", "turn_mean", {"turns": "index", "outcome_weight": 1.0}),
        ("gtpo", "normalised", "clipped", "turn_mean", {"turns": "index", "outcome_weight": 0.0}),
        ("gigpo", "centred", "clipped", "turn_mean", {"turns": "state", "gamma": 0.95, "turn_weight": 1.0}),
        (
            "ppo",
            "plain",
            "clipped",
            "token_mean",
            {"unit": "token", "critic": True, "whiten": True, "gae_lambda": 1.0, "value_clip": 0.2},
        ),
        ("ppo_dual", "plain", "clipped", "token_mean", {"unit": "token", "critic": True, "whiten": True, "clip_dual": 3.0}),
        (
            "ppo_turn",
            "plain",
            "clipped",
            "turn_mean",
            {"unit": "turn", "critic": True, "whiten": True, "gamma": 0.95, "gae_lambda": 0.95},
        ),
        (
            "agent_prm",
            "plain",
            "clipped",
            "turn_mean",
            {"unit": "turn", "critic": False, "process": True, "whiten": True, "gamma": 1.0, "gae_lambda": 1.0},
        ),
        ("anchor_gae", "plain", "clipped", "turn_mean", {"unit": "turn", "anchored": True, "whiten": True, "gamma": 0.95}),
        ("decoupled", "normalised", "clipped", "token_mean", {"importance": "token_masked", "importance_bounds": (0.0, 5.0)}),
        ("tis", "normalised", "clipped", "sequence_mean", {"importance": "token_truncated", "importance_bounds": (0.0, 2.0)}),
        ("icepop", "normalised", "clipped", "sequence_mean", {"importance": "token_masked", "importance_bounds": (0.5, 5.0)}),
        ("sequence_tis", "normalised", "clipped", "sequence_mean", {"importance": "sequence_truncated"}),
        ("sequence_mis", "normalised", "clipped", "sequence_mean", {"importance_bounds": (0.0, 3.0)}),
        ("geometric", "normalised", "clipped", "sequence_mean", {"filter": "geometric", "importance": "token_truncated"}),
        ("off_policy_mask", "normalised", "clipped", "sequence_mean", {"filter": "unlikely_negative"}),
    ],
)
def test_every_row_says_what_its_paper_says(
    name: str, advantage: str, bound: str, aggregate: str, others: dict[str, Any]
) -> None:
    row = choose(name)
    assert (row.advantage, row.bound, row.aggregate) == (advantage, bound, aggregate)
    assert {column: getattr(row, column) for column in others} == others
    told = {"source", "advantage", "bound", "aggregate", *others, *CLIP, "kl", "gamma", "filter_bounds", "importance"}
    plain = Algorithm("", "", "", "")  # what is not told above is the plain case
    given = {column for column, value in vars(row).items() if value != getattr(plain, column)}
    assert given <= told
    assert (row.kl_coef, row.entropy_coef) == (0.0, 0.0)  # no reference is kept unless one is asked for


def test_every_row_has_its_test_above() -> None:
    (mark,) = [m for m in test_every_row_says_what_its_paper_says.pytestmark if m.name == "parametrize"]
    assert {case[0] for case in mark.args[1]} == set(TABLE)


def test_the_words_of_the_table_are_the_functions_that_there_are() -> None:
    assert WORDS["advantage"] == tuple(advantages.COMPARE)
    assert WORDS["ratio"] == tuple(losses.RATIO)
    assert WORDS["bound"] == tuple(losses.BOUND)


def test_columns_are_replaced_one_by_one_and_the_page_stays() -> None:
    row = choose("grpo", aggregate="token_mean", select="mixed", clip_low=0.1, clip_high=0.3, length=7.0)
    assert (row.aggregate, row.select, row.clip_low, row.clip_high, row.length) == ("token_mean", "mixed", 0.1, 0.3, 7.0)
    assert row.advantage == "normalised"
    assert choose("grpo") == TABLE["grpo"]
    assert choose("grpo", clip_low=0.0).clip_low == 0.0


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"name": "gppo"}, "algo.name must be one of reinforce, rloo, grpo, .*; got 'gppo'"),
        ({"aggregate": "mean"}, "algo.aggregate must be one of token_mean, sequence_mean, .*, turn_mean; got 'mean'"),
        ({"select": "best"}, "algo.select must be all or mixed; got 'best'"),
        ({"advantage": "std"}, "algo.advantage must be one of plain, centred, normalised, leave_one_out; got 'std'"),
        ({"turns": "last"}, "algo.turns must be one of none, index, state, all; got 'last'"),
        ({"kl": "k1_loss"}, "algo.kl must be one of k1_reward, .*; got 'k1_loss'; k1 has no gradient in expectation"),
        ({"importance": "tis"}, "algo.importance must be one of none, token, .*; got 'tis'"),
        ({"filter": "k1"}, "algo.filter must be one of none, geometric, .*; got 'k1'"),
        ({"clip_low": -0.1}, "algo.clip_low must not be negative, got -0.1"),
        ({"kl_coef": float("nan")}, "algo.kl_coef must not be negative, got nan"),
        ({"name": "dr_grpo", "length": 0.0}, "algo.length must be positive, got 0.0"),
        ({"name": "ppo", "gae_lambda": 1.5}, "algo.gae_lambda must be between 0 and 1, got 1.5"),
        ({"name": "gspo", "aggregate": "token_mean"}, "algo.aggregate must be sequence_mean for a ratio of sequences"),
        ({"name": "gspo", "turns": "state"}, r"algo.turns must be none for gspo, .*got 'state' \(try gspo_token\)"),
        ({"importance_bounds": (2.0, 0.5)}, r"algo.importance_bounds must be \(low, high\) with 0 <= low <= high"),
        ({"filter": "k3"}, r"algo.filter_bounds must be given for algo.filter=k3, .*default \(0.999, 1.001\) is geometric's"),
        ({"name": "off_policy_mask", "filter": "geometric"}, r"algo.filter_bounds must hold 1 .*got \(0.0, 0.1\)"),
    ],
)
def test_a_row_that_cannot_be_built_says_what_is_known(columns: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Choice(**{"name": "grpo", **columns})


@pytest.mark.parametrize(
    ("name", "columns", "dead"),
    [
        ("grpo", {}, {"gamma", "gae_lambda", "length", "kl", "importance_bounds", "filter_bounds"}),
        ("grpo", {"kl_coef": 0.1, "turns": "all"}, {"gae_lambda", "length", "importance_bounds", "filter_bounds"}),
        ("gigpo", {}, {"gae_lambda", "length", "kl", "importance_bounds", "filter_bounds"}),
        ("ppo", {"importance": "token_masked", "filter": "k3"}, {"advantage", "turns", "length", "kl"}),
        ("decoupled", {"importance": "token"}, {"gamma", "gae_lambda", "length", "kl"} | {"importance_bounds"}),
    ],
)
def test_columns_that_do_nothing_are_known(name: str, columns: dict[str, Any], dead: set[str]) -> None:
    found = dict(inert_columns(name, columns))
    assert set(found) - {"filter_bounds"} == dead - {"filter_bounds"}
    assert all(found.values())


def test_a_row_without_a_bound_has_no_clips_and_no_row_has_no_columns() -> None:
    assert {"clip_low", "clip_high"} <= dict(inert_columns("rloo", {})).keys()
    assert dict(inert_columns("gppo", {"clip_low": 3.0})) == {}


def test_what_a_row_asks_of_the_step() -> None:
    assert not TABLE["grpo"].beyond_advantage
    for changed in (
        replace(TABLE["grpo"], kl_coef=0.1),
        replace(TABLE["grpo"], entropy_coef=0.1),
        TABLE["ppo"],
        TABLE["agent_prm"],
    ):
        assert changed.beyond_advantage
    assert replace(TABLE["rloo"], kl_coef=0.1).kl_in_reward
    assert not replace(TABLE["rloo"], kl_coef=0.1).beyond_advantage
    assert {name for name, row in TABLE.items() if not row.compares} == {
        *("reinforce", "spiral", "reinforce_to_go", "reinforce_pp", "ppo", "ppo_dual", "ppo_turn", "agent_prm")
    }
    assert {name for name, row in TABLE.items() if row.old_matters} == {
        *("decoupled", "tis", "icepop", "sequence_tis", "sequence_mis", "geometric")
    }
