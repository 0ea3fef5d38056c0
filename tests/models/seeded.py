"""Weights and inputs drawn by numpy alone, so that torch and JAX can make the same ones apart from each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors by name, in the order of their names: norms around one, all else around zero."""
    rng = np.random.RandomState(seed)  # its stream is frozen, unlike default_rng's
    drawn = {name: (0.25 * rng.standard_normal(shapes[name])).astype(np.float32) for name in sorted(shapes)}
    return {name: tensor + np.float32("norm" in name) for name, tensor in drawn.items()}


def token_rows(vocab_size: int, rows: int, length: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, vocab_size, (rows, length)).astype(np.int32)


def cotangent(*shape: int, seed: int) -> np.ndarray:
    """What the logits are multiplied with before they are summed, so that every gradient is of a generic direction."""
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def write_checkpoint(path: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
    """A checkpoint directory as transformers would leave it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
