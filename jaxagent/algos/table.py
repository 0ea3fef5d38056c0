"""All algorithms on one page. A row says who learns from whom, how the ratio is taken, how far it may go, how tokens are
averaged, and which groups count. A new algorithm from known parts is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array

from jaxagent.algos import advantages, losses

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm")


@dataclass(frozen=True)
class Algorithm:
    """One row of the table.

    Args:
        select: "all" groups count, or only the "mixed" ones, whose rewards differ.
        clip_low, clip_high: the ratio may move to [1 - clip_low, 1 + clip_high].
        length: the constant of sequence_sum_norm, in tokens.
    """

    source: str
    advantage: Callable[[Array, Array], Array]
    ratio: Callable[..., Array]
    bound: Callable[..., Array]
    aggregate: str
    select: str = "all"
    clip_low: float = 0.2
    clip_high: float = 0.2
    length: float = 100.0


_TOKEN, _CLIP = losses.token_ratio, losses.clipped

# fmt: off
TABLE = {
    "reinforce": Algorithm("Williams 1992",    advantages.reinforce,     _TOKEN, losses.unbounded, "sequence_sum"),
    "rloo":      Algorithm("arXiv:2402.14740", advantages.leave_one_out, _TOKEN, losses.unbounded, "sequence_sum"),
    "grpo":      Algorithm("arXiv:2402.03300", advantages.normalised,    _TOKEN, _CLIP, "sequence_mean"),
    "dr_grpo":   Algorithm("arXiv:2503.20783", advantages.centred,       _TOKEN, _CLIP, "sequence_sum_norm"),
    "dapo":      Algorithm("arXiv:2503.14476", advantages.normalised,    _TOKEN, _CLIP, "token_mean", "mixed",
                           clip_high=0.28),
    "gspo":      Algorithm("arXiv:2507.18071", advantages.normalised,    losses.sequence_ratio, _CLIP, "sequence_mean",
                           clip_low=3e-4, clip_high=4e-4),
    "cispo":     Algorithm("arXiv:2506.13585", advantages.normalised,    _TOKEN, losses.capped_weight, "token_mean",
                           clip_low=1.0, clip_high=1.0),
}
# fmt: on


def choose(
    name: str,
    aggregate: str | None = None,
    select: str | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    length: float | None = None,
) -> Algorithm:
    """The row `name` with the given columns replaced. Raises ValueError with the known values."""
    if name not in TABLE:
        raise ValueError(f"algo.name must be one of {', '.join(TABLE)}; got {name!r}")
    changes: dict[str, Any] = {
        "aggregate": aggregate,
        "select": select,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "length": length,
    }
    row = replace(TABLE[name], **{column: value for column, value in changes.items() if value is not None})
    if row.aggregate not in AGGREGATIONS:
        raise ValueError(f"algo.aggregate must be one of {', '.join(AGGREGATIONS)}; got {row.aggregate!r}")
    if row.select not in ("all", "mixed"):
        raise ValueError(f"algo.select must be all or mixed; got {row.select!r}")
    if min(row.clip_low, row.clip_high) < 0 or row.length <= 0:
        raise ValueError(
            "algo.clip_low and algo.clip_high must not be negative and algo.length must be positive; "
            f"got {row.clip_low}, {row.clip_high}, {row.length}"
        )
    return row
