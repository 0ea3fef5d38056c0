"""A run as one page: the workdir's config, evaluations, metrics and trajectories, put into the page of `page/`.

Everything here chooses and shortens; drawing is the page's part. The page asks the network for nothing. What trajectories
say is hostile until shown otherwise, so all of it travels as JSON that cannot end its script element, and the page only
ever makes text nodes of it; its content policy runs the page's own script and no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxagent import metrics
from jaxagent.chat.family import template_of
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.template import Template
from jaxagent.data.store import read
from jaxagent.types import Trajectory, Turn

PAGE_BYTES = 4_000_000
EVALUATED = ("before", "after", "ablated")
_EVALUATED_SHARE = 0.6  # of the room for trajectories, where there are training episodes too
_TRAIN_STEPS = 24  # at most so many steps show their groups
_READ_BYTES = 32_000_000  # of one step's file: a long run must not be read whole to be sampled
_POINTS = 1200  # of a curve; a longer one is averaged
_RESULT_CHARS = 2000  # of a tool's result, whose tokens stand in the row anyway
_PAIRS = 4  # of a task that failed before and was solved after
_JOINED = 8  # tokens that may share a character
_PAGE = Path(__file__).with_name("page")
_SCRIPTS = ("words", "header", "charts", "time", "dialogue", "tokens", "episodes", "live", "page")
_UNREADABLE = "\ufffd"
_CURVES = (
    "reward/mean",
    "reward/success",
    "reward/informative_groups",
    "rollout/turns",
    "rollout/entropy",
    "rollout/parse_errors",
    "rollout/tool_errors",
    "policy/sampler_logprob_gap",
    "feed/staleness_mean",
    "feed/staleness_max",
    "policy/clip_frac",
    "policy/kl",
    "policy/grad_norm",
    "engine/tokens_per_s",
    "sft/nll",
    "dpo/loss",
    "dpo/margin",
)
_GAP_BY_TURN = (
    "policy/sampler_logprob_gap_turn_"  # and the turn's number, of which there are as many as objective.py tells apart
)

Item = dict[str, Any]  # a trajectory as the page reads it


def write_report(workdir: str) -> int:
    """The command `jaxagent view`: writes the page of a run and prints where it is."""
    print(report(Path(workdir)))
    return 0


def report(workdir: Path) -> Path:
    """Writes `<workdir>/report.html`, finished run or not, and returns its path.

    Raises:
        ValueError: `workdir` holds no run.
    """
    page = workdir / "report.html"
    text = write(collect(workdir))
    partial = page.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(page)
    return page


def write(run: dict[str, Any]) -> str:
    """The page of what `collect` found."""
    head, tail = _frame()
    if run.get("live"):  # it may ask whoever sent it, and nobody else
        head = head.replace("default-src 'none';", "default-src 'none'; connect-src 'self';", 1)
    return head + embed(run) + tail


def embed(value: Any) -> str:
    """JSON in ASCII that is inert inside a script element: no character of markup is left as itself."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def collect(workdir: Path) -> dict[str, Any]:
    """All that the page shows, within PAGE_BYTES."""
    shelf = shelf_of(workdir)
    files = {path.stem: path for path in sorted((workdir / "trajectories").glob("*.jsonl"))}
    run = {**overview(workdir, shelf), "validations": sum(label.startswith("valid-") for label in files)}
    # What is said about the sets is bounded by the number of difficulties; the rest of the slack is for its own digits.
    shelf.room = PAGE_BYTES - len("".join(_frame()).encode()) - len(embed(run)) - 100_000
    run |= _evaluations(files, _tables(workdir), shelf)
    run |= _training(files, shelf)
    run |= {"trajectories": shelf.items, "vocab": {str(i): text for i, text in sorted(shelf.vocab.items())}}
    return run


def shelf_of(workdir: Path) -> Shelf:
    """An empty shelf without room, with the run's template. Raises ValueError where `workdir` holds no run."""
    return Shelf(*_template(_config(workdir).get("init_from", "")), 0)


def overview(workdir: Path, shelf: Shelf | None = None) -> dict[str, Any]:
    """What the page says above the episodes: config, curves, the figures of evaluations that are done."""
    config = _config(workdir)
    shelf = shelf or shelf_of(workdir)
    tables = _tables(workdir)
    records = metrics.with_evaluations(workdir)
    return {
        "config": config,
        "finished": "after" in tables,
        "stop": list(shelf.template.stop) if shelf.template else [],
        "tokenizer_fault": shelf.fault,
        "validations": 0,
        **curves(records, config.get("warmup", {}).get("steps", 0)),
        "evaluations": {label: _result(tables[label], {}) for label in EVALUATED if label in tables},
        "pairs": [],
        "left_out": {},
        "training": {"steps": 0, "steps_shown": 0, "groups": 0, "groups_left_out": 0},
    }


def _tables(workdir: Path) -> dict[str, Any]:
    saved = workdir / "eval.json"
    tables: dict[str, Any] = json.loads(saved.read_text()) if saved.is_file() else {}
    return tables


def _frame() -> tuple[str, str]:
    """The page before and after the run's JSON."""
    script = '"use strict";\n' + "".join((_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (_PAGE / "page.html").read_text(encoding="utf-8")
    page = page.replace("@STYLE@", (_PAGE / "page.css").read_text(encoding="utf-8"))
    page = page.replace("@SCRIPT_HASH@", f"sha256-{digest}").replace("@SCRIPT@", script)
    head, _, tail = page.partition("@RUN@")
    return head, tail


def _config(workdir: Path) -> dict[str, Any]:
    path = workdir / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} holds no run: it has no config.json. Give the --workdir of a jaxagent train.")
    try:
        config = finite(json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a run's config is a JSON object, got {type(config).__name__}")
    return config


def _template(init_from: str) -> tuple[Template | None, str]:
    """The run's template; where its tokenizer is gone, None and why, and the page shows ids."""
    try:
        return template_of(init_from, ChatOptions("keep")), ""
    except (ValueError, OSError) as error:
        return None, str(error)


def finite(value: Any) -> Any:
    """The value with every number that is not finite as None: JSON has no words for those."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


# ====================================================================== curves


def curves(records: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Columns over the training step, 1 being the first; warm-up steps count up to 0. Seconds are means per step too."""
    found = {name for record in records for name in record}
    parts = sorted(name for name in found if name.startswith("time/") and name != "time/cpu_s")
    evals = sorted(name for name in found if name.startswith("eval/success"))
    gaps = sorted(name for name in found if name.startswith(_GAP_BY_TURN))
    names = [*(name for name in _CURVES if name in found), *gaps, *evals, *parts]
    each = max(1, math.ceil(len(records) / _POINTS))
    buckets: list[Sequence[dict[str, Any]]] = []
    for phase in (lambda step: step <= warmup, lambda step: step > warmup):
        lines = [record for record in records if phase(record["step"])]
        buckets += [lines[i : i + each] for i in range(0, len(lines), each)]
    return {
        "warmup_steps": warmup,
        "steps_done": max([0, *(record["step"] - warmup for record in records)]),
        "steps_per_point": each,
        "x": [bucket[-1]["step"] - warmup for bucket in buckets],
        "curves": {name: [_mean(record.get(name) for record in bucket) for bucket in buckets] for name in names},
        "seconds": {
            name.removeprefix("time/").removesuffix("_s"): _short(sum(record.get(name) or 0.0 for record in records))
            for name in parts
        },
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return _short(sum(known) / len(known)) if known else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# ====================================================================== trajectories


class Shelf:
    """The trajectories that fit into `room` bytes of JSON, and the texts of their tokens."""

    def __init__(self, template: Template | None, fault: str, room: int):
        """Args: fault: why there is no template."""
        self.template, self.fault, self.room = template, fault, room
        self.items: list[Item] = []
        self.vocab: dict[int, str] = {}
        self._pieces: dict[int, str] = {}

    def cost(self, items: Sequence[Item]) -> int:
        """Bytes of these items and of the texts that they would be the first to need."""
        new = {i for item in items for i in item["tokens"]} - self.vocab.keys()
        size = sum(len(embed(item)) + 1 for item in items)
        return size + (sum(len(embed({str(i): self.piece(i)})) for i in new) if self.template else 0)

    def put(self, items: Sequence[Item]) -> bool:
        """Takes all of the items or, where they do not fit, none."""
        cost = self.cost(items)
        if cost > self.room:
            return False
        self.room -= cost
        self.items += items
        if self.template:
            self.vocab |= {i: self.piece(i) for item in items for i in item["tokens"] if i not in self.vocab}
        return True

    def piece(self, token: int) -> str:
        """A token's own text; U+FFFD stands in it for bytes that are no text alone."""
        if token not in self._pieces:
            known = self.template is not None and 0 <= token < self.template.vocab_size
            self._pieces[token] = self.template.text([token]) if known and self.template else f"<no token {token}>"
        return self._pieces[token]

    def joined(self, ids: Sequence[int]) -> list[list[Any]]:
        """[start, end, text] of the tokens that are text only together."""
        spans: list[list[Any]] = []
        at = 0
        while at < len(ids):
            end, text = self._join(ids, at)
            if text:
                spans.append([at, end, text])
            at = end
        return spans

    def _join(self, ids: Sequence[int], start: int) -> tuple[int, str]:
        """The end and the text of the characters that begin at `start` and are spread over tokens; no text if none are."""
        end = start
        while self.template and end < min(len(ids), start + _JOINED) and _UNREADABLE in self.piece(ids[end]):
            end += 1
            if end - start > 1 and _UNREADABLE not in (text := self.template.text(ids[start:end])):
                return end, text
        return start + 1, ""

    def item(self, t: Trajectory, label: str, step: int) -> Item:
        """A trajectory as the page reads it; `logprob` and `version` (run lengths) are those of the sampled tokens."""
        sampled = [i for i, own in enumerate(t.mask) if own]
        return {
            **about(t, label, step),
            "tokens": t.tokens,
            "joined": self.joined(t.tokens),
            "logprob": [finite(round(t.logprob[i], 4) + 0.0) for i in sampled],
            "version": [[version, len(list(run))] for version, run in groupby(t.version[i] for i in sampled)],
            "turns": [self._turn(turn) for turn in t.turns],
        }

    def _turn(self, turn: Turn) -> Item:
        """A turn without what is empty; its text only where the tokens cannot be read."""
        tools = [
            {
                "name": tool.name,
                "arguments": json.dumps(tool.arguments, ensure_ascii=False),
                "outcome": tool.outcome,
                "result": tool.result[:_RESULT_CHARS],
                "cut": max(0, len(tool.result) - _RESULT_CHARS),
                "latency_s": finite(round(tool.latency_s, 6)),
            }
            for tool in turn.tools
        ]
        advantage = None if turn.advantage is None else finite(round(turn.advantage, 5))
        told = {"reward": finite(turn.reward), "reason": turn.reason, "error": turn.error, "tools": tools}
        told |= {"parts": finite(_parts(turn)), "checks": finite(turn.checks)}
        text = {} if self.template else {"text": turn.text}
        kept = {name: value for name, value in {**told, **text}.items() if value}
        return {"start": turn.start, "end": turn.end, "advantage": advantage, **kept}


def _parts(turn: Turn) -> dict[str, float]:
    """What a turn's reward is the sum of, where it has parts: what they leave of it is the outcome."""
    rest = turn.reward - sum(turn.parts.values()) if turn.outcome is None else turn.outcome
    return {"outcome": round(rest, 9), **turn.parts} if turn.parts and "outcome" not in turn.parts else turn.parts


def about(t: Trajectory, label: str, step: int) -> Item:
    """What can be said of a trajectory without its tokens."""
    return {
        "set": label,
        "step": step,
        "task": t.task,
        "seed": str(t.seed),  # JavaScript's numbers end at 2**53
        "group": t.group,
        "rollout": t.rollout,
        "role": f"{t.role}, earlier version" * t.past or (f"{t.role}, segment {t.segment + 1}" if t.segment else t.role),
        "difficulty": t.difficulty,
        "reward": finite(round(t.reward, 6)),
        "solved": t.solved,
        "counts": t.stop.counts,
        "stop": str(t.stop),
        "error": t.error,
        "attempts": t.attempts,
        "seconds": finite(round(t.seconds, 3)),
    }


def _evaluations(files: dict[str, Path], tables: dict[str, Any], shelf: Shelf) -> dict[str, Any]:
    """Puts episodes of the evaluations on the shelf, task by task; returns their tables, the pairs, what is left out."""
    room = int(shelf.room * (_EVALUATED_SHARE if any(label.startswith("train-") for label in files) else 1))
    reserve, shelf.room = shelf.room - room, room
    found: dict[str, dict[Any, Item]] = {}
    results: dict[str, Any] = {}
    totals: dict[str, int] = {}
    for label in EVALUATED:
        if label in files:
            found[label], tally, totals[label] = _read_evaluation(files[label], label, shelf, room)
            results[label] = _result(tables.get(label), tally)
        elif label in tables:
            results[label] = _result(tables[label], {})
    chosen = _pairs(found.get("before", {}), found.get("after", {}))
    order = [*chosen, *(key for keys in found.values() for key in keys)]
    done: set[Any] = set()
    pairs = []
    for key in order:
        together = [items[key] for items in found.values() if key in items]
        if key in done or not shelf.put(together):
            continue
        done.add(key)
        if key in chosen:
            at = len(shelf.items) - len(together)
            pairs.append({"before": at, "after": at + 1, "kind": chosen[key]})
    left = {label: totals[label] - sum(item["set"] == label for item in shelf.items) for label in found}
    shelf.room += reserve
    return {"evaluations": results, "pairs": pairs, "left_out": left}


def _read_evaluation(path: Path, label: str, shelf: Shelf, room: int) -> tuple[dict[Any, Item], dict[str, list[int]], int]:
    """A file's episodes by group, rollout and seat, as many as `room` holds; [wins, episodes] by difficulty; their number."""
    items: dict[Any, Item] = {}
    tally: dict[str, list[int]] = {}
    total = 0
    for t in read(path):
        total += 1
        if t.stop.counts and not t.segment and not t.past:  # a rollout counts once
            wins_n = tally.setdefault(t.difficulty, [0, 0])
            wins_n[0] += t.solved
            wins_n[1] += 1
        if room > 0:
            item = shelf.item(t, label, 0)
            room -= len(embed(item))
            if room > 0:
                items[t.group, t.rollout, item["role"], t.seat] = item
    return items, tally, total


def _result(table: dict[str, Any] | None, tally: dict[str, list[int]]) -> dict[str, Any]:
    """The figures of an evaluation; those of a run that is not finished are counted from its stored episodes."""
    wins, n = (sum(column) for column in zip(*tally.values(), strict=True)) if tally else (0, 0)
    rates = {name: won / played for name, (won, played) in tally.items()}
    table = table or {"success": wins / n if n else None, "n": n, "k": 1, "by_difficulty": rates}
    by_difficulty = table.get("by_difficulty") or rates
    known = {name: table.get(name) for name in ("success", "ci95", "n", "k", "reward", "turns", "broken")}
    known |= {"settings": table["settings"]} if "settings" in table else {}
    return finite(
        {**known, "by_difficulty": {name: [by_difficulty[name], tally.get(name, [0, 0])[1]] for name in by_difficulty}}
    )


def _pairs(before: dict[Any, Item], after: dict[Any, Item]) -> dict[Any, str]:
    """Tasks worth seeing twice, the first of each kind: gained (one per difficulty first), lost, failed."""
    kinds: dict[str, list[Any]] = {"gained": [], "lost": [], "failed": []}
    for key, late in after.items():
        early = before.get(key)
        if early and early["counts"] and late["counts"] and not (early["solved"] and late["solved"]):
            kinds["gained" if late["solved"] else "lost" if early["solved"] else "failed"].append(key)
    firsts = {after[key]["difficulty"]: key for key in reversed(kinds["gained"])}
    gained = sorted(kinds["gained"], key=lambda key: firsts[after[key]["difficulty"]] != key)[:_PAIRS]
    return {
        **dict.fromkeys(gained, "gained"),
        **dict.fromkeys(kinds["lost"][:1], "lost"),
        **dict.fromkeys(kinds["failed"][:1], "failed"),
    }


def _training(files: dict[str, Path], shelf: Shelf) -> dict[str, Any]:
    """Puts whole groups on the shelf, from steps spread evenly over the run, those with differing rewards first."""
    labels = [label for label in files if label.startswith("train-")]
    first = next((group for label in labels for group in _groups(files[label], label, shelf, limit=1)), None)
    shown = spread(labels, min(_TRAIN_STEPS, max(1, shelf.room // max(1, shelf.cost(first))))) if first else []
    taken = skipped = 0
    for i, label in enumerate(shown):
        floor = shelf.room - shelf.room // (len(shown) - i)  # what a step leaves, the later ones share
        groups = list(_groups(files[label], label, shelf, _READ_BYTES))
        groups.sort(key=lambda group: len({item["reward"] for item in group}) == 1)
        for group in groups:
            fits = shelf.room - shelf.cost(group) >= floor and shelf.put(group)
            taken, skipped = taken + fits, skipped + (not fits)
    return {"training": {"steps": len(labels), "steps_shown": len(shown), "groups": taken, "groups_left_out": skipped}}


def _groups(path: Path, label: str, shelf: Shelf, limit: float) -> Iterator[list[Item]]:
    """The groups of a step's file. `limit` ends the reading, but never inside a group."""
    step = int(label.removeprefix("train-"))
    for _, rows in groupby(read(path), key=lambda t: t.group):
        group = list(rows)
        yield [shelf.item(t, "train", step) for t in group]
        limit -= sum(len(t.tokens) for t in group) * 40  # about the bytes of a token on disk
        if limit <= 0:
            return


def spread(values: Sequence[str], count: int) -> list[str]:
    """At most `count` of the values, evenly spaced, the first and the last among them; of one, the last."""
    if count >= len(values):
        return list(values)
    if count == 1:
        return [values[-1]]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
