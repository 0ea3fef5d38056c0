"""Where an episode is taken up again: its first turns, token by token, which all its continuations share.

A continuation is a row of its own whose prompt are the tokens of the stem, so that nothing of the stem is trained on twice and
the sampler prefills it once for all of a stem's continuations. `Agent.retrace` brings the world back, `Rollouts.branch` plays.
`paths_of` turns episodes and continuations into the arrays of algos/values.py, for who chooses turns and for who learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxagent.algos.values import Paths
from jaxagent.envs.env import Step
from jaxagent.types import Message, Trajectory


class Diverged(Exception):
    """The world did not come back to where a continuation begins."""


@dataclass(frozen=True)
class Stem:
    """The first turns of an episode and what the policy was told after them.

    Args:
        group: names its continuations, see `Stem.row`.
        tokens: all that the next turn is sampled after.
        spans: the places of the turns in them, [start, end).
        trunk: the rollout of its group that the first turns are from.
    """

    task: str
    seed: int
    group: str
    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    role: str = "agent"
    difficulty: str = ""
    trunk: int = 0

    @property
    def turns(self) -> int:
        return len(self.spans)

    def row(self, number: int, attempt: int = 1) -> Trajectory:
        """The empty row of continuation `number`. Its draws depend on the run's seed, the stem's name and this number."""
        row = Trajectory(self.task, self.seed, self.group, number, role=self.role, attempts=attempt, difficulty=self.difficulty)
        row.trunk, row.trunk_turns = self.trunk, self.turns
        return row

    def then(self, row: Trajectory, turn: int) -> Stem:
        """The stem of turn `turn` of a continuation of this stem."""
        return _stem(row, turn, self.spans, self.trunk)


def stem_of(row: Trajectory, turn: int) -> Stem:
    """The stem of turn `turn` of an episode that was played from its beginning: all that came before that turn.

    Raises ValueError for a turn that is not there and for rows whose beginning cannot be played again.
    """
    if row.trunk_turns:
        raise ValueError(
            f"{_name(row)} is a continuation that shares {row.trunk_turns} turns with another row: take Stem.then of its stem"
        )
    return _stem(row, turn, (), row.rollout)


def _stem(row: Trajectory, turn: int, before: tuple[tuple[int, int], ...], trunk: int) -> Stem:
    if row.segment:
        raise ValueError(f"{_name(row)} is segment {row.segment} of its rollout: what came before it is not in its tokens")
    if not 0 <= turn < len(row.turns):
        raise ValueError(f"{_name(row)} has {len(row.turns)} turns of its own, so none can be taken again at turn {turn}")
    spans = (*before, *((t.start, t.end) for t in row.turns[:turn]))
    group = f"{row.group}#{row.rollout}@{len(spans)}"
    tokens = tuple(row.tokens[: row.turns[turn].start])
    return Stem(row.task, row.seed, group, tokens, spans, row.role, row.difficulty, trunk)


def _name(row: Trajectory) -> str:
    return f"{row.task} (group {row.group}, rollout {row.rollout})"


def want_one_agent(rows: Sequence[Trajectory]) -> None:
    """Raises ValueError where a group was played by several agents: a turn's future is then not its own agent's alone."""
    if len(roles := sorted({row.role for row in rows})) > 1:
        raise ValueError(
            f"{rows[0].task}: turns of several agents ({', '.join(roles)}) cannot be taken again, only those of one"
        )


@dataclass(frozen=True)
class Resumed:
    """Where a continuation begins: what the world said last, and the dialogue before that."""

    step: Step
    told: tuple[Message, ...]


def paths_of(rollouts: Sequence[Sequence[Trajectory]], rewards: Sequence[np.ndarray], groups: Sequence[int]) -> Paths:
    """Rollouts and continuations, each with all its segments, as padded arrays.

    A state is known by its key, or where the world gives none by the tokens before the turn, which a trunk and its
    continuations share.

    Args:
        rewards: of each rollout's turns.
        groups: of the rollouts; a continuation is in the group of its trunk.
    """
    ids: dict[str | bytes, int] = {}
    shape = len(rollouts), max((len(reward) for reward in rewards), default=0)
    reward_BU, mask_BU, state_BU = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, int)
    for i, (segments, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        keys = [t.state or np.asarray(row.tokens[: t.start]).tobytes() for row in segments for t in row.turns]
        reward_BU[i, : len(reward)], mask_BU[i, : len(reward)] = reward, True
        state_BU[i, : len(keys)] = [ids.setdefault(key, len(ids)) for key in keys]
    first = [segments[0] for segments in rollouts]
    trunks = {
        (group, row.role, row.rollout): i for i, (row, group) in enumerate(zip(first, groups, strict=True)) if row.trunk < 0
    }
    trunk = [trunks.get((group, row.role, row.trunk), -1) for row, group in zip(first, groups, strict=True)]
    leave = np.asarray([row.trunk_turns for row in first])
    return Paths(reward_BU, mask_BU, state_BU, np.asarray(groups), np.asarray(trunk), leave)
