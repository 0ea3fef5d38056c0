"""Hugging Face checkpoint directories in and out: config.json and safetensors, one file or shards with an index.

Import and export are the identity on every tensor. A missing or unknown tensor is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxagent.models import qwen
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of

FAMILIES: Mapping[str, ModuleType] = {"qwen2": qwen, "qwen3": qwen}
# Tensors that some checkpoints carry and that hold nothing of their own.
_IGNORED = ("rotary_emb.inv_freq",)
_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)


def read_config(path: str | Path) -> DecoderConfig:
    """The decoder of a checkpoint directory. Raises ValueError for a missing directory or an unsupported model."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: a Hugging Face checkpoint directory with config.json is wanted, there is none")
    hf = json.loads((path / "config.json").read_text())
    family = FAMILIES.get(hf.get("model_type"))
    if family is None:
        raise ValueError(f"{path}: model_type {hf.get('model_type')!r} is not supported; supported are {', '.join(FAMILIES)}")
    try:
        return family.from_hf(hf)
    except KeyError as error:
        raise ValueError(f"{path}/config.json: missing field {error}") from None


def load(path: str | Path) -> Decoder:
    """A policy from a checkpoint directory, its weights in float32."""
    path = Path(path)
    config = read_config(path)
    tensors = _read_tensors(path)
    policy = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    family = FAMILIES[config.family]
    layers = [_take(tensors, family.layer_tensors(config), f"model.layers.{i}.", config, path) for i in range(config.layers)]
    params = _take(tensors, family.top_tensors(config), "", config, path)
    params["blocks"] = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    if config.tied_head:
        tensors.pop("lm_head.weight", None)  # a copy of the embedding
    unknown = [name for name in tensors if not name.endswith(_IGNORED)]
    if unknown:
        raise ValueError(f"{path}: {len(unknown)} tensors have no place in {config.family}, the first is {unknown[0]!r}")
    graph, _ = nnx.split(policy)
    return nnx.merge(graph, params)


def save(policy: Decoder, path: str | Path, *, dtype: str = "float32", tokenizer: str | Path | None = None) -> None:
    """Writes config.json and model.safetensors, which transformers loads.

    Args:
        dtype: float32, bfloat16 or float16, of the stored tensors.
        tokenizer: a checkpoint directory whose tokenizer files are copied.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config, family = policy.config, FAMILIES[policy.config.family]
    params = params_of(policy)[1]
    tensors = _give(params, family.top_tensors(config), "", config)
    for i in range(config.layers):
        layer = {name: stacked[i] for name, stacked in params["blocks"].items()}
        tensors |= _give(layer, family.layer_tensors(config), f"model.layers.{i}.", config)
    stored = {name: np.ascontiguousarray(tensor.astype(_DTYPES[dtype])) for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**family.to_hf(config), "dtype": dtype}, indent=2) + "\n")
    if tokenizer:
        for name in _TOKENIZER_FILES:
            if (source := Path(tokenizer) / name).is_file():
                (path / name).write_bytes(source.read_bytes())


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, np.ndarray] = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"{path}: {name} is missing")
        with safe_open(path / name, framework="numpy") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def _take(
    tensors: dict[str, np.ndarray],
    table: tuple[tuple[str, str, str], ...],
    prefix: str,
    config: DecoderConfig,
    path: Path,
) -> dict[str, Any]:
    """Moves the tensors of a table out of the checkpoint's, in our layout."""
    taken = {}
    for theirs, ours, layout in table:
        if prefix + theirs not in tensors:
            raise ValueError(f"{path}: tensor {prefix + theirs!r} is missing")
        tensor = tensors.pop(prefix + theirs).astype(np.float32)
        try:
            taken[ours] = jnp.asarray(_to_ours(tensor, layout, config))
        except ValueError:
            raise ValueError(
                f"{path}: tensor {prefix + theirs!r} has shape {tensor.shape}, config.json says otherwise"
            ) from None
    return taken


def _give(
    params: Mapping[str, Any], table: tuple[tuple[str, str, str], ...], prefix: str, config: DecoderConfig
) -> dict[str, np.ndarray]:
    return {prefix + theirs: _to_theirs(np.asarray(params[ours]), layout, config) for theirs, ours, layout in table}


def _to_ours(x: np.ndarray, layout: str, c: DecoderConfig) -> np.ndarray:
    """torch stores [out, in]; we store [in, out] with the heads apart."""
    heads = {"into_heads": c.heads, "heads": c.heads, "into_kv_heads": c.kv_heads, "kv_heads": c.kv_heads}
    if layout == "as_is":
        return x
    if layout == "transposed":
        return x.T
    if layout in ("into_heads", "into_kv_heads"):
        return x.T.reshape(c.width, heads[layout], c.head_width)
    if layout == "out_of_heads":
        return x.T.reshape(c.heads, c.head_width, c.width)
    return x.reshape(heads[layout], c.head_width)


def _to_theirs(x: np.ndarray, layout: str, c: DecoderConfig) -> np.ndarray:
    if layout == "transposed":
        return x.T
    if layout in ("into_heads", "into_kv_heads"):
        return x.reshape(c.width, -1).T
    if layout == "out_of_heads":
        return x.reshape(-1, c.width).T
    return x if layout == "as_is" else x.reshape(-1)
