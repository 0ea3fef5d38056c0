"""Checkpoint directories: import and export are the identity bit for bit, and what is wrong is told by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import seeded
import tiny
from safetensors.numpy import load_file, save_file

from jaxagent.models import load, save
from jaxagent.models.hf import read_config
from jaxagent.models.transformer import params_of

KINDS: dict[str, dict[str, Any]] = {
    "qwen2, tied": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "qwen2, untied": {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied_head": False},
    "qwen3, tied": {},
    "qwen3, untied": {"tied_head": False, "kv_heads": 1},
}


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Qwen2 checkpoint with its own head."""
    save(tiny.policy(tiny.config(**KINDS["qwen2, untied"])), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def edit(path: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    """Replaces tensors of a checkpoint, or takes those away that are None."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_export_then_import_gives_every_weight_back_bit_for_bit(kind: dict[str, Any], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**kind))
    save(policy, tmp_path)
    again = load(tmp_path)
    assert again.config == policy.config
    jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(again)[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_import_then_export_gives_every_tensor_back_bit_for_bit(kind: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    save(tiny.policy(tiny.config(**kind)), tmp_path / "first", dtype=dtype)
    save(load(tmp_path / "first"), tmp_path / "second", dtype=dtype)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert {tensor.dtype for tensor in first.values()} == {np.dtype(getattr(ml_dtypes, dtype, None) or dtype)}
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor.view(np.uint8), second[name].view(np.uint8), err_msg=name)
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "second" / "config.json").read_text()


def test_a_checkpoint_in_shards_loads_like_one_file(kind: dict[str, Any], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**kind))
    save(policy, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(load(tmp_path))[1])

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tmp_path)


def test_an_export_into_a_directory_that_held_shards_is_what_loads_from_it(checkpoint: Path) -> None:
    stale = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert load(checkpoint).config.family == "qwen2"


def test_a_tied_checkpoint_may_carry_a_copy_of_its_embedding(tmp_path: Path) -> None:
    save(tiny.policy(tiny.config()), tmp_path)
    edit(tmp_path, {"lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]})
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    assert load(tmp_path).config.tied_head


def test_the_tokenizer_travels_with_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "chat_template.jinja").write_text("x")
    save(load(checkpoint), tmp_path / "copy", tokenizer=checkpoint)
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "x"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: a Hugging Face checkpoint directory with config\.json is wanted"):
        load(tmp_path / "nowhere")


def test_a_missing_weights_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"checkpoint: model\.safetensors is missing"):
        load(checkpoint)


def test_a_torn_weights_file_is_named(checkpoint: Path) -> None:
    whole = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"checkpoint: model\.safetensors cannot be read as safetensors"):
        load(checkpoint)


def test_a_torn_config_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"checkpoint/config\.json is not JSON"):
        load(checkpoint)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    edit(checkpoint, {"model.layers.1.self_attn.k_proj.bias": None})
    with pytest.raises(ValueError, match=r"tensor 'model\.layers\.1\.self_attn\.k_proj\.bias' is missing"):
        load(checkpoint)


def test_an_unknown_tensor_is_named(checkpoint: Path) -> None:
    edit(checkpoint, {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
    with pytest.raises(
        ValueError, match=r"1 tensors have no place in qwen2, the first is 'model\.layers\.0\.self_attn\.q_norm"
    ):
        load(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",  # as it is
        "model.layers.0.mlp.gate_proj.weight",  # transposed
        "model.layers.0.self_attn.q_proj.weight",  # heads apart
        "model.layers.0.self_attn.o_proj.weight",  # heads apart, on the other side
        "model.layers.1.self_attn.v_proj.bias",  # heads of a vector
        "model.norm.weight",
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(checkpoint: Path, name: str) -> None:
    tensor = load_file(checkpoint / "model.safetensors")[name]
    flat = np.ascontiguousarray(tensor.T) if tensor.ndim == 2 else np.concatenate([tensor, tensor])  # same size where it can be
    edit(checkpoint, {name: flat})
    with pytest.raises(ValueError) as caught:
        load(checkpoint)
    assert str(caught.value).endswith(f"tensor {name!r} has shape {flat.shape}, by config.json it should have {tensor.shape}")


def test_an_unknown_family_is_refused_with_those_that_are_known(checkpoint: Path) -> None:
    configure(checkpoint, model_type="mamba")
    with pytest.raises(ValueError, match="model_type 'mamba' is not supported; supported are qwen2, qwen3"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_act", "gelu", "hidden_act='gelu'"),
        ("attention_bias", True, "attention_bias=True"),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}, "rope type='longrope'"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope type='dynamic'"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(checkpoint: Path, field: str, value: Any, told: str) -> None:
    configure(checkpoint, **{"rope_parameters": None, field: value})
    with pytest.raises(ValueError, match=told):
        load(checkpoint)


def test_a_missing_field_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["intermediate_size"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: missing field 'intermediate_size'"):
        load(checkpoint)


def test_both_ways_of_writing_the_rotary_base_are_understood(checkpoint: Path) -> None:
    configure(checkpoint, rope_theta=321.0, rope_parameters=None)
    assert read_config(checkpoint).rope_theta == 321.0
    configure(checkpoint, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert read_config(checkpoint).rope_theta == 123.0


def test_defaults_of_old_configs_are_those_of_transformers(tmp_path: Path) -> None:
    old = {
        "model_type": "qwen2",
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 4,
    }
    seeded.write_checkpoint(tmp_path, old, {})
    config = read_config(tmp_path)
    assert (config.kv_heads, config.head_width, config.rope_theta, config.tied_head) == (2, 4, 10000.0, False)
