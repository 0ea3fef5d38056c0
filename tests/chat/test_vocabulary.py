"""The bytes of a tokenizer's ids, and the form of calls, which is read from the family's own template."""

from __future__ import annotations

import json

import pytest
from made import JINJA, LOOK, SPECIAL, WHOLE, make
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxagent.chat.plain import PlainTemplate
from jaxagent.chat.vocabulary import vocabulary_of
from jaxagent.engine.constraints import Automaton, Compiler
from jaxagent.types import Again, Constraint, Either, Json, Message, ToolCall, ToolSpec

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
    called = ('\n{"name": "look", "arguments": ', Json(json.dumps(LOOK.parameters)))
    assert template.constraint((LOOK,), parallel=False) == Constraint((Either((called,)), "}\n", end), after=(begin,))
    another = Again(Either((("}\n", end, "\n", begin, *called),)))
    assert template.constraint((LOOK,)) == Constraint((Either((called,)), another, "}\n", end), after=(begin,))


# Mistral's later form, in which every call opens with a token of its own.
NAMED = (
    JINJA["mistral"]
    .replace("'[TOOL_CALLS] ['", "''")
    .replace(
        """(call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ')""",
        "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson",
    )
)


@pytest.mark.parametrize(
    ("family", "jinja", "several"),
    [("chatml", "", True), ("mistral", NAMED, True), ("mistral", "", False)],  # the last one numbers the ids of its calls
)
def test_a_turn_of_calls_alone_is_one_or_several_as_the_template_joins_them(family: str, jinja: str, several: bool) -> None:
    template = make(family, jinja)
    compiler = Compiler(template.vocabulary(), template.vocab_size, 4000)
    free = [template.constraint((LOOK, READ), parallel) for parallel in (False, True)]
    one, more = (compiler.compile(Constraint((held.after[0], held.form)), template.stop) for held in free)
    look, read = ToolCall("look", {"key": "37"}), ToolCall("read", {"line": 12})

    def said(automaton: Automaton, *calls: ToolCall, content: str = "") -> bool:
        stop = template.stop[:1]
        ids = template.turn(Message("assistant", content, calls=calls))
        return accepts(automaton, compiler, [*ids, *(stop if ids[-1] not in template.stop else ())])

    for automaton in (one, more):
        assert said(automaton, look) and said(automaton, read)
        assert not said(automaton, content="I know it.")
    for calls in ((look, read), (read, read, look), (look,) * 5):
        assert said(more, *calls) == several
        assert not said(one, *calls)
    wrong = ToolCall("read", {"line": "12"})
    assert not said(more, look, wrong) and not said(more, wrong, look)
    if family == "chatml":  # where a call's own token closes it, a free turn may begin the next one anyway
        assert compiler.compile(free[0], template.stop).states == compiler.compile(free[1], template.stop).states


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_family_whose_calls_are_text_like_any_other_says_that_they_cannot_be_held(family: str) -> None:
    with pytest.raises(ValueError, match="in JSON between control tokens"):
        make(family).constraint((LOOK,))


def test_the_plain_template_has_no_schemas() -> None:
    with pytest.raises(ValueError, match="have no schema"):
        PlainTemplate().constraint((LOOK,))
