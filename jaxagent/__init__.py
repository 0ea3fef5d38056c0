"""jaxagent turns a language model into a tool-using agent by reinforcement learning; this file imports nothing heavy."""

__version__ = "0.1.0"
