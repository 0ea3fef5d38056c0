"""Hugging Face checkpoint directories in and out: config.json and safetensors, one file or shards with an index.

Import and export are the identity on every tensor. A missing or unknown tensor is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxagent.models import gemma, llama, mistral, qwen
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, params_of

FAMILIES: Mapping[str, ModuleType] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), qwen),
    "llama": llama,
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), gemma),
    "mistral": mistral,
}
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
    try:
        hf = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{path}/config.json is not JSON: {error}") from None
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
    graph, shapes = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    layer_shapes = {name: weight.shape[1:] for name, weight in shapes.pop("blocks").items()}
    top_shapes = {name: weight.shape for name, weight in shapes.items()}
    family = FAMILIES[config.family]
    table = family.layer_tensors(config)
    layers = [_take(tensors, table, f"model.layers.{i}.", layer_shapes, path) for i in range(config.layers)]
    params: Params = _take(tensors, family.top_tensors(config), "", top_shapes, path)
    params["blocks"] = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    if config.tied_head:
        tensors.pop("lm_head.weight", None)  # a copy of the embedding
    unknown = [name for name in tensors if not name.endswith(_IGNORED)]
    if unknown:
        raise ValueError(f"{path}: {len(unknown)} tensors have no place in {config.family}, the first is {unknown[0]!r}")
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
    tensors = _give(params, family.top_tensors(config), "")
    for i in range(config.layers):
        layer = {name: stacked[i] for name, stacked in params["blocks"].items()}
        tensors |= _give(layer, family.layer_tensors(config), f"model.layers.{i}.")
    stored = {name: np.ascontiguousarray(tensor.astype(_DTYPES[dtype])) for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**family.to_hf(config), "dtype": dtype}, indent=2) + "\n")
    if tokenizer:
        for name in _TOKENIZER_FILES:
            if (source := Path(tokenizer) / name).is_file():
                (path / name).write_bytes(source.read_bytes())


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory by name, from one file or from the shards that the index names."""
    index, files = path / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file() and not (path / files[0]).is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, np.ndarray] = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"{path}: {name} is missing")
        try:
            with safe_open(path / name, framework="numpy") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{path}: {name} cannot be read as safetensors: {error}") from None
    return tensors


def _take(
    tensors: dict[str, np.ndarray],
    table: tuple[tuple[str, str, str], ...],
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
) -> Params:
    """Moves the tensors of a table out of the checkpoint's, in our layout and shapes."""
    taken = {}
    for theirs, ours, layout in table:
        name, shape = prefix + theirs, shapes[ours]
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name!r} is missing")
        tensor = tensors.pop(name)
        if tensor.shape != (wanted := _their_shape(shape, layout)):
            raise ValueError(f"{path}: tensor {name!r} has shape {tensor.shape}, by config.json it should have {wanted}")
        taken[ours] = jnp.asarray(_to_ours(tensor.astype(np.float32), layout, shape))
    return taken


def _give(params: Mapping[str, Any], table: tuple[tuple[str, str, str], ...], prefix: str) -> dict[str, np.ndarray]:
    return {prefix + theirs: _to_theirs(np.asarray(params[ours]), layout) for theirs, ours, layout in table}


# torch stores [out, in]; we store [in, out] with the heads apart. The layouts that tables name:
#   as_is         the same
#   transposed    [F, D] there, [D, F] here
#   into_heads    [N H, D] there, [D, N, H] here
#   out_of_heads  [D, N H] there, [N, H, D] here
#   heads         [N H] there, [N, H] here


def _their_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape that a tensor of our shape has in a checkpoint."""
    return {
        "as_is": shape,
        "transposed": shape[::-1],
        "into_heads": (math.prod(shape[1:]), shape[0]),
        "out_of_heads": (shape[-1], math.prod(shape[:-1])),
        "heads": (math.prod(shape),),
    }[layout]


def _to_ours(x: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    return (x if layout in ("as_is", "heads") else x.T).reshape(shape)


def _to_theirs(x: np.ndarray, layout: str) -> np.ndarray:
    theirs = _their_shape(x.shape, layout)
    return x.reshape(theirs) if layout in ("as_is", "heads") else x.reshape(theirs[::-1]).T
