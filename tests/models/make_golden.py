"""Writes golden.npz: what transformers computes for a tiny model of every family, logits and all gradients in float32.

Run by hand, in an environment with torch, after a change of the cases; test_golden.py compares with the file without torch.

    pip install torch && python tests/models/make_golden.py

The weights are not in the file: seeded.py draws them again from the seed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import seeded
import torch
import transformers
from safetensors.numpy import load_file

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "query_pre_attn_scalar": 12,
    "pad_token_id": None,  # torch gives the embedding of padding no gradient
}
LOCAL = {"rope_type": "default", "rope_theta": 55.0}


def plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# Name -> the class of its config, and what differs from its defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_tied": ("Qwen2", {"num_key_value_heads": 2, "rope_parameters": plain(12345.0), "tie_word_embeddings": True}),
    "qwen2_untied": ("Qwen2", {"num_key_value_heads": 1, "rope_parameters": plain(1e4), "tie_word_embeddings": False}),
    "qwen3_tied": (
        "Qwen3",
        {"num_key_value_heads": 2, "head_dim": 8, "rope_parameters": plain(777.0), "tie_word_embeddings": True},
    ),
    "qwen3_untied": (
        "Qwen3",
        {"num_key_value_heads": 4, "head_dim": 6, "rope_parameters": plain(5e6), "tie_word_embeddings": False},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": plain(5e3),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
        },
    ),
    "llama": ("Llama", {"num_key_value_heads": 2, "rope_parameters": {**plain(5e3), "rope_type": "llama3", **LLAMA3}}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "rope_parameters": plain(333.0)}),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": LOCAL,
            },
        },
    ),
}


def make_model(kind: str, fields: dict[str, Any], seed: int) -> Any:
    """The model with the weights of `seeded.tensors`, drawn under the names that a checkpoint has."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields})
    with tempfile.TemporaryDirectory() as place:
        shapes = {name: x.shape for name, x in saved(transformers.AutoModelForCausalLM.from_config(config), place).items()}
        seeded.write_checkpoint(Path(place, "seeded"), config.to_dict(), seeded.tensors(shapes, seed))
        return transformers.AutoModelForCausalLM.from_pretrained(
            Path(place, "seeded"), dtype=torch.float32, attn_implementation="eager"
        ).eval()


def saved(model: Any, place: str) -> dict[str, np.ndarray]:
    """A model's tensors as its checkpoint holds them."""
    model.save_pretrained(place)
    return dict(load_file(Path(place, "model.safetensors")))


def logits_and_gradients(model: Any, tokens: np.ndarray, ct: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The logits, and the gradient of sum(logits * ct) by tensor name."""
    logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    (logits * torch.from_numpy(ct)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as place:
        return logits.detach().numpy(), saved(model, place)


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for seed, (name, (kind, fields)) in enumerate(CASES.items()):
        model = make_model(kind, fields, seed)
        tokens = seeded.token_rows(SIZES["vocab_size"], 2, 12, seed)
        logits, grads = logits_and_gradients(model, tokens, seeded.cotangent(2, 12, SIZES["vocab_size"], seed=seed))
        arrays[f"{name}/config"] = np.asarray(json.dumps(model.config.to_dict()))
        arrays[f"{name}/seed"] = np.asarray(seed)
        arrays[f"{name}/tokens"] = tokens
        arrays[f"{name}/logits"] = logits
        arrays |= {f"{name}/grad/{tensor}": grad for tensor, grad in grads.items()}
    path = Path(__file__).with_name("golden.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size} bytes, by transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
