"""Who waits for whom, on a clock that is not real: `python benchmarks/scheduling.py`.

It depends on no machine's speed; two runs differ by up to 3 %, by which of what comes at one moment comes first.

Feed, rollouts, agent and the engine's table of slots are the trainer's; the device's programs are seconds of a roofline, tools
are log-normal latencies, and training takes its time between turns, as `Update` does it (benchmarks/clocked.py).

First table: how near a step comes to what cannot be beaten. bound / wall: the same tokens decoded with all slots busy, every
prompt prefilled once, and the training, all without waiting, over the time it took. floor / wall: the larger of that bound and
the step's slowest episode by itself, which only rollouts ahead of their step can beat. "busy" is decode, prefill and training
over the time it took.

Second table: tails. Few slots, episodes whose lengths differ from task to task; one step after the other, nothing ahead. The
time of a step's rollouts, first come first served, over the same by `lengths.py`: with tasks that come for the first time, and
for the second. "known" is the order by true lengths, longest first; "bound" the larger of work / slots and the longest.

Third table: what it saves to go on without the last of a group (feed.min_group), at the same version of the policy, and what it
costs: the share of episodes that are dropped, and how many turns those have that are trained on, over those of all.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clocked import GRAIN, Clock, ClockedEngine, Device, luck
from tables import Tables, with_json

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.env import Step, Task
from jaxagent.feed import Feed, FeedOptions
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Group, Message, Sample, Sampler, SampleRequest, Sampling

MICRO_BATCH = 32768 // GRAIN  # tokens that training takes at once


@dataclass(frozen=True)
class Shape:
    """A step's episodes. Tokens are of a model; times are of tools, in seconds."""

    groups: int = 32
    rollouts: int = 8
    tasks: int = 10**9  # after so many they come again
    turns: tuple[int, int] = (5, 50)  # least and most
    between: float = 0.0  # sigma of the logarithm between tasks, whose middle is `turns[0]`; 0: evenly between the two
    within: float = 0.3  # the same between the rollouts of a task, where tasks differ
    endless: int = 0  # tasks whose episodes all take the most turns
    sorted: bool = False  # these are the last of a step; otherwise drawn among its groups
    turn_tokens: float = 200
    answer_tokens: float = 300
    prompt_tokens: float = 1000
    tool_s: float = 2.0  # in the middle
    tool_sigma: float = 1.0
    seed: int = 0

    def count_turns(self, task: int, rollout: str) -> int:
        if not (self.between or self.endless):
            return luck(self.seed, task, rollout).randint(*self.turns)
        numbers = range(self.groups)
        long = numbers[-self.endless :] if self.sorted else luck(self.seed, "endless").sample(numbers, self.endless)
        if self.endless and task % self.groups in long:
            return self.turns[1]
        middle = self.turns[0] * luck(self.seed, task).lognormvariate(0, self.between)
        return min(self.turns[1], max(1, round(middle * luck(self.seed, task, rollout).lognormvariate(0, self.within))))

    def count_tokens(self, request: SampleRequest) -> int:
        drawn = luck(self.seed, request.key, request.start).lognormvariate(-0.245, 0.7) * self.turn_tokens
        return max(1, -(-max(8, int(drawn)) // GRAIN))


class Tools:
    """A world of tools that take their time."""

    functions, tools = "", ()

    def __init__(self, shape: Shape):
        self.shape = shape
        self.waited_s: dict[tuple[str, int], float] = {}  # by group and rollout

    def task(self, split: str, index: int) -> Task:
        return {"id": f"tools/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Episode:
        group, _, rollout = name.partition("/")[2].rpartition("#")
        return Episode(self, group, int(rollout))


class Episode:
    def __init__(self, world: Tools, group: str, rollout: int):
        self.world, self.place = world, (group, rollout)
        self.luck = luck(world.shape.seed, group, rollout)

    async def reset(self, task: Task, seed: int) -> Step:
        self.left = self.world.shape.count_turns(seed, "#".join(map(str, self.place)))
        return Step([Message("user", "?" * (int(self.world.shape.prompt_tokens) // GRAIN - 2))])

    async def step(self, action: Message) -> Step:
        self.left -= 1
        if not self.left:
            return Step(terminated=True, reward=self.luck.random())
        shape = self.world.shape
        slow_s = shape.tool_s * self.luck.lognormvariate(0, shape.tool_sigma)
        self.world.waited_s[self.place] = self.world.waited_s.get(self.place, 0.0) + slow_s
        await asyncio.sleep(slow_s)
        answer = min(4096.0, max(8.0, self.luck.lognormvariate(-0.32, 0.8) * shape.answer_tokens))
        return Step([Message("user", "!" * max(0, round(answer / GRAIN) - 2))])

    async def close(self) -> None:
        pass


class Training:
    """Takes groups as they are finished, and the device when nothing is decoded. Stands where `update.Update` stands."""

    ordered, waiting = False, True

    def __init__(self, clock: Clock, engine: ClockedEngine, device: Device):
        self.clock, self.engine, self.device = clock, engine, device
        self._packed: list[int] = []
        self._over = 0  # episodes, when it was looked last
        self._ready: deque[float] = deque()

    def add(self, group: Group) -> None:
        for row in group.trajectories:
            self._packed.append(len(row.tokens))
            if self.device.weight * sum(self._packed) >= MICRO_BATCH:
                self._ready.append(self.device.train(self._packed))
                self._packed = []

    def work(self) -> bool:
        """Time goes on until an episode is over, or the device is free and there is a micro-batch for it."""
        self.clock.go_on(lambda: len(self.engine.held_s) > self._over or bool(self._ready and self.engine.idle))
        self._over = len(self.engine.held_s)
        if self._ready and self.engine.idle:
            self._train(self._ready.popleft())
        return True

    def finish(self) -> None:
        """What is left."""
        self._train(sum(self._ready) + self.device.train(self._packed))
        self._ready.clear()
        self._packed = []

    def _train(self, seconds: float) -> None:
        until = self.engine.held_until = self.clock.time() + seconds
        self.engine.busy_s += seconds
        self.clock.call_soon_threadsafe(self.clock.call_at, until, int)  # so that time stops there
        self.clock.go_on(lambda: self.clock.time() > until - 1e-9)


@dataclass
class Run:
    """Feed, rollouts and engine on one clock."""

    shape: Shape
    slots: int
    max_staleness: int = 0
    through: Callable[[Sampler], Sampler] = lambda sampler: sampler
    min_group: int = 0
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.clock, self.world = Clock(), Tools(self.shape)
        self.engine = ClockedEngine(self.clock, self.device, self.slots, self.shape.count_tokens)
        agent = Agent(PlainTemplate(), (), self.through(self.engine), Limits(10**6, 10**6))
        options = RolloutOptions(concurrency=10**6, deadline_s=1e6, attempts=1)
        self.rollouts = Rollouts(self.world, agent, lambda: None, self.shape.seed, options, self.clock)
        ahead = {"max_staleness": self.max_staleness, "min_group": self.min_group}
        sizes = FeedOptions(self.shape.groups, self.shape.rollouts, **ahead)
        sampling = Sampling(max_tokens=1 << 16)
        self.feed = Feed(self.world, Counted(self.shape.tasks), self.rollouts, sampling, sizes)  # type: ignore[arg-type]
        self.training = Training(self.clock, self.engine, self.device)

    def step(self, number: int, left: int, *, train: bool = True) -> list[Group]:
        """One step; afterwards there are new weights."""
        groups, _ = self.feed.take(mixed=False, version=number, steps_left=left, meanwhile=self.training)
        if train:
            self.training.finish()
        self.engine.version = number + 1
        return groups

    def close(self) -> None:
        self.rollouts.close()

    def bound(self, groups: Sequence[Group], train: bool = True) -> float:
        """Seconds of the same work without any waiting."""
        device, rows = replace(self.device, prefill_s=0.0), [row for group in groups for row in group.trajectories]
        spans = [(turn.end - turn.start, (turn.start + turn.end) / 2) for row in rows for turn in row.turns]
        sampled = sum(n for n, _ in spans)
        held = GRAIN * sum(n * at for n, at in spans) / sampled
        fed = [(turn.start - turn.fed_start, turn.fed_start) for row in rows for turn in row.turns[1:]]
        fed += [(group.trajectories[0].turns[0].start, 0) for group in groups]
        seconds = GRAIN * sampled / self.slots * device.decode(self.slots, self.slots * held)
        seconds += device.prefill(GRAIN * sum(n for n, _ in fed), GRAIN**2 * sum(n * (at + n / 2) for n, at in fed))
        return seconds + (device.train([len(row.tokens) for row in rows]) if train else 0.0)

    def slowest(self, groups: Sequence[Group]) -> float:
        """Seconds of the longest episode by itself."""
        rows = [row for group in groups for row in group.trajectories]

        def alone(row: Any) -> float:
            tools_s = self.world.waited_s.get((row.group, row.rollout), 0.0)
            return tools_s + GRAIN * sum(row.mask) * self.device.decode(1, GRAIN * len(row.tokens) / 2)

        return max(map(alone, rows))


class Counted:
    """Tasks 0, 1, 2 ... and then again. Stands where `data.tasks.TaskStream` stands."""

    def __init__(self, size: int):
        self.size, self.at = size, 0

    def take(self, count: int) -> list[int]:
        self.at += count
        return [i % self.size for i in range(self.at - count, self.at)]

    def tell(self, index: int, solved: int, played: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def restore(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def pace(shape: Shape, slots: int, max_staleness: int, steps: int, weight: int = 1) -> dict[str, float]:
    """How near whole steps come to their bounds. Each row may stand for several of a larger run."""
    run = Run(shape, slots, max_staleness, device=Device(weight=weight))
    found = [run.step(i, steps - 1 - i) for i in range(steps)]
    wall = run.clock.time()
    run.close()
    bounds, slowest = [run.bound(groups) for groups in found], [run.slowest(groups) for groups in found]
    ages = [
        i - v
        for i, groups in enumerate(found)
        for group in groups
        for row in group.trajectories
        for v, own in zip(row.version, row.mask, strict=True)
        if own
    ]
    return {
        "s per step": wall / steps,
        "bound / wall": sum(bounds) / wall,
        "floor / wall": sum(map(max, bounds, slowest)) / wall,
        "busy": run.engine.busy_s / wall,
        "staleness": sum(ages) / len(ages),
        "slowest episode, s": sum(slowest) / steps,
    }


class Unranked:
    """First come first served, whatever the rank. Implements `types.Sampler`."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def rank(self, request: SampleRequest) -> Any:
        return None

    async def generate(self, request: SampleRequest) -> Sample:
        return await self.sampler.generate(replace(request, rank=self.rank(request)))

    def release(self, trajectory: str) -> None:
        self.sampler.release(trajectory)


class Known(Unranked):
    """The longest first, as it turns out."""

    def __init__(self, sampler: Sampler, shape: Shape):
        super().__init__(sampler)
        self.shape = shape

    def rank(self, request: SampleRequest) -> Any:
        place = request.trajectory.rpartition(".")[0]
        number = int(place.partition("/")[2].partition("#")[0])
        return lambda: (0, float(self.shape.count_turns(number % self.shape.tasks, place)))


def tails(shape: Shape, slots: int) -> dict[str, float]:
    """Seconds of two steps' rollouts over the same tasks, in three orders, and what no order can beat."""
    shape = replace(shape, tasks=shape.groups)
    ways: dict[str, Callable[[Sampler], Sampler]] = {
        "fifo": Unranked,
        "long first": lambda sampler: sampler,
        "known": lambda sampler: Known(sampler, shape),
    }
    found: dict[str, float] = {}
    for name, through in ways.items():
        run = Run(shape, slots, through=through)
        for visit in range(2):
            began, held = run.clock.time(), len(run.engine.held_s)
            run.step(visit, 0, train=False)
            found[f"{name} {visit}"] = run.clock.time() - began
            mine = run.engine.held_s[held:]
            found[f"bound {visit}"] = max(sum(mine) / slots, max(mine))
        run.close()
    return found


TAILS = {
    "4 of 64 tasks take 60 turns, the others about 6; 64 slots": (Shape(groups=64, turns=(6, 60), endless=4), 64),
    "the same, these tasks last": (Shape(groups=64, turns=(6, 60), endless=4, sorted=True), 64),
    "1 of 64 tasks, the last": (Shape(groups=64, turns=(6, 60), endless=1, sorted=True), 64),
    "the same, tools of 10 s, sigma 0.3": (
        Shape(groups=64, turns=(6, 60), endless=1, sorted=True, tool_s=10.0, tool_sigma=0.3),
        64,
    ),
    "1 of 24 tasks, the last, takes 30 turns, the others about 4; such tools; 32 slots": (
        Shape(groups=24, turns=(4, 30), endless=1, sorted=True, tool_s=10.0, tool_sigma=0.3),
        32,
    ),
    "64 tasks, log-normal, sigma 1, 6 turns in the middle, 60 at most; 64 slots": (
        Shape(groups=64, turns=(6, 60), between=1.0),
        64,
    ),
    "the same, 256 slots": (Shape(groups=64, turns=(6, 60), between=1.0), 256),
}


def without_the_last(shape: Shape, slots: int, min_group: int) -> dict[str, float]:
    """Seconds of one step's rollouts that go on so early, what is dropped, and how long what is kept is."""
    run = Run(shape, slots, min_group=min_group)
    groups = run.step(0, 0, train=False)
    seconds, rows = run.clock.time(), [row for group in groups for row in group.trajectories]
    run.close()
    turns = {id(row): shape.count_turns(int(row.group.rpartition("/")[2]), f"{row.group}#{row.rollout}") for row in rows}
    kept = [row for row in rows if row.stop.counts]
    mean, of_all = (sum(turns[id(row)] for row in of) / len(of) for of in (kept, rows))
    least = min(sum(row.stop.counts for row in group.trajectories) for group in groups)
    return {"s": seconds, "dropped": 1 - len(kept) / len(rows), "turns": mean / of_all, "least": float(least)}


LATE = {
    "tools of 2 s, sigma 1; 5 to 10 turns": Shape(turns=(5, 10)),
    "tools of 2 s, sigma 2; 5 to 10 turns": Shape(turns=(5, 10), tool_sigma=2.0),
    "tools of 0.2 s; rollouts of a task differ by sigma 0.7 around 6 turns": Shape(
        turns=(6, 60), between=0.1, within=0.7, tool_s=0.2
    ),
}


def main() -> None:
    """Prints the tables in Markdown; with --json they are in a file too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tool-s", type=float, nargs="*", default=[0.2, 2.0, 10.0], help="in the middle")
    parser.add_argument("--seeds", type=int, default=3, help="of the second table")
    options = with_json(parser).parse_args()
    began, tables = time.process_time(), Tables(options)
    measures = "s per step", "bound / wall", "floor / wall", "busy", "staleness"
    tables.begin("tool, s", "turns", "max_staleness", "slots", *measures, words=2)
    for tool_s in options.tool_s:
        for turns in ((5, 10), (5, 50)):
            for ahead, slots in ((0, 256), (1, 256), (1, 512)):
                got = pace(Shape(tool_s=tool_s, turns=turns), slots, ahead, options.steps)
                cells = [f"{got[name]:.2f}" for name in measures[1:]]
                tables.row(f"{tool_s:g}", f"{turns[0]}-{turns[1]}", ahead, slots, f"{got['s per step']:.0f}", *cells)
    orders = "fifo / long first", "fifo / known", "fifo / bound"
    tables.begin("a step's episodes, 8 of a task", "visit", "fifo, s", *orders, words=2)
    for name, (shape, slots) in TAILS.items() if options.seeds else ():
        runs = [tails(replace(shape, seed=seed), slots) for seed in range(options.seeds)]
        for visit, word in enumerate(("first", "second")):
            total = {way: sum(run[f"{way} {visit}"] for run in runs) for way in ("fifo", "long first", "known", "bound")}
            ratios = [total["fifo"] / total[way] for way in ("long first", "known", "bound")]
            tables.row(name, word, f"{total['fifo'] / options.seeds:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
    costs = "s", "all / this", "dropped", "turns, kept / all"
    tables.begin("a step's episodes, 8 of a task; 256 slots", "min_group", *costs, words=2)
    for name, shape in LATE.items() if options.seeds else ():
        every = 0.0
        for min_group in (0, 7, 6, 4):
            runs = [without_the_last(replace(shape, seed=seed), 256, min_group) for seed in range(options.seeds)]
            mean = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
            every = every or mean["s"]
            shares = f"{every / mean['s']:.2f}", f"{mean['dropped']:.3f}", f"{mean['turns']:.3f}"
            tables.row(name, min_group or "all", f"{mean['s']:.0f}", *shares)
    tables.note(f"\n{time.process_time() - began:.0f} CPU-s")


if __name__ == "__main__":
    main()
