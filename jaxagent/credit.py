"""From groups to training rows: advantages by the algorithm's row of the table, and each token's part in the loss.

algos/advantages.py knows padded arrays only; here rollouts, with all their segments and turns, become such arrays and back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxagent.algos import losses
from jaxagent.algos.advantages import (
    COMPARE,
    Turns,
    gae,
    moving_baseline,
    of_rollouts_and_turns,
    whitened,
)
from jaxagent.algos.table import Algorithm
from jaxagent.algos.values import anchored, path_weights
from jaxagent.data.pack import Row
from jaxagent.metrics import Mean
from jaxagent.stem import paths_of
from jaxagent.types import Group, StopReason, Trajectory, Turn, by_rollout


@dataclass
class Credit:
    """What one row is to learn, per token."""

    row: Trajectory
    advantage: np.ndarray
    weight: np.ndarray  # its part in the loss: see algos/losses.py
    share: np.ndarray
    value: np.ndarray | None = None  # of the critic, before the step
    target: np.ndarray | None = None  # for the critic
    judged: np.ndarray | None = None  # where

    @property
    def idle(self) -> bool:
        """Whether its advantages give no gradient."""
        return not self.advantage.any()


@dataclass
class Rollout:
    """The rows of one rollout and seat, as one: their turns and their sampled tokens follow each other."""

    segments: list[Trajectory]
    group: int  # its place among the groups of the step
    penalty: list[np.ndarray]  # per token of each segment: what is subtracted from the reward; empty for nothing
    value: list[np.ndarray]  # per token of each segment; empty without a critic
    part: np.ndarray | None = None  # of each turn in the loss, where futures were sampled several times

    @cached_property
    def turns(self) -> list[Turn]:
        return [turn for row in self.segments for turn in row.turns]

    @cached_property
    def turn_of_token(self) -> np.ndarray:
        """The number of its turn for every sampled token, counted over all segments."""
        found, before = [], 0
        for row in self.segments:
            found.append(np.asarray(row.turn)[np.asarray(row.mask, bool)] + before)
            before += len(row.turns)
        return np.concatenate(found)

    @cached_property
    def lengths(self) -> list[int]:
        """Sampled tokens of each turn."""
        return np.bincount(self.turn_of_token, minlength=len(self.turns)).tolist()

    def sampled(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Of arrays per token of each segment, what belongs to sampled tokens."""
        pairs = zip(values, self.segments, strict=True)
        return np.concatenate([np.asarray(x, np.float32)[np.asarray(row.mask, bool)] for x, row in pairs])

    def spread(self, sampled: np.ndarray) -> list[np.ndarray]:
        """The inverse of `sampled`: per token of each segment, 0 where nothing was sampled."""
        found, at = [], 0
        for row in self.segments:
            mask = np.asarray(row.mask, bool)
            values = np.zeros(len(mask), sampled.dtype)
            values[mask] = sampled[at : at + mask.sum()]
            at += int(mask.sum())
            found.append(values)
        return found

    @cached_property
    def first_tokens(self) -> np.ndarray:
        """Whether a sampled token is the first of its turn."""
        return np.diff(self.turn_of_token, prepend=-1) > 0

    @cached_property
    def value_of_turns(self) -> np.ndarray:
        """The critic's value of the state that each turn begins in; 0 without a critic."""
        found = np.zeros(len(self.turns), np.float32)
        if self.value:
            found[self.turn_of_token[self.first_tokens]] = self.sampled(self.value)[self.first_tokens]
        return found

    @property
    def penalty_of_turns(self) -> np.ndarray:
        if not self.penalty:
            return np.zeros(len(self.turns))
        return np.bincount(self.turn_of_token, self.sampled(self.penalty), len(self.turns))


Arrays = Mapping[int, np.ndarray]


def counted(groups: Sequence[Group]) -> list[Trajectory]:
    """The rows of the rollouts that count: what the infrastructure broke, or what sampled nothing, teaches nothing."""
    return [row for group in groups for rollout in [*_counting(group), *_continuing(group)] for row in rollout]


def _counting(group: Group) -> list[list[Trajectory]]:
    return _teaching(group.trajectories)


def _continuing(group: Group) -> list[list[Trajectory]]:
    """The continuations of a group that count."""
    return _teaching(group.branches)


def _teaching(rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
    rollouts = by_rollout(rows)
    return [segments for segments in rollouts if segments[0].stop.counts and any(any(row.mask) for row in segments)]


def assign(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    penalty: Arrays | None = None,
    value: Arrays | None = None,
    baselines: dict[str, float] | None = None,
) -> list[list[Credit]]:
    """What every row that counts is to learn, group by group; writes the advantages of the turns.

    Rollouts are compared within their group and role. The segments of a rollout are one rollout: they share its return.

    Args:
        penalty: per token of the row with this id(): what is subtracted from its reward, as the distance to a reference.
        value: the same: of the critic.
        baselines: the moving means of the roles before this step, for algorithms that have them; changed to those after it.
    """
    rollouts = [
        Rollout(
            segments,
            g,
            [penalty[id(row)] for row in segments] if penalty else [],
            [value[id(row)] for row in segments] if value else [],
        )
        for g, group in enumerate(groups)
        for segments in [*_counting(group), *(_continuing(group) if algorithm.anchored else [])]
    ]
    found: list[list[Credit]] = [[] for _ in groups]
    if not rollouts:
        return found
    means = _moved(rollouts, algorithm, {} if baselines is None else baselines)
    by_token, targets, judged = _advantages(rollouts, algorithm, means)
    if algorithm.whiten:
        used = np.concatenate([np.full(len(x), not _dropped(r, algorithm)) for x, r in zip(by_token, rollouts, strict=True)])
        flat = whitened(np.concatenate(by_token), used)
        by_token = np.split(flat, np.cumsum([len(x) for x in by_token])[:-1])
    if algorithm.anchored:
        _count_futures_once(rollouts)
    for i, (rollout, advantage) in enumerate(zip(rollouts, by_token, strict=True)):
        sums = np.bincount(rollout.turn_of_token, advantage, len(rollout.turns))
        for turn, total, n in zip(rollout.turns, sums, rollout.lengths, strict=True):
            turn.advantage = float(total) / max(n, 1)
        if not _dropped(rollout, algorithm):
            more = [rollout.value, rollout.spread(targets[i]), rollout.spread(judged[i])] if algorithm.critic else []
            found[rollout.group] += _credits(rollout, advantage, algorithm, more)
    return found


def _dropped(rollout: Rollout, algorithm: Algorithm) -> bool:
    return algorithm.drop_overlong and any(row.stop == StopReason.MAX_TOKENS for row in rollout.segments)


def _moved(rollouts: Sequence[Rollout], algorithm: Algorithm, baselines: dict[str, float]) -> list[float]:
    """The moving mean that each rollout is compared with; `baselines` moves on."""
    if not algorithm.baseline_decay:
        return [0.0] * len(rollouts)
    roles = [rollout.segments[0].role for rollout in rollouts]
    before = {role: baselines.get(role, 0.0) for role in roles}
    for role, mean in before.items():
        rewards = np.asarray([r.segments[0].reward for r, of in zip(rollouts, roles, strict=True) if of == role], np.float32)
        baselines[role] = moving_baseline(rewards, mean, algorithm.baseline_decay)[1]
    return [before[role] for role in roles]


def _advantages(
    rollouts: Sequence[Rollout], algorithm: Algorithm, means: Sequence[float]
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """(advantages, targets of the critic, where it is judged) of the sampled tokens of every rollout."""
    if algorithm.unit == "token":
        return _of_tokens(rollouts, algorithm)
    rewards = [np.asarray([turn.reward for turn in r.turns]) - r.penalty_of_turns for r in rollouts]
    for reward, mean in zip(rewards, means, strict=True):
        reward[-1] -= mean
    mask_BU = padded([np.ones(len(r.turns), bool) for r in rollouts])
    if algorithm.anchored:
        paths = paths_of([r.segments for r in rollouts], rewards, [r.group for r in rollouts])
        by_turn = target = anchored(paths, algorithm.gamma)
    elif algorithm.unit == "turn":
        value = [r.value_of_turns for r in rollouts]
        by_turn, target = gae(padded(rewards), padded(value), mask_BU, algorithm.gamma, algorithm.gae_lambda)
    else:
        by_turn = target = _of_comparisons(rollouts, rewards, mask_BU, algorithm)
    per_token = [(by_turn[i][r.turn_of_token], target[i][r.turn_of_token]) for i, r in enumerate(rollouts)]
    return [a for a, _ in per_token], [t for _, t in per_token], [r.first_tokens for r in rollouts]


def _count_futures_once(rollouts: Sequence[Rollout]) -> None:
    """The parts of trunks and continuations in the loss: all that go on from one turn count together as one."""
    nothing = [np.zeros(len(r.turns)) for r in rollouts]
    weight_BU = path_weights(paths_of([r.segments for r in rollouts], nothing, [r.group for r in rollouts]))
    for rollout, weight in zip(rollouts, weight_BU, strict=True):
        rollout.part = weight[: len(rollout.turns)]


def _of_tokens(
    rollouts: Sequence[Rollout], algorithm: Algorithm
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Every sampled token is a step; a turn's reward comes with its last one."""
    rewards = []
    for rollout in rollouts:
        nothing = np.zeros(len(rollout.turn_of_token), np.float32)
        reward = -rollout.sampled(rollout.penalty) if rollout.penalty else nothing
        last = np.cumsum(rollout.lengths) - 1
        np.add.at(reward, np.maximum(last, 0), [turn.reward for turn in rollout.turns])
        rewards.append(reward)
    mask = padded([np.ones(len(reward), bool) for reward in rewards])
    value = padded([r.sampled(r.value) if r.value else np.zeros(len(x)) for r, x in zip(rollouts, rewards, strict=True)])
    both = gae(padded(rewards), value, mask, algorithm.gamma, algorithm.gae_lambda)
    advantage, target = ([x[i, : len(reward)] for i, reward in enumerate(rewards)] for x in both)
    return advantage, target, [np.ones(len(reward), bool) for reward in rewards]


def _of_comparisons(
    rollouts: Sequence[Rollout], rewards: Sequence[np.ndarray], mask_BU: np.ndarray, algorithm: Algorithm
) -> np.ndarray:
    """The sum over the parts of the reward, which are one where they are not compared separately."""
    group = np.asarray(_ids([(r.group, r.segments[0].role) for r in rollouts]))
    state = padded([np.asarray(ids) for ids in _nested_ids([[turn.state for turn in r.turns] for r in rollouts])])
    names = sorted({name for r in rollouts for turn in r.turns for name in turn.parts}) if algorithm.separate else []
    parts = [[np.asarray([turn.parts.get(name, 0.0) for turn in r.turns]) for r in rollouts] for name in names]
    left = [reward - sum(part[i] for part in parts) for i, reward in enumerate(rewards)]
    if not parts or any(np.abs(x).max(initial=0) > 1e-6 for x in left):
        parts.append(left)
    total = np.zeros(mask_BU.shape, np.float32)
    for part in parts:
        turns = Turns(padded(part), mask_BU, state, group, np.ones(len(rollouts), bool))
        total += of_rollouts_and_turns(
            turns,
            COMPARE[algorithm.advantage],
            algorithm.turns,
            algorithm.gamma,
            algorithm.outcome_weight,
            algorithm.turn_weight,
        )
    return total


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Ragged rows as one array, with zeros behind."""
    found = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype if rows[0].dtype != np.float64 else np.float32)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found


def _ids(keys: Sequence[object]) -> list[int]:
    """The same number for the same key."""
    known: dict[object, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _nested_ids(keys: Sequence[Sequence[object]]) -> list[list[int]]:
    flat = iter(_ids([key for row in keys for key in row]))
    return [[next(flat) for _ in row] for row in keys]


def _credits(
    rollout: Rollout, advantage: np.ndarray, algorithm: Algorithm, more: Sequence[Sequence[np.ndarray]]
) -> list[Credit]:
    """A rollout's credit, row by row. Its segments weigh together what one row of their length would."""
    pairs = np.asarray(losses.aggregation(algorithm.aggregate, rollout.lengths, algorithm.length))
    if rollout.part is not None:
        pairs = pairs * rollout.part[:, None]
    weight, share = (rollout.spread(pairs[rollout.turn_of_token, i]) for i in range(2))
    columns = [rollout.spread(advantage), weight, share, *more]
    return [Credit(row, *(column[i] for column in columns)) for i, row in enumerate(rollout.segments)]


def rows_of(credits: Sequence[Credit], *, keep_idle: bool = False, version: int = 0) -> tuple[list[Row], float]:
    """The rows that have a gradient, and the share of the tokens of those that have none.

    A row of advantage 0 has no gradient: leaving it out changes nothing but the denominator, which still counts it.
    `keep_idle` keeps such rows, for losses with a term besides the advantage. `version` is of the weights that are trained.
    """
    rows, idle = [], 0.0
    for c in credits:
        if c.idle and not keep_idle:
            idle += float(c.share.sum())
        else:
            rows.append(_row(c, version))
    return rows, idle


def _row(c: Credit, version: int) -> Row:
    advantage, weight, share = (x.tolist() for x in (c.advantage, c.weight, c.share))
    value, target, judged = (x if x is None else x.tolist() for x in (c.value, c.target, c.judged))
    t = c.row
    age = np.where(t.mask, version - np.asarray(t.version, int), 0).tolist()
    return Row(t.tokens, t.mask, t.logprob, advantage, weight, share, _routing(t), value, target, judged, t.turn, age)


def _routing(row: Trajectory) -> np.ndarray | None:
    return np.concatenate(row.routing) if row.routing else None


def plain_rows(rows: Sequence[Trajectory]) -> list[Row]:
    """Rows to be scored before anyone knows what they are to learn."""
    nothing = [[0.0] * len(row.tokens) for row in rows]
    return [Row(t.tokens, t.mask, t.logprob, zeros, zeros, zeros, _routing(t)) for t, zeros in zip(rows, nothing, strict=True)]


def training_rows(groups: Sequence[Group], algorithm: Algorithm, *, keep_idle: bool = False) -> tuple[list[Row], float]:
    """`rows_of` what `assign` gives for all groups, without critic and reference."""
    return rows_of([c for credits in assign(groups, algorithm) for c in credits], keep_idle=keep_idle)


# ---------------------------------------------------------------------- what the step's groups and credit were like


def group_metrics(kept: Sequence[Group], sampled: Sequence[Group]) -> dict[str, float]:
    """Of the groups of a step, as they were sampled and as far as they count; roles are groups of their own."""
    by_role: dict[tuple[int, str], list[Trajectory]] = defaultdict(list)
    for g, group in enumerate(sampled):
        for segments in _counting(group):
            by_role[g, segments[0].role].append(segments[0])
    members = list(by_role.values())
    several = [float(np.std([row.reward for row in rows], ddof=1)) for rows in members if len(rows) > 1]
    tasks = [group.trajectories[0].task for group in sampled if group.trajectories]
    return {
        "groups/all_solved": _mean([all(row.solved for row in rows) for rows in members]),
        "groups/none_solved": _mean([not any(row.solved for row in rows) for rows in members]),
        "groups/std_mean": _mean(several),
        "groups/kept": len(kept) / max(len(sampled), 1),
        "groups/repeated_tasks": 1 - len(set(tasks)) / max(len(tasks), 1),
    }


def role_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """In worlds of several agents: the mean reward of every role, and how often the policy beats earlier versions of itself."""
    rollouts = [segments[0] for group in groups for segments in _counting(group)]
    roles = sorted({row.role for row in rollouts})
    found = {f"reward/role_{role}": _mean([row.reward for row in rollouts if row.role == role]) for role in roles}
    versus = {(row.group, row.rollout) for group in groups for row in group.others}
    against = [row for row in rollouts if (row.group, row.rollout) in versus]
    won = {"reward/success_against_past": _mean([row.solved for row in against])} if against else {}
    return (found if len(roles) > 1 else {}) | won


def credit_metrics(credits: Sequence[Credit], algorithm: Algorithm) -> dict[str, float]:
    """Of the advantages of the sampled tokens that are trained on; of anchor states, how many turns were compared in each."""
    advantage = [c.advantage[np.asarray(c.row.mask, bool)] for c in credits]
    a = np.concatenate(advantage) if advantage else np.zeros(0)
    if not len(a):
        return {}
    found = {
        "credit/advantage_mean": Mean(float(a.sum()), len(a)),
        "credit/advantage_std": float(a.std()),
        "credit/advantage_min": float(a.min()),
        "credit/advantage_max": float(a.max()),
        "credit/positive_tokens": Mean(float((a > 0).sum()), len(a)),
    }
    if algorithm.turns == "state":
        keys = [(c.row.group, c.row.role, turn.state) for c in credits for turn in c.row.turns]
        sizes = np.asarray(list(Counter(keys).values()))
        found["credit/state_group_size"] = float(sizes.mean())
        found["credit/state_singletons"] = float((sizes == 1).sum() / sizes.sum())  # of the turns
    return found


LATE = 3  # turns from this number on are taken together


def sampling_metrics(rows: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How old the sampled tokens are, and how uncertain the policy was in its first turns, which gate all that follows."""
    age, surprise = [], defaultdict(list)
    for row in rows:
        mask = np.asarray(row.mask, bool)
        age.append(version - np.asarray(row.version)[mask])
        for turn, logprob in zip(np.asarray(row.turn)[mask], np.asarray(row.logprob)[mask], strict=True):
            surprise[min(int(turn), LATE)].append(-float(logprob))
    ages = np.concatenate(age) if age else np.zeros(0)
    found = {f"rollout/entropy_turn_{turn}{'_on' * (turn == LATE)}": _mean(surprise[turn]) for turn in sorted(surprise)}
    return found | {
        "feed/staleness_mean": Mean(float(ages.sum()), len(ages)),
        "feed/staleness_max": float(ages.max(initial=0)),
    }


def _mean(values: Sequence[float]) -> float:
    return Mean(float(np.sum(values)), len(values))
