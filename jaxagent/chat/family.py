"""Which template a checkpoint speaks."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from jaxagent.chat.plain import PlainTemplate, is_plain
from jaxagent.chat.template import Template


def template_of(checkpoint: str) -> Template:
    """The chat template of a checkpoint directory; the plain byte-level one where it is empty or says so."""
    if not checkpoint:
        return PlainTemplate()
    if not (Path(checkpoint) / "tokenizer_config.json").is_file():
        raise ValueError(f"{checkpoint}: a tokenizer is wanted beside the weights, tokenizer_config.json is missing")
    if is_plain(Path(checkpoint)):
        return PlainTemplate()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it regrets at import that torch is not there
    return importlib.import_module("jaxagent.chat.chatml").ChatMLTemplate.load(checkpoint)
