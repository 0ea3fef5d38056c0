"""Shaping: what training adds to the rewards of a group's rollouts. Evaluation never sees it, and outcomes stay as they are.

Every component is bounded and stands by its name in `Turn.parts`, so that each has its own curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxagent.rewards.terms import efficiency, failed_calls, held, otc, overlong, progressive, staged
from jaxagent.types import Group, Trajectory, Turn, by_rollout

MODES = ("sum", "progressive", "staged")
TERMS = ("overlong", "failed_calls", "efficiency", "otc")
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
        return progressive(outcome, steps, self.alpha_schedule(progress))


@dataclass(frozen=True)
class StagedReward:
    """First the form alone, then form and outcome, an outcome counting only where every turn was in form.

    stage_schedule: 0 or 1 at every progress.
    """

    stage_schedule: Callable[[float], float]

    def __call__(self, outcome: float, steps: Sequence[float], progress: float) -> float:
        return staged([sum(steps) / len(steps) if steps else 0.0, outcome], int(self.stage_schedule(progress)))


class Shaping:
    """Applies a mode and terms to groups.

    Args:
        mode: "sum" leaves what the world pays; "progressive" and "staged" replace it by ProgressiveReward and StagedReward.
        schedule: alphas, or stages, of equal shares of the run; for "sum" nothing.
        terms: the weight of each of TERMS, in (0, 1), together below 1: no shaping may outweigh an outcome.
        limit: sampled tokens at which `overlong` takes its whole weight; its zone is the last fifth.
        turns: that an episode may have, the smoothing constant of `otc`.
    """

    def __init__(
        self,
        mode: str = "sum",
        schedule: Sequence[float] = (),
        terms: Mapping[str, float] | None = None,
        limit: int = 0,
        turns: int = 1,
    ):
        terms = dict(terms or {})
        if mode not in MODES:
            raise ValueError(f"reward.mode must be one of {', '.join(MODES)}; got {mode!r}")
        if mode != "sum" and not schedule:
            raise ValueError(
                f"reward.schedule must have a value for every share of the run where reward.mode is {mode}; got ()"
            )
        if mode == "progressive" and not all(0 <= alpha <= 1 for alpha in schedule):
            raise ValueError(f"reward.schedule must hold alphas in [0, 1], got {tuple(schedule)}")
        if mode == "staged" and not all(stage in (0, 1) for stage in schedule):
            raise ValueError(f"reward.schedule must hold stages 0 (form) or 1 (form, then outcome), got {tuple(schedule)}")
        if unknown := [name for name in terms if name not in TERMS]:
            raise ValueError(f"reward.terms must be of {', '.join(TERMS)}; got {unknown[0]!r}")
        if not all(0 < weight < 1 for weight in terms.values()) or sum(terms.values()) >= 1:
            raise ValueError(f"reward.terms must have positive weights that together stay below an outcome's 1; got {terms}")
        self.terms, self.limit, self.turns = terms, limit, turns
        self._whole: Callable[[float, Sequence[float], float], float] | None = None
        if mode != "sum":
            self._whole = ProgressiveReward(held(schedule)) if mode == "progressive" else StagedReward(held(schedule))

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
                turn.parts = turn.parts or ({"outcome": turn.reward} if turn.reward else {})
            if self._whole:
                self._replace(turns, outcome, progress)
            self._charge(turns, segments, outcome, calls, min(solved, default=calls))
            _settle(segments)

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
                amount = weight * overlong(length, self.limit, max(1, self.limit // 5))
            elif name == "failed_calls":
                failed = sum(bool(turn.error) + sum(tool.outcome != "ok" for tool in turn.tools) for turn in turns)
                amount = weight * failed_calls(failed)
            else:
                paid = max(0.0, sum(turn.parts.get("outcome", 0.0) for turn in turns)) if self._whole else max(0.0, outcome)
                worth = efficiency(paid, calls, fewest, 1.0) if name == "efficiency" else otc(paid, calls, self.turns)
                amount = weight * (worth - paid)
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


def _settle(segments: Sequence[Trajectory]) -> None:
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
    found = {f"part_{name}": total / len(episodes) for name, total in parts.items() if name != "outcome"}
    for name, pairs in checks.items():
        found[f"check_{name}"] = sum(check for _, check in pairs) / len(pairs)
        found[f"gap_{name}"] = sum(outcome - check for outcome, check in pairs) / len(pairs)
    return found
