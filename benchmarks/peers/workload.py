"""What all runners are given and how they report: prompts, turn lengths, tools, clocks, one JSON line. Standard library only.

Turn lengths are drawn from the step's number, so that every runner samples the same number of tokens in every turn of every
episode, whatever its random numbers are. A step is timed from the end of the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULT = "result: 42"  # what the tool says
RESULT_TOKENS = 20  # room for it in an episode's budget, with what stands around it in any of the chat templates


@dataclass(frozen=True)
class Workload:
    """One run of one runner; `compare.py` says what the defaults are.

    Args:
        model: folder of a Hugging Face checkpoint with a `prompts.json`, as model.py makes it.
        work: "agentic", episodes of several turns with a tool between them, or "single", one turn of `new_tokens`.
        tool_ms: what the tool takes, for every step.
        turn_tokens: sampled tokens of a turn, in the mean; an episode's turns and results fit into `budget`.
        even: all turns have `turn_tokens` tokens: the case in which nobody waits for the longest turn.
        beta: weight of the distance to the reference, whose log-probs are computed in every step.
        micro: prompts whose rollouts are in one gradient batch of the peers; all of them fit for a small model only.
    """

    model: Path
    work: str
    tool_ms: tuple[float, ...]
    prompts: int
    group: int
    turns: int
    turn_tokens: int
    budget: int
    new_tokens: int
    even: bool
    beta: float
    micro: int

    @property
    def agentic(self) -> bool:
        return self.work == "agentic"

    @property
    def steps(self) -> int:
        return len(self.tool_ms)

    @property
    def episodes(self) -> int:
        return self.prompts * self.group

    def asked(self) -> dict[str, Any]:
        """The prompts: `messages`, what the user says, and `texts`, the whole beginning of the dialogue, `tokens` long."""
        found: dict[str, Any] = json.loads((self.model / "prompts.json").read_text())
        if len(found["texts"]) < self.prompts:
            raise SystemExit(f"{self.model}/prompts.json has {len(found['texts'])} prompts, {self.prompts} are wanted")
        return {name: value[: self.prompts] if isinstance(value, list) else value for name, value in found.items()}

    def lengths(self, step: int) -> list[list[int]]:
        """Sampled tokens of every turn of every episode of a step."""
        rng = random.Random(step)
        return [self._episode(rng) for _ in range(self.episodes)]

    def _episode(self, rng: random.Random) -> list[int]:
        if not self.agentic:
            return [self.new_tokens]
        if self.even:
            return [self.turn_tokens] * self.turns
        room = self.budget - (self.turns - 1) * RESULT_TOKENS
        while True:
            turns = [2 + int(rng.expovariate(1 / (self.turn_tokens - 1.5))) for _ in range(self.turns)]
            if sum(turns) <= room:
                return turns

    def tokens(self, step: int) -> int:
        """Sampled tokens of a step."""
        return sum(map(sum, self.lengths(step)))


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of every runner."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", choices=("agentic", "single"), default="agentic")
    parser.add_argument(
        "--tool-ms", type=float, nargs="+", default=[50.0, 50.0], help="of every step; as many as there are steps"
    )
    add_sizes(parser)
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The arguments that the runners and `compare.py` share."""
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=24, help="sampled tokens of a turn, in the mean")
    parser.add_argument("--budget", type=int, default=192, help="tokens of an episode after its prompt, tool results included")
    parser.add_argument("--new-tokens", type=int, default=128, help="of single-turn work")
    parser.add_argument("--even", action="store_true", help="all turns are of the same length")
    parser.add_argument("--beta", type=float, default=0.04)
    parser.add_argument("--micro", type=int, default=4, help="prompts in a gradient batch of the peers")


def workload_of(options: argparse.Namespace) -> Workload:
    values = {name: getattr(options, name) for name in Workload.__dataclass_fields__}
    return Workload(**{**values, "tool_ms": tuple(options.tool_ms)})


def reward(text: str) -> float:
    """Something that differs between rollouts."""
    return float(sum(map(ord, text)) % 7)


@dataclass
class Report:
    """Collects the steps of a run and prints them."""

    runner: str
    workload: Workload
    steps: list[dict[str, Any]] = field(default_factory=list)
    sampled: int = 0  # in the step so far
    _began: float = field(default_factory=time.perf_counter)
    _lap: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        """The first step begins: what was before is setting up."""
        self._lap = time.perf_counter(), time.process_time()
        self._setup_s = self._lap[0] - self._began

    def step(self, **more: Any) -> None:
        """A step has ended."""
        now = time.perf_counter(), time.process_time()
        number = len(self.steps)
        told = {"tool_ms": self.workload.tool_ms[number], "wall_s": now[0] - self._lap[0], "cpu_s": now[1] - self._lap[1]}
        wanted = {"tokens": self.sampled, "tokens_wanted": self.workload.tokens(number)}
        self.steps.append({name: _short(value) for name, value in {**told, **wanted, **more}.items()})
        print(f"{self.runner}: {self.steps[-1]}", file=sys.stderr, flush=True)
        self.sampled, self._lap = 0, now
        self.print()  # it may be the last that is heard of it

    def print(self, **more: Any) -> None:
        """A line of standard output; the last one counts. Memory is that of the process and the largest of those it started."""
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = sum(resource.getrusage(who).ru_maxrss for who in whose) / 1024
        said = {"runner": self.runner, "setup_s": _short(self._setup_s), "peak_mib": round(peak), "cpus": os.cpu_count()}
        print(json.dumps({**said, "steps": self.steps, **more}), flush=True)


class Tools:
    """How many tool calls there were, and how many at once."""

    def __init__(self) -> None:
        self.calls = self.now = self.most = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        with self._lock:
            self.calls, self.now = self.calls + 1, self.now + 1
            self.most = max(self.most, self.now)
        yield
        with self._lock:
            self.now -= 1

    def take(self) -> dict[str, int]:
        """Of the step that ends."""
        told = {"tool_calls": self.calls, "tools_at_once": self.most}
        self.calls = self.most = 0
        return told


def distinct(turns: Sequence[Sequence[int]], count: int = 4) -> int:
    """How many different beginnings there are among turns: one means that all samples are equal."""
    return len({tuple(turn[:count]) for turn in turns if len(turn) >= count})


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
