"""Alarms: what a step's metrics look like when a run goes wrong. Pure: metrics in, words out; the stories speak and stop."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("kl", "entropy", "zero_variance", "parse_errors", "held_out", "gap", "tools", "gradient", "compiled")
LIMITS = {"kl": 0.1, "entropy": 0.05, "zero_variance": 0.9}
WINDOW = 5  # steps over which noisy metrics are averaged
NO_TOOL = 10  # steps without a call that reaches a tool
RISE = 0.1  # of parse errors above their lowest window, and of a gap above its first
FALL = 0.1  # of held-out success below its best
SOLVED = 0.9  # success from which on a policy has little to explore for: its entropy may fall


class Alarms:
    """Looks at the metrics of one step after the other.

    Args:
        limits: other limits than those of LIMITS, by name. kl: of one step, old policy against new, per token (k3). entropy:
            share of the first step's entropy, over WINDOW steps, as long as success over them is below SOLVED. zero_variance:
            share of groups whose rewards are all equal, over WINDOW steps.
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
        self._calm: dict[str, int] = {}  # of the alarms that were raised: steps since they had a reason

    def look(self, values: Mapping[str, float | None]) -> dict[str, str]:
        """The alarms that this step raises, by name, with the reason.

        One that goes on is raised once, and again only after WINDOW steps in a row without a reason for it: what is noisy
        crosses its limit to and fro. A step in which there is nothing to judge by, as one without an evaluation, is none.
        """
        for name, value in values.items():
            if value is not None and name.startswith(("reward/", "rollout/", "eval/success")):
                self._seen.setdefault(name, []).append(float(value))
        new: dict[str, str] = {}
        for name in NAMES:
            reason: str | None = getattr(self, f"_{name}_alarm")(values)
            if reason:
                if name not in self._calm:
                    new[name] = reason
                self._calm[name] = 0
            elif reason is not None and name in self._calm:
                self._calm[name] += 1
                if self._calm[name] >= WINDOW:
                    del self._calm[name]
        return new

    def _recent(self, name: str, window: int = WINDOW) -> float | None:
        """The mean of the last steps, or None before there are enough."""
        seen = self._seen.get(name, [])
        return sum(seen[-window:]) / window if len(seen) >= window else None

    def _success(self) -> float | None:
        """The mean success of the last steps, of which there may be fewer."""
        seen = self._seen.get("reward/success", [])[-WINDOW:]
        return sum(seen) / len(seen) if seen else None

    # ------------------------------- one function per name: a reason, "" for none, None where there is nothing to judge by

    def _kl_alarm(self, values: Mapping[str, float | None]) -> str | None:
        kl = values.get("policy/kl")
        if kl is None:
            return None
        return (
            f"the policy moved by a KL of {kl:.3g} in one step (the limit is {self.limits['kl']:g})"
            if kl > self.limits["kl"]
            else ""
        )

    def _entropy_alarm(self, values: Mapping[str, float | None]) -> str | None:
        """A policy that has settled before it can do the task. One that can is sure of what it does, and should be."""
        seen, success = self._seen.get("rollout/entropy", []), self._success()
        if "rollout/entropy" not in values or len(seen) < 2:
            return None
        now = sum(seen[-WINDOW:]) / len(seen[-WINDOW:])
        if now >= self.limits["entropy"] * seen[0] or (success is not None and success >= SOLVED):
            return ""
        return f"the entropy fell from {seen[0]:.3g} to {now:.3g} (the limit is {self.limits['entropy']:g} of it)"

    def _zero_variance_alarm(self, values: Mapping[str, float | None]) -> str | None:
        informative = self._recent("reward/informative_groups")
        if informative is None:
            return None
        if 1 - informative <= self.limits["zero_variance"]:
            return ""
        success = self._success()
        why = "tasks are too hard or too easy"
        if success is not None and not 1 - SOLVED < success < SOLVED:
            why = f"{success:.0%} of the episodes succeed, the tasks are too {'easy' if success >= SOLVED else 'hard'}"
        return (
            f"in {1 - informative:.0%} of the groups of the last {WINDOW} steps all rewards were equal "
            f"(the limit is {self.limits['zero_variance']:.0%}): {why}"
        )

    def _parse_errors_alarm(self, values: Mapping[str, float | None]) -> str | None:
        seen, now = self._seen.get("rollout/parse_errors", []), self._recent("rollout/parse_errors")
        if now is None:
            return None
        least = min(sum(seen[i : i + WINDOW]) / WINDOW for i in range(len(seen) - WINDOW + 1))
        if now - least <= RISE:
            return ""
        return f"{now:.0%} of the turns of the last {WINDOW} steps could not be read, up from {least:.0%}"

    def _held_out_alarm(self, values: Mapping[str, float | None]) -> str | None:
        success, outcome = values.get("eval/success"), self._recent("reward/outcome")
        if success is None or outcome is None:
            return None
        if self._best is None or success >= self._best[0]:
            self._best = success, outcome
            return ""
        best, then = self._best
        if best - success <= FALL or outcome <= then:
            return ""
        return f"held-out success fell from {best:.3f} to {success:.3f} while the outcome in training rose to {outcome:.3f}"

    def _gap_alarm(self, values: Mapping[str, float | None]) -> str | None:
        judged = {name: self._recent(name) for name in self._seen if name.startswith("reward/gap_")}
        for name, now in judged.items():
            first = self._seen[name][:WINDOW]
            if now is not None and now - sum(first) / len(first) > RISE:
                check = name.removeprefix("reward/gap_")
                return f"the outcome is {now:.2f} above what the check {check!r} gives, which nothing is trained on, and rising"
        return "" if any(now is not None for now in judged.values()) else None

    def _tools_alarm(self, values: Mapping[str, float | None]) -> str | None:
        reached = self._recent("rollout/tools_reached", NO_TOOL)
        if not self.tools or reached is None:
            return None
        if reached > 0:
            return ""
        return f"no call reached a tool in the last {NO_TOOL} steps: the policy cannot make one, or has given it up"

    def _gradient_alarm(self, values: Mapping[str, float | None]) -> str | None:
        counts = [values.get(f"{learner}/skipped") for learner in ("policy", "critic")]
        if all(count is None for count in counts):
            return None
        skipped = sum(count or 0.0 for count in counts)
        return f"a gradient was not finite, {skipped:.0f} updates skipped" if skipped else ""

    def _compiled_alarm(self, values: Mapping[str, float | None]) -> str | None:
        late = values.get("engine/compiled")
        if late is None:
            return None
        return (
            f"turns waited for {late:.0f} programs that were compiled after the start: no shape should be new by then"
            if late
            else ""
        )
