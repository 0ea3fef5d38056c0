"""Nothing hangs: whatever is waited for hangs, raises or is cancelled, episodes are over within their declared budget.

Places are found in the source (awaits.py), so that a new one is tried too. Time is virtual: a deadline costs nothing, and a
busy machine misses none.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from awaits import Faults
from scripted import ScriptedSampler, never
from toys import Stairs, climbing

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from clocked import Clock

from jaxagent import agent, journal, lengths, rollout, tools
from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.env import Env, Step, Task
from jaxagent.journal import Journal
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.stem import stem_of
from jaxagent.tools import Tool, dispatch_all, tool
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, ToolSpec, Trajectory

PLAIN = PlainTemplate()
SAMPLING = Sampling(max_tokens=12)
OPTIONS = RolloutOptions(concurrency=4, deadline_s=60.0, attempts=1)
KINDS = ("hang", "raise", "cancel")
# What is not tried at a place, and why. Whatever hangs or is cancelled within these functions is tried where they wait for it.
ENDED_WITHIN = {  # by its own try and time limits, and awaited by nobody else: a fault in front of it would be no fault of ours
    "rollout.Rollouts._episode: self._attempts(row, task, member, how, hold)": KINDS,
    "rollout.Rollouts._continuation: self._attempts(partial(how.stem.row, number), task, member, how, hold)": KINDS,
    "rollout.Rollouts._shut: _close(self.agent.close)": KINDS,
    "rollout.Rollouts._shut: _close(self._sandbox.close)": KINDS,
}
RAISES_NOTHING = {  # a wait of asyncio with a time limit, and what is made of nothing else
    "rollout.Rollouts._continuation: how.origin.leave()": ("raise",),
    "rollout._Origin.leave: asyncio.wait({self._retraced}, timeout=LEAVE_S)": ("raise",),
    "rollout._Origin.leave: _close(self._env.close)": ("raise",),
}
# The loop's last wait, with a time limit, in a task that nobody else knows.
LAST = {"rollout.Rollouts._shut: asyncio.wait(tasks, timeout=2 * LEAVE_S)": KINDS}
UNTRIED = ENDED_WITHIN | RAISES_NOTHING | LAST
THREADED = {"tools.tool.run: in_thread(functools.partial(function, **arguments))"}  # of which virtual time knows nothing
LOOK_UP = Path(__file__).parents[1] / "configs" / "programs" / "look_up.py"


# ====================================================================== worlds


async def slow(key: str) -> str:
    await asyncio.sleep(1.0)
    return key


class Errands:
    """Each episode calls a pure tool twice at once, then another, then answers."""

    functions = ""

    def __init__(self) -> None:
        self.kit = Tool(ToolSpec("P", "", {"properties": {"key": {}}}), slow, 5.0, pure=True), tool(slow, 5.0)
        self.tools = tuple(one.spec for one in self.kit)
        self.opened = self.closed = 0

    def task(self, split: str, index: int) -> Task:
        return {"id": f"errands/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Env:
        self.opened += 1
        return Errand(self)


class Errand:
    def __init__(self, world: Errands):
        self.world = world

    async def reset(self, task: Task, seed: int) -> Step:
        await asyncio.sleep(0.1)
        return Step([Message("user", str(seed))])

    async def step(self, action: Message) -> Step:
        if not action.calls:
            return Step(terminated=True, answered=True, reward=1.0)
        calls = action.calls * (2 if action.calls[0].name == "P" else 1)  # the template holds one call per turn
        records = await dispatch_all(self.world.kit, calls)
        return Step([Message("tool", "ok", name=calls[0].name)], tools=records)

    async def close(self) -> None:
        self.world.closed += 1


class Stubborn(Errands):
    """One of its episodes never ends, and does not let itself be ended when it is told to."""

    def episode(self, name: str, sandbox: Any) -> Env:
        made = super().episode(name, sandbox)
        if "train/1#0" in name:
            made.step = clings  # type: ignore[method-assign]
        return made


async def clings(action: Message) -> Step:
    with contextlib.suppress(asyncio.CancelledError):
        await never()
    await never()
    raise AssertionError("never is over")


def errand(text: str, request: SampleRequest) -> Sequence[int]:
    name = {0: "P", 1: "slow"}.get(text.count("<result>"), "")
    return PLAIN.turn(Message("assistant", calls=(ToolCall(name, {"key": "k"}),)) if name else Message("assistant", "done"))


def climb(text: str, request: SampleRequest) -> Sequence[int]:
    return PLAIN.turn(climbing("U")[0])


class Shared:
    """What all episodes share, and is closed with them."""

    closed = False

    async def close(self) -> None:
        self.closed = True


@dataclass
class Played:
    """What came of a call: its rows, how long it took, what it left behind."""

    rows: list[Trajectory]
    seconds: float
    budget_s: float
    left: list[Any]


def facts(row: Trajectory) -> tuple[Any, ...]:
    return row.group, row.rollout, row.trunk, row.tokens, row.stop, row.reward, [r.outcome for t in row.turns for r in t.tools]


def over(clock: Clock, futures: Sequence[Future[list[Trajectory]]]) -> list[Trajectory]:
    clock.go_on(lambda: all(future.done() for future in futures))
    return [row for future in futures for row in future.result(timeout=0)]


def tried(world: Any, write: Any, kept: Path | None = None, branched: bool = False) -> Played:
    """Three groups of two on four places; of a branched world, continuations of one of its episodes besides."""
    clock, sampler, shared = Clock(), ScriptedSampler(PLAIN, write), Shared()
    player = Agent(PLAIN, world.tools, sampler, Limits(max_turns=8, max_tokens=400))
    made = Rollouts(world, player, lambda: shared, 7, OPTIONS, clock)
    log = Journal(kept, redraw=kept.name.startswith("redraw")) if kept else None
    if log:
        log.begin(0)
    tasks = [(f"train/{i}", world.task("train", i)) for i in range(3)]
    futures = [future for group in made.play(tasks, 2, SAMPLING, journal=log) for future in group]
    rows = over(clock, futures)
    count = len(rows)
    if branched and rows[0].stop.counts:
        stem = stem_of(rows[0], 1)
        futures = [future for n in (0, 2) for future in made.branch(stem, tasks[0][1], range(n, n + 2 - n // 2), SAMPLING)]
        rows += over(clock, futures)
        count += 3
    seconds = clock.time()
    made.close()
    if log:
        log.close()
    left = [*asyncio.all_tasks(clock), *sampler.rows, *made._holds]
    left += ["a world"] * (getattr(world, "opened", 0) - getattr(world, "closed", 0) > 1)  # one may be the fault itself
    left += ["a place"] * (made._gate.free != OPTIONS.concurrency) + ["the sandbox"] * (not shared.closed)
    return Played(rows, seconds, OPTIONS.budget_s(count), left)


# ====================================================================== every place


def check(found: Played, calm: Played, place: str) -> None:
    """At most one episode differs, and says why; unless it is what all continuations of a stem share."""
    assert found.left == [], place
    assert found.seconds <= found.budget_s, place
    usual = {(row.group, row.rollout, row.trunk): facts(row) for row in calm.rows}
    assert {(row.group, row.rollout, row.trunk) for row in found.rows} <= set(usual)
    changed = [row for row in found.rows if facts(row) != usual[row.group, row.rollout, row.trunk]]
    assert len(changed) <= (2 if any(row.trunk >= 0 for row in changed) else 1), [(place, row.error) for row in changed]
    for row in changed:
        told = [record.outcome for turn in row.turns for record in turn.tools if record.outcome != "ok"]
        if row.stop.counts:  # a fault of the tool itself is told to the policy
            assert told in (["timeout"], ["error"])
            continue
        assert row.stop is StopReason.INFRA_FAILURE
        assert row.error.startswith(f"turn {row.trunk_turns + len(row.turns)}: ")
        assert "; waiting for the " in row.error
        assert "; sandbox session " in row.error or row.error.endswith(("for the place", "for the agent"))
        if place.startswith("tools."):
            assert ", asked for " in row.error


def test_whatever_is_waited_for_may_fail_in_any_way_and_all_else_goes_on(tmp_path: Path) -> None:
    names = (tmp_path / f"{name}-{n}" for n in range(10**6) for name in ("keep", "redraw"))
    unfinished = half_written(next(names))

    def kept(word: str) -> Played:
        folder = next(name for name in names if name.name.startswith(word))
        shutil.copytree(unfinished, folder)
        return tried(Errands(), errand, folder)

    scenes: dict[str, Callable[[], Played]] = {
        "errands": lambda: tried(Errands(), errand),
        "branches": lambda: tried(Stairs(forks=True), climb, branched=True),
        "retraced": lambda: tried(Stairs(), climb, branched=True),
        "kept": lambda: kept("keep"),
        "redrawn": lambda: kept("redraw"),
        "stubborn": lambda: tried(Stubborn(), errand),
    }
    reached: set[str] = set()
    found = Faults()
    with found.within(rollout, agent, tools, lengths, journal) as places:
        for name, scene in scenes.items():
            found.arm()
            calm = scene()
            assert calm.left == []
            assert sum(not row.stop.counts for row in calm.rows) == (name == "stubborn")
            mine = sorted(set(found.seen) - reached)
            reached |= set(found.seen)
            for place in mine:
                for kind in sorted(set(KINDS) - set(UNTRIED.get(place, ()))):
                    found.arm(place, kind)
                    check(scene(), calm, f"{kind} at {place} in {name}")
    assert set(places) - reached == THREADED
    assert set(UNTRIED) <= reached


@pytest.mark.parametrize(
    "awaited", ["_Origin.leave: _close(self._env.close)", "Rollouts._attempt: _close(hold.opened.pop().close)"]
)
def test_a_world_that_hangs_as_it_closes_is_left_though_its_episode_was_over_at_once(
    awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervise = Rollouts._supervise

    def late(made: Rollouts, futures: Sequence[Future[list[Trajectory]]]) -> None:
        """As on a machine so busy that rows are whole before anybody looks after their episodes."""
        while not all(made._holds[future].over for future in futures if future in made._holds):
            time.sleep(0.001)
        supervise(made, futures)

    monkeypatch.setattr(Rollouts, "_supervise", late)
    found = Faults()
    with found.within(rollout, agent, tools, lengths, journal):
        calm = tried(Stairs(forks=True), climb, branched=True)
        found.arm(f"rollout.{awaited}", "hang")
        check(tried(Stairs(forks=True), climb, branched=True), calm, awaited)
        assert found.seen[f"rollout.{awaited}"]


def half_written(folder: Path) -> Path:
    """A journal as a killed run leaves it: the first turn of every episode, and no end of one."""
    assert all(row.stop.counts for row in tried(Errands(), errand, folder).rows)
    (path,) = folder.glob("*.jsonl")
    path.write_bytes(b"".join(line + b"\n" for line in path.read_bytes().split(b"\n") if b'"turn": 0,' in line[:200]))
    return folder


def test_a_world_that_would_end_the_process_ends_its_episode() -> None:
    class Quitter(Errands):
        def episode(self, name: str, sandbox: Any) -> Env:
            made = super().episode(name, sandbox)
            if "train/1#0" in name:
                made.step = quit_now  # type: ignore[method-assign]
            return made

    async def quit_now(action: Message) -> Step:
        raise SystemExit(3)

    rows = tried(Quitter(), errand).rows
    assert [row.stop.counts for row in rows] == [True, True, False, True, True, True]
    assert rows[2].error.startswith(
        "turn 1: Interrupted: SystemExit: 3; waiting for the environment, asked for P; sandbox session "
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_in_a_thread_may_fail_in_any_way(kind: str) -> None:
    def plain(key: str) -> str:
        return key

    found = Faults()
    with found.within(tools):
        made = tool(plain, 0.05)
        (place,) = THREADED
        found.arm(place, kind)
        call = dispatch_all([made], [ToolCall("plain", {"key": "a"})])
        if kind == "cancel":
            with pytest.raises(asyncio.CancelledError):
                asyncio.run(call)
            return
        (record,) = asyncio.run(call)
    assert record.outcome == {"hang": "timeout", "raise": "error"}[kind]


def test_the_budget_is_what_the_places_and_attempts_give() -> None:
    options = RolloutOptions(concurrency=4, deadline_s=10.0, attempts=3)
    leaving_s = 3 * rollout.LEAVE_S
    assert options.budget_s(4) == 3 * (10 + leaving_s) + leaving_s
    assert options.budget_s(5) == 2 * 3 * (10 + leaving_s) + leaving_s


def test_closing_ends_though_what_is_shared_does_not_let_itself_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "LEAVE_S", 0.05)

    class Stuck:
        async def close(self) -> None:
            await never()

    class Sleepy(Agent):
        async def close(self) -> None:
            await never()

    world = Errands()
    made = Rollouts(world, Sleepy(PLAIN, world.tools, ScriptedSampler(PLAIN, errand), Limits()), Stuck, 0, OPTIONS)
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
