"""Alarms: what a step's metrics look like when a run goes wrong. Pure: metrics in, words out; the stories speak and stop."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("kl", "entropy", "zero_variance", "parse_errors", "held_out", "gap", "tools", "gradient", "compiled")
LIMITS = {"kl": 0.1, "entropy": 0.05, "zero_variance": 0.9}
WINDOW = 5  # steps over which noisy metrics are averaged
NO_TOOL = 10  # steps without a call that reaches a tool
RISE = 0.1  # of parse errors above their lowest window, and of a gap above its first
FALL = 0.1  # of held-out success below its best


class Alarms:
    """Looks at the metrics of one step after the other.

    Args:
        limits: other limits than those of LIMITS, by name. kl: of one step, old policy against new, per token (k3). entropy:
            share of the first step's entropy. zero_variance: share of groups whose rewards are all equal, over WINDOW steps.
        stop: the alarms that end the run, by name with commas; "all" is all; the others only warn.
        tools: whether the world has any.
    """

    def __init__(self, limits: Mapping[str, float] | None = None, stop: str = "tools", tools: bool = True):
        self.limits = {**LIMITS, **dict(limits or {})}
        for name, value in self.limits.items():
            if name not in LIMITS:
                raise ValueError(f"alarms.limits must be of {', '.join(LIMITS)}; got {name!r}")
            if value <= 0:
                raise ValueError(f"alarms.limits must be positive, got {name}={value}")
        asked = [name.strip() for name in stop.split(",") if name.strip()]
        if unknown := [name for name in asked if name not in (*NAMES, "all")]:
            raise ValueError(f"alarms.stop must name some of {', '.join(NAMES)}, or be all; got {unknown[0]!r}")
        self.tools = tools
        self.stop = frozenset(NAMES if "all" in asked else asked)
        self._seen: dict[str, list[float]] = {}
        self._best: tuple[float, float] | None = None  # held-out success, and the outcome in training then
        self._raised: set[str] = set()

    def look(self, values: Mapping[str, float | None]) -> dict[str, str]:
        """The alarms that this step raises, by name, with the reason. One that goes on is raised once."""
        for name, value in values.items():
            if value is not None and name.startswith(("reward/", "rollout/", "eval/success")):
                self._seen.setdefault(name, []).append(float(value))
        found = {name: text for name in NAMES if (text := getattr(self, f"_{name}_alarm")(values))}
        new = {name: text for name, text in found.items() if name not in self._raised}
        self._raised = set(found)
        return new

    def _recent(self, name: str, window: int = WINDOW) -> float | None:
        """The mean of the last steps, or None before there are enough."""
        seen = self._seen.get(name, [])
        return sum(seen[-window:]) / window if len(seen) >= window else None

    # ------------------------------------------------------------------ one function per name

    def _kl_alarm(self, values: Mapping[str, float | None]) -> str:
        kl = values.get("policy/kl") or 0.0
        return (
            f"the policy moved by a KL of {kl:.3g} in one step (the limit is {self.limits['kl']:g})"
            if kl > self.limits["kl"]
            else ""
        )

    def _entropy_alarm(self, values: Mapping[str, float | None]) -> str:
        seen = self._seen.get("rollout/entropy", [])
        if "rollout/entropy" not in values or len(seen) < 2 or seen[-1] >= self.limits["entropy"] * seen[0]:
            return ""
        return f"the entropy fell from {seen[0]:.3g} to {seen[-1]:.3g} (the limit is {self.limits['entropy']:g} of it)"

    def _zero_variance_alarm(self, values: Mapping[str, float | None]) -> str:
        informative = self._recent("reward/informative_groups")
        if informative is None or 1 - informative <= self.limits["zero_variance"]:
            return ""
        return (
            f"in {1 - informative:.0%} of the groups of the last {WINDOW} steps all rewards were equal "
            f"(the limit is {self.limits['zero_variance']:.0%}): tasks are too hard or too easy"
        )

    def _parse_errors_alarm(self, values: Mapping[str, float | None]) -> str:
        seen, now = self._seen.get("rollout/parse_errors", []), self._recent("rollout/parse_errors")
        if now is None:
            return ""
        least = min(sum(seen[i : i + WINDOW]) / WINDOW for i in range(len(seen) - WINDOW + 1))
        if now - least <= RISE:
            return ""
        return f"{now:.0%} of the turns of the last {WINDOW} steps could not be read, up from {least:.0%}"

    def _held_out_alarm(self, values: Mapping[str, float | None]) -> str:
        success, outcome = values.get("eval/success"), self._recent("reward/outcome")
        if success is None or outcome is None:
            return ""
        if self._best is None or success >= self._best[0]:
            self._best = success, outcome
            return ""
        best, then = self._best
        if best - success <= FALL or outcome <= then:
            return ""
        return f"held-out success fell from {best:.3f} to {success:.3f} while the outcome in training rose to {outcome:.3f}"

    def _gap_alarm(self, values: Mapping[str, float | None]) -> str:
        for name in (name for name in self._seen if name.startswith("reward/gap_")):
            now, first = self._recent(name), self._seen[name][:WINDOW]
            if now is not None and now - sum(first) / len(first) > RISE:
                check = name.removeprefix("reward/gap_")
                return f"the outcome is {now:.2f} above what the check {check!r} gives, which nothing is trained on, and rising"
        return ""

    def _tools_alarm(self, values: Mapping[str, float | None]) -> str:
        reached = self._recent("rollout/tools_reached", NO_TOOL)
        if not self.tools or reached is None or reached > 0:
            return ""
        return f"no call reached a tool in the last {NO_TOOL} steps: the policy cannot make one, or has given it up"

    def _gradient_alarm(self, values: Mapping[str, float | None]) -> str:
        skipped = sum(values.get(f"{learner}/skipped") or 0.0 for learner in ("policy", "critic"))
        return f"a gradient was not finite, {skipped:.0f} updates skipped" if skipped else ""

    def _compiled_alarm(self, values: Mapping[str, float | None]) -> str:
        late = values.get("engine/compiled") or 0.0
        return (
            f"turns waited for {late:.0f} programs that were compiled after the start: no shape should be new by then"
            if late
            else ""
        )
