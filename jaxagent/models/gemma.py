"""Gemma 2 and the text part of Gemma 3: their config.json and tensor names, and what is peculiar to them.

Both norm the output of attention and of the feed-forward too, store norms as their distance from one, scale the embedding by
sqrt(D), use a tanh GELU and let layers slide in turn. Gemma 2 caps scores and logits softly. Gemma 3 norms queries and keys
and rotates its sliding layers by a base of their own. A checkpoint with a vision tower gives its language model only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxagent.models.family import (
    ATTENTION,
    MLP,
    O_BIAS,
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

__all__ = ["PREFIXES", "from_hf", "layer_tensors", "to_hf", "top_tensors"]

# A multimodal checkpoint's names: what comes before the language model's own, and what is left out.
PREFIXES: Mapping[str, str | None] = {
    "language_model.": "",
    "model.language_model.": "model.",
    **dict.fromkeys(("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")),
}
ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_SIZES,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {**_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
}
_THETA, _LOCAL_THETA = 1e6, 1e4  # of Gemma 3, where config.json does not say
NORMS: Tensors = (
    ("post_attention_layernorm.weight", "post_attn_norm", "as_is"),
    ("pre_feedforward_layernorm.weight", "mlp_norm", "as_is"),
    ("post_feedforward_layernorm.weight", "post_mlp_norm", "as_is"),
)


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Our config from config.json. Raises ValueError naming a field that is not supported."""
    if c["model_type"] == "gemma3":  # with a vision tower
        c = {"tie_word_embeddings": c.get("tie_word_embeddings"), **c["text_config"], "model_type": "gemma3_text"}
    # null means off for these two, not the default
    caps: dict[str, Any] = {name: c[name] or 0.0 for name in ("final_logit_softcapping", "attn_logit_softcapping") if name in c}
    c = {**completed(c, _DEFAULTS[c["model_type"]]), **caps}
    c.setdefault("hidden_activation", c.get("hidden_act", "gelu_pytorch_tanh"))
    refuse(c, {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False})
    period = c.get("sliding_window_pattern", 2)
    sliding = sliding_layers(c, tuple(bool((i + 1) % period) for i in range(c["num_hidden_layers"])))
    rope, local_theta = _ropes(c) if c["model_type"] == "gemma3_text" else (None, 0.0)
    return read(
        c,
        rope,
        local_rope_theta=local_theta if any(sliding) else 0.0,
        sliding=sliding if any(sliding) else (),
        window=c["sliding_window"] if any(sliding) else 0,
        activation="gelu_tanh",
        attn_scale=float(c["query_pre_attn_scalar"]) ** -0.5,
        attn_softcap=float(c.get("attn_logit_softcapping", 0.0)),
        logit_softcap=float(c.get("final_logit_softcapping", 0.0)),
        qk_norm=c["model_type"] == "gemma3_text",
        qkv_bias=bool(c.get("attention_bias")),
        o_bias=bool(c.get("attention_bias")),
        plus_one_norms=True,
        post_norms=True,
        scaled_embed=True,
    )


def _ropes(c: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The rope of full layers, and the base of sliding ones, from the nested form or the older flat one."""
    nested = c.get("rope_parameters") or {}
    if "full_attention" not in nested:
        full = {"rope_theta": c.get("rope_theta", _THETA), **(c.get("rope_scaling") or {}), **nested}
        return full, float(c.get("rope_local_base_freq", _LOCAL_THETA))
    local = nested.get("sliding_attention") or {}
    refuse({"model_type": "gemma3_text", "rope_type of sliding layers": local.get("rope_type", "default")}, _LOCAL_ROPE)
    return {"rope_theta": _THETA, **nested["full_attention"]}, float(local.get("rope_theta", _LOCAL_THETA))


_LOCAL_ROPE = {"rope_type of sliding layers": "default"}


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """config.json as transformers reads it."""
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _whole(c.attn_scale**-2),
        "sliding_window": c.window or 4096,
        "layer_types": layer_types(c),
        "attn_logit_softcapping": c.attn_softcap or None,
        "final_logit_softcapping": c.logit_softcap or None,
        "attention_bias": c.qkv_bias,
    }
    if c.family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": c.local_rope_theta or c.rope_theta}
        full = {**c.rope_scaling.to_hf(), "rope_theta": c.rope_theta}
        own["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return write(c, ARCHITECTURES[c.family], **own)


def _whole(x: float) -> int | float:
    return round(x) if abs(x - round(x)) < 1e-6 * x else x


def layer_tensors(c: DecoderConfig) -> Tensors:
    """The (checkpoint name, our name, layout) of every tensor of a layer."""
    norms, biases = QK_NORMS if c.qk_norm else (), QKV_BIASES + O_BIAS if c.qkv_bias else ()
    return ATTENTION + NORMS + MLP + norms + biases
