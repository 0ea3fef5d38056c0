"""Hugging Face checkpoint directories in and out: config.json and safetensors, one file or shards with an index.

Import and export are the identity on every tensor. Both stream: a tensor goes from its file to the devices that hold it, in
the dtype it is stored in, and is transposed and cast there. The host never holds more than a few tensors, a device never
more than its part of the weights and of one tensor. A missing or unknown tensor is an error that names it, before any
device holds anything.

A family is a module with

  from_hf(config.json) -> DecoderConfig      to_hf(DecoderConfig) -> config.json
  layer_tensors(config), top_tensors(config) -> rows (their name, our name, layout), see layouts.py.
      A layer's names come after "model.layers.<i>."; "{expert}" in one stands for 0 ... experts-1, stacked in ours after the
      layers: [L, E, ...].
  PREFIXES, where checkpoints of it come with several names: a prefix -> what it is replaced by, or None for tensors that are
      not read; the longest that fits counts.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from jaxagent.models import gemma, llama, mistral, qwen
from jaxagent.models.layouts import Layout
from jaxagent.models.stream import Stream, Weight, fetched, pieces
from jaxagent.models.tensor_files import CODES, DTYPES, TensorFiles, write_files, write_text
from jaxagent.models.transformer import Decoder, DecoderConfig, logical_axes, params_of
from jaxagent.sharding import DeviceMesh

FAMILIES: Mapping[str, ModuleType] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), qwen),
    "llama": llama,
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), gemma),
    "mistral": mistral,
}
# Tensors that some checkpoints carry and that hold nothing of their own.
_IGNORED = ("rotary_emb.inv_freq",)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------------- config.json


def read_config(path: str | Path) -> DecoderConfig:
    """The decoder of a checkpoint directory. Raises ValueError for a missing directory or an unsupported model."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: a Hugging Face checkpoint directory with config.json is wanted, there is none; nothing is downloaded "
            "here: hf download NAME --local-dir=DIR does that"
        )
    try:
        hf = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{path}/config.json is not JSON: {error}") from None
    if not isinstance(hf, dict):
        raise ValueError(f"{path}/config.json: a JSON object is wanted, got {type(hf).__name__}")
    family = FAMILIES.get(str(hf.get("model_type")))
    if family is None:
        raise ValueError(f"{path}: model_type {hf.get('model_type')!r} is not supported; supported are {', '.join(FAMILIES)}")
    text = hf.get("text_config")  # where a multimodal checkpoint says what its decoder is
    for part in (hf, text if isinstance(text, dict) else {}):
        if quantised := part.get("quantization_config"):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"{path}/config.json: quantization_config ({method}): quantised checkpoints are not supported; take the one in "
                f"{', '.join(DTYPES)}"
            )
    try:
        return family.from_hf(hf)
    except KeyError as error:
        raise ValueError(f"{path}/config.json: missing field {error}") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}/config.json: a field has a value of the wrong kind: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# ---------------------------------------------------------------------- which tensors fill which weight


def _weights(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
    """Every weight by its dotted name, from the tables of its family."""
    family = FAMILIES[config.family]
    found: dict[str, Weight] = {}
    layers, experts = range(config.layers), range(config.experts)
    rows = [(theirs, "blocks." + ours, layout, True) for theirs, ours, layout in family.layer_tensors(config)]
    rows += [(*row, False) for row in family.top_tensors(config)]
    for theirs, ours, layout, layered in rows:
        names: Any = [f"model.layers.{i}.{theirs}" for i in layers] if layered else theirs
        if "{expert}" in theirs:
            names = [[name.replace("{expert}", str(e)) for e in experts] for name in names]
        names = np.array(names, object)
        shape = shapes.get(ours, ())
        if ours in found or shape[: names.ndim] != names.shape:
            raise ValueError(
                f"{family.__name__}: {theirs!r} cannot fill {ours!r} of shape {shape}, it is {names.shape} tensors"
            )
        found[ours] = Weight(names, Layout(layout, shape[names.ndim :]))
    if rest := sorted(shapes.keys() - found.keys()):
        raise ValueError(f"{family.__name__}: no tensor fills {rest[0]!r}; its tables must name every weight of the decoder")
    return found


def _find(files: TensorFiles, config: DecoderConfig, weights: Iterable[Weight]) -> dict[str, str]:
    """The name in the files of every tensor that is wanted, all of them checked, and none left over."""
    family = FAMILIES[config.family]
    found = _canonical(files, getattr(family, "PREFIXES", {}))
    used = set()
    for weight in weights:
        for name in weight.names.flat:
            if name not in found:
                some = ", ".join(sorted({tensor.file for tensor in files.tensors.values()})[:3])
                raise ValueError(f"{files.path}: tensor {name!r} is missing; looked for in {some}")
            stored = files.tensors[found[name]]
            where = f"{files.path}/{stored.file}: tensor {found[name]!r}"
            if stored.code not in CODES:
                raise ValueError(
                    f"{where} is stored as {stored.code}, read are {', '.join(CODES)}; quantised ones are not supported"
                )
            if stored.shape != weight.layout.stored:
                raise ValueError(f"{where} has shape {stored.shape}, by config.json it should have {weight.layout.stored}")
            used.add(name)
    copies = {"lm_head.weight"} if config.tied_head else set()  # of the embedding
    unknown = [theirs for name, theirs in found.items() if name not in used | copies and not name.endswith(_IGNORED)]
    if unknown:
        first = f"{unknown[0]!r} in {files.tensors[unknown[0]].file}"
        raise ValueError(f"{files.path}: {len(unknown)} tensors have no place in {config.family}, the first is {first}")
    return found


def _canonical(files: TensorFiles, prefixes: Mapping[str, str | None]) -> dict[str, str]:
    """Canonical names -> names in the files; tensors that the family drops are told and left out."""
    found: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for theirs in files.tensors:
        prefix = max((p for p in prefixes if theirs.startswith(p)), key=len, default="")
        instead = prefixes.get(prefix, "")
        if instead is None:
            dropped[prefix] += 1
            continue
        name = instead + theirs.removeprefix(prefix)
        if name in found:
            raise ValueError(f"{files.path}: tensors {found[name]!r} and {theirs!r} are both {name!r}")
        found[name] = theirs
    if dropped:
        told = ", ".join(f"{count} of {prefix}*" for prefix, count in dropped.items())
        _log.warning("%s: %d tensors are not for the decoder and are left out: %s", files.path, dropped.total(), told)
    return found


# ---------------------------------------------------------------------- in and out


def load(path: str | Path, mesh: DeviceMesh | None = None, dtype: str = "float32") -> Decoder:
    """A policy from a checkpoint directory, each weight on the devices that hold it.

    Every process of a mesh over several hosts calls this and reads what its own devices need. The host's buffers hold at most
    512 MiB or half of the largest file, whichever is less, or one tensor (of experts: one for each part of the mesh that
    holds some).

    Args:
      mesh: the weights are placed by the table of sharding.py; none leaves them on the default device.
      dtype: float32, bfloat16 or float16, of the weights; the stored dtype may be another, and differ between tensors.

    Raises ValueError for whatever is missing, unknown, of another shape or dtype, or cannot be cut by the mesh.
    """
    _check_dtype(dtype)
    path = Path(path)
    config = read_config(path)
    skeleton = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    graph, shapes = params_of(skeleton)
    flat = flatten_dict(shapes, sep=".")
    shardings: Mapping[str, Any] = dict.fromkeys(flat)
    if mesh is not None:
        mesh.check(shapes, logical_axes(skeleton))
        shardings = flatten_dict(mesh.shardings(logical_axes(skeleton), shapes), sep=".")
    weights = _weights(config, {name: x.shape for name, x in flat.items()})
    with TensorFiles(path) as files:
        stream = Stream(files, _find(files, config, weights.values()))
        params = {name: stream.fill(weight, shardings[name], jnp.dtype(dtype)) for name, weight in weights.items()}
        jax.block_until_ready(params)
    return nnx.merge(graph, unflatten_dict(params, sep="."))


def save(
    policy: Decoder,
    path: str | Path,
    *,
    dtype: str = "float32",
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and model.safetensors, or shards with an index, which transformers loads.

    One tensor at a time comes from the devices. Over several hosts every process calls this with the same arguments; the first
    one writes.

    Args:
      dtype: float32, bfloat16 or float16, of the stored tensors.
      tokenizer: a checkpoint directory whose tokenizer files are copied.
      max_shard_bytes: of the tensors in one file.
    """
    _check_dtype(dtype)
    path = Path(path)
    config = policy.config
    params = flatten_dict(params_of(policy)[1], sep=".")
    weights = _weights(config, {name: x.shape for name, x in params.items()})
    parts = {name: weight.parts(getattr(params[name], "sharding", None)) for name, weight in weights.items()}
    if jax.process_index() == 0:
        shapes = {tensor: weights[name].layout.stored for name, _, _, names in pieces(weights, parts) for tensor in names}
        path.mkdir(parents=True, exist_ok=True)
        write_files(path, shapes, fetched(params, weights, parts, dtype), dtype, max_shard_bytes)
        text = json.dumps({**FAMILIES[config.family].to_hf(config), "dtype": dtype}, indent=2) + "\n"
        write_text(path / "config.json", text)
        for name in _TOKENIZER_FILES if tokenizer else ():
            if (source := Path(tokenizer or "") / name).is_file():
                (path / name).write_bytes(source.read_bytes())
    else:
        for _ in fetched(params, weights, parts, dtype):  # takes part in gathering
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {path}")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
