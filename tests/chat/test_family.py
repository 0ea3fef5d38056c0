"""Which template a checkpoint speaks: by its tokenizer's control tokens, and never by guessing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made import DIALECT, JINJA, LOOK, SPECIAL, WHOLE, make, make_tokenizer
from test_history import BRIEF

from jaxagent.chat.family import DIALECTS, dialect_of, template_of
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.tokenizer_template import TokenizerTemplate
from jaxagent.types import Message


@pytest.mark.parametrize("family", DIALECT)
def test_a_checkpoint_directory_gives_the_same_template(family: str, tmp_path: Path) -> None:
    template = make(family)
    template.tokenizer.save_pretrained(tmp_path)
    loaded = template_of(str(tmp_path))
    assert isinstance(loaded, TokenizerTemplate)
    assert loaded.dialect is DIALECT[family]
    assert (loaded.stop, loaded.vocab_size) == (template.stop, template.vocab_size)
    asked = [Message("system", "a"), Message("user", "b")]
    assert loaded.prompt(asked, (LOOK,)) == template.prompt(asked, (LOOK,))


def test_every_family_of_the_table_is_recognised_by_its_own_tokens_only() -> None:
    assert set(DIALECT.values()) == set(DIALECTS)
    for family, dialect in DIALECT.items():
        assert dialect_of({*SPECIAL[family], *WHOLE.get(family, ())}) is dialect
    assert dialect_of({"<|im_start|>", "<|im_end|>", "<|tool_call_start|>"}) is None  # LFM2, whose calls are others
    assert dialect_of({"<|user|>", "<|assistant|>", "<|end|>"}) is None


def test_an_unknown_family_is_refused_by_its_name_with_those_that_are_known(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("gemma")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    known = r"phi3 has a tokenizer of no known chat family, or no chat template.*ChatML \(Qwen\).*Llama 3 .*Gemma"
    with pytest.raises(ValueError, match=known):
        template_of(str(tmp_path))


def test_a_template_that_rewrites_is_refused_with_the_checkpoint_named_unless_declared(tmp_path: Path) -> None:
    make_tokenizer("chatml", BRIEF).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: the chat template rewrites what was said before"):
        template_of(str(tmp_path))
    loaded = template_of(str(tmp_path), ChatOptions("keep"))
    assert isinstance(loaded, TokenizerTemplate)
    assert loaded.rewritings
    assert JINJA["chatml"] != BRIEF
