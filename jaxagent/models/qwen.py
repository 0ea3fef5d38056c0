"""Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE: their config.json and tensor names, and what is peculiar to them.

Qwen2 adds biases to queries, keys and values, and its later layers may slide. Qwen3 has none and norms queries and keys per
head. Qwen3-MoE is Qwen3 with a mixture of experts in every layer.
"""

from __future__ import annotations

from typing import Any

from jaxagent.models.family import (
    ATTENTION,
    MLP,
    MLP_NORM,
    QK_NORMS,
    QKV_BIASES,
    Tensors,
    completed,
    layer_types,
    read,
    refuse,
    sliding_layers,
    top_tensors,
    write,
)
from jaxagent.models.transformer import DecoderConfig

__all__ = ["from_hf", "layer_tensors", "to_hf", "top_tensors"]

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_DEFAULTS = {
    "qwen2": {"max_window_layers": 28, "sliding_window": 4096},
    "qwen3": {"head_dim": 128, "max_window_layers": 28, "sliding_window": 4096},
    "qwen3_moe": {"sliding_window": 4096, "num_experts_per_tok": 8, "norm_topk_prob": False},
}
EXPERTS: Tensors = (
    ("mlp.gate.weight", "router", "transposed"),
    ("mlp.experts.{expert}.gate_proj.weight", "gate", "transposed"),
    ("mlp.experts.{expert}.up_proj.weight", "up", "transposed"),
    ("mlp.experts.{expert}.down_proj.weight", "down", "transposed"),
)


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Our config from config.json. Raises ValueError naming a field that is not supported."""
    c = completed(c, _DEFAULTS[c["model_type"]])
    refuse(c, {"hidden_act": "silu", "attention_bias": False})
    sliding: tuple[bool, ...] = ()
    if c.get("use_sliding_window"):
        first = c["max_window_layers"] if c["model_type"] != "qwen3_moe" else 0
        sliding = sliding_layers(c, tuple(i >= first for i in range(c["num_hidden_layers"])))
    mixture = {}
    if c["model_type"] == "qwen3_moe":
        refuse(c, {"mlp_only_layers": [], "decoder_sparse_step": 1})
        mixture = {
            "experts": c["num_experts"] if "num_experts" in c else c["num_local_experts"],
            "experts_per_token": c["num_experts_per_tok"],
            "normalised_experts": c["norm_topk_prob"],
            "ffn_width": c["moe_intermediate_size"],
        }
    return read(
        c,
        qkv_bias=c["model_type"] == "qwen2",
        qk_norm=c["model_type"] != "qwen2",
        sliding=sliding if any(sliding) else (),
        window=c["sliding_window"] if any(sliding) else 0,
        **mixture,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """config.json as transformers reads it."""
    own: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": any(c.sliding)}
    if any(c.sliding):
        own |= {"sliding_window": c.window, "layer_types": layer_types(c), "max_window_layers": c.sliding.index(True)}
    if c.experts:
        own |= {
            "num_experts": c.experts,
            "num_experts_per_tok": c.experts_per_token,
            "norm_topk_prob": c.normalised_experts,
            "moe_intermediate_size": c.ffn_width,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }
    return write(c, ARCHITECTURES[c.family], **own)


def layer_tensors(c: DecoderConfig) -> Tensors:
    """The (checkpoint name, our name, layout) of every tensor of a layer."""
    norms, biases = QK_NORMS if c.qk_norm else (), QKV_BIASES if c.qkv_bias else ()
    return ATTENTION + MLP_NORM + (EXPERTS if c.experts else MLP) + biases + norms
