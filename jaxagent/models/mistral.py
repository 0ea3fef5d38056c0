"""Mistral 7B and what is built like it: Llama without biases, whose layers may all slide."""

from __future__ import annotations

from typing import Any

from jaxagent.models.family import ATTENTION, MLP, MLP_NORM, Tensors, completed, read, refuse, top_tensors, write
from jaxagent.models.transformer import DecoderConfig

__all__ = ["from_hf", "layer_tensors", "to_hf", "top_tensors"]


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Our config from config.json. Raises ValueError naming a field that is not supported."""
    window = c.get("sliding_window", 4096)  # null means none
    c = completed(c, {"num_key_value_heads": 8, "max_position_embeddings": 131072})
    refuse(c, {"hidden_act": "silu", "attention_bias": False})
    return read(c, sliding=(True,) * c["num_hidden_layers"] if window else (), window=window or 0)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """config.json as transformers reads it."""
    return write(c, "MistralForCausalLM", hidden_act="silu", sliding_window=c.window or None)


def layer_tensors(c: DecoderConfig) -> Tensors:
    """The (checkpoint name, our name, layout) of every tensor of a layer."""
    return ATTENTION + MLP_NORM + MLP
