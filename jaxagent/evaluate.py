"""How good a policy is on held-out tasks: success with its interval, pass@k, pass^k, by difficulty and by turn.

The policy is a run's, or a model behind an endpoint that plays the same tasks in the same worlds.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.agent import Limits
from jaxagent.data.store import Store
from jaxagent.endpoint import Endpoint, EndpointOptions
from jaxagent.envs import env as envs
from jaxagent.envs.env import Task, World
from jaxagent.hosts import ALONE, Hosts
from jaxagent.journal import Journal
from jaxagent.models.frozen import digest
from jaxagent.parts import Sandbox, build, restore_weights, use_devices
from jaxagent.progress import Progress
from jaxagent.rollout import RolloutOptions, Rollouts, Stopped, wait
from jaxagent.types import Group, Sampling, Trajectory, by_rollout


@dataclass(frozen=True)
class HeldOut(Sampling):
    """How an evaluation samples: a record of its own, which nothing but `held_out` makes and `evaluate` takes nothing else."""


def held_out(
    config: ConfigDict, temperature: float | None = None, top_p: float | None = None, max_tokens: int | None = None
) -> HeldOut:
    """How a run's evaluations sample: by its `evaluate` and what is given, never by what its training draws with.

    From `sampling` comes the budget of a turn alone, which is the world's as those of `agent` are.
    """
    most = config.sampling.max_tokens if max_tokens is None else max_tokens
    chosen = config.evaluate.temperature if temperature is None else temperature
    return HeldOut(temperature=chosen, top_p=1.0 if top_p is None else top_p, max_tokens=most)


def settings_of(
    config: ConfigDict, sampling: HeldOut, *, split: str, tasks: int, k: int, ablated: bool = False
) -> dict[str, Any]:
    """All that the result of an evaluation depends on besides policy and world, as it stands in its table."""
    size = {"split": split, "tasks": tasks, "rollouts": k, "ablated": ablated}
    drawn: dict[str, Any] = json.loads(json.dumps(asdict(sampling)))  # as it comes back from a file
    return {**size, "seed": config.seed, "sampling": drawn}


def evaluate(
    rollouts: Rollouts,
    sampling: HeldOut,
    *,
    split: str,
    tasks: int,
    k: int = 1,
    ablated: bool = False,
    hosts: Hosts = ALONE,
    stop: Callable[[], bool] | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Plays `k` episodes of each of the first `tasks` tasks of a split, or all it has; returns the table and the trajectories.

    Hosts play a share of the tasks each, and return the table of all with the trajectories of their own. The draws depend on
    the run's seed, the split and the task only, so two policies meet the same luck. Raises TypeError for any other sampling.

    Args:
        stop: whether this host is to stop. Raises Stopped, on all hosts, where one of them was: it gives up its episodes at
            once, the others when theirs are over.
    """
    if not isinstance(sampling, HeldOut):
        raise TypeError(f"an evaluation samples as `held_out` says, not as training does: got {sampling}")
    own = hosts.share(tasks_of(rollouts.world, split, tasks))
    futures = rollouts.play(own, k, sampling, ablated=ablated)
    try:
        groups, stopped = [Group.of(name, wait(members, stop)) for (name, _), members in zip(own, futures, strict=True)], False
    except Stopped:
        groups, stopped = [], True
    if hosts.any(stopped):
        raise Stopped
    everyone = hosts.together([[shortened(t) for t in group.trajectories] for group in groups]) if hosts.count > 1 else []
    told = [[Trajectory.from_json(t) for t in group] for group in everyone] or [group.trajectories for group in groups]
    return summarise(told, k), [row for group in groups for row in group.rows]


def tasks_of(world: World, split: str, tasks: int) -> list[tuple[str, Task]]:
    """The first tasks of a split, with the names of their groups."""
    return [(f"{split}/{i}", world.task(split, i)) for i in range(min(tasks, envs.size_of(world, split)))]


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
    rates_of: dict[str, list[float]] = defaultdict(list)
    for group, won in zip(played, wins, strict=True):
        by_difficulty[group[0].difficulty] += [t.solved for t in group]
        rates_of[group[0].difficulty].append(won / len(group))
    n = len(everyone)
    turns = sum(len(t.turns) for group in groups for t in group if t.stop.counts)
    success = sum(wins) / n if n else math.nan
    rates = [won / len(group) for group, won in zip(played, wins, strict=True)]
    roles = sorted({t.role for t in everyone})
    by_role = {role: _role_table([t for t in everyone if t.role == role]) for role in roles} if len(roles) > 1 else {}
    return {
        "success": success,
        "ci95": interval(rates, k),
        "n": len(played),
        "k": k,
        "reward": sum(t.reward for t in everyone) / n if n else math.nan,
        "turns": turns / n if n else math.nan,
        **_of_several([len(group) for group in played], wins, k),
        "by_difficulty": {name: sum(hits) / len(hits) for name, hits in sorted(by_difficulty.items())},
        "ci95_by_difficulty": {name: interval(each, k) for name, each in sorted(rates_of.items())},
        "solved_by_turn": _by_turn([segments for group in whole for segments in group if segments[0].stop.counts]),
        "broken": sum(len(group) for group in whole) - n,
        **({"by_role": by_role} if by_role else {}),
    }


def _of_several(played: list[int], wins: list[int], k: int) -> dict[str, Any]:
    """pass@j and pass^j, the mean over tasks, for j of 1, the powers of 2 below k, and k."""
    found: dict[str, dict[str, Any]] = {"pass_at_k": {}, "ci95_at_k": {}, "pass_hat_k": {}, "ci95_hat_k": {}}
    for j in sorted({k, *(2**i for i in range(k.bit_length()) if 2**i < k)}):
        for name, share in (("at", pass_at), ("hat", pass_hat)):
            each = [share(n, w, j) for n, w in zip(played, wins, strict=True) if n >= j]
            found[f"pass_{name}_k"][str(j)] = sum(each) / len(each) if each else math.nan
            found[f"ci95_{name}_k"][str(j)] = interval(each, k / j)
    return found


def _by_turn(episodes: list[list[Trajectory]]) -> dict[str, float]:
    """The share of episodes that were solved within so many turns."""
    lengths = [(sum(len(row.turns) for row in segments), segments[0].solved) for segments in episodes]
    ends = sorted({n for n, solved in lengths if solved})
    return {str(end): sum(solved and n <= end for n, solved in lengths) / len(lengths) for end in ends}


def _role_table(rows: list[Trajectory]) -> dict[str, float]:
    n = len(rows)
    return {"success": sum(t.solved for t in rows) / n, "reward": sum(t.reward for t in rows) / n, "n": n}


@dataclass(frozen=True)
class Asked:
    """What `jaxagent eval` is asked; None is what the run says.

    Args:
        workdir: a run, whose last checkpoint is scored, or whose world an endpoint plays.
        config: FILE[:ARG] instead of a run, for an endpoint.
        to: a folder for the episodes; default: `evals` in the workdir, or here where there is none.
    """

    workdir: str = ""
    config: str = ""
    split: str = ""  # test, or valid where checkpoints are followed
    tasks: int | None = None
    rollouts: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    to: str = ""

    def read(self, overrides: Sequence[str] = ()) -> ConfigDict:
        if self.config:
            config, notes = configs.load(self.config, overrides)
            print(*notes, sep="\n", end="\n" * bool(notes), file=sys.stderr)
            return config
        return configs.read(Path(self.workdir) / "config.json")

    def sampling(self, config: ConfigDict) -> HeldOut:
        """How an evaluation samples: by the run's `evaluate` and by the flags."""
        return held_out(config, self.temperature, self.top_p, self.max_tokens)


def report(
    asked: Asked,
    endpoint: EndpointOptions | None = None,
    overrides: Sequence[str] = (),
    concurrency: int = 8,
    as_json: bool = False,
) -> int:
    """The command `jaxagent eval`: scores the last checkpoint of a run, or an endpoint, and prints the table.

    Every episode that ends is kept, and the same command goes on with those after it was stopped. What another world, policy or
    setting played is in another folder.
    """
    if asked.config and not endpoint:
        raise ValueError("--config says a world and no policy: give --endpoint and --model too, or --workdir")
    config = asked.read(overrides)
    sampling, c = asked.sampling(config), config.evaluate
    tasks, k = asked.tasks or c.final_tasks, asked.rollouts or c.rollouts
    settings = settings_of(config, sampling, split=asked.split or "test", tasks=tasks, k=k)
    made = _foreign(config, endpoint, concurrency) if endpoint else _own(config, Path(asked.workdir))
    with made as (rollouts, world, policy):
        said = {"policy": policy, **settings}
        home = Path(asked.to or Path(asked.workdir) / "evals")
        folder = folder_of(home, {**said, **place_of(config)})
        table, rows = kept(rollouts, world, sampling, said, folder)
    player = rollouts.agent
    if isinstance(player, Endpoint) and player.fault:
        raise ValueError(f"--endpoint={player.fault}")
    if table["broken"]:
        faults = Counter(row.error for row in rows if not row.stop.counts)
        print(
            f"{table['broken']} episodes broke and count nowhere, most of them: {faults.most_common(1)[0][0]}", file=sys.stderr
        )
    if as_json:
        print(json.dumps(table, indent=2))
    else:
        show(table, folder)
    return 0


def show(table: dict[str, Any], folder: Path) -> None:
    """Prints the table for eyes."""

    def row(name: str, success: float, ends: Sequence[float]) -> list[str]:
        return [name, f"{success:.3f}", "{:.3f} to {:.3f}".format(*ends)]

    rows = [row("success", table["success"], table["ci95"])]
    for sign, name in (("@", "at"), ("^", "hat")):
        shares, ends = table[f"pass_{name}_k"], table[f"ci95_{name}_k"]
        rows += [row(f"pass{sign}{j}", share, ends[j]) for j, share in shares.items() if j != "1"]
    levels = table["by_difficulty"].items()
    rows += [row(f"  {level}", success, table["ci95_by_difficulty"][level]) for level, success in levels if len(levels) > 1]
    rows += [[f"  {role}", f"{own['success']:.3f}", ""] for role, own in table.get("by_role", {}).items()]
    progress, k = Progress(), table["k"]
    title = f"{table['n']} tasks of {table['settings']['split']}, {k} episode{'s' * (k > 1)} each"
    progress.table(title, ["", "success", "95 % interval"], rows)
    progress.console.print(f"reward {table['reward']:.3f}, {table['turns']:.1f} turns an episode; all of it is in {folder}")


def place_of(config: ConfigDict) -> dict[str, Any]:
    """What is played, of all that a config says: not where the sandbox is, but what it does."""
    place: dict[str, Any] = {name: config[name].to_dict() for name in ("env", "agent", "chat", "sandbox")}
    for name in ("url", "token_file"):
        del place["sandbox"][name]
    return {**place, "deadline_s": config.rollout.deadline_s}


def folder_of(home: Path, settings: dict[str, Any]) -> Path:
    """The folder of an evaluation, named by all that it depends on; what that is stands in it."""
    text = json.dumps(settings, sort_keys=True, indent=2) + "\n"
    folder = home / f"{settings['split']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(text)
    return folder


def kept(
    rollouts: Rollouts, world: World, sampling: HeldOut, said: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], list[Trajectory]]:
    """The table and the episodes. Those that are in the folder are taken from it, the others are put there as they end."""
    split, k = said["split"], said["rollouts"]
    journal, progress = Journal(folder / "journal", redraw=False, keep_broken=False), Progress(sys.stderr)
    try:
        if known := journal.begin(0)[0]:
            print(f"{known} episodes are there already, in {folder}", file=sys.stderr)
        named = tasks_of(world, split, said["tasks"])
        futures = rollouts.play(named, k, sampling, journal=journal)
        groups: list[Group] = []
        progress.start("tasks", 0)
        for (name, _), members in zip(named, futures, strict=True):
            groups.append(Group.of(name, wait(members)))
            progress.step(len(groups), len(named), {})
        if journal.fault:
            raise ValueError(f"{folder}: {journal.fault.strerror or journal.fault}")
    finally:
        progress.stop()
        journal.close()
    rows = [row for group in groups for row in group.rows]
    table = {**summarise([group.trajectories for group in groups], k), "settings": said}
    Store(folder).write("episodes", rows)
    (folder / "table.json").write_text(json.dumps(table, indent=2) + "\n")
    return table, rows


@contextmanager
def _own(config: ConfigDict, workdir: Path) -> Iterator[tuple[Rollouts, World, dict[str, Any]]]:
    """The policy of a run, and what it is called: weights of the same name are the same."""
    use_devices(config)
    parts = build(config, with_critic=False)
    try:
        step = restore_weights(parts, workdir, config.checkpoint.keep)
        yield parts.rollouts, parts.world, {"step": step, "weights": int(jax.jit(digest)(parts.learner.params))}
    finally:
        parts.close()


@contextmanager
def _foreign(
    config: ConfigDict, options: EndpointOptions, concurrency: int
) -> Iterator[tuple[Rollouts, World, dict[str, Any]]]:
    """A model behind an endpoint in the config's world. Raises ValueError for what it cannot play."""
    world = envs.find(config.env.name)(**config.env.options)
    if getattr(world, "runs_program", False):
        raise ValueError("the program of this world asks its door itself: point it to the endpoint, and score it by itself")
    sandbox = Sandbox(config.sandbox, world, None)
    try:
        player = Endpoint(world.tools, Limits(**config.agent), options)
        how = RolloutOptions(**{**config.rollout, "concurrency": concurrency})
        rollouts = Rollouts(world, player, sandbox.client, config.seed, how)
        try:
            yield rollouts, world, {"endpoint": options.url, "model": options.model, "fields": dict(options.fields)}
        finally:
            rollouts.close()
    finally:
        sandbox.close()
        envs.end(world)


def pass_at(n: int, wins: int, k: int) -> float:
    """Unbiased pass@k of n episodes, 1 - C(n - wins, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - wins, k) / math.comb(n, k)


def pass_hat(n: int, wins: int, k: int) -> float:
    """Unbiased pass^k: that all of k episodes succeed, C(wins, k) / C(n, k) (Yao et al. 2024, section 4)."""
    return math.comb(wins, k) / math.comb(n, k)


def interval(shares: Sequence[float], most: float = 1.0, z: float = 1.96) -> list[float]:
    """The 95 % interval of the mean of one share per task: episodes of one task are not independent, tasks are.

    It is Wilson's (1927) of as many draws as there are tasks where every share is 0 or 1. Shares between say more: as often as
    their variance goes into that of zeros and ones of the same mean, which is the effective size of Korn & Graubard (1998),
    and at most `most` times as much. Two tasks of 0 and two of 1 count in both variances: tasks that agree are no certainty.
    """
    if not (n := len(shares)):
        return [0.0, 1.0]
    p, seen = sum(shares) / n, [*shares, 0.0, 0.0, 1.0, 1.0]
    mean = sum(seen) / len(seen)
    variance = sum((share - mean) ** 2 for share in seen) / len(seen)
    size = n * min(most, mean * (1 - mean) / variance)
    centre = (p + z * z / (2 * size)) / (1 + z * z / size)
    half = z * math.sqrt(p * (1 - p) / size + z * z / (4 * size * size)) / (1 + z * z / size)
    return [max(0.0, centre - half), min(1.0, centre + half)]
