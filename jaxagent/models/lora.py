"""Low-rank adapters: which linear maps carry one, and how strong it is (Hu et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSpec:
    """y = x W + (alpha / rank) x A B on every target, with A [in, rank] and B [rank, out] (Hu et al. 2021, eq. 3)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of transformer.LINEARS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
