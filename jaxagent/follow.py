"""`jaxagent eval --follow`: evaluates the checkpoints of a run while it trains, in a process of its own.

Training neither waits for it nor knows of it: what the two share are files. Every evaluation is of one version of the weights,
a checkpoint, which is held by hard links until it is done, whatever training deletes meanwhile. It draws what the run's own
evaluations draw, so that in exact mode the table of a step is the one that training would have made there.

Each leaves its episodes and its table in the run's `evals`, and a line in `evaluations.jsonl`, whose `step` is the checkpoint's
on the one step axis of the run; what shows the run's metrics shows these beside them. A process that is stopped goes on with
the episodes that it had.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxagent.evaluate import Asked, HeldOut, folder_of, held_out, kept, place_of, settings_of
from jaxagent.lock import alone
from jaxagent.metrics import EVALUATIONS, eval_metrics, read, want_alike
from jaxagent.models.frozen import digest
from jaxagent.parts import build, restore_weights, use_devices
from jaxagent.sharding import AXES, DeviceMesh

POLL_S = 2.0  # how often it is looked for a new checkpoint
RETRY_S = 60.0  # after an evaluation that the infrastructure broke
FOLLOWED = "follows this run there already; wait for its end, or give this one --to=FOLDER"

# The table of a step, whose checkpoint is held in a workdir of its own, and the share of episodes that the infrastructure lost.
Score = Callable[[int, Path], tuple[dict[str, Any], float]]


class Unreadable(Exception):
    """A checkpoint that cannot be restored."""


class Following:
    """Which checkpoints of a run are evaluated, and what came of it."""

    def __init__(self, workdir: Path, home: Path, settings: dict[str, Any], first: int, last: int, max_broken: float):
        """Args:
        home: where `evaluations.jsonl` and what is held are; the workdir, or another folder.
        settings: of all these evaluations. Raises ValueError where the file has some of others.
        first, last: the steps of the run from which on, and up to which, there is something to evaluate.
        max_broken: a table of which the infrastructure lost a greater share is no result.
        """
        self.checkpoints, self.home, self.path = workdir / "checkpoints", home, home / EVALUATIONS
        self.settings, self.first, self.last, self.max_broken = settings, first, last, max_broken
        self.skipped: set[int] = set()  # checkpoints that cannot be read
        self.pause_s = POLL_S  # until it is worth to look again, where `next` did nothing
        known = read(self.path)
        want_alike({f"of {self.path}": known[-1] if known else {}, "that is asked for": {"settings": settings}})
        self.done = {record["step"] for record in known}
        home.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record) + "\n" for record in known)  # without a torn last line
        self.path.write_text(text)

    def due(self) -> int | None:
        """The oldest checkpoint that is whole and not evaluated yet."""
        there = [int(path.name) for path in self.checkpoints.glob("*") if path.name.isdecimal()]
        return min((step for step in there if step >= self.first and step not in self.done | self.skipped), default=None)

    @property
    def over(self) -> bool:
        """Whether nothing will come any more."""
        return self.last in self.done | self.skipped

    @contextmanager
    def held(self, step: int) -> Iterator[Path | None]:
        """A workdir whose only checkpoint is that of `step`, as long as it is wanted; None where it was deleted before."""
        home, there = self.home / "evals" / "held", self.checkpoints / str(step)
        here = home / "checkpoints" / str(step)
        shutil.rmtree(home, ignore_errors=True)  # of a process that was killed
        try:
            shutil.copytree(there, here, copy_function=_link)
            whole = there.is_dir() and _files(there) == _files(here)  # nothing of it was deleted meanwhile
        except (FileNotFoundError, shutil.Error):
            whole = False
        try:
            yield home if whole else None
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def next(self, score: Score) -> dict[str, Any] | None:
        """Evaluates what is due and writes its line; None where there was nothing, or nothing came of it, which is said."""
        self.pause_s = POLL_S
        if (step := self.due()) is None:
            return None
        with self.held(step) as workdir:
            if workdir is None:
                print(f"step {step}: training deleted its checkpoint before it was held (checkpoint.keep)", file=sys.stderr)
                return None
            try:
                table, lost = score(step, workdir)
            except Unreadable as error:
                print(f"step {step} is left out: its checkpoint cannot be read ({error})", file=sys.stderr)
                self.skipped.add(step)
                return None
        if lost == 1 or lost > self.max_broken:
            self.pause_s = RETRY_S
            print(
                f"step {step}: {lost:.0%} of the episodes were lost to the infrastructure (train.max_broken allows "
                f"{self.max_broken:.0%}); those are played again in {RETRY_S:.0f} s, the others are kept",
                file=sys.stderr,
            )
            return None
        told = {name: table[name] for name in ("n", "broken", "ci95", "settings")}
        record = {"step": step, **eval_metrics(table), **told}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.done.add(step)
        return record


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def _link(source: str, target: str) -> None:
    """A second name of a file, or a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def follow(asked: Asked) -> int:
    """The command: evaluates checkpoints as they appear, and ends with the last one of the run."""
    config, workdir = asked.read(), Path(asked.workdir)
    sampling, c = asked.sampling(config), config.evaluate
    split, tasks, k = asked.split or "valid", asked.tasks or c.tasks, asked.rollouts or c.rollouts
    settings = settings_of(config, sampling, split=split, tasks=tasks, k=k)
    home = Path(asked.to) if asked.to else workdir
    if not asked.to:
        own = settings_of(config, held_out(config), split="valid", tasks=c.tasks, k=c.rollouts)
        try:
            want_alike({"of the run itself": {"settings": own}, "that is asked for": {"settings": settings}})
        except ValueError as error:
            raise ValueError(f"{error}; or keep these apart with --to=FOLDER") from None
    home.mkdir(parents=True, exist_ok=True)
    with alone(home / "evaluations.lock", FOLLOWED):
        return _follow(config, workdir, home, sampling, settings)


def _follow(config: ConfigDict, workdir: Path, home: Path, sampling: HeldOut, settings: dict[str, Any]) -> int:
    first, last = config.warmup.steps, config.warmup.steps + config.train.steps
    following = Following(workdir, home, settings, first, last, config.train.max_broken)
    if following.over:
        print(f"all is evaluated: {following.path}", file=sys.stderr)
        return 0
    with _scoring(config, sampling, settings, home) as score:
        while not following.over:
            if record := following.next(score):
                low, high = record["ci95"]
                print(f"step {record['step']}: success {record['eval/success']:.3f} ({low:.3f} to {high:.3f})", flush=True)
            else:
                time.sleep(following.pause_s)
    return 0


@contextmanager
def _scoring(config: ConfigDict, sampling: HeldOut, settings: dict[str, Any], home: Path) -> Iterator[Score]:
    """What makes the table of a held checkpoint, on the devices of this process."""
    use_devices(config)
    try:
        DeviceMesh.build(**{axis: config.mesh[axis] for axis in AXES})
    except ValueError:  # the run's own mesh is of more devices than this process has
        with config.unlocked():
            config.mesh.update({"data": 0, **{axis: 1 for axis in AXES if axis != "data"}})
    parts = build(config, with_critic=False)

    def score(step: int, held: Path) -> tuple[dict[str, Any], float]:
        try:
            restore_weights(parts, held, 1)
        except ValueError as error:  # training had begun to delete it
            raise Unreadable(str(error).partition(";")[0]) from error
        if parts.selves:  # as the run's own evaluation of this step does, which counts from the end of the warm-up
            parts.selves.sit(step - config.warmup.steps)
        said = {"policy": {"step": step, "weights": int(jax.jit(digest)(parts.learner.params))}, **settings}
        folder = folder_of(home / "evals", {**said, **place_of(config)})
        table, rows = kept(parts.rollouts, parts.world, sampling, said, folder)
        return table, sum(not row.stop.counts for row in rows) / max(1, len(rows))

    try:
        yield score
    finally:
        parts.close()
