"""How the time of a function of hostile text grows: 4 where a text four times as long takes four times as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_CLOCK_S = 0.001  # below which a time says nothing


def growth(function: Callable[[str], Any], piece: str, short: int, long: int) -> float:
    """Process time for a text of `long` characters over that for `short`, the best of three each."""

    def seconds(length: int) -> float:
        text, best = (piece * length)[:length], float("inf")
        for _ in range(3):
            began = time.process_time()
            function(text)
            best = min(best, time.process_time() - began)
        return best

    return seconds(long) / max(_CLOCK_S, seconds(short))
