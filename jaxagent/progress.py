"""What one sees in the terminal: a live line on a terminal, plain lines in a pipe, and the tables at the end."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_BARS = " ▁▂▃▄▅▆▇█"
PLAIN_EVERY_S = 5.0  # between two lines of the same phase in a pipe


class Progress:
    """Says what happens. One live line per phase on a terminal; in a pipe a line now and then, and always the last."""

    def __init__(self, stream: TextIO | None = None):
        self.console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self.began = time.monotonic()
        self._live: Live | None = None
        self._phase = ""
        self._phase_began = 0.0
        self._first_step = 0
        self._last_line = 0.0
        self._curve: list[float] = []

    def say(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self.console.print(Text(f"{time.monotonic() - self.began:6.1f} s  ") + Text(text, style=style))

    def start(self, phase: str, step: int) -> None:
        """Begins a phase whose next step is `step`."""
        self.stop()
        self._phase, self._phase_began, self._first_step, self._last_line = phase, time.monotonic(), step, 0.0
        self._curve = []
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()

    def step(self, step: int, steps: int, shown: dict[str, str], curve: float | None = None) -> None:
        """One step done: `shown` are the numbers worth seeing, `curve` the one that is drawn."""
        if curve is not None:
            self._curve.append(curve)
        now = time.monotonic()
        pace = (now - self._phase_began) / max(1, step - self._first_step)
        left = clock(pace * (steps - step))
        numbers = [f"{name} {value}" for name, value in shown.items()]
        text = "  ".join([f"{self._phase} {step}/{steps}", *numbers, f"left {left}"])
        if self._live:
            self._live.update(Text(f"{now - self.began:6.1f} s  {text}  ") + Text(spark(self._curve), style="green"))
        elif step == steps or now - self._last_line >= PLAIN_EVERY_S:
            self._last_line = now
            self.say(text)

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table, the first column a name and the others numbers."""
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self.console.print(table)


def spark(values: Sequence[float], width: int = 32) -> str:
    """The values, in [0, 1], as a line of small bars; thinned to `width`."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[round(min(max(v, 0.0), 1.0) * (len(_BARS) - 1))] for v in values)


def clock(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
