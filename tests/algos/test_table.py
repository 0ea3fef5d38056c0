"""The page of all algorithms: what each row says, and how a column is replaced."""

from __future__ import annotations

import pytest

from jaxagent.algos import advantages, losses
from jaxagent.algos.table import AGGREGATIONS, TABLE, choose

A, L = advantages, losses


@pytest.mark.parametrize(
    ("name", "advantage", "ratio", "bound", "aggregate", "select", "clip"),
    [
        ("reinforce", A.reinforce, L.token_ratio, L.unbounded, "sequence_sum", "all", None),
        ("rloo", A.leave_one_out, L.token_ratio, L.unbounded, "sequence_sum", "all", None),
        ("grpo", A.normalised, L.token_ratio, L.clipped, "sequence_mean", "all", (0.2, 0.2)),
        ("dr_grpo", A.centred, L.token_ratio, L.clipped, "sequence_sum_norm", "all", (0.2, 0.2)),
        ("dapo", A.normalised, L.token_ratio, L.clipped, "token_mean", "mixed", (0.2, 0.28)),
        ("gspo", A.normalised, L.sequence_ratio, L.clipped, "sequence_mean", "all", (3e-4, 4e-4)),
        ("cispo", A.normalised, L.token_ratio, L.capped_weight, "token_mean", "all", (1.0, 1.0)),
    ],
)
def test_every_row_says_what_its_paper_says(
    name: str, advantage: object, ratio: object, bound: object, aggregate: str, select: str, clip: tuple[float, float] | None
) -> None:
    row = choose(name)
    assert (row.advantage, row.ratio, row.bound) == (advantage, ratio, bound)
    assert (row.aggregate, row.select) == (aggregate, select)
    assert clip is None or (row.clip_low, row.clip_high) == clip


def test_no_row_stands_there_without_a_test_above() -> None:
    assert set(TABLE) == {"reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"}
    assert {row.aggregate for row in TABLE.values()} <= set(AGGREGATIONS)


def test_columns_are_replaced_one_by_one_and_the_page_stays() -> None:
    row = choose("grpo", aggregate="token_mean", select="mixed", clip_low=0.1, clip_high=0.3, length=7.0)
    assert (row.aggregate, row.select, row.clip_low, row.clip_high, row.length) == ("token_mean", "mixed", 0.1, 0.3, 7.0)
    assert row.advantage is A.normalised
    assert choose("grpo") == TABLE["grpo"]
    assert choose("grpo", clip_low=0.0).clip_low == 0.0


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"name": "gppo"}, "algo.name must be one of reinforce, rloo, grpo, dr_grpo, dapo, gspo, cispo; got 'gppo'"),
        ({"name": "grpo", "aggregate": "mean"}, "algo.aggregate must be one of token_mean, sequence_mean, .*; got 'mean'"),
        ({"name": "grpo", "select": "best"}, "algo.select must be all or mixed; got 'best'"),
        ({"name": "grpo", "clip_low": -0.1}, "algo.clip_low and algo.clip_high must not be negative .*got -0.1, 0.2"),
        ({"name": "dr_grpo", "length": 0.0}, "algo.length must be positive; got 0.2, 0.2, 0.0"),
    ],
)
def test_a_row_that_cannot_be_built_says_what_is_known(columns: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        choose(**columns)  # type: ignore[arg-type]
