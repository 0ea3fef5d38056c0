"""From rollouts to what is imitated or preferred: the best of a group, all that reach a threshold, the best and the worst.

Rows are built from the tokens that were sampled, as they were sampled. Beside credit.py, which turns the same rewards into
advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxagent.data.pack import Row
from jaxagent.types import Group, Trajectory, by_rollout

MODES = ("sft", "raft", "rest_em", "search", "rest_mcts", "dpo")
SEARCHES = ("search", "rest_mcts")


@dataclass(frozen=True)
class FinetuneOptions:
    """What is learnt from, and how it is chosen.

    Args:
        mode: "" in a config for `jaxagent train`. "sft" imitates a file. "raft" samples, keeps what is good, imitates that, and
            samples again from the policy that came of it; "rest_em" does the same but learns every round from the start
            policy anew (ReST-EM, arXiv:2312.06585). "search" is raft with what a tree search over turns finds, of feed.rollouts
            simulations for each task, see search.py; "rest_mcts" teaches a second learner what the searches say of states, at
            critic.lr, and from the second round on its word guides them (ReST-MCTS*, arXiv:2406.03816). "dpo" learns from
            pairs: of a file, or the best and worst of each group.
        path: the file or folder to learn from, see data/dialogues.py; empty samples with the policy.
        batch: rows, or pairs, of a step.
        rounds: of sampling; the steps are shared evenly among them.
        threshold: rewards that a rollout must reach to be imitated; empty takes the best of each group. Several are applied
            one after the other to the same rollouts, each for its share of the round's steps (ReST's improve steps).
        beta: of DPO: how dear it is to leave the start policy.
    """

    mode: str = ""
    path: str = ""
    batch: int = 32
    rounds: int = 1
    threshold: tuple[float, ...] = ()
    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.mode not in ("", *MODES):
            raise ValueError(f"finetune.mode must be one of {', '.join(MODES)}, or empty for jaxagent train; got {self.mode!r}")
        for name in ("batch", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"finetune.{name} must be at least 1, got {getattr(self, name)}")
        if self.mode == "sft" and not self.path:
            raise ValueError("finetune.path must name the file to learn from where finetune.mode is sft; got ''")
        if self.mode in SEARCHES and self.path:
            raise ValueError(
                f"finetune.path must be empty where finetune.mode is {self.mode}, which samples; got {self.path!r}"
            )
        if self.path and self.rounds > 1:
            raise ValueError(f"finetune.rounds must be 1 where finetune.path gives all there is, got {self.rounds}")
        if self.mode == "rest_mcts" and self.rounds < 2:
            raise ValueError(
                "finetune.rounds must be at least 2 where finetune.mode is rest_mcts: the first round has no guide yet; "
                f"got {self.rounds}"
            )
        if list(self.threshold) != sorted(self.threshold):
            raise ValueError(f"finetune.threshold must not fall, got {tuple(self.threshold)}")
        if self.beta <= 0:
            raise ValueError(f"finetune.beta must be positive, got {self.beta}")


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; each is one row, or the segments of one rollout."""

    chosen: Sequence[Row]
    rejected: Sequence[Row]


def imitated(tokens: Sequence[int], mask: Sequence[bool]) -> Row:
    """A row of which every sampled token counts once, and nothing else."""
    ones = [1.0] * len(tokens)
    return Row(tokens, mask, [0.0] * len(tokens), ones, ones, ones)


def rows_of(segments: Sequence[Trajectory]) -> list[Row]:
    """The training rows of a rollout: its sampled tokens as they are."""
    return [imitated(row.tokens, row.mask) for row in segments if any(row.mask)]


def best(group: Group) -> list[Row]:
    """The rows of the first rollout with the highest reward (RAFT, arXiv:2304.06767, algorithm 1), by role.

    A group whose rewards are all equal gives nothing: its best rollout is any of them, and to imitate that teaches nothing
    on average. So where all fail, nothing is learnt.
    """
    return [row for rollouts in _compared(group) for row in rows_of(max(rollouts, key=_reward))]


def reaching(group: Group, threshold: float) -> list[Row]:
    """The rows of all rollouts whose reward reaches the threshold (ReST, arXiv:2308.08998, eq. 3; ReST-EM with one)."""
    rollouts = [segments for role in _counted(group) for segments in role]
    return [row for segments in rollouts if _reward(segments) >= round(threshold, 6) for row in rows_of(segments)]


def pairs_of(group: Group) -> list[Pair]:
    """The best and the worst rollout of a group, by role; nothing where all rewards are equal, or both wrote the same."""
    found = [Pair(rows_of(max(rollouts, key=_reward)), rows_of(min(rollouts, key=_reward))) for rollouts in _compared(group)]
    return [pair for pair in found if differ(pair)]


def differ(pair: Pair) -> bool:
    """Whether the two answers differ in a sampled token."""
    return _written(pair.chosen) != _written(pair.rejected)


def _written(rows: Sequence[Row]) -> list[list[tuple[int, int]]]:
    return [[(at, token) for at, (token, own) in enumerate(zip(row.tokens, row.mask, strict=True)) if own] for row in rows]


def _reward(segments: Sequence[Trajectory]) -> float:
    return round(segments[0].reward, 6)  # float noise is no difference


def _counted(group: Group) -> list[list[list[Trajectory]]]:
    """By role, the rollouts that count and sampled something."""
    roles: dict[str, list[list[Trajectory]]] = {}
    for segments in by_rollout(group.trajectories):
        if segments[0].stop.counts and any(any(row.mask) for row in segments):
            roles.setdefault(segments[0].role, []).append(segments)
    return list(roles.values())


def _compared(group: Group) -> list[list[list[Trajectory]]]:
    """Those roles of which the rewards differ."""
    return [rollouts for rollouts in _counted(group) if len({_reward(segments) for segments in rollouts}) > 1]
