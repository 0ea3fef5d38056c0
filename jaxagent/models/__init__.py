"""The one decoder and the families that fill it.

policy = load(path)             # any supported Hugging Face checkpoint directory
logits_BTV = policy(tokens_BT)
save(policy, path)
"""

from jaxagent.models.hf import load, save
from jaxagent.models.transformer import Decoder, DecoderConfig, Policy

__all__ = ["Decoder", "DecoderConfig", "Policy", "load", "save"]
