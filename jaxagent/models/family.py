"""What the config.json and the tensors of all families share; a family's own file adds what is peculiar to it.

What a family must offer stands at the top of hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxagent.models.rope import RopeScaling
from jaxagent.models.transformer import DecoderConfig

# The checkpoint's name, ours, and the kind of its layout (see hf.py).
Tensors = tuple[tuple[str, str, str], ...]

ATTENTION: Tensors = (
    ("input_layernorm.weight", "attn_norm", "as_is"),
    ("self_attn.q_proj.weight", "q", "into_heads"),
    ("self_attn.k_proj.weight", "k", "into_heads"),
    ("self_attn.v_proj.weight", "v", "into_heads"),
    ("self_attn.o_proj.weight", "o", "out_of_heads"),
)
MLP_NORM: Tensors = (("post_attention_layernorm.weight", "mlp_norm", "as_is"),)
MLP: Tensors = (
    ("mlp.gate_proj.weight", "gate", "transposed"),
    ("mlp.up_proj.weight", "up", "transposed"),
    ("mlp.down_proj.weight", "down", "transposed"),
)
QKV_BIASES: Tensors = tuple((f"self_attn.{x}_proj.bias", f"{x}_bias", "heads") for x in "qkv")
O_BIAS: Tensors = (("self_attn.o_proj.bias", "o_bias", "as_is"),)
QK_NORMS: Tensors = tuple((f"self_attn.{x}_norm.weight", f"{x}_norm", "as_is") for x in "qk")

_COMMON = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}


def completed(c: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it leaves out."""
    given = {name: value for name, value in c.items() if value is not None}
    return {**_COMMON, **defaults, **given}


def refuse(c: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raises ValueError that names every field whose value is not the supported one; a missing field is."""
    faults = [f"{name}={c[name]!r} (supported: {want!r})" for name, want in supported.items() if c.get(name, want) != want]
    if faults:
        raise ValueError(f"config.json of {c.get('model_type')}: {'; '.join(faults)}")


def read(c: dict[str, Any], rope: Mapping[str, Any] | None = None, **peculiar: Any) -> DecoderConfig:
    """Our config from a completed config.json. `rope`: where a family keeps several."""
    rope = rope or c.get("rope_parameters") or c.get("rope_scaling") or {}
    try:
        scaling = RopeScaling.from_hf(dict(rope))
    except ValueError as error:
        raise ValueError(f"config.json of {c['model_type']}: {error}") from None
    heads = c["num_attention_heads"]
    fields: dict[str, Any] = {
        "vocab_size": c["vocab_size"],
        "width": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "heads": heads,
        "kv_heads": c.get("num_key_value_heads", heads),
        "head_width": c.get("head_dim") or c["hidden_size"] // heads,
        "ffn_width": c["intermediate_size"],
        "rope_theta": float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
        "rope_scaling": scaling,
        "norm_eps": float(c["rms_norm_eps"]),
        "tied_head": bool(c["tie_word_embeddings"]),
        "max_positions": c["max_position_embeddings"],
        "family": c["model_type"],
    }
    return DecoderConfig(**{**fields, **peculiar})


def sliding_layers(c: Mapping[str, Any], otherwise: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers slide: by `layer_types`, or what the model type says where config.json does not."""
    kinds = c.get("layer_types")
    if kinds is None:
        return otherwise
    known = {"sliding_attention": True, "full_attention": False}
    if strange := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"config.json of {c['model_type']}: layer_types has {strange[0]!r} (supported: {', '.join(known)})")
    return tuple(known[kind] for kind in kinds)


def write(c: DecoderConfig, architecture: str, **peculiar: Any) -> dict[str, Any]:
    """config.json as transformers reads it."""
    rope = {**c.rope_scaling.to_hf(), "rope_theta": c.rope_theta}
    return {
        "architectures": [architecture],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.ffn_width,
        "rope_theta": c.rope_theta,
        "rope_parameters": rope,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_head,
        "max_position_embeddings": c.max_positions,
        **peculiar,
    }


def layer_types(c: DecoderConfig) -> list[str]:
    return ["sliding_attention" if c.slides(i) else "full_attention" for i in range(c.layers)]


def top_tensors(c: DecoderConfig) -> Tensors:
    """The tensors outside the layers."""
    head: Tensors = () if c.tied_head else (("lm_head.weight", "head", "as_is"),)
    return (("model.embed_tokens.weight", "embed", "as_is"), ("model.norm.weight", "norm", "as_is"), *head)
