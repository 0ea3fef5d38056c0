"""What is printed: plain lines in a pipe, one live line on a terminal."""

from __future__ import annotations

import io
import re

import pytest

from jaxagent.progress import Progress, clock, spark


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_orders_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def run(stream: io.StringIO, steps: int = 40) -> str:
    progress = Progress(stream)
    progress.say("compiled", style="bold red")
    progress.start("step", 0)
    for step in range(1, steps + 1):
        progress.step(step, steps, {"success": f"{step / steps:.2f}"}, curve=step / steps)
    progress.stop()
    progress.table("Held-out", ["difficulty", "success"], [["[/1 hop]", 0.5], ["é", 1]])
    return stream.getvalue()


def test_in_a_pipe_there_are_plain_lines_only() -> None:
    text = run(io.StringIO())
    assert "\x1b" not in text
    assert "\r" not in text
    assert re.search(r"^ +\d+\.\d s  compiled$", text, re.MULTILINE)


def test_in_a_pipe_a_phase_has_few_lines_and_always_its_last() -> None:
    lines = [line for line in run(io.StringIO(), steps=500).splitlines() if " step " in line]
    assert 1 <= len(lines) < 100
    assert re.search(r"step 500/500  success 1\.00  left 0:00$", lines[-1])


def test_a_line_in_a_pipe_is_never_broken_however_long() -> None:
    stream = io.StringIO()
    Progress(stream).say("word " * 100)
    assert stream.getvalue().count("\n") == 1


def test_a_table_shows_its_cells_as_they_are() -> None:
    text = run(io.StringIO())
    assert "Held-out" in text
    assert "[/1 hop]" in text


def test_what_is_said_is_never_read_as_markup() -> None:
    stream = io.StringIO()
    Progress(stream).say("lost: [/red] [bold]x[/bold]")
    assert "lost: [/red] [bold]x[/bold]" in stream.getvalue()


def test_on_a_terminal_there_is_a_live_line_with_its_curve_that_goes_away() -> None:
    text = run(Terminal())
    assert "\x1b[" in text
    assert "█" in text


def test_a_phase_may_be_stopped_twice_and_begun_again() -> None:
    progress = Progress(Terminal())
    for _ in range(2):
        progress.start("warm-up", 3)
        progress.start("step", 0)
        progress.stop()
        progress.stop()


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([0.0, 0.5, 1.0], " ▄█"),
        ([-3.0, 7.0], " █"),
        ([0.125] * 3, "▁▁▁"),
    ],
)
def test_a_curve_is_a_bar_for_every_value(values: list[float], bars: str) -> None:
    assert spark(values) == bars


def test_a_long_curve_is_thinned_by_means() -> None:
    assert spark([0.0, 1.0] * 64) == "▄" * 32
    assert len(spark([0.5] * 33)) == 32


def test_seconds_are_shown_as_minutes() -> None:
    assert [clock(s) for s in (0, 59.9, 60, 3661)] == ["0:00", "0:59", "1:00", "61:01"]
