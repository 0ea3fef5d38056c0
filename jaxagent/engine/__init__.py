"""The sampler: tokens in; tokens and log-probs out. It knows no messages, tools or worlds."""

from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.replicas import Replicas

__all__ = ["Engine", "EngineOptions", "Replicas"]
