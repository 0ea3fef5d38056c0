"""Llama 3, 3.1, 3.2 and 3.3: their config.json and tensor names, and what is peculiar to them.

From 3.1 on the rotary frequencies are stretched (`rope_type: llama3`). Some fine-tunes put biases on attention.
"""

from __future__ import annotations

from typing import Any

from jaxagent.models.family import (
    ATTENTION,
    MLP,
    MLP_NORM,
    O_BIAS,
    QKV_BIASES,
    Tensors,
    completed,
    read,
    refuse,
    top_tensors,
    write,
)
from jaxagent.models.transformer import DecoderConfig

__all__ = ["from_hf", "layer_tensors", "to_hf", "top_tensors"]


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Our config from config.json. Raises ValueError naming a field that is not supported."""
    c = completed(c, {"max_position_embeddings": 2048})
    refuse(c, {"hidden_act": "silu", "mlp_bias": False})
    biased = bool(c.get("attention_bias"))
    return read(c, qkv_bias=biased, o_bias=biased)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """config.json as transformers reads it."""
    return write(c, "LlamaForCausalLM", hidden_act="silu", attention_bias=c.qkv_bias, mlp_bias=False)


def layer_tensors(c: DecoderConfig) -> Tensors:
    """The (checkpoint name, our name, layout) of every tensor of a layer."""
    return ATTENTION + MLP_NORM + MLP + (QKV_BIASES + O_BIAS if c.qkv_bias else ())
