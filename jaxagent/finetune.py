"""The short story: learning without a policy gradient. Read it from top to bottom.

    sft       a file of dialogues, or trajectories that a run has stored -> imitate what the assistant wrote
    raft      sample, keep the best or what reaches a threshold, imitate it, sample again
    rest_em   the same, but every round learns from the start policy anew
    search    raft with what a tree search over turns finds; its values of turns are kept in labels/
    rest_mcts the same; a second learner is taught the values of what was found, and guides the search from the second round on
    dpo       pairs of a file, or the best and worst of each group of rollouts -> prefer the one to the other

    main(config, workdir) -> 0 when done, 75 when it saved on SIGTERM and should be started again

The place, its chapters before and after, and how it goes on after a kill are those of train.py. An example's turn depends on
the seed and the step only, a round's rollouts are read again from where they were stored, and the start policy stands in
`start/`: so the same config and workdir resume exactly.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent import train
from jaxagent.algos.select import success_of_best
from jaxagent.checkpoint import Checkpoints
from jaxagent.data.dialogues import Examples, by_group
from jaxagent.data.pack import Batch, Row, pack
from jaxagent.data.tasks import examples_at
from jaxagent.envs import env as envs
from jaxagent.hosts import ALONE, join
from jaxagent.learner import Learner
from jaxagent.parts import build, faults, policy_shape, use_devices
from jaxagent.process import read_labels, said_of
from jaxagent.progress import Progress
from jaxagent.search import label_records
from jaxagent.selection import MODES, SEARCHES, Pair, best, imitated, pairs_of, reaching, rows_of
from jaxagent.supervised import answer_logprobs, imitate, prefer
from jaxagent.train import FAULTS, Run
from jaxagent.types import Group, by_rollout

__all__ = ["FAULTS", "main", "run"]


@dataclass
class Lesson:
    """What a round learns from: rows for each of its phases, or pairs with their log-probs under the start policy."""

    phases: list[list[Row]] = field(default_factory=list)
    values: list[Row] = field(default_factory=list)  # of states, from the searches of this round and those before
    pairs: list[Pair] = field(default_factory=list)
    reference_P2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    told: dict[str, float] = field(default_factory=dict)  # metrics of the sampling, for the round's first step


def run(spec: str, overrides: Sequence[str], workdir: str) -> int:
    """The command `jaxagent finetune`: a config file with overrides, all its faults told at once."""
    config, found = configs.load(spec, overrides)
    if found:
        raise configs.ConfigError([*found, *faults(config)])
    return main(config, workdir)


def main(config: ConfigDict, workdir: str | Path, progress: Progress | None = None) -> int:
    """Fine-tunes, evaluates before and after, and leaves a workdir as train.main does. Bad input is told before it compiles."""
    workdir, progress = Path(workdir), progress or Progress()
    if found := faults(config):
        raise configs.ConfigError(found)
    if not config.finetune.mode:
        raise configs.ConfigError([f"finetune.mode is empty: this config is for jaxagent train; choose {', '.join(MODES)}"])
    train.prepare(config, workdir)
    join()  # several processes are refused, and would otherwise all write here
    use_devices(config)
    given = read(config) if config.finetune.path else None
    watchdog = train.watchdog_of(workdir, ALONE)
    with train.owned(workdir, ALONE):
        with watchdog.within("start"):
            parts = build(config, workdir / "sandbox.log", with_critic=config.finetune.mode == "rest_mcts")
        configs.save(config, workdir / "config.json")
        try:
            chapters = tell, train.resume, train.warm_up, partial(tune, given=given), train.finish
            return train.story(Run(config, workdir, parts, progress, watchdog), *chapters)
        finally:
            with train.deaf(signal.SIGTERM), watchdog.within("close"):
                progress.stop()
                parts.close()


def tell(run: Run) -> None:
    c = run.config
    source = c.finetune.path or f"{c.finetune.rounds} rounds of {c.feed.prompts} x {c.feed.rollouts} episodes"
    size = sum(weights.size for weights in jax.tree.leaves(run.parts.learner.trained)) / 1e6
    run.progress.say(
        f"{c.finetune.mode}: {size:.2f}M weights to train on {jax.device_count()} {jax.default_backend()} devices, {source}, "
        f"{c.train.steps} steps of {c.finetune.batch}; {run.parts.sandbox.description}"
    )


# ====================================================================== what is given


def read(config: ConfigDict) -> Lesson:
    """The file of `finetune.path` as rows or pairs. Raises ValueError naming file and line."""
    c = config.finetune
    world = envs.find(config.env.name)(**config.env.options)
    examples = Examples(policy_shape(config)[0], world.tools, config.learner.row_tokens)
    if c.mode == "dpo":
        rendered, stored = examples.pairs(c.path)
        groups = [Group(rows[0].group, rows) for rows in by_group(stored)]
        pairs = [Pair([imitated(*chosen)], [imitated(*rejected)]) for chosen, rejected in rendered]
        pairs += [pair for group in groups for pair in pairs_of(group)]
        if not pairs:
            raise ValueError(
                f"{c.path}: no pair in it: in each of its {len(groups)} groups of trajectories all rewards are equal"
            )
        return Lesson(pairs=pairs)
    dialogues, stored = examples.dialogues(c.path)
    if c.mode == "sft":
        return Lesson(
            [[*(imitated(*dialogue) for dialogue in dialogues), *(r for each in by_rollout(stored) for r in rows_of(each))]]
        )
    if dialogues:
        raise ValueError(
            f"{c.path}: finetune.mode={c.mode} chooses by reward, which dialogues have not: choose sft, or trajectories"
        )
    lesson = Lesson(chosen([Group(rows[0].group, rows) for rows in by_group(stored)], c.threshold))
    if not any(lesson.phases):
        wanted = f"reaches finetune.threshold={c.threshold}" if c.threshold else "is better than the others of its group"
        raise ValueError(f"{c.path}: none of its {len(stored)} trajectories {wanted}")
    return lesson


def chosen(groups: Sequence[Group], thresholds: Sequence[float]) -> list[list[Row]]:
    """What is imitated in each phase of a round."""
    if not thresholds:
        return [[row for group in groups for row in best(group)]]
    return [[row for group in groups for row in reaching(group, threshold)] for threshold in thresholds]


# ====================================================================== the loop


def tune(run: Run, given: Lesson | None) -> None:
    c, parts = run.config, run.parts
    first, per_round = c.warmup.steps, c.train.steps // c.finetune.rounds
    start = start_of(run) if c.finetune.mode in ("rest_em", "dpo") and run.step < first + c.train.steps else {}
    lesson, number = Lesson(), -1
    run.progress.start(c.finetune.mode, run.step - first)
    train.pay_evaluation(run, show)
    while run.step < first + c.train.steps:
        step = run.step - first
        round_, within = divmod(step, per_round)
        # What to learn from: the file, or rollouts of the policy as it is when the round begins.
        if round_ != number:
            lesson, number = given or sample(run, round_, fresh=within == 0), round_
            if c.finetune.mode == "dpo":
                phase = partial(run.watchdog.within, "reference")  # each batch is one: how many there are, the data say
                lesson.reference_P2 = under(parts.learner, start, lesson.pairs, c.finetune.batch, phase)
        if c.finetune.mode == "rest_em" and within == 0:
            parts.learner.restore_weights(copied(start))
            train.begin_training(run)
        # One step of imitation or preference.
        values, lesson.told = lesson.told, {}
        with run.clock.part("train", "learner"):
            values |= learn(run, lesson, round_, within, per_round)
        # How good it is on tasks that it never sees.
        if train.due(run):
            parts.engines.publish(parts.learner.params, version=step + 1)
        train.end_step(run, values, show)
    parts.engines.publish(parts.learner.params, version=c.train.steps)


def sample(run: Run, round_: int, *, fresh: bool) -> Lesson:
    """A round's rollouts and what of them is learnt from. Where the round has begun before, they are read from the store."""
    c, label = run.config, f"train-{round_ + 1:06d}"
    told: dict[str, float] = {}
    if fresh:
        run.parts.engines.publish(run.parts.learner.params, version=run.step - c.warmup.steps)
        with run.clock.part("rollout"):
            groups = sampled(run, round_)
        told = train.described(run, groups)
        rows = [row for group in groups for row in group.rows]
        run.store.write(label, rows)
        run.played(rows)
    else:
        groups = [Group.of(rows[0].group, rows) for rows in by_group(run.store.read(label))]
    lesson = Lesson(told=told)
    if c.finetune.mode == "dpo":
        lesson.pairs = [pair for group in groups for pair in pairs_of(group)]
    else:
        lesson.phases = chosen(groups, c.finetune.threshold)
    if c.finetune.mode == "rest_mcts":
        paths = [labels_of(run, number) for number in range(round_ + 1)]
        lesson.values = [row for path in paths for row in read_labels(path, c.learner.row_tokens, told=True)]
    if told:
        solved = train.mean(any(row.solved for row in group.trajectories) for group in groups)
        told["select/solved_groups"] = solved
        # Above what is found where tasks differ in how hard they are: more rollouts then help less than they would.
        told["select/solved_groups_if_alike"] = success_of_best(told["reward/success"], c.feed.rollouts)
        told["select/kept"] = float(len(lesson.pairs) or sum(len(rows) for rows in lesson.phases))
    return lesson


def sampled(run: Run, round_: int) -> list[Group]:
    """The groups of a round: rollouts, or what was found by search, whose values of turns are written down."""
    c = run.config
    shape = train.shaper(run, round_ / c.finetune.rounds)
    if c.finetune.mode not in SEARCHES:
        return run.feed.take(mixed=False, shape=shape, stop=lambda: run.stopping)[0]
    critic = run.parts.critic if round_ else None  # before the second round it has been taught nothing
    value = partial(said_of, critic.score, critic.options.batch_rows, critic.options.row_tokens) if critic else None
    groups, trees = run.feed.search(shape, stop=lambda: run.stopping, value=value)
    labels = labels_of(run, round_)
    labels.parent.mkdir(exist_ok=True)
    labels.write_text("".join(json.dumps(record) + "\n" for tree in trees for record in label_records(tree)))
    return groups


def labels_of(run: Run, round_: int) -> Path:
    """Where the values of a round's turns are written."""
    return run.workdir / "labels" / f"train-{round_ + 1:06d}.jsonl"


def learn(run: Run, lesson: Lesson, round_: int, within: int, per_round: int) -> dict[str, float]:
    """One optimizer step on the examples whose turn it is; nothing where the round gave nothing to learn from."""
    c, learner = run.config.finetune, run.parts.learner
    phases = max(1, len(lesson.phases))
    phase, at = divmod(within, per_round // phases)
    examples: Sequence[Any] = lesson.pairs if c.mode == "dpo" else lesson.phases[phase]
    told = teach(run, lesson.values, round_, within) if lesson.values else {}
    if not examples:
        return told
    count = min(c.batch, len(examples))
    turn = examples_at(len(examples), run.config.seed + round_ * phases + phase, at * count, count)
    if c.mode == "dpo":
        return prefer(learner, [examples[i] for i in turn], lesson.reference_P2[turn], c.beta)
    return told | imitate(learner, [examples[i] for i in turn])


def teach(run: Run, values: Sequence[Row], round_: int, within: int) -> dict[str, float]:
    """One step of the second learner on what the searches have found; its metrics."""
    critic, count = run.parts.critic, min(run.config.finetune.batch, len(values))
    assert critic  # of rest_mcts
    rows = [values[i] for i in examples_at(len(values), run.config.seed + round_, within * count, count)]
    for batch in pack(rows, batch_rows=critic.options.batch_rows, row_tokens=critic.options.row_tokens):
        critic.accumulate(batch)
    return critic.apply()


def show(run: Run, step: int, values: dict[str, float]) -> None:
    names = {
        "nll": "sft/nll",
        "loss": "dpo/loss",
        "margin": "dpo/margin",
        "success": "reward/success",
        "held-out": "eval/success",
    }
    shown = {word: f"{values[name]:.3f}" for word, name in names.items() if name in values}
    run.progress.step(step, run.config.train.steps, shown, curve=values.get("eval/success"))


# ====================================================================== the start policy


def start_of(run: Run) -> dict[str, Any]:
    """The trained weights with which fine-tuning began; kept in `start/` before its first step."""
    learner = run.parts.learner
    kept = Checkpoints(run.workdir / "start", keep=1)
    try:
        if kept.latest() is None:
            kept.save(0, learner.weights(), {})
            kept.wait()
            return copied(learner.weights())
        return kept.trees(0, learner.weights())
    finally:
        kept.close()


def copied(weights: dict[str, Any]) -> dict[str, Any]:
    """A copy: the learner's own arrays end with its next step."""
    return jax.tree.map(jnp.copy, weights)


def under(
    learner: Learner, start: dict[str, Any], pairs: Sequence[Pair], batch: int, phase: Callable[[], Any] = nullcontext
) -> np.ndarray:
    """The answers' log-probs under the start policy, once for all steps of a round; the learner keeps its own weights.

    Args: phase: what each batch is computed in.
    """
    now, parts = learner.weights(), [np.zeros((0, 2))]
    learner.restore_weights(start)
    try:
        with phase():
            learner.score(Batch.empty(learner.options.batch_rows, learner.options.row_tokens))  # compiled here, pairs or not
        for i in range(0, len(pairs), batch):
            with phase():
                parts.append(answer_logprobs(learner, pairs[i : i + batch]))
    finally:
        learner.restore_weights(now)
    return np.concatenate(parts)
