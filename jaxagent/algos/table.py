"""All algorithms on one page. A row says who learns from whom, how the ratio is taken, how far it may go, how tokens are
averaged, which groups count, and what corrects a stale sampler. A new algorithm from known parts is one row.

A row is data: its words name functions of advantages.py and losses.py. Standard library only, so that a config can be checked
against it anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

WORDS = {
    "unit": ("rollout", "turn", "token"),
    "advantage": ("plain", "centred", "normalised", "leave_one_out"),
    "turns": ("none", "index", "state", "all"),
    "ratio": ("token", "sequence", "sequence_token"),
    "bound": ("unbounded", "clipped", "capped"),
    "aggregate": ("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm", "turn_mean"),
    "select": ("all", "mixed"),
    "kl": ("k1_reward", "k2_reward", "k3_reward", "k2_loss", "k3_loss"),
    "importance": ("none", "token", "token_truncated", "token_masked", "sequence_truncated", "sequence_masked"),
    "filter": ("none", "geometric", "k2", "k3", "unlikely_negative"),
}


@dataclass(frozen=True)
class Algorithm:
    """One row of the table. All columns but the first have the value of the plain case.

    Args:
        source: where it is from.
        advantage: how returns are compared within a group (advantages.COMPARE); for rollouts.
        bound, ratio: of losses.BOUND and losses.RATIO.
        aggregate: how tokens are averaged, see losses.aggregation.
        select: "all" groups count, or only the "mixed" ones, whose rewards differ.
        unit: whose return it is. A "rollout" is compared with its group; a "turn" or "token" is a step of a decision process,
            whose advantage is from `gae`: with a critic, or with V = 0 and lambda = 1, which is the return to go.
        turns: with which turns of its group a turn's return to go is compared besides, for rollouts: see
            advantages.of_rollouts_and_turns.
        outcome_weight, turn_weight: of the two comparisons.
        gamma, gae_lambda: per turn or per token, as `unit` says; of the comparison of turns per turn.
        anchored: of turns: values are means over the visits of their states by the group's other paths, which continuations of
            chosen turns (feed.branches) may add to, see values.py.
        critic: a value function is trained, see critic.py; of value_clip, see losses.value_loss.
        process: a process reward model is trained in its place, and pays every turn a difference of potentials: see process.py.
        separate: every named part of the reward is compared by itself (GDPO).
        whiten: advantages are whitened over all sampled tokens of the step.
        baseline_decay: rewards are taken less a moving mean of their role; 0 is off.
        clip_low, clip_high: the ratio may move to [1 - clip_low, 1 + clip_high].
        clip_dual: c > 1 of the dual clip, for a bound that is a multiple of the ratio; 0 is off.
        length: the constant of sequence_sum_norm, in tokens.
        kl, kl_coef: the estimate of KL(policy, policy at the start of reinforcement), and whether it is subtracted from the
            reward of every token or added to the loss.
        entropy_coef: of the entropy that is subtracted from the loss.
        importance, importance_bounds: the weight old / behaviour, see losses.importance_weight.
        filter, filter_bounds: see losses.kept_sequences.
        drop_overlong: rollouts that ran out of tokens leave the loss and its denominator, but not their group.
    """

    source: str
    advantage: str
    bound: str
    aggregate: str
    select: str = "all"
    ratio: str = "token"
    unit: str = "rollout"
    turns: str = "none"
    outcome_weight: float = 1.0
    turn_weight: float = 1.0
    gamma: float = 1.0
    gae_lambda: float = 1.0
    critic: bool = False
    process: bool = False
    anchored: bool = False
    value_clip: float = 0.2
    separate: bool = False
    whiten: bool = False
    baseline_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 0.0
    length: float = 100.0
    kl: str = "k2_loss"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance: str = "none"
    importance_bounds: tuple[float, float] = (0.0, 2.0)
    filter: str = "none"
    filter_bounds: tuple[float, float] = (0.999, 1.001)
    drop_overlong: bool = False

    @property
    def kl_estimate(self) -> str:
        return self.kl.partition("_")[0]

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl.endswith("_reward")

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl.endswith("_loss")

    @property
    def beyond_advantage(self) -> bool:
        """Whether a token of advantage 0 has a gradient."""
        return self.kl_in_loss or self.entropy_coef > 0 or self.has_critic

    @property
    def has_critic(self) -> bool:
        """Whether a second learner is trained beside the policy."""
        return self.critic or self.process

    @property
    def by_group(self) -> bool:
        """Whether the gradient of a group is known before the step's other groups are.

        Not where advantages are whitened over the step or taken less a moving mean, nor where a critic's values, continuations
        of turns or the distance to a reference enter them, which are asked of all rollouts together.
        """
        return not (self.whiten or self.baseline_decay or self.has_critic or self.anchored or self.kl_in_reward)

    @property
    def compares(self) -> bool:
        """Whether a rollout alone in its group learns nothing."""
        return self.anchored or (self.unit == "rollout" and self.advantage != "plain")

    @property
    def old_matters(self) -> bool:
        """Whether it corrects for the distance between the sampler and the policy at the start of the step."""
        return self.importance != "none" or self.filter in ("geometric", "k2", "k3")


# fmt: off
_GRPO = Algorithm("arXiv:2402.03300", "normalised", "clipped", "sequence_mean", kl="k3_loss")
_PPO = Algorithm("arXiv:1707.06347", "plain", "clipped", "token_mean", unit="token", critic=True, whiten=True)
_GSPO = Algorithm("arXiv:2507.18071", "normalised", "clipped", "sequence_mean", ratio="sequence", clip_low=3e-4, clip_high=4e-4)

TABLE = {
    # without a critic: a rollout is compared with its group
    "reinforce":    Algorithm("Williams 1992",    "plain",         "unbounded", "sequence_sum"),
    "rloo":         Algorithm("arXiv:2402.14740", "leave_one_out", "unbounded", "sequence_sum", kl="k1_reward"),
    "grpo":         _GRPO,
    "dr_grpo":      Algorithm("arXiv:2503.20783", "centred",       "clipped",   "sequence_sum_norm"),
    "dapo":         Algorithm("arXiv:2503.14476", "normalised",    "clipped",   "token_mean", "mixed", clip_high=0.28),
    "cispo":        Algorithm("arXiv:2506.13585", "normalised",    "capped",    "token_mean", clip_low=1.0, clip_high=1.0),
    "gspo":         _GSPO,
    "gspo_token":   replace(_GSPO, ratio="sequence_token"),
    "gdpo":         Algorithm("arXiv:2601.05242", "normalised",    "clipped",   "sequence_mean", separate=True, whiten=True),
    "spiral":       Algorithm("arXiv:2506.24119", "plain",         "unbounded", "sequence_sum", baseline_decay=0.95),
    "reinforce_pp_baseline":
                    Algorithm("arXiv:2501.03262", "centred",       "clipped",   "token_mean", whiten=True),
    # turns are compared too
    "turn_grpo":    Algorithm("arXiv:2505.11821", "normalised",    "clipped",   "turn_mean", turns="index"),
    "gtpo":         Algorithm("arXiv:2511.14846", "normalised",    "clipped",   "turn_mean", turns="index", outcome_weight=0.0,
                              gamma=0.95),
    # F = 1: among two or three turns of a state the deviation blows up small differences; advantage = normalised is F = std
    "gigpo":        Algorithm("arXiv:2505.10978", "centred",       "clipped",   "turn_mean", turns="state", gamma=0.95),
    # a decision process of turns or tokens
    "reinforce_to_go": Algorithm("Williams 1992", "plain",         "unbounded", "sequence_sum", unit="turn"),
    "reinforce_pp": Algorithm("arXiv:2501.03262", "plain",         "clipped",   "token_mean", unit="token", whiten=True,
                              kl="k1_reward"),
    "ppo":          _PPO,
    "ppo_dual":     replace(_PPO, source="arXiv:1912.09729", clip_dual=3.0),
    "ppo_turn":     replace(_PPO, source="arXiv:1707.06347, a turn as one action", aggregate="turn_mean", unit="turn",
                            gamma=0.95, gae_lambda=0.95),
    # lambda = 1: whatever the model says, what is best stays so; below, its word stands for what came of a turn
    "agent_prm":    Algorithm("arXiv:2502.10325", "plain",         "clipped",   "turn_mean", unit="turn", process=True,
                              whiten=True),
    # values without a critic; feed.branches continues turns of uncertain value
    "anchor_gae":   replace(_PPO, source="algos/values.py", aggregate="turn_mean", unit="turn", gamma=0.95, critic=False,
                            anchored=True),
    # a stale or mismatched sampler
    "decoupled":    replace(_GRPO, source="arXiv:2505.24298", aggregate="token_mean", importance="token_masked",
                            importance_bounds=(0.0, 5.0)),
    "tis":          replace(_GRPO, source="token-level truncated importance sampling", importance="token_truncated"),
    "icepop":       replace(_GRPO, source="arXiv:2510.18855", importance="token_masked", importance_bounds=(0.5, 5.0)),
    "sequence_tis": replace(_GRPO, source="truncated importance sampling", importance="sequence_truncated"),
    "sequence_mis": replace(_GRPO, source="masked importance sampling", importance="sequence_masked",
                            importance_bounds=(0.0, 3.0)),
    "geometric":    replace(_GRPO, source="geometric filter, token weight", filter="geometric", importance="token_truncated"),
    "off_policy_mask":
                    replace(_GRPO, source="arXiv:2512.02556", filter="unlikely_negative", filter_bounds=(0.0, 0.1)),
}
# fmt: on


@dataclass(frozen=True)
class Choice:
    """The row `name` with the columns replaced that are given. Raises ValueError with what is known, or what contradicts."""

    name: str
    advantage: str | None = None
    turns: str | None = None
    gamma: float | None = None
    gae_lambda: float | None = None
    aggregate: str | None = None
    select: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    length: float | None = None
    kl: str | None = None
    kl_coef: float | None = None
    entropy_coef: float | None = None
    importance: str | None = None
    importance_bounds: tuple[float, float] | None = None
    filter: str | None = None
    filter_bounds: tuple[float, float] | None = None
    drop_overlong: bool | None = None

    def __post_init__(self) -> None:
        if self.name not in TABLE:
            raise ValueError(f"algo.name must be one of {', '.join(TABLE)}; got {self.name!r}")
        if fault := next(_faults(self.row), None):
            raise ValueError(fault)

    @property
    def row(self) -> Algorithm:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return replace(TABLE[self.name], **{column: value for column, value in given.items() if value is not None})


def choose(name: str, **columns: Any) -> Algorithm:
    """The row `name` with the given columns replaced, as `Choice` checks it."""
    return Choice(name, **columns).row


def _faults(row: Algorithm) -> Iterator[str]:
    """What a row cannot be; the column to change comes first."""
    for column, known in WORDS.items():
        if getattr(row, column) not in known:
            why = "; k1 has no gradient in expectation as a loss" if getattr(row, column) == "k1_loss" else ""
            yield f"algo.{column} must be {' or '.join(known) if len(known) == 2 else 'one of ' + ', '.join(known)}; got " + (
                f"{getattr(row, column)!r}{why}"
            )
    for column in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
        if not getattr(row, column) >= 0:
            yield f"algo.{column} must not be negative, got {getattr(row, column)}"
    if not row.length > 0:
        yield f"algo.length must be positive, got {row.length}"
    for column in ("gamma", "gae_lambda"):
        if not 0 <= getattr(row, column) <= 1:
            yield f"algo.{column} must be between 0 and 1, got {getattr(row, column)}"
    for column in ("importance_bounds", "filter_bounds"):
        bounds = getattr(row, column)
        if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
            yield f"algo.{column} must be (low, high) with 0 <= low <= high, got {bounds}"
    if row.filter == "geometric" and not row.filter_bounds[0] <= 1 <= row.filter_bounds[1]:
        yield f"algo.filter_bounds must hold 1 for algo.filter=geometric, or nothing is kept; got {row.filter_bounds}"
    if row.filter not in ("none", "geometric") and row.filter_bounds == Algorithm.filter_bounds:
        yield (
            f"algo.filter_bounds must be given for algo.filter={row.filter}, whose measure is 0 where nothing has changed: "
            f"(0, 0.01), say; the default {row.filter_bounds} is geometric's"
        )
    if row.ratio != "token" and row.aggregate != "sequence_mean":
        yield f"algo.aggregate must be sequence_mean for a ratio of sequences, got {row.aggregate!r}"
    if row.ratio == "sequence" and (row.turns != "none" or row.unit != "rollout"):
        yield f"algo.turns must be none for gspo, which averages what turns were given; got {row.turns!r} (try gspo_token)"


def inert_columns(name: str, columns: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The columns that do nothing as the others stand, and why; nothing for a row that does not exist."""
    if name not in TABLE:
        return
    known = {f.name for f in fields(Algorithm)}
    row = replace(TABLE[name], **{key: value for key, value in columns.items() if key in known and value is not None})
    steps = f"{name} takes {row.unit}s as steps of a decision process and compares no rollouts"
    dead = {
        ("clip_low", "clip_high"): (row.bound == "unbounded", f"{name} does not bound its ratio"),
        ("length",): (row.aggregate != "sequence_sum_norm", "only the aggregation sequence_sum_norm divides by it"),
        ("advantage", "turns"): (row.unit != "rollout", steps),
        ("gamma",): (row.unit == "rollout" and row.turns == "none", "returns of whole rollouts are not discounted"),
        ("gae_lambda",): (not row.has_critic, f"{name} has no critic"),
        ("kl",): (not row.kl_coef, "algo.kl_coef is 0"),
        ("importance_bounds",): (row.importance in ("none", "token"), f"algo.importance={row.importance} has no bounds"),
        ("filter_bounds",): (row.filter == "none", "algo.filter is none"),
    }
    for keys, (is_dead, why) in dead.items():
        if is_dead:
            yield from ((key, why) for key in keys)
