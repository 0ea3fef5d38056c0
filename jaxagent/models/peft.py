"""Adapter directories in PEFT's layout, in and out: adapter_config.json and adapter_model.safetensors.

The base is a checkpoint directory of its own, which `base_model_name_or_path` names. torch stores [out, in], so A is [r, in]
and B is [out, r] there; ours are [in, r] and [r, out] of all layers, with the heads of queries, keys, values and outputs apart.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxagent.models import hf
from jaxagent.models.adapters import LORA_A, LORA_B
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import LINEARS, Decoder, DecoderConfig, params_of
from jaxagent.sharding import DeviceMesh

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What changes the meaning of the factors, or adds weights beside them, and its value where it does not.
_OFF: dict[str, Any] = {
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "use_qalora", "alora_invocation_tokens"), False),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "layer_replication"), None),
    "bias": "none",
}
_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_FACTORS = {LORA_A: "lora_A", LORA_B: "lora_B"}


def is_adapter_directory(path: str | Path) -> bool:
    """Whether a directory holds an adapter rather than a whole checkpoint."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str | Path) -> str:
    """The checkpoint directory under an adapter's; of a whole checkpoint itself. Raises ValueError where it is not here."""
    if not is_adapter_directory(path):
        return str(path)
    named = _read_config(Path(path)).get("base_model_name_or_path")
    for base in (Path(named), Path(path) / named) if named else ():
        if (base / "config.json").is_file():
            return str(base)
    raise ValueError(
        f"{path}/{CONFIG}: base_model_name_or_path is {named!r}; the path of the base's checkpoint directory is wanted "
        "there, and that it is on this machine"
    )


def read_config(path: str | Path) -> DecoderConfig:
    """The decoder of a checkpoint directory, or that of an adapter directory's base with the adapters on it."""
    base = hf.read_config(base_of(path))
    return replace(base, lora=_read_spec(Path(path), base)) if is_adapter_directory(path) else base


def load(path: str | Path, mesh: DeviceMesh | None = None, dtype: str = "float32") -> Decoder:
    """The policy of a checkpoint directory, or that of an adapter directory's base with the adapters on it.

    Args:
        mesh: where the base goes; see hf.load.
        dtype: of the base; adapters are float32.
    """
    policy = hf.load(base_of(path), mesh, dtype)
    if not is_adapter_directory(path):
        return policy
    config = read_config(path)
    params = params_of(policy)[1]
    graph, shapes = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    return nnx.merge(graph, {**params, "blocks": {**params["blocks"], **_read_factors(Path(path), config, shapes["blocks"])}})


def save(policy: Decoder, path: str | Path, *, base: str | Path, dtype: str = "float32") -> None:
    """Writes a policy's adapters, which `peft.PeftModel.from_pretrained` puts on the model of the directory `base`."""
    path, lora = Path(path), policy.config.lora
    if lora is None:
        raise ValueError(f"{path}: the adapters of a policy are wanted, it has none")
    blocks = params_of(policy)[1]["blocks"]
    tensors = {
        f"{place}.{theirs}.weight": np.ascontiguousarray(_stored(blocks[name + ours][i], ours).astype(_DTYPES[dtype]))
        for i, name, place in _places(policy.config)
        for ours, theirs in _FACTORS.items()
    }
    modules = sorted({place.rpartition(".")[2] for _, _, place in _places(policy.config)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _places(config: DecoderConfig, targets: tuple[str, ...] | None = None) -> list[tuple[int, str, str]]:
    """(layer, our linear, what PEFT puts before the factors' names) of every adapter of a decoder."""
    if targets is None:
        targets = config.lora.targets if config.lora else ()
    theirs = {ours: name for name, ours, _ in hf.FAMILIES[config.family].layer_tensors(config)}
    modules = {name: theirs[name].removesuffix(".weight") for name in targets}
    layers = range(config.layers)
    return [(i, name, f"base_model.model.model.layers.{i}.{module}") for i in layers for name, module in modules.items()]


def _stored(factor: Any, ours: str) -> np.ndarray:
    """A layer's factor as torch stores it."""
    rank = factor.shape[-1 if ours == LORA_A else 0]
    return np.asarray(factor).reshape((-1, rank) if ours == LORA_A else (rank, -1)).T


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{path}/{CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ValueError(f"{path}/{CONFIG}: peft_type LORA is wanted, got {kind!r}")
    for name, off in _OFF.items():
        if (value := config.get(name)) and value != off:
            raise ValueError(f"{path}/{CONFIG}: {name}={value!r} is not supported, only low-rank factors of one rank are")
    return config


def _read_spec(path: Path, base: DecoderConfig) -> LoraSpec:
    """Rank, strength and targets; the targets by the tensors there are, for `target_modules` may be a pattern."""
    config, tensors = _read_config(path), _tensors(path)
    linears = tuple(name for name in LINEARS if not (base.experts and name in ("gate", "up", "down")))
    there = {name for _, name, place in _places(base, linears) if f"{place}.lora_A.weight" in tensors}
    spec = LoraSpec(config["r"], float(config["lora_alpha"]), tuple(name for name in linears if name in there))
    known = {f"{place}.{theirs}.weight" for _, _, place in _places(base, spec.targets) for theirs in _FACTORS.values()}
    if strange := sorted(set(tensors) - known):
        raise ValueError(
            f"{path}/{WEIGHTS}: {len(strange)} tensors are no factors of a {base.family}'s linear maps: {strange[0]!r}"
        )
    if missing := sorted(known - set(tensors)):
        raise ValueError(
            f"{path}/{WEIGHTS}: tensor {missing[0]!r} is missing; a linear map has factors in every layer or in none"
        )
    if not there:
        raise ValueError(f"{path}/{WEIGHTS} holds no factors")
    return spec


def _tensors(path: Path) -> dict[str, np.ndarray]:
    if not (path / WEIGHTS).is_file():
        raise ValueError(f"{path}: {WEIGHTS} is missing; a .bin is not read, save the adapter with safetensors")
    try:
        return load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{path}: {WEIGHTS} cannot be read as safetensors: {error}") from None


def _read_factors(path: Path, config: DecoderConfig, shapes: dict[str, Any]) -> dict[str, Any]:
    """The factors of all layers, stacked, in our shapes."""
    tensors = _tensors(path)
    layers: dict[str, list[np.ndarray]] = {}
    for _, name, place in _places(config):
        for ours, theirs in _FACTORS.items():
            key, shape = f"{place}.{theirs}.weight", shapes[name + ours].shape[1:]
            rank = shape[-1 if ours == LORA_A else 0]
            rest = math.prod(shape) // rank
            if tensors[key].shape != (wanted := (rank, rest) if ours == LORA_A else (rest, rank)):
                raise ValueError(
                    f"{path}/{WEIGHTS}: tensor {key!r} has shape {tensors[key].shape}, by {CONFIG} and the base's config.json "
                    f"it should have {wanted}"
                )
            layers.setdefault(name + ours, []).append(tensors[key].astype(np.float32).T.reshape(shape))
    return {name: jnp.asarray(np.stack(factors)) for name, factors in layers.items()}
