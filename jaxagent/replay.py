"""One step of training again, on this machine's CPUs, from what the run stored: where does it first come out otherwise?

The weights before the step are those of the last checkpoint before it, taught anew with the stored trajectories of the steps
between; without one, the run is taught from its beginning. Then every stage of the step is compared with what was recorded:

    trajectories  the rows are what the sampler was fed and what it sampled, by the weights of this step
    rewards       shaping, and what metrics.jsonl says of rewards
    credit        the advantage of every turn
    packing       tokens and denominator of the loss, and how full the rows are
    log-probs     of the sampled tokens, under the weights before the step
    loss          with its ratios and distances
    gradient      its norm
    update        the norms of the step and of the weights after it
    weights       every weight of the checkpoint after the step, where there is one

The same devices and versions give the same bits. Others round otherwise: --tolerance says how much may differ.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxagent import config as configs
from jaxagent import supervised
from jaxagent.credit import group_metrics, role_metrics
from jaxagent.data.store import Store, audit
from jaxagent.feed import has_signal
from jaxagent.metrics import read
from jaxagent.parts import learning, use_devices
from jaxagent.process import take_back
from jaxagent.train import Course, begin_training, next_update, restore, rewards
from jaxagent.types import Group, Trajectory, by_rollout

_NAMES: dict[str, tuple[str, ...]] = {
    "rewards": ("reward/", "groups/"),
    "credit": ("credit/",),
    "packing": ("policy/tokens", "policy/denominator", "train/row_fill", "critic/tokens"),
    "log-probs": ("policy/nll", "policy/entropy", "policy/sampler_logprob_gap", "off_policy/", "critic/value_mean"),
    "gradient": ("policy/grad_norm", "critic/grad_norm"),
    "update": (
        "policy/update_norm",
        "policy/param_norm",
        "policy/lr",
        "policy/skipped",
        "critic/update",
        "critic/param",
        "critic/lr",
    ),
    "loss": ("policy/", "critic/", "router/"),  # whatever else these say
}
STAGES = ("trajectories", "rewards", "credit", "packing", "log-probs", "loss", "gradient", "update", "weights")


@dataclass(frozen=True)
class Found:
    """What came of a stage: how many numbers were compared, the worst of them, and whether it is within the tolerance."""

    stage: str
    compared: int
    difference: float
    worst: str
    same: bool


def replay(run: str, step: int, tolerance: float) -> int:
    """The command `jaxagent replay`: 0 where the step comes out as it was recorded, 1 where it does not."""
    with contextlib.suppress(RuntimeError):  # devices exist already: they are used as they are
        jax.config.update("jax_platforms", "cpu")
    found = replayed(Path(run), step, tolerance)
    print(f"{'stage':<14}{'compared':>9}  {'difference':>10}  worst")
    for one in found:
        print(f"{one.stage:<14}{one.compared:>9}  {one.difference:>10.3g}  {one.worst}{'' if one.same else '   <- differs'}")
    first = next((one for one in found if not one.same), None)
    bits = "to the last bit" if not any(one.difference for one in found) else f"within {tolerance:g}"
    print(
        f"step {step}: " + (f"the first stage that differs is {first.stage}: {first.worst}" if first else f"the same, {bits}")
    )
    return int(first is not None)


def replayed(workdir: Path, step: int, tolerance: float = 1e-4) -> list[Found]:
    """The stages of training step `step`, counted from 1. Raises ValueError where the run has not stored what is needed."""
    config = configs.read(workdir / "config.json")
    if config.finetune.mode or config.learner.replay_routing:
        what = "fine-tuning" if config.finetune.mode else "learner.replay_routing, whose routing is not stored"
        raise ValueError(f"{workdir}: steps of reinforcement are replayed, but this is a run of {what}")
    use_devices(config)
    course = Course(config, workdir, learning(config))
    try:
        return compare(course, step, tolerance)
    finally:
        course.checkpoints.close()


def compare(course: Course, step: int, tolerance: float = 1e-4) -> list[Found]:
    """The stages of a step of a run whose parts are there already; where rows are not sound, only that."""
    at = course.config.warmup.steps + step
    recorded = next((record for record in read(course.workdir / "metrics.jsonl") if record["step"] == at), None)
    if step < 1 or recorded is None:
        raise ValueError(f"{course.workdir}: metrics.jsonl has no training step {step}")
    if others := sorted((course.workdir / "trajectories").glob("host-*")):
        raise ValueError(f"{course.workdir}: {1 + len(others)} processes trained together, of one process steps are replayed")
    first = _trajectories(stored(course.store, step), step, course.config.feed.max_staleness)
    if not first.same:
        return [first]
    _go_to(course, at - 1)
    return [first, *_compared(course, step, recorded, tolerance)]


def _go_to(course: Course, wanted: int) -> None:
    """Brings the weights to where they were after step `wanted` of the one step axis."""
    c, learner = course.config, course.parts.learner
    for part in filter(None, (learner, course.parts.critic)):
        part.begin(supervised.warmup_optimizer(**c.warmup_optimizer), max(c.warmup.steps, 1))
    before = [at for at in course.checkpoints.steps() if at <= wanted]
    if before:
        restore(course, before[-1])
    if course.step < c.warmup.steps:
        world, template = course.parts.world, course.parts.template
        dialogues = supervised.demonstrations(world, c.warmup.demos, c.seed)
        rows = [supervised.supervised_row(template, dialogue, world.tools) for dialogue in dialogues]
        while course.step < c.warmup.steps:
            supervised.supervise(learner, rows, c.warmup.batch, (c.seed, course.step))
            course.step += 1
        begin_training(course)
    elif not before:
        begin_training(course)
    while course.step < wanted:
        step = course.step - c.warmup.steps
        _taught(course, _kept(course, stored(course.store, step + 1)), step)
        course.step += 1


def stored(store: Store, step: int) -> list[Group]:
    """The groups that were sampled for a step."""
    label = f"train-{step:06d}"
    if label not in store.labels():
        raise ValueError(f"{store.folder}: {label}.jsonl is missing, which this step is made of")
    rows: dict[str, list[Trajectory]] = {}
    for row in store.read(label):
        # A continuation is named after its stem, as train/3#0@2, and belongs to the group of that.
        rows.setdefault(row.group.partition("#")[0] if row.trunk >= 0 else row.group, []).append(row)
    for of_group in rows.values():
        take_back(of_group)  # rows are stored after the update, which paid them
    return [Group.of(key, of_group) for key, of_group in rows.items()]


def _kept(course: Course, sampled: Sequence[Group]) -> list[Group]:
    mixed = course.parts.algorithm.select == "mixed"
    return [group for group in sampled if not mixed or has_signal(group)]


def _taught(course: Course, groups: Sequence[Group], step: int) -> dict[str, float]:
    """The update of a step, where nothing is played meanwhile."""
    return next_update(course, step, ()).finish(groups)


# ====================================================================== stage by stage


def _compared(course: Course, step: int, recorded: Mapping[str, Any], tolerance: float) -> list[Found]:
    sampled, found = stored(course.store, step), list[Found]()
    kept, was = _kept(course, sampled), copy.deepcopy(sampled)
    good = [row for group in sampled for row in group.trajectories if row.stop.counts]
    values = rewards(sampled, good) | group_metrics(kept, sampled) | role_metrics(sampled)
    shaped = _shaped_again(course, was, (step - 1) / course.config.train.steps)
    # Credit is written into the rows that were read: what they said before is compared with it.
    values |= _taught(course, kept, step - 1)
    course.step += 1
    advantages = [
        (f"{row.task}#{row.rollout} turn {t}", then.advantage, now.advantage)
        for old, new in zip(was, sampled, strict=True)
        for row, after in zip(old.trajectories, new.trajectories, strict=True)
        for t, (then, now) in enumerate(zip(row.turns, after.turns, strict=True))
    ]
    if not course.config.engine.exact:  # rows were then packed as their groups arrived, and that order is not stored
        recorded = {name: value for name, value in recorded.items() if name != "train/row_fill"}
        values.pop("train/row_fill", None)
    own = {"rewards": shaped, "credit": advantages, "weights": _weights(course, course.step)}
    for stage in STAGES[1:]:
        numbers = [(name, recorded.get(name), value) for name, value in values.items() if _stage_of(name) == stage]
        numbers += [(name, then, None) for name, then in recorded.items() if name not in values and _stage_of(name) == stage]
        found.append(_found(stage, [*own.get(stage, ()), *numbers], tolerance))
    return found


def _stage_of(name: str) -> str:
    return next((stage for stage, starts in _NAMES.items() if name.startswith(starts)), "")


def _found(stage: str, numbers: Iterable[tuple[str, Any, Any]], tolerance: float) -> Found:
    """Args: numbers: names, what was recorded, and what came now; None is no number, as one that is not finite in a file."""
    worst, name, n = 0.0, "", 0
    for what, then, now in numbers:
        n += 1
        missing = [x is None or not math.isfinite(x) for x in (then, now)]
        apart = float(missing[0] != missing[1]) and math.inf
        if not any(missing):
            apart = abs(now - then) / max(abs(then), 0.01)  # smaller ones are compared as if they were that large
        if apart > worst:
            worst, name = apart, f"{what}: {_said(then)} was recorded, {_said(now)} came"
    return Found(stage, n, worst, name, worst <= tolerance)


def _said(value: Any) -> str:
    return "nothing" if value is None else f"{value:.7g}"


def _trajectories(groups: Sequence[Group], step: int, max_staleness: int) -> Found:
    rows = [row for group in groups for row in group.trajectories if row.stop.counts]
    for row in rows:
        named = f"{row.task}#{row.rollout}"
        if fault := audit(row):
            return Found("trajectories", len(rows), math.inf, f"{named}: {fault}", False)
        versions = {version for version, mask in zip(row.version, row.mask, strict=True) if mask}
        if versions - set(range(step - 1 - max_staleness, step)):
            fault = f"{named}: sampled by the weights of step {sorted(versions)}, not {step - 1} or {max_staleness} before"
            return Found("trajectories", len(rows), math.inf, fault, False)
    return Found("trajectories", len(rows), 0.0, "", True)


def _shaped_again(course: Course, groups: Sequence[Group], progress: float) -> list[tuple[str, Any, Any]]:
    """The rewards of every turn as stored, and as shaping gives them from what the world paid."""
    numbers: list[tuple[str, Any, Any]] = []
    for group in groups:
        again = copy.deepcopy(group)
        if course.shaping.active:
            _unshape(again.trajectories, {"form", *course.shaping.terms})
            course.shaping.apply(again, progress)
        for row, new in zip(group.trajectories, again.trajectories, strict=True):
            named = f"{row.task}#{row.rollout}"
            numbers.append((f"{named} return", row.reward, new.reward))
            numbers += [
                (f"{named} turn {t}", then.reward, now.reward)
                for t, (then, now) in enumerate(zip(row.turns, new.turns, strict=True))
            ]
    return numbers


def _unshape(rows: Sequence[Trajectory], added: set[str]) -> None:
    """Takes back what shaping added: outcomes and the world's own parts are left."""
    for segments in by_rollout(row for row in rows if row.stop.counts):
        for turn in (turn for row in segments for turn in row.turns):
            turn.parts = {name: value for name, value in turn.parts.items() if name not in {"outcome", *added}}
            turn.reward = (turn.outcome or 0.0) + sum(turn.parts.values())
        whole = sum(turn.reward for row in segments for turn in row.turns)
        for row in segments:
            row.elsewhere = whole - sum(turn.reward for turn in row.turns)


def _weights(course: Course, at: int) -> list[tuple[str, Any, Any]]:
    """The greatest distance of every array from that of the checkpoint after the step, beside a distance of 0."""
    if at not in course.checkpoints.steps():
        return []
    ours = course.parts.learner.weights()
    theirs = course.checkpoints.trees(at, ours)
    paths = jax.tree_util.tree_leaves_with_path(ours)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), 0.0, float(np.abs(np.asarray(mine) - np.asarray(its)).max()))
        for (path, mine), its in zip(paths, jax.tree.leaves(theirs), strict=True)
        if mine.size and np.issubdtype(mine.dtype, np.floating)
    ]
