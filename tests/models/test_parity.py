"""Fresh random models of transformers against ours, both ways. Needs torch: `pytest -m parity`.

test_golden.py holds the same promise without torch, for fixed models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeded
from flax import nnx
from safetensors.numpy import load_file

from jaxagent.models import hf
from jaxagent.models.transformer import params_of

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2, tied, grouped": {"kind": "qwen2", "num_key_value_heads": 2, "tied": True, "theta": 1e6},
    "qwen2, untied, one key head": {"kind": "qwen2", "num_key_value_heads": 1, "tied": False, "theta": 54321.0},
    "qwen3, tied, wide heads": {"kind": "qwen3", "num_key_value_heads": 2, "head_dim": 24, "tied": True, "theta": 99.5},
    "qwen3, untied, ungrouped": {"kind": "qwen3", "num_key_value_heads": 4, "head_dim": 8, "tied": False, "theta": 1e4},
}


@pytest.fixture(params=VARIANTS.values(), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> Any:
    """A model as transformers initialises it, but for norms and biases, which would be ones and zeros."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    variant = dict(request.param)
    kind, theta, tied = variant.pop("kind"), variant.pop("theta"), variant.pop("tied")
    make = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[kind]
    rope = {"rope_type": "default", "rope_theta": theta}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        make(**SIZES, **variant, rope_parameters=rope, tie_word_embeddings=tied, initializer_range=0.2), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


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
    wanted = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, grad in wanted.items():
        np.testing.assert_allclose(ours[name], grad, atol=1e-4 * max(1e-3, np.abs(grad).max()), rtol=1e-4, err_msg=name)


def test_our_export_loads_in_transformers_with_equal_logits_and_tensors(model: Any, tmp_path: Path) -> None:
    import torch
    import transformers

    model.save_pretrained(tmp_path / "theirs")
    hf.save(hf.load(tmp_path / "theirs"), tmp_path / "ours")
    again, faults = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
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
