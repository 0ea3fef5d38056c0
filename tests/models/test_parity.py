"""Fresh random models of transformers against ours, both ways. Needs torch: `pytest -m parity`.

test_golden.py holds the same promise without torch, for fixed models.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeded
from flax import nnx
from safetensors.numpy import load_file

from jaxagent.engine import Engine, EngineOptions
from jaxagent.models import hf
from jaxagent.models.transformer import params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.types import SampleRequest, Sampling

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7, "pad_token_id": None}  # padding has no gradient
# Sizes, bases, widths and windows are not the defaults, so that a field that is not read shows.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, tied, grouped": ("Qwen2", {"num_key_value_heads": 2, "rope": {"rope_theta": 1e6}, "rms_norm_eps": 1e-5}),
    "qwen2, untied, one key head": ("Qwen2", {"num_key_value_heads": 1, "tied": False, "rope": {"rope_theta": 54321.0}}),
    "qwen2, late layers slide": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3, tied, wide heads": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24, "rope": {"rope_theta": 99.5}}),
    "qwen3, untied, yarn": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 8, "tied": False, "rope": YARN}),
    "qwen3-moe": ("Qwen3Moe", {**MIXTURE, "num_key_value_heads": 2, "head_dim": 16, "norm_topk_prob": True, "tied": False}),
    "qwen3-moe, raw weights": ("Qwen3Moe", {**MIXTURE, "num_key_value_heads": 1, "head_dim": 8, "norm_topk_prob": False}),
    "llama 3.1": ("Llama", {"num_key_value_heads": 2, "tied": False, "rope": {"rope_type": "llama3", **LLAMA3}}),
    "llama 3, biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "rms_norm_eps": 1e-4}),
    "llama, linear rope": ("Llama", {"num_key_value_heads": 1, "rope": {"rope_type": "linear", "factor": 2.5}}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6, "tied": False}),
    "mistral, no window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 321.0},
            },
        },
    ),
}


@pytest.fixture(params=VARIANTS.values(), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> Any:
    """A model as transformers initialises it, but for norms and biases, which would be ones and zeros."""
    return made(*request.param)


def made(kind: str, fields: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    told = {**fields, "tie_word_embeddings": fields.get("tied", True)}
    if rope := told.pop("rope", None):
        told["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0, **rope}
    told.pop("tied", None)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **told}, initializer_range=0.2, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def tensors_of(model: Any, path: Path) -> dict[str, np.ndarray]:
    """A model's tensors under the names that its checkpoints have."""
    model.save_pretrained(path)
    return dict(load_file(path / "model.safetensors"))


def test_logits_and_all_gradients_equal_those_of_transformers(model: Any, tmp_path: Path) -> None:
    import torch

    model.save_pretrained(tmp_path / "theirs")
    tokens = seeded.token_rows(SIZES["vocab_size"], 2, 17, 1)
    ct = seeded.cotangent(2, 17, SIZES["vocab_size"], seed=2)
    theirs = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    (theirs * torch.from_numpy(ct)).mean().backward()

    graph, params = params_of(hf.load(tmp_path / "theirs"))

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params)(tokens)
        return jnp.mean(logits * ct), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-4, rtol=1e-4)
    hf.save(nnx.merge(graph, grads), tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients" / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    wanted = tensors_of(model, tmp_path / "their gradients")
    assert ours.keys() == wanted.keys()
    for name, grad in wanted.items():
        np.testing.assert_allclose(ours[name], grad, atol=1e-4 * max(1e-3, np.abs(grad).max()), rtol=1e-4, err_msg=name)


def test_our_export_loads_in_transformers_with_equal_logits_and_tensors(model: Any, tmp_path: Path) -> None:
    import torch
    import transformers

    model.save_pretrained(tmp_path / "theirs")
    hf.save(hf.load(tmp_path / "theirs"), tmp_path / "ours")
    again, faults = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(faults.values())
    tokens = torch.from_numpy(seeded.token_rows(SIZES["vocab_size"], 2, 17, 1).astype(np.int64))
    with torch.no_grad():
        np.testing.assert_array_equal(again.eval()(tokens).logits.numpy(), model(tokens).logits.numpy())
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor.numpy(), after[name].numpy(), err_msg=name)


def test_shards_load_in_transformers_and_its_shards_here(model: Any, tmp_path: Path) -> None:
    import transformers

    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    hf.save(hf.load(tmp_path / "theirs"), tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 1
    again, faults = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(faults.values())
    after = again.state_dict()
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), after[name].numpy(), err_msg=name)


def test_what_transformers_writes_comes_back_byte_for_byte(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "theirs")
    hf.save(hf.load(tmp_path / "theirs"), tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(tensor.view(np.uint8), ours[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize("kind", ["qwen2, tied, grouped", "qwen3-moe", "llama 3.1", "mistral", "gemma2", "gemma3"])
def test_the_engine_decodes_the_tokens_that_generate_does(kind: str, tmp_path: Path) -> None:
    import torch

    model = made(*VARIANTS[kind])
    model.save_pretrained(tmp_path)
    prompt = seeded.token_rows(SIZES["vocab_size"], 1, 9, 3)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    with torch.no_grad():
        theirs = model.generate(torch.from_numpy(prompt.astype(np.int64)), max_new_tokens=64, do_sample=False, use_cache=True)
    policy = hf.load(tmp_path)
    options = EngineOptions(slots=2, slot_tokens=96, decode_tokens=16, append_rows=1, append_tokens=(8,), chunk=32)
    engine = Engine(policy.config, options, next(DeviceMesh.build(1).replicas()))
    request = SampleRequest("row", tuple(map(int, prompt[0])), 0, (0, 1), (), Sampling(temperature=0.0, max_tokens=64))
    try:
        engine.publish(params_of(policy)[1], version=0)
        ours = asyncio.run(engine.generate(request))
    finally:
        engine.close()
    assert list(ours.tokens) == theirs[0, 9:].tolist()


@pytest.mark.parametrize("kind", ["qwen2, tied, grouped", "qwen3-moe", "llama 3.1", "gemma2", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_it_is_in_transformers(kind: str, tmp_path: Path) -> None:
    import torch

    model = made(*VARIANTS[kind])
    model.save_pretrained(tmp_path)
    tokens = seeded.token_rows(SIZES["vocab_size"], 8, 33, 1)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        exact = torch.log_softmax(model(ids).logits, -1).numpy()
        their_gap = np.abs(torch.log_softmax(model.to(torch.bfloat16)(ids).logits.float(), -1).numpy() - exact)
    graph, params = params_of(hf.load(tmp_path))
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    logits = jax.jit(lambda params: nnx.merge(graph, params)(tokens))(narrow)
    our_gap = np.abs(np.asarray(jax.nn.log_softmax(logits)) - exact)
    assert our_gap.mean() <= 1.1 * their_gap.mean(), (our_gap.mean(), their_gap.mean())
    assert np.quantile(our_gap, 0.999) <= 1.25 * np.quantile(their_gap, 0.999)
