"""The bytes of a tokenizer's ids, and the form of calls, which is read from the family's own template."""

from __future__ import annotations

import json

import pytest
from made import LOOK, SPECIAL, WHOLE, make
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxagent.chat.plain import PlainTemplate
from jaxagent.chat.vocabulary import vocabulary_of
from jaxagent.engine.constraints import Automaton, Compiler
from jaxagent.types import Constraint, Either, Json, Message, ToolCall, ToolSpec

TEXT = 'Look up the key, "é ☃"\n\n\t{"a": [1]}'
READ = ToolSpec("read", "", {"type": "object", "properties": {"line": {"type": "integer"}}, "required": []})


@pytest.mark.parametrize("family", SPECIAL)
def test_the_bytes_of_the_ids_are_the_text(family: str) -> None:
    template = make(family)
    vocabulary = template.vocabulary()
    ids = template.tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(vocabulary.pieces[i] for i in ids) == TEXT.encode()
    assert len(vocabulary.pieces) == template.vocab_size
    named = {template.tokenizer.convert_ids_to_tokens(i) for i in vocabulary.control}
    assert named == {*SPECIAL[family], *(WHOLE.get(family, ()) if family != "gemma" else ())}


def test_sentence_piece_letters_are_bytes_and_spaces() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<0x0A>": 0, "▁a": 1, "é": 2, "<end>": 3}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    assert vocabulary_of(fast, ["<end>"]).pieces == (b"\n", b" a", "é".encode(), b"<end>")


def test_the_plain_vocabulary_is_bytes_and_control_tokens() -> None:
    vocabulary = PlainTemplate().vocabulary()
    assert vocabulary.pieces[65] == b"A"
    assert vocabulary.pieces[263] == b"<eos>"
    assert vocabulary.control == frozenset(range(256, 264))


def accepts(automaton: Automaton, compiler: Compiler, tokens: list[int]) -> bool:
    state = automaton.start
    for token in tokens:
        if not automaton.mask_GW[state, token // 32] >> (token % 32) & 1:
            return False
        for symbol in compiler.pieces.symbol_VM[token]:
            state = int(automaton.next_GA[state, symbol]) if symbol >= 0 else state
    return True


@pytest.mark.parametrize("family", ["chatml", "mistral"])
def test_every_call_that_the_template_writes_can_be_sampled_and_wrong_ones_cannot(family: str) -> None:
    template = make(family)
    compiler = Compiler(template.vocabulary(), template.vocab_size, 4000)
    automaton = compiler.compile(template.constraint((LOOK, READ)), template.stop)

    def said(content: str, *calls: ToolCall) -> bool:
        return accepts(automaton, compiler, template.turn(Message("assistant", content, calls=calls)))

    assert said("I know it.")
    for call in (ToolCall("look", {"key": 'é "\n'}), ToolCall("read", {"line": 12}), ToolCall("read", {})):
        assert said("", call)
    for call in (
        ToolCall("look", {}),
        ToolCall("look", {"key": 12}),
        ToolCall("look", {"key": "a", "deep": True}),
        ToolCall("read", {"line": "12"}),
        ToolCall("write", {}),
    ):
        assert not said("", call)
    if family == "chatml":
        look = ToolCall("look", {"key": "37"})
        assert said("Both.", look, ToolCall("read", {"line": 1}))
        assert not said("Both.", look, ToolCall("read", {"line": None}))


def test_the_form_of_a_chatml_call_is_that_of_the_template() -> None:
    template = make("chatml")
    begin, end = template.tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    form = ('\n{"name": "look", "arguments": ', Json(json.dumps(LOOK.parameters)), "}\n", end)
    assert template.constraint((LOOK,)) == Constraint(Either((form,)), after=(begin,))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_family_whose_calls_are_text_like_any_other_says_that_they_cannot_be_held(family: str) -> None:
    with pytest.raises(ValueError, match="in JSON between control tokens"):
        make(family).constraint((LOOK,))


def test_the_plain_template_has_no_schemas() -> None:
    with pytest.raises(ValueError, match="have no schema"):
        PlainTemplate().constraint((LOOK,))
