"""Rotary position embedding and the scalings of its frequencies that checkpoints ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched for rows longer than those of pretraining. Names as in transformers' config.json."""

    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0  # longest row of pretraining; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: rotations over the original length above which a frequency is kept
    beta_slow: float = 1.0  # and below which it is divided by the factor
    truncate: bool = True
    attention_factor: float = 1.0  # yarn: cosine and sine are multiplied by it

    @classmethod
    def from_hf(cls, rope: dict[str, Any]) -> RopeScaling:
        """Reads `rope_parameters` or `rope_scaling`. Raises ValueError for a kind that is not built, KeyError for a gap."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in KINDS:
            raise ValueError(f"rope type={kind!r} (supported: {', '.join(KINDS)})")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} (supported: 1.0)")
        if kind == "default":
            return cls()
        factor = float(rope["factor"])
        if kind == "linear":
            return cls(kind, factor)
        original = int(rope["original_max_position_embeddings"])
        if kind == "llama3":
            return cls(kind, factor, original, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]))
        return cls(
            kind,
            factor,
            original,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_yarn_attention_factor(rope, factor),
        )

    def to_hf(self) -> dict[str, Any]:
        """The same as `rope_parameters`, without the base."""
        told: dict[str, Any] = {"rope_type": self.kind}
        if self.kind != "default":
            told["factor"] = self.factor
        if self.kind in ("llama3", "yarn"):
            told["original_max_position_embeddings"] = self.original_positions
        if self.kind == "llama3":
            told |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            told |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            told["attention_factor"] = self.attention_factor
        return told


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    """Peng et al. 2023, section 3.4: 0.1 ln(factor) + 1, or the ratio of two such (DeepSeek)."""

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def frequencies(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The angle per position of each of the `width / 2` planes, float32."""
    s = scaling
    plain = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if s.kind == "linear":
        plain = plain / s.factor
    elif s.kind == "llama3":
        turns = s.original_positions * plain / (2 * math.pi)  # over the original length
        keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
        plain = plain * (keep + (1 - keep) / s.factor)
    elif s.kind == "yarn":
        low, high = (_plane_of(turns, width, theta, s.original_positions) for turns in (s.beta_fast, s.beta_slow))
        if s.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        divide = np.clip((np.arange(width // 2) - low) / (high - low or 0.001), 0, 1)
        plain = plain * (1 - divide + divide / s.factor)
    return plain.astype(np.float32)


def _plane_of(turns: float, width: int, theta: float, length: int) -> float:
    """The (fractional) plane that turns so often over `length` positions (Peng et al. 2023, eq. 17)."""
    return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


PLAIN = RopeScaling()
Rotation = tuple[Array, Array]  # cosine and sine, [B, T, 1, H / 2]


def rotary(pos_BT: Int[Array, "B T"], width: int, theta: float, scaling: RopeScaling = PLAIN) -> Rotation:
    """Cosine and sine of the rotation at each position (Su et al. 2021); the halves rotate, as in transformers."""
    angle = pos_BT[..., None, None].astype(jnp.float32) * frequencies(width, theta, scaling)
    return jnp.cos(angle) * scaling.attention_factor, jnp.sin(angle) * scaling.attention_factor


def rotate(x_BTNH: Float[Array, "B T N H"], cos: Array, sin: Array) -> Float[Array, "B T N H"]:
    """Rotates the two halves of each head."""
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
