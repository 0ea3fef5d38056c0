"""jaxagent itself, for compare.py: its own training loop on the workload, with engine, rollouts, learner and publishing.

`--lock-step` is the same trainer with episodes that take every turn together, as synchronous trainers roll out: all sample, all
wait for the slowest tool, then comes the next turn. What is cached is kept all the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.peers.workload import Report, Workload, arguments, distinct, workload_of
from jaxagent import config as configs
from jaxagent import train
from jaxagent.agent import Agent
from jaxagent.parts import build, use_devices
from jaxagent.progress import Progress
from jaxagent.types import Sample, Sampler, SampleRequest

REPOSITORY = Path(__file__).resolve().parents[2]
CHUNK = 64  # cache positions
DEVICES = 2  # mesh.cpu_devices: an engine on each


class Scheduled:
    """A sampler whose turns are as long as the workload says. Implements `types.Sampler`."""

    def __init__(self, sampler: Sampler, workload: Workload):
        self.sampler, self.workload = sampler, workload
        self.turns: dict[str, int] = {}
        self.said: list[list[int]] = []

    async def generate(self, request: SampleRequest) -> Sample:
        number, rollout = request.trajectory.removeprefix("train/").partition(".")[0].split("#")
        step, prompt = divmod(int(number), self.workload.prompts)
        turn = self.turns[request.trajectory] = self.turns.get(request.trajectory, -1) + 1
        tokens = self.workload.lengths(step)[prompt * self.workload.group + int(rollout)][turn]
        sampling = replace(request.sampling, max_tokens=tokens)
        sample = await self.sampler.generate(replace(request, stop=(), sampling=sampling))
        self.said.append(sample.tokens)
        return sample

    def release(self, trajectory: str) -> None:
        self.turns.pop(trajectory, None)
        self.sampler.release(trajectory)


class Timed(train.Run):
    """A run that reports its steps."""

    def watch(self, workload: Workload, sampler: Scheduled, report: Report) -> None:
        self.workload, self.sampler, self.report = workload, sampler, report

    def done(self, values: dict[str, float]) -> None:
        spent = {f"{name}_s": seconds for name, seconds in self.clock.parts.items() if name != "compile"}
        super().done(values)
        told = {name: values[key] for name, key in TOLD.items() if key in values}
        self.report.sampled = sum(map(len, self.sampler.said))
        told |= {"model_calls": len(self.sampler.said), "distinct": distinct(self.sampler.said)}
        self.report.step(**self.parts.world.clock.take(), **told, **spent)
        self.sampler.said.clear()
        if len(self.report.steps) < self.workload.steps:
            self.parts.world.tool_s = self.workload.tool_ms[len(self.report.steps)] / 1e3


TOLD = {
    "streamed": "feed/streamed",
    "row_fill": "train/row_fill",
    "fill": "engine/fill",
    "busy_s": "engine/busy_s",
    "compiled": "engine/compiled",
}


def main() -> None:
    """Runs and prints a JSON line."""
    parser = arguments(__doc__)
    parser.add_argument("--lock-step", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the config")
    options = parser.parse_args()
    workload = workload_of(options)
    report = Report("jaxagent, lock-step" if options.lock_step else "jaxagent", workload)
    config, faults = configs.load(str(REPOSITORY / "configs" / "base.py"), [*settings(workload, options), *options.set])
    if faults:
        raise configs.ConfigError(faults)
    use_devices(config)
    with tempfile.TemporaryDirectory() as workdir:
        play(config, Path(workdir), workload, report)
    report.print(versions={name: metadata.version(name) for name in ("jax", "flax")})


def play(config: Any, workdir: Path, workload: Workload, report: Report) -> None:
    """`train.main` without evaluations, and with a schedule between agent and engines."""
    parts = build(config, workdir / "sandbox.log")
    agent = parts.rollouts.agent
    assert isinstance(agent, Agent)
    scheduled = Scheduled(agent.sampler, workload)
    parts.rollouts.agent = agent.through(lambda _: scheduled)
    parts.world.tool_s = workload.tool_ms[0] / 1e3  # type: ignore[attr-defined]
    progress = Progress(sys.stderr)
    try:
        run = Timed(config, workdir, parts, progress)
        run.watch(workload, scheduled, report)
        train.story(run, train.tell, train.resume, train.begin_training, lambda _: report.begin(), train.train)
    finally:
        progress.stop()
        parts.close()


def settings(workload: Workload, options: argparse.Namespace) -> list[str]:
    """The run as changes to configs/base.py; all else is as there."""
    budget = workload.budget if workload.agentic else workload.new_tokens
    row = workload.asked()["tokens"] + budget
    slot = -(-row // CHUNK) * CHUNK
    packed = slot * 3 // 2 if workload.agentic else slot  # episodes of unequal length fill nine tenths of such rows
    turns = workload.turns if workload.agentic else 1
    world = {"model": str(workload.model), "prompts": workload.prompts, "turns": turns}
    if options.lock_step:
        world["together"] = workload.episodes
    keys: dict[str, Any] = {
        "init_from": str(workload.model),
        "env.name": "benchmarks.peers.world",
        **{f"env.options.{name}": value for name, value in world.items()},
        "agent.max_turns": turns,
        "agent.max_tokens": slot + budget,  # the lengths of turns are the workload's
        "sampling.max_tokens": budget,
        "feed.prompts": workload.prompts,
        "feed.rollouts": workload.group,
        "algo.name": "grpo",
        "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 0,
        "optimizer.lr_final": 1e-6,
        "mesh.cpu_devices": DEVICES,
        "mesh.fsdp": DEVICES,  # each holds half of the learner's weights and moments
        "engine.slots": -(-workload.episodes // DEVICES),
        "engine.slot_tokens": slot,
        "engine.chunk": slot if workload.agentic else CHUNK,  # of single turns all rows use as many positions, and few at first
        "engine.append_tokens": "(32,64)",  # a tool's result, and a prompt
        "engine.decode_tokens": 8,
        "engine.exact": False,
        "learner.batch_rows": 2 * DEVICES,
        "learner.row_tokens": packed,
        "learner.head_chunk": packed,
        "train.steps": workload.steps,
        "evaluate.every": 0,
        "checkpoint.every": 10**6,
        "sandbox.code": "off",
    }
    if workload.beta:
        keys |= {"algo.kl_coef": workload.beta, "algo.kl": "k3_loss"}
    return [f"{key}={value}" for key, value in keys.items()]


if __name__ == "__main__":
    main()
