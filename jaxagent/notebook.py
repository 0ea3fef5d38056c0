"""A run in a notebook's own page: curves as pictures, episodes with their words coloured by who wrote them.

What the report has at length, with neither a script nor a frame: hosts of notebooks show markup alone. Colours are such as
read on white and on black. What episodes say is hostile until shown otherwise; all of it is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, islice
from pathlib import Path
from unicodedata import category

from jaxagent.data.store import read
from jaxagent.types import Trajectory, Turn
from jaxagent.view import overview, shelf_of

CURVES = ("reward/success", "rollout/turns", "rollout/entropy", "rollout/tool_errors", "policy/sampler_logprob_gap", "sft/nll")
_HELD_OUT = "eval/success"  # drawn as points over the curve of the same thing in training
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 300, 150, 44, 22, 10
_STYLE = """<style>
.jxa { font: 13px/1.5 system-ui, sans-serif; max-width: 960px; font-variant-numeric: tabular-nums; }
.jxa svg text { font: 11px system-ui, sans-serif; fill: currentColor; opacity: .7; }
.jxa .grid { display: flex; flex-wrap: wrap; gap: 14px; }
.jxa figure { margin: 0; }
.jxa figcaption { font-weight: 600; }
.jxa .episode { border: 1px solid #8886; border-radius: 8px; padding: 8px 12px; margin: 10px 0; }
.jxa .said { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 0; }
.jxa .said span { border-radius: 4px; padding: 2px 3px; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.jxa .policy { background: #4f6bed38; }
.jxa .gained { background: #1b9e5a4d; }
.jxa .lost { background: #e0483a45; }
.jxa .tool { background: #b8860b38; }
.jxa .prompt { opacity: .65; }
.jxa .soft { opacity: .7; }
</style>"""


@dataclass(frozen=True)
class Html:
    """Markup that a notebook shows where it is the last line of a cell."""

    text: str

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{len(self.text)} characters of HTML, for a notebook to show"


def curves(workdir: str | Path, names: Sequence[str] = CURVES) -> Html:
    """The run's curves over its steps, of training and of the warm-up; points on success are held-out evaluations.

    Raises:
        ValueError: `workdir` holds no run.
    """
    run = overview(Path(workdir))
    drawn = []
    for name in names:
        values = run["curves"].get(name, [])
        line = [(x, y) for x, y in zip(run["x"], values, strict=False) if y is not None]
        held_out = run["curves"].get(_HELD_OUT, []) if name == "reward/success" else []
        points = [(x, y) for x, y in zip(run["x"], held_out, strict=False) if y is not None]
        if len(line) > 1:
            drawn.append(f"<figure><figcaption>{escape(name)}</figcaption>{_plot(line, points)}</figure>")
    steps = f"<p class=soft>{run['steps_done']} steps of training; ○ held-out tasks</p>"
    return Html(f'{_STYLE}<div class="jxa"><div class="grid">{"".join(drawn)}</div>{steps if drawn else "no steps yet"}</div>')


def _plot(line: Sequence[tuple[float, float]], points: Sequence[tuple[float, float]]) -> str:
    every = [*line, *points]
    (x0, x1), (y0, y1) = ((min(axis), max(axis)) for axis in zip(*every, strict=True))
    if y0 >= 0 and 0.2 < y1 <= 1:  # a share
        y0, y1 = 0.0, 1.0
    y0 *= not 0 < y0 < 0.1 * y1  # from zero, where that is near
    y1 += (y1 == y0) * (abs(y1) or 1.0)

    def at(x: float, y: float) -> tuple[str, str]:
        across = (x - x0) / ((x1 - x0) or 1.0) * (_WIDTH - _LEFT - 10)
        down = (y1 - y) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{_LEFT + across:.1f}", f"{_TOP + down:.1f}"

    grid = ""
    for value in (y0, (y0 + y1) / 2, y1):
        _, y = at(x0, value)
        grid += f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".15"/>'
        grid += f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{value:.3g}</text>'
    for value, anchor in ((x0, "start"), (x1, "end")):
        grid += f'<text x="{at(value, y0)[0]}" y="{_HEIGHT - 5}" text-anchor="{anchor}">{value:g}</text>'
    path = " ".join(",".join(at(*point)) for point in line)
    circles = "".join(
        '<circle cx="{}" cy="{}" r="4" fill="none" stroke="#e07a1f" stroke-width="2"/>'.format(*at(*point)) for point in points
    )
    curve = f'<polyline points="{path}" fill="none" stroke="#4f6bed" stroke-width="2" stroke-linejoin="round"/>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">{grid}{curve}{circles}</svg>'


def episodes(workdir: str | Path, label: str = "after", count: int = 3) -> Html:
    """Episodes of a set ("before", "after", "train-000007"), as the policy read and wrote them.

    They are the first ones; of a step of training, those of the first group that has something to compare. A turn is
    green where it was credited more than others, red where less, blue where nothing was learnt from it.

    Raises:
        ValueError: `workdir` holds no run.
        OSError: the run has no such set.
    """
    folder = Path(workdir)
    template = shelf_of(folder).template
    path = folder / "trajectories" / f"{label}.jsonl"
    rows = _compared(path, count) if label.startswith("train-") else list(islice(read(path), count))
    text = template.text if template else None
    told = "".join(_episode(row, text) for row in rows)
    kinds = {
        "prompt": "the prompt",
        "policy": "the policy",
        "gained": "credited",
        "lost": "blamed",
        "tool": "tools and the world",
    }
    used = [f'<span class="{kind}">&nbsp;{words}&nbsp;</span>' for kind, words in kinds.items() if f'class="{kind}"' in told]
    return Html(f'{_STYLE}<div class="jxa"><p>{escape(label)}: {" ".join(used)}</p>{told}</div>')


def _compared(path: Path, count: int) -> list[Trajectory]:
    """Of the first group whose rewards differ, or of the first."""
    first: list[Trajectory] = []
    for _, rows in groupby(read(path), lambda row: row.group):
        group = list(rows)
        if len({row.reward for row in group}) > 1:
            return group[:count]
        first = first or group
    return first[:count]


def _episode(row: Trajectory, text: Callable[[Sequence[int]], str] | None) -> str:
    mark = '<b style="color:#1b9e5a">✓</b>' if row.solved else '<b style="color:#e0483a">✗</b>'
    facts = [row.task, row.difficulty, f"reward {row.reward:g}", str(row.stop), row.error]
    said, at = [], 0
    for number, turn in enumerate(row.turns):
        if text:
            said.append(_span("tool" if number else "prompt", text(row.tokens[at : turn.start])))
            said.append(_span(_kind(turn), text(row.tokens[turn.start : turn.end]), _about(turn)))
        else:
            said.append(_span(_kind(turn), turn.text, _about(turn)))
            said += [_span("tool", tool.result) for tool in turn.tools]
        at = turn.end
    if text:
        said.append(_span("tool", text(row.tokens[at:])))
    why = f"<div class=soft>{_inert(row.turns[-1].reason)}</div>" if row.turns and row.turns[-1].reason else ""
    head = " · ".join(_inert(fact) for fact in facts if fact)
    return f'<div class="episode">{mark} {head}<div class="said">{"".join(said)}</div>{why}</div>'


def _kind(turn: Turn) -> str:
    return "policy" if not turn.advantage else "gained" if turn.advantage > 0 else "lost"


def _about(turn: Turn) -> str:
    """What a pointer that rests on a turn is told."""
    credit = "" if turn.advantage is None else f"advantage {turn.advantage:+.3g}"
    calls = [f"{tool.name}: {tool.outcome}, {tool.latency_s:.3g} s" for tool in turn.tools]
    return "; ".join(filter(None, [credit, turn.error, *calls]))


def _span(kind: str, words: str, about: str = "") -> str:
    return f'<span class="{kind}" title="{_inert(about)}">{_inert(words)}</span>' if words else ""


def _inert(words: str) -> str:
    """Text as markup: nothing in it is a tag, an entity, a control, or turns the direction of reading."""
    return escape("".join(c if c.isprintable() or c in "\n\t" or category(c) == "Zs" else "\ufffd" for c in words))
