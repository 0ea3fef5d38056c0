"""Learning from preferences: of two answers, which one, and how much a policy says so by itself. Arrays are [P]: pairs."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

Pairs = Float[Array, " P"]


def dpo(chosen: Pairs, rejected: Pairs, beta: float) -> tuple[Pairs, Pairs, Pairs]:
    """-log sigma(m) with m = beta (chosen - rejected) (DPO, arXiv:2305.18290, eq. 7).

    Args:
        chosen, rejected: log pi(answer) - log pi_ref(answer), summed over the tokens that the policy samples.

    Returns:
        Loss, margin m, and pull = beta sigma(-m), which is the whole gradient: d loss / d chosen = -pull and
        d loss / d rejected = pull (eq. 8). Every token of an answer has its answer's pull as a constant advantage, so that
        the two answers of a pair need not stand in one program at once.
    """
    margin = beta * (chosen - rejected)
    return -jax.nn.log_sigmoid(margin), margin, beta * jax.nn.sigmoid(-margin)
