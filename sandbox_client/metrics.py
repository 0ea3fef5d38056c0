"""Counters and histograms of the server, in Prometheus' text form."""

from collections import Counter, defaultdict
from typing import Any

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """What was asked, how it ended, and where the time went: queue, set-up, run."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.dropped_bytes = 0
        self._seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (len(_BUCKETS_S) + 2))

    def observe(self, operation: str, reply: dict[str, Any]) -> None:
        """Counts one operation by its reply."""
        self.outcomes[operation, reply["outcome"]] += 1
        self.dropped_bytes += reply.get("dropped_bytes", 0)
        self.time(operation, reply["elapsed_s"])

    def time(self, what: str, elapsed_s: float) -> None:
        """Adds one duration to the histogram `what`."""
        row = self._seconds[what]
        row[-2] += 1
        row[-1] += elapsed_s
        for place, bound in enumerate(_BUCKETS_S):
            if elapsed_s <= bound:
                row[place] += 1
                break

    def text(self, level: str, gauges: dict[str, float]) -> str:
        """Returns the page."""
        lines = [f'sandbox_level{{level="{level}"}} 1']
        lines += [f"sandbox_{name} {value:g}" for name, value in gauges.items()]
        for (operation, outcome), count in self.outcomes.items():
            lines.append(f'sandbox_outcomes_total{{operation="{operation}",outcome="{outcome}"}} {count}')
        lines += [f'sandbox_refusals_total{{code="{code}"}} {count}' for code, count in self.refusals.items()]
        lines.append(f"sandbox_dropped_bytes_total {self.dropped_bytes}")
        for operation, row in self._seconds.items():
            total = 0.0
            for bound, within in zip(_BUCKETS_S, row, strict=False):
                total += within
                lines.append(f'sandbox_seconds_bucket{{operation="{operation}",le="{bound}"}} {total:g}')
            lines.append(f'sandbox_seconds_bucket{{operation="{operation}",le="+Inf"}} {row[-2]:g}')
            lines.append(f'sandbox_seconds_count{{operation="{operation}"}} {row[-2]:g}')
            lines.append(f'sandbox_seconds_sum{{operation="{operation}"}} {row[-1]:.6f}')
        return "\n".join(lines) + "\n"
