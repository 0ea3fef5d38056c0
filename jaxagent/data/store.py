"""Trajectories on disk: one JSONL file per step, with tokens, masks, log-probs, versions, rewards and their reasons."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxagent.types import Trajectory


class Store:
    """A folder of `<label>.jsonl` files. A file appears whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, label: str, trajectories: Iterable[Trajectory]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{label}.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(trajectory.to_json()) + "\n" for trajectory in trajectories))
        partial.rename(path)

    def labels(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.jsonl"))

    def read(self, label: str) -> list[Trajectory]:
        return list(read(self.folder / f"{label}.jsonl"))


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file one by one: the file of a large run does not fit into memory."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Trajectory.from_json(json.loads(line))


def audit(trajectory: Trajectory) -> str:
    """Proves prefix continuity: every sampler call was fed exactly the tokens that the row holds before its turn.

    Returns an empty string, or the turn, the position and the two tokens that differ.
    """
    n = len(trajectory.tokens)
    for name in ("mask", "logprob", "version", "turn"):
        if len(getattr(trajectory, name)) != n:
            return f"{n} tokens, but {len(getattr(trajectory, name))} entries of {name}"
    held = 0
    for number, turn in enumerate(trajectory.turns):
        if turn.fed_start != held or turn.start != held + len(turn.fed):
            return f"turn {number}: the sampler held {turn.fed_start} and was fed {len(turn.fed)}, the row had {held}"
        if not turn.start < turn.end <= n:
            return f"turn {number}: tokens {turn.start} to {turn.end} of a row of {n}"
        for offset, fed in enumerate(turn.fed):
            if trajectory.tokens[held + offset] != fed:
                at = held + offset
                return f"turn {number}, position {at}: the sampler was fed {fed}, the row holds {trajectory.tokens[at]}"
        if not all(trajectory.mask[turn.start : turn.end]) or any(trajectory.mask[held : turn.start]):
            return f"turn {number}: the mask is not true exactly on tokens {turn.start} to {turn.end}"
        if any(at != number for at in trajectory.turn[turn.start : turn.end]):
            return f"turn {number}: tokens {turn.start} to {turn.end} are said to be of another turn"
        held = turn.end
    return "tokens after the last turn are said to be sampled" if any(trajectory.mask[held:]) else ""
