"""Checkpoint directories for tests: the kinds of tiny ones, and what is done to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# Every matrix of it goes through the devices tensor by tensor; those of the tiny ones are put together on the host.
STREAMED = {"vocab_size": 400, "width": 192, "heads": 8, "kv_heads": 4, "head_width": 64, "ffn_width": 256}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2, tied": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "qwen2, untied": {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied_head": False},
    "qwen3, tied": {},
    "qwen3, untied": {"tied_head": False, "kv_heads": 1},
    "qwen2, untied, streamed": {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied_head": False, **STREAMED},
    "qwen3, tied, streamed": STREAMED,
}
MESHES: dict[str, dict[str, int]] = {
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 8": {"data": 1, "fsdp": 8},
    "tensor 4, fewer key heads than that": {"data": 2, "tensor": 4},
    "expert 2, context 2, tensor 2": {"data": 1, "expert": 2, "context": 2, "tensor": 2},
}


def edit(path: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    """Replaces tensors of a checkpoint, or takes those away that are None."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_shards(path: Path, changes: Mapping[str, np.ndarray] | None = None) -> dict[str, str]:
    """Cuts a checkpoint of one file into two, every other tensor in each; returns the place of every tensor."""
    tensors = {**load_file(path / "model.safetensors"), **(changes or {})}
    (path / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def assert_equal_bytes(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(ours[name].view(np.uint8), tensor.view(np.uint8), err_msg=name)
