"""What a training step makes smaller: the loss of a policy, or of a critic, and the sums that its metrics are made of.

Everything is a sum over tokens: it is divided once, when all micro-batches are in. Names that end in _max are joined by their
maximum. Nothing here knows where the log-probs and values come from.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxagent.algos import losses
from jaxagent.algos.table import Algorithm

Arrays = dict[str, Array]
Sums = dict[str, Any]

ROWS = ("tokens", "segment", "position", "mask", "weight", "share")
PARTS = 4  # turns, and versions, by which the gap is told apart; from the last on they are taken together
EDGES = np.geomspace(1e-5, 20.0, 65).astype(np.float32)  # of log ratios, for their 99th percentile within a quarter


def join(old: Sums, new: Sums) -> Sums:
    """The sums of two micro-batches together."""
    return {name: jnp.maximum(old[name], x) if name.endswith("_max") else old[name] + x for name, x in new.items()}


def _count(x: Array) -> Float[Array, ""]:
    return jnp.sum(x).astype(jnp.float32)


class PolicyObjective:
    """The loss of an algorithm's row: bound, corrections, KL and entropy, per sampled token."""

    output, prefix, after = "logprob", "policy", False

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.reads = (
            *ROWS,
            "logprob",
            "old_logprob",
            "advantage",
            "turn",
            "age",
            *(("reference",) if algorithm.kl_in_loss else ()),
        )
        shapes = {"above": (len(EDGES),), **dict.fromkeys(("gap_turn", "gap_age"), (2, PARTS))}
        self.sums = {name: shapes.get(name, ()) for name in _POLICY_SUMS}

    def loss(self, outputs: Arrays, batch: Arrays, on_policy: Array) -> tuple[Float[Array, ""], Sums]:
        """(sum of weight times loss, sums). `on_policy` is supervised learning: old = new, and nothing but the advantage."""
        a, mask, segment, advantage = self.algorithm, batch["mask"], batch["segment"], batch["advantage"]
        new, entropy = outputs["logprob"], outputs["entropy"]
        held = jax.lax.stop_gradient(new)
        old = jnp.where(on_policy, held, batch["old_logprob"])
        ratio = losses.RATIO[a.ratio](new, old, mask, segment)
        free = losses.BOUND[a.bound](ratio, advantage, new, a.clip_low, a.clip_high)
        loss = losses.dual_clipped(free, advantage, a.clip_dual) if a.clip_dual else free
        weight, kept = self._corrections(held, old, batch, on_policy)
        total = jnp.where(mask & kept, loss * weight, 0.0)
        reference = batch.get("reference", held)
        if a.kl_in_loss:
            total += jnp.where(mask & ~on_policy, a.kl_coef * losses.kl_estimate(a.kl_estimate, new - reference), 0.0)
        if a.entropy_coef:
            total -= jnp.where(mask & ~on_policy, a.entropy_coef * entropy, 0.0)
        total = jnp.sum(total * batch["weight"])
        u, log_u = jax.lax.stop_gradient(ratio), jax.lax.stop_gradient(jnp.log(ratio))
        log_rho = jnp.where(mask, held - batch["logprob"], 0.0)
        rho = jnp.where(mask, jnp.exp(jnp.clip(log_rho, -losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO)), 0.0)
        to_reference = jnp.where(mask, losses.kl_estimate("k3", held - reference), 0.0)
        return total, {
            "share": batch["share"].sum(),
            "tokens": _count(mask),
            "loss": total,
            "nll": -jnp.sum(jnp.where(mask, held, 0.0)),
            "entropy": jnp.sum(jnp.where(mask, entropy, 0.0)),
            "clip_low": _count(mask & (u < 1 - a.clip_low) & (advantage < 0)),
            "clip_high": _count(mask & (u > 1 + a.clip_high) & (advantage > 0)),
            "clip_dual": _count(mask & (loss < free)),
            "kl": jnp.sum(jnp.where(mask, u - 1 - log_u, 0.0)),  # k3 of old against new
            "kl_k1": -jnp.sum(jnp.where(mask, log_u, 0.0)),
            "kl_reference": to_reference.sum(),
            "ratio": jnp.sum(jnp.where(mask, u, 0.0)),
            "ratio_max": jnp.max(jnp.where(mask, u, 0.0)),
            "above": jnp.sum(mask & (log_u > EDGES[:, None, None]), (1, 2)).astype(jnp.float32),
            "gap": jnp.abs(log_rho).sum(),
            "gap_max": jnp.abs(log_rho).max(),
            **{f"gap_{by}": _apart(jnp.abs(log_rho), mask, batch[by]) for by in ("turn", "age")},
            "log_rho": log_rho.sum(),
            "rho": rho.sum(),
            "rho_squared": jnp.sum(rho**2),
            "rho_max": rho.max(),
            "masked": _count(mask & (weight == 0)),
            "filtered": _count(mask & ~kept),
        }

    def _corrections(self, held: Array, old: Array, batch: Arrays, on_policy: Array) -> tuple[Array, Array]:
        """The weight of every token, and whether its sequence is used."""
        a, mask, segment = self.algorithm, batch["mask"], batch["segment"]
        weight = losses.importance_weight(a.importance, a.importance_bounds, old - batch["logprob"], mask, segment)
        logprobs = (held, old, batch["logprob"])
        kept = losses.kept_sequences(a.filter, a.filter_bounds, logprobs, batch["advantage"], mask, segment)
        return jnp.where(on_policy, 1.0, weight), on_policy | kept

    def metrics(self, sums: Sums, idle_share: float) -> dict[str, float]:
        """Means over the tokens that had a gradient."""
        s = {name: float(value) for name, value in sums.items() if not np.ndim(value)}
        tokens, share = max(s["tokens"], 1.0), max(s["share"] + idle_share, 1e-9)
        below = np.asarray(sums["above"]) <= 0.01 * s["tokens"]
        found = {
            "policy/loss": s["loss"] / share,
            "policy/denominator": s["share"] + idle_share,
            **{f"policy/{name}": s[name] / tokens for name in ("nll", "entropy", "kl", "kl_k1")},
            "policy/clip_frac": (s["clip_low"] + s["clip_high"]) / tokens,
            "policy/clip_frac_low": s["clip_low"] / tokens,
            "policy/clip_frac_high": s["clip_high"] / tokens,
            "policy/ratio_mean": s["ratio"] / tokens,
            "policy/ratio_p99": float(np.exp(EDGES[below.argmax() if below.any() else -1])),
            "policy/ratio_max": s["ratio_max"],
            "policy/tokens": s["tokens"],
            **_gap_metrics(s, tokens),
            **{name: x for by in ("turn", "age") for name, x in _gaps_by(by, np.asarray(sums[f"gap_{by}"])).items()},
        }
        a = self.algorithm
        optional = {
            "policy/clip_frac_dual": ("clip_dual", a.clip_dual),
            "policy/kl_reference": ("kl_reference", a.kl_in_loss),
            "off_policy/masked": ("masked", a.importance.endswith("masked")),
            "off_policy/filtered": ("filtered", a.filter != "none"),
        }
        return found | {name: s[key] / tokens for name, (key, there) in optional.items() if there}


def _apart(gap: Array, mask: Array, part: Array) -> Float[Array, "2 P"]:
    """The sum of a gap and the number of tokens, by their turn or age."""
    there = mask & (jnp.minimum(part, PARTS - 1) == jnp.arange(PARTS)[:, None, None])
    return jnp.stack([jnp.sum(jnp.where(there, x, 0.0), (1, 2)) for x in (gap, jnp.ones_like(gap))])


def _gaps_by(name: str, sums: np.ndarray) -> dict[str, float]:
    """The mean gap of every turn, or of every number of versions between sampling and training, that there is."""
    keys = (f"policy/sampler_logprob_gap_{name}_{i}{'_on' * (i == PARTS - 1)}" for i in range(PARTS))
    return {key: float(gap / count) for key, gap, count in zip(keys, *sums, strict=True) if count}


def _gap_metrics(s: dict[str, float], tokens: float) -> dict[str, float]:
    """How far the policy is from what sampled, rho = pi / pi_behaviour: before the first update a mismatch, then a change."""
    mean, square = s["rho"] / tokens, s["rho_squared"] / tokens
    return {
        "policy/sampler_logprob_gap": s["gap"] / tokens,
        "policy/sampler_logprob_gap_max": s["gap_max"],
        "off_policy/rho_mean": mean,
        "off_policy/rho_std": max(square - mean**2, 0.0) ** 0.5,
        "off_policy/rho_max": s["rho_max"],
        "off_policy/ess": mean**2 / square if square else 1.0,  # share of the tokens that the weights are worth
        "off_policy/chi2": square - 1.0 if s["tokens"] else 0.0,
        "off_policy/perplexity_ratio": float(np.exp(-s["log_rho"] / tokens)),  # of the policy's to the sampler's
    }


_POLICY_SUMS = (
    *("share", "tokens", "loss", "nll", "entropy", "clip_low", "clip_high", "clip_dual", "kl", "kl_k1", "kl_reference"),
    *(
        "ratio",
        "ratio_max",
        "above",
        "gap",
        "gap_max",
        "gap_turn",
        "gap_age",
        "log_rho",
        "rho",
        "rho_squared",
        "rho_max",
        "masked",
        "filtered",
    ),
)


class ValueObjective:
    """Regression of a critic on returns, where they are judged; every such place counts once."""

    output, prefix, after = "value", "critic", False

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.reads: tuple[str, ...] = ("tokens", "segment", "position", "value", "target", "judged")
        self.sums: dict[str, tuple[int, ...]] = dict.fromkeys(_VALUE_SUMS, ())

    def loss(self, outputs: Arrays, batch: Arrays, on_policy: Array) -> tuple[Float[Array, ""], Sums]:
        value, judged = outputs["value"], batch["judged"].astype(bool)
        loss = losses.value_loss(value, batch["value"], batch["target"], self.algorithm.value_clip)
        held = jax.lax.stop_gradient(value)
        target, error = (jnp.where(judged, x, 0.0) for x in (batch["target"], batch["target"] - held))
        total = jnp.sum(jnp.where(judged, loss, 0.0))
        return total, {
            "share": _count(judged),
            "tokens": _count(judged),
            "loss": total,
            "value": jnp.sum(jnp.where(judged, held, 0.0)),
            "target": target.sum(),
            "target_squared": jnp.sum(target**2),
            "error": error.sum(),
            "error_squared": jnp.sum(error**2),
            "clipped": _count(judged & (jnp.abs(held - batch["value"]) > self.algorithm.value_clip)),
        }

    def metrics(self, sums: Sums, idle_share: float) -> dict[str, float]:
        """Explained variance is 1 - Var(R - V) / Var(R): at most 0, the mean return would be the better critic."""
        s = {name: float(value) for name, value in sums.items()}
        n = max(s["tokens"], 1.0)
        spread = s["target_squared"] / n - (s["target"] / n) ** 2
        left = s["error_squared"] / n - (s["error"] / n) ** 2
        return {
            "critic/loss": s["loss"] / n,
            "critic/value_mean": s["value"] / n,
            "critic/target_mean": s["target"] / n,
            "critic/explained_variance": 1 - left / spread if spread > 1e-12 else 0.0,
            **({} if self.after else {"critic/clip_frac": s["clipped"] / n if self.algorithm.value_clip else 0.0}),
            "critic/tokens": s["tokens"],
        }


class ProcessObjective(ValueObjective):
    """Soft binary cross-entropy of a process reward model, whose values z are log-odds of a good end (arXiv:2502.10325).

        L = -sum w [q log s(z) + (1 - q) log(1 - s(z))] = sum w [softplus(z) - q z]        dL/dz = w (s(z) - q)

    It speaks where a token has been read (`after`), not where it is chosen: of a state and what was done in it. The target q is
    in [0, 1]; `judged` is w, the visits that q is a mean of.
    """

    after = True

    def __init__(self, algorithm: Algorithm):
        super().__init__(algorithm)
        self.reads = ("tokens", "segment", "position", "target", "judged")

    def loss(self, outputs: Arrays, batch: Arrays, on_policy: Array) -> tuple[Float[Array, ""], Sums]:
        z, w, q = outputs["value"], batch["judged"], batch["target"]
        total = jnp.sum(w * (jax.nn.softplus(z) - q * z))
        s = jax.lax.stop_gradient(jax.nn.sigmoid(z))
        return total, {
            "share": w.sum(),
            "tokens": w.sum(),
            "loss": total,
            "value": jnp.sum(w * s),
            "target": jnp.sum(w * q),
            "target_squared": jnp.sum(w * q**2),
            "error": jnp.sum(w * (q - s)),
            "error_squared": jnp.sum(w * (q - s) ** 2),
            "clipped": jnp.zeros(()),
        }


_VALUE_SUMS = ("share", "tokens", "loss", "value", "target", "target_squared", "error", "error_squared", "clipped")
