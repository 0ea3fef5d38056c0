"""Which template a checkpoint speaks."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from jaxagent.chat import chatml, gemma, llama, mistral
from jaxagent.chat.dialect import Dialect
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.plain import PlainTemplate, is_plain
from jaxagent.chat.template import Template

DIALECTS = (chatml.DIALECT, llama.DIALECT, gemma.DIALECT, mistral.DIALECT)


def template_of(checkpoint: str, options: ChatOptions | None = None) -> Template:
    """The chat template of a checkpoint directory; the plain byte-level one where it is empty or says so.

    Raises ValueError for a checkpoint without a tokenizer, of a family that is not known, or whose template rewrites what was
    said in a way that `options` do not allow.
    """
    if not checkpoint:
        return PlainTemplate()
    if not (Path(checkpoint) / "tokenizer_config.json").is_file():
        raise ValueError(f"{checkpoint}: a tokenizer is wanted beside the weights, tokenizer_config.json is missing")
    if is_plain(Path(checkpoint)):
        return PlainTemplate()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it regrets at import that torch is not there
    found = importlib.import_module("jaxagent.chat.tokenizer_template")
    tokenizer = found.tokenizer_of(checkpoint)
    dialect = dialect_of(set(tokenizer.get_added_vocab()))
    if dialect is None or not tokenizer.chat_template:
        known = "; ".join(f"{dialect.family} ({' '.join(dialect.control)})" for dialect in DIALECTS)
        raise ValueError(
            f"{checkpoint}: {_name(Path(checkpoint))} has a tokenizer of no known chat family, or no chat template. "
            "Take its instruction-tuned checkpoint, or put the chat_template.jinja of that beside the weights. "
            f"Families are recognised by their control tokens: {known}"
        )
    try:
        return found.TokenizerTemplate(tokenizer, dialect, options)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None


def dialect_of(tokens: set[str]) -> Dialect | None:
    """The dialect of a tokenizer with these added tokens."""
    return next((dialect for dialect in DIALECTS if dialect.speaks(tokens)), None)


def _name(checkpoint: Path) -> str:
    """What a checkpoint says it is."""
    for file in ("config.json", "tokenizer_config.json"):
        if (checkpoint / file).is_file():
            said = json.loads((checkpoint / file).read_text())
            if name := said.get("model_type") or said.get("tokenizer_class"):
                return str(name)
    return "it"
