"""Sandboxes die at random while episodes are played: what survives is what would have been, down to the gradient."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from marked import init_with
from scripted import ScriptedSampler
from test_rollout import PLAIN, SAMPLING, drawing, facts, many_tasks, rollouts, rows_of

from jaxagent.algos.table import TABLE
from jaxagent.credit import training_rows
from jaxagent.data.pack import pack
from jaxagent.envs.chain import Chain
from jaxagent.envs.env import Env, Step, Task
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.types import Group, Message, StopReason, Trajectory
from sandbox_client import EmbeddedServer, Outcome, Session

TASKS, GROUP, SHARE = 8, 4, 0.15
Kill = Callable[[Session], Awaitable[None]]


async def closed(session: Session) -> None:
    """Ends a session as another client would."""
    await session._end()


async def killed(session: Session) -> None:
    """Kills the process that the session lives in, as somebody on its machine may: a sleeper in it tells which."""
    mark = f"{time.monotonic_ns() % 10**9 + 10**6}.25"
    result = await session.exec(f"import subprocess; subprocess.Popen(['sleep', '{mark}'], stdin=subprocess.DEVNULL); None")
    assert result.outcome is Outcome.OK, result
    pid = init_with(mark)
    assert pid > 1
    os.kill(pid, signal.SIGKILL)


class Mortal:
    """A world in which a share of the sandboxes is killed, behind the back of the client, before one of their steps."""

    def __init__(self, world: Chain, share: float, seed: int, replayable: bool, kill: Kill):
        self.kill = kill
        self.world, self.tools, self.functions = world, world.tools, world.functions
        self._luck, self._share, self._replayable = random.Random(seed), share, replayable
        self.killed = self.rebuilt = 0

    def task(self, split: str, index: int) -> Task:
        return self.world.task(split, index)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return self.world.demonstrate(task, rng)

    def episode(self, name: str, sandbox: Any) -> Env:
        doomed = self._luck.randrange(2, 4) if self._luck.random() < self._share else 0
        return Doomed(self, self.world.episode(name, Opener(sandbox, self._replayable)), doomed)


class Opener:
    """Opens sessions that may be replayed, or not."""

    def __init__(self, sandbox: Any, replayable: bool):
        self.sandbox, self.replayable = sandbox, replayable

    async def open_session(self, *arguments: Any) -> Session:
        return await self.sandbox.open_session(*arguments, replayable=self.replayable)


class Doomed:
    """One episode whose sandbox dies before its step number `last`, 0 for never."""

    def __init__(self, mortal: Mortal, env: Any, last: int):
        self.mortal, self.env, self.last, self.steps = mortal, env, last, 0

    async def reset(self, task: Task, seed: int) -> Step:
        return await self.env.reset(task, seed)

    async def step(self, action: Message) -> Step:
        self.steps += 1
        if self.steps == self.last:
            self.mortal.killed += 1
            await self.mortal.kill(self.env.session)
        return await self.env.step(action)

    async def close(self) -> None:
        if self.env.session is not None:
            self.mortal.rebuilt += self.env.session.rebuilt
        await self.env.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(functions=(Chain.functions,), code="off") as running:
        yield running


@pytest.fixture(scope="module")
def jailed() -> Iterator[EmbeddedServer]:
    """A server whose sessions are processes of their own, where they can be."""
    with EmbeddedServer(functions=(Chain.functions,), code="auto", options=("--warm=8",)) as running:
        if running.level < "L3":
            pytest.skip("no namespaces and memory cgroups here, which together tell who has killed a process")
        yield running


def played(
    server: EmbeddedServer, share: float, attempts: int, replayable: bool = False, kill: Kill = closed
) -> tuple[list[Trajectory], Mortal]:
    world = Mortal(Chain(), share, seed=4, replayable=replayable, kill=kill)
    with rollouts(world, ScriptedSampler(PLAIN, drawing), server, attempts=attempts, concurrency=8) as many:
        return rows_of(many.play(many_tasks(world.world, TASKS), GROUP, SAMPLING)), world


def gradients(*runs: list[Trajectory]) -> list[dict[str, Any]]:
    """The gradient of a smallest policy on the rows of each run; a reward is drawn from what was said."""
    config = tiny.config(vocab_size=PLAIN.vocab_size)
    options = LearnerOptions(batch_rows=8, row_tokens=256, head_chunk=128)
    learner = Learner(config, tiny.params(config), tiny.mesh(1, 1, 1), TABLE["grpo"], options)
    learner.begin(OptimizerOptions(lr=1e-2, lr_final=1e-3, warmup_steps=0, b1=0.0, clip_norm=1e9), len(runs))
    found = []
    for run in runs:
        fresh = jax.device_put(tiny.params(config), jax.tree.map(lambda p: p.sharding, learner.params))
        moments = jax.tree.map(jnp.zeros_like, learner.opt_state)
        learner.restore({"params": fresh, "opt_state": moments}, updates=0)
        groups: dict[str, list[Trajectory]] = {}
        for row in run:
            if row.turns:  # a reward of what was lost would show
                row.turns[-1].reward = zlib.crc32(bytes(str(row.tokens), "ascii")) % 97 / 97 if row.stop.counts else 1e3
            groups.setdefault(row.group, []).append(row)
        rows, idle = training_rows([Group(key, members) for key, members in groups.items()], TABLE["grpo"])
        for batch in pack(rows, batch_rows=8, row_tokens=256):
            learner.accumulate(batch, on_policy=True)
        learner.apply(idle)
        found.append(jax.device_get(optax.tree.get(learner.opt_state, "mu")))
    return found


@pytest.mark.parametrize("kill", [closed, killed])
def test_episodes_whose_sandboxes_die_are_masked_and_the_others_are_what_they_would_have_been(
    server: EmbeddedServer, request: pytest.FixtureRequest, kill: Kill
) -> None:
    whole, _ = played(server, 0.0, attempts=1)
    rows, world = played(request.getfixturevalue("jailed") if kill is killed else server, SHARE, attempts=1, kill=kill)
    lost = [row for row in rows if row.stop is StopReason.INFRA_FAILURE]
    assert world.killed == len(lost) >= 2
    assert {row.reward for row in lost} == {0.0} and all("SessionLost" in row.error for row in lost)
    known = {(row.group, row.rollout): facts(row) for row in whole}
    survivors = [row for row in rows if row.stop.counts]
    assert len(survivors) == TASKS * GROUP - len(lost)
    assert all(facts(row) == known[row.group, row.rollout] for row in survivors)


def test_the_gradient_is_a_faultless_run_s_over_what_survives_and_over_all_if_tried_again_or_replayed(
    server: EmbeddedServer, jailed: EmbeddedServer
) -> None:
    whole, _ = played(server, 0.0, attempts=1)
    again, retried = played(server, SHARE, attempts=5)
    replayed, rebuilt = played(server, SHARE, attempts=1, replayable=True)
    assert retried.killed >= 2 and rebuilt.killed == rebuilt.rebuilt >= 2
    assert [facts(row) for row in again] == [facts(row) for row in whole]
    assert [facts(row) for row in replayed] == [facts(row) for row in whole]
    rows, dead = played(jailed, SHARE, attempts=1, kill=killed)
    alive = {(row.group, row.rollout) for row in rows if row.stop.counts}
    assert len(alive) == TASKS * GROUP - dead.killed < TASKS * GROUP
    spared = [row for row in whole if (row.group, row.rollout) in alive]
    want, *others, got, survivors = gradients(whole, again, replayed, rows, spared)
    assert any(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(want))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, want)
    # those that were lost and not tried again are as if they had never been asked for
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, survivors)
    assert any(np.abs(a - b).max() > 1e-5 for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
