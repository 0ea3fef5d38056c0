"""What waiting for tools costs a training step: `python benchmarks/streaming.py`, or `--bounds 0 1 2 4` for rollouts ahead.

Whole steps of a policy of random weights in a world whose tool sleeps; feed, rollouts, engine and learner are the trainer's.
Without more: wall seconds of the rollouts alone, of the training alone on the same groups, and of a step in which the gradients
of finished groups are computed in the engine's gaps; their ratio is within the run. With `--bounds`, some steps for each bound
on staleness: seconds per step, tokens trained per second, how old they were, and the lengths of the episodes trained on, since
a trainer that takes what is finished first would look fast by learning from the short ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from decode import SHAPES
from flax import nnx
from tables import Tables, with_json

from jaxagent.agent import Agent, Limits
from jaxagent.algos.table import TABLE
from jaxagent.chat.plain import PlainTemplate
from jaxagent.credit import sampling_metrics
from jaxagent.data.tasks import TaskStream
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.replicas import Replicas
from jaxagent.envs.env import ENDLESS, Step, Task
from jaxagent.feed import Feed, FeedOptions
from jaxagent.heap import keep_freed_memory
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.sharding import DeviceMesh
from jaxagent.types import Group, Message, Sampling
from jaxagent.update import Update, UpdateOptions


class Sleeping:
    """A world that answers every turn after a while, a fixed number of times; rewards are drawn."""

    functions, tools = "", ()

    def __init__(self, options: argparse.Namespace):
        self.options = options

    def task(self, split: str, index: int) -> Task:
        return {"id": f"sleeping/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> SleepingEpisode:
        return SleepingEpisode(self.options, random.Random(name.partition("/")[2]))


class SleepingEpisode:
    def __init__(self, options: argparse.Namespace, luck: random.Random):
        self.options, self.luck = options, luck
        self.left = max(1, round(options.turns * luck.lognormvariate(0, options.turns_sigma)))

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", "?" * self.options.prompt_tokens)])

    async def step(self, action: Message) -> Step:
        self.left -= 1
        if not self.left:
            return Step(terminated=True, reward=self.luck.random())
        await asyncio.sleep(self.options.tool_s * self.luck.lognormvariate(0, self.options.tool_sigma))
        return Step([Message("user", "!" * self.options.answer_tokens)])

    async def close(self) -> None:
        pass


class Trainer:
    """The parts of a run."""

    def __init__(self, options: argparse.Namespace):
        self.options = o = options
        template = PlainTemplate()
        config = DecoderConfig(**{**SHAPES[o.model], "vocab_size": template.vocab_size})
        mesh = DeviceMesh.build(1)
        params = params_of(Decoder(config, nnx.Rngs(0)))[1]
        shape = LearnerOptions(batch_rows=o.batch_rows, row_tokens=o.row_tokens, head_chunk=o.row_tokens)
        self.learner = Learner(config, params, mesh, TABLE["dr_grpo"], shape)
        self.learner.begin(OptimizerOptions(lr=1e-5), 1000)
        self.learner.warm_up()
        slots = o.prompts * o.rollouts * (1 + max(o.bounds or (0,)))
        sizes = {"slots": slots, "slot_tokens": o.row_tokens, "chunk": o.row_tokens, "append_tokens": (16, 64)}
        options_ = EngineOptions(**sizes, exact=False, decode_tokens=8)
        self.engines = Replicas([Engine(config, options_, mesh)])
        self.engines.publish(self.learner.params, version=0)
        self.engines.warm_up()
        self.world = Sleeping(o)
        agent = Agent(template, (), self.engines, Limits(10**6, o.row_tokens))
        self.rollouts = Rollouts(self.world, agent, lambda: None, 0, RolloutOptions(concurrency=10**6))

    def feed(self, bound: int = 0) -> Feed:
        sizes = FeedOptions(self.options.prompts, self.options.rollouts, max_staleness=bound)
        return Feed(self.world, TaskStream(ENDLESS, 0), self.rollouts, Sampling(max_tokens=self.options.turn_tokens), sizes)

    def update(self, step: int) -> Update:
        return Update(self.learner, None, [self.engines], UpdateOptions(ordered=False), place=(0, step), baselines={})

    def close(self) -> None:
        self.rollouts.close()
        self.engines.close()


def main() -> None:
    """Measures and prints a table in Markdown; with --json it is in a file too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--turns", type=float, default=4, help="of an episode, in the middle")
    parser.add_argument("--turns-sigma", type=float, default=0.3, help="of the logarithm of the number of turns")
    parser.add_argument("--turn-tokens", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--tool-s", type=float, default=2.0)
    parser.add_argument("--tool-sigma", type=float, default=0.0, help="of the logarithm of the tool's time")
    parser.add_argument("--batch-rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="for each bound")
    parser.add_argument("--bounds", type=int, nargs="*", default=[])
    options = with_json(parser).parse_args()
    keep_freed_memory()
    trainer = Trainer(options)
    try:
        ahead(trainer) if options.bounds else streaming(trainer)
    finally:
        trainer.close()


def streaming(trainer: Trainer) -> None:
    """Rollouts alone, training alone, both: taken in turns, the best of each."""
    best = dict.fromkeys(("rollouts alone", "training alone", "streaming"), float("inf"))
    early = 0.0
    for repeat in range(trainer.options.repeats + 1):
        feed, seconds = trainer.feed(), {}
        began = time.perf_counter()
        groups, _ = feed.take(mixed=False)
        seconds["rollouts alone"] = time.perf_counter() - began
        update = trainer.update(repeat)
        began = time.perf_counter()
        update.finish(groups)
        seconds["training alone"] = time.perf_counter() - began
        feed, update = trainer.feed(), trainer.update(repeat)
        began = time.perf_counter()
        groups, _ = feed.take(mixed=False, meanwhile=update)
        told = update.finish(groups)
        seconds["streaming"] = time.perf_counter() - began
        if repeat:  # the first time something may still be compiled
            early = max(early, told["feed/streamed"])
            best = {name: min(best[name], s) for name, s in seconds.items()}
    most = max(best["rollouts alone"], best["training alone"])
    best["one after the other"] = best["rollouts alone"] + best["training alone"]
    tables = Tables(trainer.options)
    tables.begin("", "wall s", "of max(rollouts, training)")
    for name, s in best.items():
        tables.row(name, f"{s:.2f}", f"{s / most:.2f}")
    tables.note(f"\n{early:.0%} of the micro-batches were computed before the last group was in")


def ahead(trainer: Trainer) -> None:
    """Some steps for each bound on staleness."""
    tables, columns = Tables(trainer.options), ("s per step", "tokens trained per s", "mean staleness", "max")
    tables.begin("max_staleness", *columns, "turns: 10 %, half, 90 %, most", words=0)
    steps = trainer.options.steps
    for bound in trainer.options.bounds:
        feed, trained, lengths, ages, oldest = trainer.feed(bound), 0, [], [], 0.0
        trainer.engines.publish(trainer.learner.params, version=0)
        began = time.perf_counter()
        for step in range(steps):
            update = trainer.update(step)
            groups, _ = feed.take(mixed=False, version=step, steps_left=steps - step - 1, meanwhile=update)
            update.finish(groups)
            trainer.engines.publish(trainer.learner.params, version=step + 1)
            ages_of = sampling_metrics(rows_of(groups), step)
            ages.append(ages_of["feed/staleness_mean"])
            oldest = max(oldest, ages_of["feed/staleness_max"])
            trained += sum(sum(row.mask) for row in rows_of(groups))
            lengths += [len(row.turns) for row in rows_of(groups)]
        seconds = time.perf_counter() - began
        spread = ", ".join(f"{x:.0f}" for x in np.quantile(lengths, (0.1, 0.5, 0.9, 1.0)))
        told = f"{seconds / steps:.2f}", f"{trained / seconds:.0f}", f"{np.mean(ages):.2f}", f"{oldest:.0f}"
        tables.row(bound, *told, spread)


def rows_of(groups: list[Group]) -> list[Any]:
    return [row for group in groups for row in group.trajectories]


if __name__ == "__main__":
    main()
