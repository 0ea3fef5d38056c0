"""Adapter directories: what was written comes back bit for bit, and what is wrong is told by name.

test_peft_parity.py asks PEFT itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxagent.models import hf, peft
from jaxagent.models.adapters import is_adapter, unadapted
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import LINEARS, Decoder, DecoderConfig, params_of

KINDS: dict[str, dict[str, Any]] = {
    "qwen3, all": {"lora": LoraSpec(2, 3.0, tuple(LINEARS))},
    "qwen2, some": {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "lora": LoraSpec(3, 0.5, ("q", "o", "down"))},
    "llama": {"family": "llama", "qk_norm": False, "kv_heads": 1, "lora": LoraSpec(1, 1.0, ("k", "v"))},
}
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def written(kind: Mapping[str, Any], path: Path, dtype: str = "float32") -> Decoder:
    """A policy with adapters; its base and they are saved under `path`."""
    policy = tiny.policy(tiny.config(**kind))
    params = params_of(policy)[1]
    plain = {name: w for name, w in params["blocks"].items() if not is_adapter(name)}
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(unadapted(policy.config), nnx.Rngs(0))))[0]
    hf.save(nnx.merge(graph, {**params, "blocks": plain}), path / "base")
    peft.save(policy, path / "adapter", base=path / "base", dtype=dtype)
    return policy


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    written(KINDS["qwen3, all"], tmp_path)
    return tmp_path / "adapter"


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / peft.CONFIG).read_text())
    (path / peft.CONFIG).write_text(json.dumps({**config, **changes}))


def edit(path: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    tensors = {**load_file(path / peft.WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / peft.WEIGHTS)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_adapters_come_back_on_their_base_bit_for_bit(kind: dict[str, Any], tmp_path: Path) -> None:
    policy = written(kind, tmp_path)
    assert peft.read_config(tmp_path / "adapter") == policy.config
    again = peft.load(tmp_path / "adapter")
    assert again.config == policy.config
    jax.tree.map(np.testing.assert_array_equal, params_of(again)[1], params_of(policy)[1])


def test_a_whole_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    written(KINDS["llama"], tmp_path)
    assert peft.base_of(tmp_path / "base") == str(tmp_path / "base")
    assert peft.read_config(tmp_path / "base").lora is None
    assert peft.load(tmp_path / "base").config.lora is None


def test_the_files_are_as_peft_names_and_shapes_them(tmp_path: Path) -> None:
    policy = written(KINDS["qwen2, some"], tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    c: DecoderConfig = policy.config
    shapes = {
        "self_attn.q_proj.lora_A": (3, c.width),
        "self_attn.q_proj.lora_B": (c.heads * c.head_width, 3),
        "self_attn.o_proj.lora_A": (3, c.heads * c.head_width),
        "self_attn.o_proj.lora_B": (c.width, 3),
        "mlp.down_proj.lora_A": (3, c.ffn_width),
        "mlp.down_proj.lora_B": (c.width, 3),
    }
    want = {f"base_model.model.model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    assert {name: tensor.shape for name, tensor in tensors.items()} == want
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    b = np.asarray(params_of(policy)[1]["blocks"]["q_lora_b"][1])  # [r, N, H]; row n * H + h there is head n's h
    got = tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    assert got[2 * c.head_width + 5, 1] == b[1, 2, 5].astype(ml_dtypes.bfloat16)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 0.5, "bias": "none"}
    assert config.items() >= wanted.items()
    assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_base_may_be_named_relative_to_its_adapters(adapter: Path) -> None:
    configure(adapter, base_model_name_or_path="../base")
    assert peft.load(adapter).config.lora is not None


def test_a_policy_without_adapters_has_none_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the adapters of a policy are wanted, it has none"):
        peft.save(tiny.policy(tiny.config()), tmp_path, base="x")


@pytest.mark.parametrize("name", ["someone/model", None, "/nowhere"])
def test_a_base_that_is_not_here_is_told(adapter: Path, name: str | None) -> None:
    configure(adapter, base_model_name_or_path=name)
    with pytest.raises(ValueError, match=f"base_model_name_or_path is {name!r}; the path of the base's checkpoint directory"):
        peft.load(adapter)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type LORA is wanted, got 'IA3'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"use_rslora": True}, "use_rslora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, r"rank_pattern=\{'q_proj': 4\} is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        (
            {"r": 4},
            r"lora_A\.weight' has shape \(2, 16\), by adapter_config\.json and the base's config\.json it should .* \(4, 16\)",
        ),
    ],
)
def test_what_is_not_plain_low_rank_is_refused_by_name(adapter: Path, changes: dict[str, Any], told: str) -> None:
    configure(adapter, **changes)
    with pytest.raises(ValueError, match=told):
        peft.load(adapter)


def test_a_torn_config_is_named(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter/adapter_config\.json is not JSON"):
        peft.load(adapter)


def test_missing_and_torn_weights_are_named(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read as safetensors"):
        peft.load(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing; a \.bin is not read"):
        peft.load(adapter)


def test_a_missing_and_a_strange_tensor_are_named(adapter: Path) -> None:
    edit(adapter, {"base_model.model.lm_head.lora_A.weight": np.ones((2, 16), np.float32)})
    with pytest.raises(ValueError, match=r"1 tensors are no factors of a qwen3's linear maps: 'base_model\.model\.lm_head"):
        peft.load(adapter)
    edit(adapter, {"base_model.model.lm_head.lora_A.weight": None, FIRST: None})
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight' is missing; a linear map has factors in"
    ):
        peft.load(adapter)
