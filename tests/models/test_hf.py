"""Checkpoint directories: import and export are the identity bit for bit, and what is wrong is told by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import seeded
import tiny
from checkpoints import KINDS, MESHES, STREAMED, assert_equal_bytes, configure, edit, in_shards
from safetensors.numpy import load_file, save_file

from jaxagent.models import hf, load, qwen, save
from jaxagent.models.hf import read_config
from jaxagent.models.transformer import params_of
from jaxagent.sharding import DeviceMesh


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Qwen2 checkpoint with its own head."""
    save(tiny.policy(tiny.config(**KINDS["qwen2, untied"])), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


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


# ---------------------------------------------------------------------- what families may ask for


MIXTURE = {"family": "qwen3_moe", "experts": 8, "experts_per_token": 2, "tied_head": False}
DOWN = "model.layers.{}.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize("sizes", [{"ffn_width": 8}, STREAMED], ids=["on the host", "streamed"])
def test_the_tensors_of_experts_are_stacked_after_the_layers(sizes: dict[str, int], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**MIXTURE, **sizes))
    save(policy, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    down = np.asarray(policy.blocks.down[...])
    for layer in range(2):
        for expert in range(8):
            np.testing.assert_array_equal(tensors[DOWN.format(layer, expert)], down[layer, expert].T)
    save(policy, tmp_path / "shards", max_shard_bytes=400_000)  # of which no file has room for all experts
    for mesh in (None, *MESHES.values()):  # some cut the experts
        loaded = load(tmp_path / "shards", mesh and DeviceMesh.build(**mesh))
        jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(loaded)[1])
        save(loaded, tmp_path / "again")
        assert_equal_bytes(load_file(tmp_path / "again" / "model.safetensors"), tensors)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save(tiny.policy(tiny.config(**MIXTURE)), tmp_path)
    edit(tmp_path, {DOWN.format(1, 7): None})
    with pytest.raises(ValueError, match=rf"tensor '{DOWN.format(1, 7)}' is missing"):
        load(tmp_path)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 1, "expert": 8}], ids=["many on a device", "one on a device"])
def test_experts_in_several_dtypes_are_joined(mesh: dict[str, int], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**MIXTURE, **STREAMED))
    save(policy, tmp_path, dtype="bfloat16")
    wide = np.full((STREAMED["width"], STREAMED["ffn_width"]), 1 + 2**-20, np.float32)
    edit(tmp_path, {DOWN.format(1, e): wide for e in (3, 7)})
    wanted = np.asarray(policy.blocks.down[...]).astype(ml_dtypes.bfloat16).astype(np.float32)
    wanted[1, [3, 7]] = wide.T
    np.testing.assert_array_equal(load(tmp_path, DeviceMesh.build(**mesh)).blocks.down[...], wanted)


def test_a_family_whose_tables_forget_a_weight_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config()
    save(tiny.policy(config), tmp_path)
    rows = [row for row in qwen.layer_tensors(config) if row[1] != "down"]
    for row, told in ((None, "no tensor fills 'blocks.down'"), (("x.weight", "downs", "as_is"), "cannot fill 'blocks.downs'")):
        tables = (*rows, *((row,) if row else ()))
        monkeypatch.setitem(
            hf.FAMILIES, "qwen3", SimpleNamespace(**{**vars(qwen), "layer_tensors": lambda _, tables=tables: tables})
        )
        with pytest.raises(ValueError, match=told):
            load(tmp_path)


def test_prefixes_are_replaced_the_longest_first_and_what_is_dropped_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes = {"language_model.": "", "language_model.model.": "model.", "model.": "elsewhere.", "vision.": None, "x.": None}
    monkeypatch.setitem(hf.FAMILIES, "qwen3", SimpleNamespace(**vars(qwen), PREFIXES=prefixes))
    policy = tiny.policy(tiny.config(tied_head=False))
    save(policy, tmp_path)
    tensors = {f"language_model.{name}": x for name, x in load_file(tmp_path / "model.safetensors").items()}
    extra = {"vision.a": np.zeros(3, np.int8), "vision.b": np.zeros(3, np.int8), "x.c": np.zeros(1, np.float32)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(load(tmp_path))[1])
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("jaxagent")]
    assert line.endswith("3 tensors are not for the decoder and are left out: 2 of vision.*, 1 of x.*")

    edit(tmp_path, {"lm_head.weight": tensors["language_model.lm_head.weight"]})
    with pytest.raises(ValueError, match=r"tensors '(language_model\.)?lm_head\.weight' and .* are both 'lm_head\.weight'"):
        load(tmp_path)


# ---------------------------------------------------------------------- what is there already


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


# ---------------------------------------------------------------------- what is wrong is told


def test_a_missing_weights_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"checkpoint: model\.safetensors is missing"):
        load(checkpoint)


def test_a_torn_weights_file_is_named(checkpoint: Path) -> None:
    whole = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"checkpoint: model\.safetensors cannot be read as safetensors"):
        load(checkpoint)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors is missing; pytorch_model\.bin is there, but .*save_pretrained"):
        load(checkpoint)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    in_shards(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(checkpoint)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(checkpoint: Path) -> None:
    places = in_shards(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    for name in ("model.norm.weight", "model.norm.bias"):  # one that is in the other file, one that is in none
        wrong = {**places, name: next(file for file in places.values() if file != places.get(name))}
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ValueError, match=rf"index\.json names tensor '{name}' of {wrong[name]}, but"):
            load(checkpoint)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_refused(checkpoint: Path, text: str) -> None:
    in_shards(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: .*weight_map"):
        load(checkpoint)


def test_a_tensor_in_two_files_is_refused_with_both(checkpoint: Path) -> None:
    in_shards(checkpoint)
    for file in checkpoint.glob("model-*.safetensors"):
        save_file({**load_file(file), "model.norm.weight": np.ones(16, np.float32)}, file)
    both = r"'model\.norm\.weight' is in two files, model-00001-of-00002\.safetensors and model-00002-of-00002\.safetensors"
    with pytest.raises(ValueError, match=both):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_a_stored_dtype_that_is_not_read_is_named(checkpoint: Path, dtype: Any) -> None:
    edit(checkpoint, {"model.norm.weight": np.ones(16, dtype)})
    told = r"model\.safetensors: tensor 'model\.norm\.weight' is stored as [FI]\d+, read are F32, BF16, F16; quantised"
    with pytest.raises(ValueError, match=told):
        load(checkpoint)


def test_quantised_checkpoints_are_refused_by_their_config(checkpoint: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    for changes in (quantised, {"quantization_config": None, "text_config": quantised}):
        configure(checkpoint, **changes)
        with pytest.raises(ValueError, match=r"quantization_config \(gptq\): quantised checkpoints are not supported; take"):
            read_config(checkpoint)


@pytest.mark.parametrize("changes", [{"num_attention_heads": "four"}, {"rope_parameters": [1]}, {"num_key_value_heads": 0}])
def test_a_field_of_the_wrong_kind_is_told_with_the_file(checkpoint: Path, changes: dict[str, Any]) -> None:
    configure(checkpoint, **changes)
    with pytest.raises(ValueError, match=r"config\.json: a field has a value of the wrong kind: "):
        read_config(checkpoint)


def test_a_config_that_is_no_object_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: a JSON object is wanted, got list"):
        read_config(checkpoint)


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
