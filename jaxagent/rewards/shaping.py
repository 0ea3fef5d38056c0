"""Shaping: what training adds to the rewards of a group's rollouts. Evaluation never sees it, and outcomes stay as they are.

Every component is bounded and stands by its name in `Turn.parts`, so that each has its own curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxagent.metrics import Mean
from jaxagent.rewards import terms
from jaxagent.rewards.terms import held
from jaxagent.types import Group, Trajectory, Turn, by_rollout

_POLICY_FAULTS = ("bad_arguments", "unknown_tool")


@dataclass(frozen=True)
class ProgressiveReward:
    """R = alpha outcome + (1 - alpha) mean of the turns' form, where alpha depends on how far the run is.

    A turn's form is 1 where it could be read and its calls had a tool and arguments that fit, else 0. As long as alpha is
    below 1 the form biases what is learnt, so the last alpha should be 1. Rewards under different alphas cannot be compared;
    `reward/outcome` can.
    """

    alpha_schedule: Callable[[float], float]

    def __call__(self, outcome: float, steps: Sequence[float], progress: float) -> float:
        return terms.progressive(outcome, steps, self.alpha_schedule(progress))


@dataclass(frozen=True)
class StagedReward:
    """First the form alone, then form and outcome, an outcome counting only where every turn was in form.

    stage_schedule: 0 or 1 at every progress.
    """

    stage_schedule: Callable[[float], float]

    def __call__(self, outcome: float, steps: Sequence[float], progress: float) -> float:
        return terms.staged([sum(steps) / len(steps) if steps else 0.0, outcome], int(self.stage_schedule(progress)))


class Shaping:
    """Applies what is asked for to groups.

    Args:
        progressive: alphas of equal shares of the run, for a ProgressiveReward in place of what the world pays.
        staged: 0 or 1 for equal shares of the run, for a StagedReward in its place.
        overlong, failed_calls, efficiency, otc: weights of the terms of rewards/terms.py, in [0, 1), together below 1: no
            shaping may outweigh an outcome.
        limit: sampled tokens at which `overlong` takes its whole weight; its zone is the last fifth.
        turns: that an episode may have, the smoothing constant of `otc`.
    """

    def __init__(
        self,
        progressive: Sequence[float] = (),
        staged: Sequence[float] = (),
        overlong: float = 0.0,
        failed_calls: float = 0.0,
        efficiency: float = 0.0,
        otc: float = 0.0,
        limit: int = 0,
        turns: int = 1,
    ):
        for name, values in (("progressive", progressive), ("staged", staged)):
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise ValueError(
                    f"reward.{name} must be a tuple, one value for each part of the run, got {values!r}: write (1,)"
                )
        if progressive and staged:
            raise ValueError("reward.progressive and reward.staged each replace what the world pays; give one of them")
        if not all(0 <= alpha <= 1 for alpha in progressive):
            raise ValueError(f"reward.progressive must hold alphas in [0, 1], got {tuple(progressive)}")
        if not all(stage in (0, 1) for stage in staged):
            raise ValueError(f"reward.staged must hold stages 0 (form) or 1 (form, then outcome), got {tuple(staged)}")
        weights = {"overlong": overlong, "failed_calls": failed_calls, "efficiency": efficiency, "otc": otc}
        if strange := [name for name, weight in weights.items() if not isinstance(weight, int | float)]:
            raise ValueError(f"reward.{strange[0]} must be a number, got {weights[strange[0]]!r}")
        self.terms = {name: weight for name, weight in weights.items() if weight}
        if not all(0 < weight < 1 for weight in self.terms.values()) or sum(weights.values()) >= 1:
            raise ValueError(f"the terms of reward must have weights that together stay below an outcome's 1; got {self.terms}")
        self.limit, self.turns = limit, turns
        self._whole: Callable[[float, Sequence[float], float], float] | None = None
        if progressive or staged:
            self._whole = ProgressiveReward(held(progressive)) if progressive else StagedReward(held(staged))

    @property
    def active(self) -> bool:
        return bool(self._whole or self.terms)

    def apply(self, group: Group, progress: float) -> None:
        """Shapes a group's rewards in place. `progress` in [0, 1] is how far the run is."""
        rollouts = [segments for segments in by_rollout(group.trajectories) if segments[0].stop.counts]
        counts = [_calls(_turns(segments)) for segments in rollouts]
        solved = [n for n, segments in zip(counts, rollouts, strict=True) if segments[0].solved]
        for calls, segments in zip(counts, rollouts, strict=True):
            turns = _turns(segments)
            if not turns:
                continue
            outcome = segments[0].outcome
            for turn in turns:
                turn.outcome = turn.reward if turn.outcome is None else turn.outcome
                turn.parts = {"outcome": turn.outcome, **turn.parts} if turn.outcome or turn.parts else {}
            if self._whole:
                self._replace(turns, outcome, progress)
            self._charge(turns, segments, outcome, calls, min(solved, default=calls))
            settle(segments)

    def _replace(self, turns: Sequence[Turn], outcome: float, progress: float) -> None:
        """The whole of the form and the outcome in place of the outcome; it stands on the last turn."""
        assert self._whole
        steps = [form(turn) for turn in turns]
        whole = self._whole(outcome, steps, progress)
        for turn in turns:
            _set(turn, "outcome", 0.0)
        formed = self._whole(0.0, steps, progress)
        _set(turns[-1], "form", formed)
        _set(turns[-1], "outcome", whole - formed)

    def _charge(self, turns: Sequence[Turn], segments: Sequence[Trajectory], outcome: float, calls: int, fewest: int) -> None:
        for name, weight in self.terms.items():
            if name == "overlong":
                length = sum(sum(row.mask) for row in segments)
                amount = weight * terms.overlong(length, self.limit, max(1, self.limit // 5))
            elif name == "failed_calls":
                failed = sum(bool(turn.error) + sum(tool.outcome != "ok" for tool in turn.tools) for turn in turns)
                amount = weight * terms.failed_calls(failed)
            else:
                paid = max(0.0, sum(turn.parts.get("outcome", 0.0) for turn in turns)) if self._whole else max(0.0, outcome)
                within = (
                    terms.efficiency(paid, calls, fewest, 1.0) if name == "efficiency" else terms.otc(paid, calls, self.turns)
                )
                amount = weight * (within - paid)
            _set(turns[-1], name, amount)


def form(turn: Turn) -> float:
    """1 where a turn could be read and its calls had a tool and arguments that fit it; what a tool then says is not form."""
    return float(not turn.error and all(tool.outcome not in _POLICY_FAULTS for tool in turn.tools))


def _set(turn: Turn, name: str, amount: float) -> None:
    """Makes `amount` the component `name` of a turn's reward, and says so in its reason."""
    turn.parts = {**turn.parts, name: amount}
    turn.reward = sum(turn.parts.values())
    if name != "outcome" and amount:
        turn.reason = "; ".join(filter(None, (turn.reason, f"{name} {amount:+.3g}")))


def settle(segments: Sequence[Trajectory]) -> None:
    """Tells every segment again what the others of its rollout brought in."""
    own = [(sum(turn.reward for turn in row.turns), sum(turn.outcome or 0.0 for turn in row.turns)) for row in segments]
    reward, outcome = (sum(column) for column in zip(*own, strict=True))
    for row, (mine, done) in zip(segments, own, strict=True):
        row.elsewhere, row.outcome_elsewhere = reward - mine, outcome - done


def _turns(segments: Sequence[Trajectory]) -> list[Turn]:
    return [turn for row in segments for turn in row.turns]


def _calls(turns: Sequence[Turn]) -> int:
    return sum(len(turn.tools) for turn in turns)


def components(rows: Sequence[Trajectory]) -> dict[str, float]:
    """What the rows' rewards are made of, in means per episode, and how far outcomes are above the checks.

    `part_<name>` for every component besides the outcome; `check_<name>` for every scorer that nothing is trained on, over
    the episodes that it scored, and `gap_<name>`, the mean of outcome - check there: where it grows, the reward is gamed.
    """
    episodes = by_rollout(rows)
    parts: dict[str, float] = {}
    checks: dict[str, list[tuple[float, float]]] = {}
    for segments in episodes:
        scored: dict[str, float] = {}
        for turn in _turns(segments):
            for name, value in turn.parts.items():
                parts[name] = parts.get(name, 0.0) + value
            for name, value in turn.checks.items():
                scored[name] = scored.get(name, 0.0) + value
        for name, value in scored.items():
            checks.setdefault(name, []).append((segments[0].outcome, value))
    found: dict[str, float] = {f"part_{name}": Mean(total, len(episodes)) for name, total in parts.items() if name != "outcome"}
    for name, pairs in checks.items():
        found[f"check_{name}"] = Mean.of(check for _, check in pairs)
        found[f"gap_{name}"] = Mean.of(outcome - check for outcome, check in pairs)
    return found
