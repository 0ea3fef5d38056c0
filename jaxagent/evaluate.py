"""How good a policy is on held-out tasks: success with its interval, pass@k, pass^k, and success by difficulty."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxagent import config as configs
from jaxagent.envs.env import World, size_of
from jaxagent.hosts import ALONE, Hosts
from jaxagent.parts import build, restore_weights, use_devices
from jaxagent.rollout import Rollouts, wait
from jaxagent.types import Group, Sampling, Trajectory, by_rollout


def evaluate(
    rollouts: Rollouts,
    world: World,
    sampling: Sampling,
    *,
    split: str,
    tasks: int,
    k: int = 1,
    ablated: bool = False,
    hosts: Hosts = ALONE,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Plays `k` episodes of each of the first `tasks` tasks of a split, or all it has; returns the table and the trajectories.

    Hosts play a share of the tasks each, and return the table of all with the trajectories of their own. The draws depend on
    the run's seed, the split and the task only, so two policies meet the same luck.
    """
    named = [(f"{split}/{i}", world.task(split, i)) for i in range(min(tasks, size_of(world, split)))]
    own = hosts.share(named)
    futures = rollouts.play(own, k, sampling, ablated=ablated)
    groups = [Group.of(name, wait(members)) for (name, _), members in zip(own, futures, strict=True)]
    everyone = hosts.together([[shortened(t) for t in group.trajectories] for group in groups]) if hosts.count > 1 else []
    told = [[Trajectory.from_json(t) for t in group] for group in everyone] or [group.trajectories for group in groups]
    return summarise(told, k), [row for group in groups for row in group.rows]


def shortened(trajectory: Trajectory) -> dict[str, Any]:
    """How an episode went, as JSON and without its tokens: all that a table needs."""
    nothing: dict[str, Any] = {name: [] for name in ("tokens", "mask", "logprob", "version", "turn", "routing")}
    turns = [replace(turn, fed=[], tools=[], text="") for turn in trajectory.turns]
    return replace(trajectory, turns=turns, **nothing).to_json()


def summarise(groups: list[list[Trajectory]], k: int) -> dict[str, Any]:
    """The table of an evaluation; episodes that the infrastructure broke are counted apart and never as failures.

    In worlds of several agents every seat is counted, and `by_role` tells them apart.
    """
    whole = [by_rollout(group) for group in groups]
    played = [[segments[0] for segments in group if segments[0].stop.counts] for group in whole]
    played = [group for group in played if group]
    everyone = [t for group in played for t in group]
    wins = [sum(t.solved for t in group) for group in played]
    by_difficulty: dict[str, list[bool]] = defaultdict(list)
    for t in everyone:
        by_difficulty[t.difficulty].append(t.solved)
    n = len(everyone)
    turns = sum(len(t.turns) for group in groups for t in group if t.stop.counts)
    success = sum(wins) / n if n else math.nan
    rates = [win / len(group) for win, group in zip(wins, played, strict=True)]
    roles = sorted({t.role for t in everyone})
    by_role = {role: _role_table([t for t in everyone if t.role == role]) for role in roles} if len(roles) > 1 else {}
    return {
        "success": success,
        "ci95": list(wilson(sum(wins), n) if k == 1 else normal(rates)),
        "n": len(played),
        "k": k,
        "reward": sum(t.reward for t in everyone) / n if n else math.nan,
        "turns": turns / n if n else math.nan,
        "pass_at_k": {str(j): pass_at_k([len(group) for group in played], wins, j) for j in sorted({1, k})},
        **({"all_at_k": {str(k): all_at_k([len(group) for group in played], wins, k)}} if k > 1 else {}),
        "by_difficulty": {name: sum(hits) / len(hits) for name, hits in sorted(by_difficulty.items())},
        "broken": sum(len(group) for group in whole) - n,
        **({"by_role": by_role} if by_role else {}),
    }


def _role_table(rows: list[Trajectory]) -> dict[str, float]:
    n = len(rows)
    return {"success": sum(t.solved for t in rows) / n, "reward": sum(t.reward for t in rows) / n, "n": n}


def report(workdir: str, split: str, tasks: int | None, rollouts: int | None, temperature: float | None) -> int:
    """The command `jaxagent eval`: scores the last checkpoint of a run and prints the table as JSON."""
    config = configs.read(Path(workdir) / "config.json")
    use_devices(config)
    parts = build(config, with_critic=False)
    try:
        restore_weights(parts, Path(workdir), config.checkpoint.keep)
        c = config.evaluate
        chosen = c.temperature if temperature is None else temperature
        sampling = Sampling(**{**config.sampling, "temperature": chosen})
        n, k = tasks or c.final_tasks, rollouts or c.rollouts
        table, _ = evaluate(parts.rollouts, parts.world, sampling, split=split, tasks=n, k=k)
    finally:
        parts.close()
    print(json.dumps(table, indent=2))
    return 0


def pass_at(n: int, wins: int, k: int) -> float:
    """Unbiased pass@k of n episodes, 1 - C(n - wins, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - wins, k) / math.comb(n, k)


def pass_at_k(played: list[int], wins: list[int], k: int) -> float:
    """The mean of pass@k over the tasks that have k episodes; a task that lost some to the infrastructure has no say."""
    each = [pass_at(n, w, k) for n, w in zip(played, wins, strict=True) if n >= k]
    return sum(each) / len(each) if each else math.nan


def all_at_k(played: list[int], wins: list[int], k: int) -> float:
    """The mean of pass^k, C(wins, k) / C(n, k), that all of k episodes go well (tau-bench); as `pass_at_k`."""
    each = [math.comb(w, k) / math.comb(n, k) for n, w in zip(played, wins, strict=True) if n >= k]
    return sum(each) / len(each) if each else math.nan


def wilson(wins: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson interval of a share."""
    if not n:
        return (0.0, 1.0)
    p = wins / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (max(0.0, centre - half), min(1.0, centre + half))


def normal(rates: list[float], z: float = 1.96) -> tuple[float, float]:
    """The normal interval of a mean of per-task rates: episodes of one task are not independent."""
    n = len(rates)
    if n < 2:
        return (0.0, 1.0)
    mean = sum(rates) / n
    half = z * math.sqrt(sum((r - mean) ** 2 for r in rates) / (n - 1) / n)
    return (max(0.0, mean - half), min(1.0, mean + half))
