"""Qwen2, Qwen2.5 and Qwen3 checkpoints: their config.json, and where each of their tensors lives in ours."""

from __future__ import annotations

from typing import Any

from jaxagent.models.transformer import DecoderConfig

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Per layer: the checkpoint's name, ours, and the kind of its layout (see hf.py).
LAYER = (
    ("input_layernorm.weight", "attn_norm", "as_is"),
    ("self_attn.q_proj.weight", "q", "into_heads"),
    ("self_attn.k_proj.weight", "k", "into_heads"),
    ("self_attn.v_proj.weight", "v", "into_heads"),
    ("self_attn.o_proj.weight", "o", "out_of_heads"),
    ("post_attention_layernorm.weight", "mlp_norm", "as_is"),
    ("mlp.gate_proj.weight", "gate", "transposed"),
    ("mlp.up_proj.weight", "up", "transposed"),
    ("mlp.down_proj.weight", "down", "transposed"),
)
BIASES = tuple((f"self_attn.{x}_proj.bias", f"{x}_bias", "heads") for x in "qkv")
QK_NORMS = tuple((f"self_attn.{x}_norm.weight", f"{x}_norm", "as_is") for x in "qk")


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Our config from config.json. Raises ValueError naming a field that is not supported."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        "rope type": (kind, "default"),
        "use_sliding_window": (bool(c.get("use_sliding_window")), False),
        "hidden_act": (c.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(c.get("attention_bias")), False),
    }
    faults = [f"{name}={got!r} (supported: {want!r})" for name, (got, want) in refused.items() if got != want]
    if faults:
        raise ValueError(f"config.json of {c.get('model_type')}: {'; '.join(faults)}")
    heads = c["num_attention_heads"]
    return DecoderConfig(
        vocab_size=c["vocab_size"],
        width=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads", heads),
        head_width=c.get("head_dim") or c["hidden_size"] // heads,
        ffn_width=c["intermediate_size"],
        rope_theta=float(c.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        tied_head=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=c["model_type"] == "qwen2",
        qk_norm=c["model_type"] == "qwen3",
        max_positions=c.get("max_position_embeddings", 32768),
        family=c["model_type"],
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """config.json as transformers reads it."""
    return {
        "architectures": [ARCHITECTURES[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.ffn_width,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_head,
        "max_position_embeddings": c.max_positions,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": False,
    }


def layer_tensors(c: DecoderConfig) -> tuple[tuple[str, str, str], ...]:
    """The (checkpoint name, our name, layout) of every tensor of a layer."""
    return LAYER + (BIASES if c.qkv_bias else ()) + (QK_NORMS if c.qk_norm else ())


def top_tensors(c: DecoderConfig) -> tuple[tuple[str, str, str], ...]:
    """The same for the tensors outside the layers."""
    head = () if c.tied_head else (("lm_head.weight", "head", "as_is"),)
    return (("model.embed_tokens.weight", "embed", "as_is"), ("model.norm.weight", "norm", "as_is"), *head)
