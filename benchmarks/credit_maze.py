"""Which credit teaches a transformer to search mazes soonest: trainings by the trainer itself. `credit.py` runs it and prints.

Every method is a training of `configs/maze.py` with the same warm-up for all methods of a seed, kept as a checkpoint, then 30
steps of 8 groups of 8 by the row of algos/table.py as it stands there. The long maze has 26 rooms, the way out 12 or 13 of
them away, and 24 moves, where the other has 18, 8 or 9, and 16; there 60 steps have 2 groups each, so that the direction of a
step is noisier, and only the first five methods are run. Where turns are branched, groups have 6 rollouts and 4 continuations,
which takes no more tokens. Doors open in the trainer's process (open_maze.py); all runs share one process and its compile
cache. Success is that of a step's own rollouts: every task draws a map of its own, so nothing of it was ever trained on.
Tokens are all that were sampled, continuations and replaced groups included. CPU-s are without compiling.

`compare` looks at the estimators on the same rollouts, of policy and critic after 8 steps of `ppo_turn`: Pearson's correlation
between the advantage and Q - V of 48 turns, each estimated by 16 token-exact continuations of its own and 16 of the turn after
it, freed of their known sampling variance; blame, the share of all negative advantage that lies on mistakes (turns through a
trap or back the way one came, which no search needs; "all alike" is their share of the turns); and the gradient's noise to
signal, tr Cov(g) / |g|^2 between the groups.
"""

from __future__ import annotations

import copy
import gc
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent import config as configs
from jaxagent.algos.table import Algorithm, choose
from jaxagent.credit import Credit, assign, counted, plain_rows, rows_of
from jaxagent.data.pack import pack, unpack
from jaxagent.envs.maze import DOORS, Maze
from jaxagent.feed import Feed, FeedOptions, stream_of
from jaxagent.metrics import read
from jaxagent.parts import build, use_devices
from jaxagent.progress import Progress
from jaxagent.rollout import wait
from jaxagent.stem import stem_of
from jaxagent.train import EXIT_DONE, Run, prepare, resume, score, story, train, warm_up
from jaxagent.types import Group, Sampling, Trajectory

REPOSITORY = Path(__file__).resolve().parents[1]
WARM = 250  # steps
SHAPE = (
    *("env.name=benchmarks.open_maze", "sandbox.code=off", "mesh.cpu_devices=1", "engine.slots=64"),
    *("evaluate.every=0", "evaluate.final_tasks=128", "evaluate.ablate=False", f"checkpoint.every={WARM}"),
)
LONG = (
    *("env.options.rooms=26", "env.options.distance=(12,13)", "env.options.demo_moves=24", "agent.max_turns=24"),
    *("agent.max_tokens=240", "engine.slot_tokens=240", "engine.chunk=240", "learner.row_tokens=240"),
    *("feed.prompts=2", "engine.slots=16"),
)
MAZES: dict[str, tuple[str, ...]] = {"maze": (), "long maze": LONG}
STEPS = {"maze": 30, "long maze": 60}
CRITIC = ("critic.lr=3e-3",)
METHODS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "gigpo": (),
    "ppo_turn": CRITIC,
    "anchor_gae": (),
    "anchor_gae, branched": ("feed.rollouts=6", "feed.branches=4"),
    "reinforce": (),
    "rloo": (),
    "dr_grpo": (),
    "dapo": (),
    "gspo": (),
    "cispo": (),
    "reinforce_pp": (),
    "turn_grpo": (),
    "ppo": CRITIC,
    "ppo_turn, lambda 0.5": (*CRITIC, "algo.gae_lambda=0.5"),
}
FIRST = 5  # methods that are run with all seeds before the others are run at all, and alone in the long maze
TRAINED, PICKS, CONTINUATIONS = 8, 48, 16  # of the second table


# ---------------------------------------------------------------------- trainings


def configured(world: str, method: str, seed: int, *overrides: str) -> Any:
    """The experiment of configs/maze.py with a row of the table as it stands there."""
    name = method.partition(",")[0]
    given = [f"algo.name={name}", f"seed={seed}", *SHAPE, *MAZES[world], *overrides]
    config, faults = configs.load(str(REPOSITORY / "configs" / "maze.py"), given)
    if faults:
        raise configs.ConfigError(faults)
    config.algo.aggregate = config.algo.clip_high = None
    return config


def played(config: Any, workdir: Path, *chapters: Callable[[Run], None]) -> None:
    """Some chapters of the trainer's story, in this process."""
    sys.path[:] = dict.fromkeys([*sys.path, str(REPOSITORY)])  # for the world, benchmarks.open_maze
    prepare(config, workdir)
    use_devices(config)
    with (workdir / "log.txt").open("a") as log:
        parts = build(config, workdir / "sandbox.log")
        configs.save(config, workdir / "config.json")
        try:
            code = story(Run(config, workdir, parts, Progress(log)), resume, warm_up, *chapters)
        finally:
            parts.close()
    if code != EXIT_DONE:
        raise SystemExit("stopped; the same command goes on")
    jax.clear_caches()
    gc.collect()


def warmed(world: str, seed: int, out: Path) -> Path:
    """A workdir with the checkpoint that all methods of a seed start from."""
    warm, workdir = out / f"warm-{world.replace(' ', '-')}-{seed}", out / "run"
    if not (warm / "done").exists():
        shutil.rmtree(warm, ignore_errors=True)
        played(configured(world, "grpo", seed), warm)
        (warm / "done").touch()
    shutil.rmtree(workdir, ignore_errors=True)
    shutil.copytree(warm / "checkpoints" / str(WARM), workdir / "checkpoints" / str(WARM))
    return workdir


def learn(world: str, method: str, seed: int, out: Path) -> dict[str, Any]:
    """One training; what the first table is made of."""
    workdir, ends = warmed(world, seed, out), list[float]()
    config = configured(world, method, seed, f"train.steps={STEPS[world]}", *METHODS[method])
    played(config, workdir, train, lambda run: ends.append(score(run, "after", "test", 128)["success"]))
    steps = [record for record in read(workdir / "metrics.jsonl") if record["step"] > WARM]
    cpu = [record["time/cpu_s"] for record in steps]
    cpu[0] = cpu[1]  # without compiling
    return {
        "success": [record["reward/success"] for record in steps],
        "tokens": [record["engine/tokens_per_s"] * record["time/rollout_s"] for record in steps],
        "cpu_s": cpu,
        "after": ends[0],
    }


# ---------------------------------------------------------------------- credit of the same rollouts by all estimators


@dataclass(frozen=True)
class Estimator:
    """A row, whether it is given continuations, and whether the states it is told are rooms without the door one came by."""

    algorithm: Algorithm
    branched: bool = False
    room_only: bool = False


def estimators() -> dict[str, Estimator]:
    """Estimators by name."""
    names = ("reinforce", "grpo", "dr_grpo", "turn_grpo", "gtpo", "gigpo", "reinforce_to_go", "ppo_turn", "anchor_gae")
    known = {name: Estimator(choose(name)) for name in names}
    known["gigpo, F = std"] = Estimator(choose("gigpo", advantage="normalised"))
    known["ppo_turn, lambda 0.5"] = Estimator(choose("ppo_turn", gae_lambda=0.5))
    known["anchor_gae, branched"] = Estimator(choose("anchor_gae"), branched=True)
    return known | {f"{name}, rooms only": Estimator(choose(name), room_only=True) for name in ("gigpo", "anchor_gae")}


def mistakes(world: Maze, row: Trajectory) -> list[bool]:
    """Which turns of an episode went through a trap, back, or nowhere."""
    maze, found = world.map(row.seed), []
    for turn in row.turns:
        door = turn.tools[0].name if turn.tools and turn.tools[0].name in DOORS else ""
        found.append(not door or maze.signs()[1 + DOORS.index(door)] != "o")
        if door:
            maze.move(door)
    return found


@dataclass
class Turns:
    """Turns of the same rollouts, whose exact advantage is asked for: their groups, rollouts and numbers."""

    places: list[tuple[int, int, int]]
    whole: list[Group]  # groups of 8
    branched: list[Group]  # of the first 6 of these, with continuations

    def rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        return [groups[g].trajectories[i] for g, i, _ in self.places]


def sampled(run: Run) -> Turns:
    """The groups of one step, played with and without continuations, and some turns that both have."""
    before, parts = run.feed.state(), run.parts
    whole, _ = run.feed.take(mixed=False)
    options = FeedOptions(prompts=len(whole), rollouts=6, branches=4)
    tasks = stream_of(parts.world, run.config.seed, options)
    narrow = Feed(parts.world, tasks, parts.rollouts, Sampling(**run.config.sampling), options)
    narrow.restore(before)
    branched, _ = narrow.take(mixed=False)
    rows = [(g, i, row) for g, group in enumerate(branched) for i, row in enumerate(group.trajectories)]
    places = [(g, i, k) for g, i, row in rows for k in range(len(row.turns))]
    chosen = np.random.default_rng(run.config.seed).choice(len(places), PICKS, replace=False)
    turns = Turns([places[i] for i in chosen], whole, branched)
    if [row.tokens for row in turns.rows(whole)] != [row.tokens for row in turns.rows(branched)]:
        raise RuntimeError("the same rollouts were played twice and differ: engine.exact must be true")
    return turns


def continued(run: Run, turns: Turns) -> tuple[np.ndarray, float]:
    """Q - V of the turns by continuations, and the variance of that estimate, both means over what was sampled."""
    sampling = Sampling(**run.config.sampling)

    def asked(row: Trajectory, turn: int, first: int) -> Any:
        if turn == len(row.turns):
            return [row.reward]  # the episode was over
        task = {"id": row.task, "seed": row.seed, "difficulty": row.difficulty}
        return run.parts.rollouts.branch(stem_of(row, turn), task, range(first, first + CONTINUATIONS), sampling)

    def answered(futures: Any) -> list[float]:
        return futures if isinstance(futures[0], float) else [row.reward for row in wait(futures) if row.stop.counts]

    picked = list(zip(turns.rows(turns.whole), [k for _, _, k in turns.places], strict=True))
    # Numbers are draws: others than the feed's, which are in the advantages, and others for the turn after than for this one.
    both = [(asked(row, k + 1, 2000), asked(row, k, 1000)) for row, k in picked]
    exact, variance = [], []
    for after, at in both:
        q, v = answered(after), answered(at)
        exact.append(float(np.mean(q) - np.mean(v)))
        variance += [np.var(x, ddof=1) / len(x) if len(x) > 1 else 0.0 for x in (q, v)]
    return np.asarray(exact), float(np.mean(variance) * 2)


def values(run: Run, groups: Sequence[Group]) -> dict[int, np.ndarray]:
    """What the run's critic says of every token."""
    learner, critic = run.parts.learner, run.parts.critic
    assert critic
    shape = {"batch_rows": learner.own_rows, "row_tokens": learner.options.row_tokens}
    trajectories = counted(groups)
    rows = plain_rows(trajectories)
    scores = unpack(rows, [critic.score(batch) for batch in pack(rows, **shape)], **shape)
    return {id(row): x for row, x in zip(trajectories, scores, strict=True)}


def gradient(run: Run, credits: Sequence[Credit]) -> np.ndarray:
    """The policy gradient of a group, on the policy that sampled it."""
    learner = run.parts.learner
    rows, _ = rows_of(credits)
    for batch in pack(rows, batch_rows=learner.own_rows, row_tokens=learner.options.row_tokens):
        learner.accumulate(batch, on_policy=True)
    found = learner._acc["grads"] if rows else jax.tree.map(jnp.zeros_like, learner.trained)
    learner._acc = None
    return np.concatenate([np.asarray(g, np.float64).reshape(-1) for g in jax.tree.leaves(found)])


def rooms_only(groups: Sequence[Group]) -> list[Group]:
    """Copies whose turns say in which room they were taken, and not by which door that was entered."""
    copies = copy.deepcopy(list(groups))
    for turn in (turn for group in copies for row in group.rows for turn in row.turns):
        turn.state = turn.state[:1]
    return copies


def measure(run: Run, found: dict[str, Any]) -> None:
    """The numbers of the second table, of one seed."""
    turns, world = sampled(run), run.parts.world
    assert isinstance(world, Maze)
    exact, found["variance"] = continued(run, turns)
    found["exact"] = exact.tolist()
    rows = [row for group in turns.whole for row in group.trajectories]
    found["success"] = float(np.mean([row.reward for row in rows]))
    found["mistakes"] = float(np.mean([bad for row in rows for bad in mistakes(world, row)]))
    for name, estimator in estimators().items():
        groups, algorithm = turns.branched if estimator.branched else turns.whole, estimator.algorithm
        groups = rooms_only(groups) if estimator.room_only else groups
        credits = assign(groups, algorithm, value=values(run, groups) if algorithm.critic else None)
        rows = [row for group in groups for row in group.trajectories]
        advantage = [turn.advantage or 0.0 for row in rows for turn in row.turns]
        bad = np.asarray([bad for row in rows for bad in mistakes(world, row)])
        blame = np.maximum(-np.asarray(advantage), 0.0)
        gradients = np.asarray([gradient(run, of_group) for of_group in credits])
        found[name] = {
            "advantage": [
                row.turns[k].advantage or 0.0 for row, (_, _, k) in zip(turns.rows(groups), turns.places, strict=True)
            ],
            "blame": float(blame[bad].sum() / max(blame.sum(), 1e-9)),
            "noise": float(gradients.var(0, ddof=1).sum() * len(gradients) / (gradients.sum(0) ** 2).sum()),
        }


def compare(world: str, seed: int, out: Path) -> dict[str, Any]:
    """All estimators on the rollouts of one policy."""
    workdir = warmed(world, seed, out)
    config = configured(world, "ppo_turn", seed, f"train.steps={TRAINED}", "optimizer.lr_final=7e-4", *CRITIC)
    found: dict[str, Any] = {}
    played(config, workdir, train, partial(measure, found=found))
    return found


def correlation(found: dict[str, Any], name: str) -> float:
    """Pearson's, of the advantages and of Q - V without the variance that sampling has added to it."""
    advantage, exact = np.asarray(found[name]["advantage"]), np.asarray(found["exact"])
    true = max(exact.var(ddof=1) - found["variance"], 1e-9)
    return float(np.cov(advantage, exact)[0, 1] / np.sqrt(max(advantage.var(ddof=1), 1e-12) * true))


def ordered(world: str, methods: Sequence[str], seeds: int) -> Iterator[dict[str, Any]]:
    """Runs in the order of their importance; "credit" is the comparison on the same rollouts."""
    first = [method for method in list(METHODS)[:FIRST] if method in methods]
    rest = [method for method in methods if method not in (*first, "credit")]
    compared = ["credit"] if "credit" in methods else []
    for some in ([*first, *compared], rest) if world == "maze" else (first,):
        yield from ({"world": world, "method": method, "seed": seed} for seed in range(seeds) for method in some)
