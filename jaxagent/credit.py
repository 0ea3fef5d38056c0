"""From groups to training rows: advantages by the algorithm's row of the table, and each token's part in the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxagent.algos import losses
from jaxagent.algos.table import Algorithm
from jaxagent.data.pack import Row
from jaxagent.types import Group, Trajectory, by_rollout


def assign(groups: Sequence[Group], algorithm: Algorithm) -> list[Trajectory]:
    """Writes every turn's advantage and returns the rows that count. Rollouts are compared within their group and role.

    The segments of a rollout are one rollout: they share its return and its advantage.
    """
    members: dict[tuple[str, str], list[list[Trajectory]]] = defaultdict(list)
    for group in groups:
        for segments in by_rollout(group.trajectories):
            members[group.key, segments[0].role].append(segments)
    width = max((len(rollouts) for rollouts in members.values()), default=0)
    reward_PG = np.zeros((len(members), width), np.float32)
    valid_PG = np.zeros((len(members), width), bool)
    for p, rollouts in enumerate(members.values()):
        reward_PG[p, : len(rollouts)] = [segments[0].reward for segments in rollouts]
        valid_PG[p, : len(rollouts)] = [
            segments[0].stop.counts and any(any(row.mask) for row in segments) for segments in rollouts
        ]
    advantage_PG = np.asarray(algorithm.advantage(jnp.asarray(reward_PG), jnp.asarray(valid_PG))).tolist()
    counted = []
    for p, rollouts in enumerate(members.values()):
        for g, segments in enumerate(rollouts):
            if valid_PG[p, g]:
                counted += segments
                for turn in (turn for row in segments for turn in row.turns):
                    turn.advantage = advantage_PG[p][g]
    return counted


def training_rows(groups: Sequence[Group], algorithm: Algorithm, *, keep_idle: bool = False) -> tuple[list[Row], float]:
    """The rows that have a gradient, and the share of the tokens of those that have none.

    A row of advantage 0 has no gradient: leaving it out changes nothing but the denominator, which still counts it.
    `keep_idle` keeps such rows, for losses with a term besides the advantage. The segments of a rollout weigh together what
    one row of their length would.
    """
    rollouts = by_rollout(assign(groups, algorithm))
    lengths = [sum(sum(row.mask) for row in segments) for segments in rollouts]
    weights, shares = losses.aggregation(algorithm.aggregate, lengths, algorithm.length)
    weighed = [
        (row, weight, share) for segments, weight, share in zip(rollouts, weights, shares, strict=True) for row in segments
    ]
    rows, idle = [], 0.0
    for row, weight, share in weighed:
        by_turn = [turn.advantage or 0.0 for turn in row.turns]
        if not any(by_turn) and not keep_idle:
            idle += share * sum(row.mask)
            continue
        n = len(row.tokens)
        advantage = [by_turn[turn] if turn >= 0 else 0.0 for turn in row.turn]
        routing = np.concatenate(row.routing) if row.routing else None
        rows.append(Row(row.tokens, row.mask, row.logprob, advantage, [weight] * n, [share] * n, routing))
    return rows, idle
