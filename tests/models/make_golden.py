"""Writes golden.npz: what transformers computes for tiny Qwen2 and Qwen3 models, logits and all gradients in float32.

Run by hand, in an environment with torch, after a change of the cases; test_golden.py compares with the file without torch.

    pip install torch && python tests/models/make_golden.py

The weights are not in the file: seeded.py draws them again from the seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import seeded
import torch
import transformers

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
# Name -> model type, key heads, head width, base of the rotary embedding, whether the head is the embedding.
CASES: dict[str, tuple[str, int, int, float, bool]] = {
    "qwen2_tied": ("qwen2", 2, 4, 12345.0, True),
    "qwen2_untied": ("qwen2", 1, 4, 10000.0, False),
    "qwen3_tied": ("qwen3", 2, 8, 777.0, True),
    "qwen3_untied": ("qwen3", 4, 6, 5e6, False),
}


def make_config(kind: str, kv_heads: int, head_width: int, theta: float, tied: bool) -> Any:
    make = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[kind]
    return make(
        **SIZES,
        num_key_value_heads=kv_heads,
        head_dim=head_width,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def make_model(config: Any, seed: int) -> Any:
    """The model with the weights of `seeded.tensors`; a tied head is not a tensor of its own."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    weights = seeded.tensors({name: tuple(p.shape) for name, p in parameters.items()}, seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name]))
    return model


def logits_and_gradients(model: Any, tokens: np.ndarray, ct: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The logits, and the gradient of sum(logits * ct) by tensor name."""
    model.zero_grad()
    logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    (logits * torch.from_numpy(ct)).sum().backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for seed, (name, case) in enumerate(CASES.items()):
        config = make_config(*case)
        model = make_model(config, seed)
        tokens = seeded.token_rows(SIZES["vocab_size"], 2, 12, seed)
        logits, grads = logits_and_gradients(model, tokens, seeded.cotangent(2, 12, SIZES["vocab_size"], seed=seed))
        arrays[f"{name}/config"] = np.asarray(json.dumps(config.to_dict()))
        arrays[f"{name}/seed"] = np.asarray(seed)
        arrays[f"{name}/tokens"] = tokens
        arrays[f"{name}/logits"] = logits
        arrays |= {f"{name}/grad/{tensor}": grad for tensor, grad in grads.items()}
    path = Path(__file__).with_name("golden.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size} bytes, by transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
