"""The byte-level template: nothing that is said can become a control token, and what is rendered is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jaxagent.chat.family import template_of
from jaxagent.chat.plain import (
    CALL,
    CONTROL,
    END_CALL,
    EOS,
    RESULT,
    SYSTEM,
    TURN,
    USER,
    PlainTemplate,
    is_plain,
    tokenizer_files,
)
from jaxagent.chat.template import render
from jaxagent.types import Message, ToolCall, ToolSpec

TEMPLATE = PlainTemplate()
LOOK = ToolSpec("look", "", {"type": "object", "properties": {"key": {"type": "string"}}})
MOVE = ToolSpec("move", "", {"type": "object", "properties": {"x": {"type": "string"}, "y": {"type": "string"}}})
TOOLS = (LOOK, MOVE, ToolSpec("A"))

texts = st.text(max_size=30) | st.sampled_from(CONTROL) | st.sampled_from([f"a{token}b" for token in CONTROL])


def test_a_dialogue_is_the_bytes_between_the_control_tokens() -> None:
    ids = TEMPLATE.prompt([Message("system", "hi"), Message("user", "37A")], TOOLS)
    assert ids == [SYSTEM, *b"hi", USER, *b"37A", TURN]
    assert TEMPLATE.extend([Message("tool", "52", name="A")]) == [RESULT, *b"52", TURN]
    assert TEMPLATE.turn(Message("assistant", "64")) == [*b"64", EOS]
    assert TEMPLATE.turn(Message("assistant", calls=(ToolCall("A", {"key": "37"}),))) == [CALL, *b"A37", END_CALL]


@drawn
@given(texts)
def test_an_answer_is_read_back_as_it_was_written(content: str) -> None:
    message = Message("assistant", content)
    assert TEMPLATE.parse(TEMPLATE.turn(message), TOOLS) == message


@drawn
@given(texts.filter(bool))
def test_a_call_is_read_back_as_it_was_written(value: str) -> None:
    message = Message("assistant", calls=(ToolCall("look", {"key": value}),))
    assert TEMPLATE.parse(TEMPLATE.turn(message), TOOLS) == message


@drawn
@given(st.text(min_size=1).filter(lambda text: "," not in text), st.text())
def test_a_call_of_two_arguments_is_read_back_and_the_last_may_hold_commas(x: str, y: str) -> None:
    message = Message("assistant", calls=(ToolCall("move", {"x": x, "y": y}),))
    assert TEMPLATE.parse(TEMPLATE.turn(message), TOOLS) == message


def test_a_call_without_arguments_is_read_back() -> None:
    message = Message("assistant", calls=(ToolCall("A"),))
    assert TEMPLATE.parse(TEMPLATE.turn(message), TOOLS) == message


def test_a_turn_of_several_calls_is_refused_rather_than_cut() -> None:
    with pytest.raises(ValueError, match="one call per turn"):
        TEMPLATE.turn(Message("assistant", calls=(ToolCall("A"), ToolCall("A"))))


@drawn
@given(texts, texts)
def test_no_text_of_a_user_or_a_tool_becomes_a_control_token(said: str, found: str) -> None:
    prompt = TEMPLATE.prompt([Message("user", said)], TOOLS)
    observation = TEMPLATE.extend([Message("tool", found, name="look")])
    assert [i for i in prompt if i >= 256] == [USER, TURN]
    assert [i for i in observation if i >= 256] == [RESULT, TURN]
    assert bytes(prompt[1:-1]).decode() == said
    assert bytes(observation[1:-1]).decode() == found


@drawn
@given(st.lists(st.integers(0, 263), max_size=12))
def test_whatever_is_sampled_is_read_as_a_message_or_told_as_an_error(ids: list[int]) -> None:
    message = TEMPLATE.parse(ids, TOOLS)
    assert message.role == "assistant"
    ended = bool(ids) and ids[-1] in TEMPLATE.stop
    assert ended or message.error
    assert not (message.error and message.calls)
    assert isinstance(TEMPLATE.text(ids), str)


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([], "the turn did not end within its token budget"),
        ([*b"64"], "the turn did not end within its token budget"),
        ([CALL, *b"A37"], "the turn did not end within its token budget"),
        ([CALL, *b"A37", EOS], "control tokens in the wrong place"),
        ([*b"64", END_CALL], "control tokens in the wrong place"),
        ([*b"6", TURN, *b"4", EOS], "control tokens in the wrong place"),
        ([CALL, CALL, *b"A37", END_CALL], "control tokens in the wrong place"),
        ([CALL, END_CALL], "a call needs a name"),
        ([CALL, *b"37", END_CALL], "a call needs a name"),
        ([CALL, *b"B37", END_CALL], "no tool 'B'; there are look, move, A"),
        ([CALL, 0xFF, END_CALL], "a call needs a name"),
    ],
)
def test_a_malformed_turn_says_what_is_wrong_with_it(ids: list[int], error: str) -> None:
    message = TEMPLATE.parse(ids, TOOLS)
    assert (message.error, message.calls) == (error, ())


def test_half_a_character_is_read_with_a_mark_for_it() -> None:
    assert TEMPLATE.parse(["é".encode()[0], EOS], TOOLS).content == "�"


DIALOGUE = (
    Message("user", "37AB"),
    Message("assistant", calls=(ToolCall("look", {"key": "37"}),)),
    Message("tool", "!!", name="look"),
    Message("assistant", calls=(ToolCall("look", {"key": "_a b"}),)),
    Message("tool", "52", name="look"),
    Message("assistant", "52"),
)


def test_prompt_turns_and_observations_one_after_another_are_the_whole() -> None:
    ids, mask = render(TEMPLATE, DIALOGUE, TOOLS)
    grown = TEMPLATE.prompt(DIALOGUE[:1], TOOLS)
    for i in (1, 3, 5):
        grown += TEMPLATE.turn(DIALOGUE[i])
        grown += TEMPLATE.extend(DIALOGUE[i + 1 : i + 2]) if i < 5 else []
    assert grown == ids
    written = [i for i, sampled in zip(ids, mask, strict=True) if sampled]
    assert written == [*TEMPLATE.turn(DIALOGUE[1]), *TEMPLATE.turn(DIALOGUE[3]), *TEMPLATE.turn(DIALOGUE[5])]


def export(folder: Path) -> Path:
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text)
    return folder


def hf(message: Message) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls]
    return {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}


def test_transformers_loads_the_exported_tokenizer_and_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(export(tmp_path))
    assert len(tokenizer) == TEMPLATE.vocab_size
    assert tokenizer.convert_tokens_to_ids(list(CONTROL)) == list(range(256, 264))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, EOS)
    for text in ("37AB", "naïve ☃\n\t ", "  two  spaces ", "日本"):
        assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    dialogue = (Message("system", "be brief"), *DIALOGUE)
    whole = tokenizer.apply_chat_template([hf(m) for m in dialogue], return_dict=False)
    assert whole == render(TEMPLATE, dialogue, TOOLS)[0]
    asked = tokenizer.apply_chat_template([hf(m) for m in dialogue[:2]], add_generation_prompt=True, return_dict=False)
    assert asked == TEMPLATE.prompt(dialogue[:2], TOOLS)


def test_a_checkpoint_with_the_exported_tokenizer_speaks_the_plain_template(tmp_path: Path) -> None:
    assert is_plain(export(tmp_path))
    assert isinstance(template_of(str(tmp_path)), PlainTemplate)
    assert isinstance(template_of(""), PlainTemplate)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ 1 }}"}))
    assert not is_plain(tmp_path)


def test_a_checkpoint_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a tokenizer is wanted beside the weights, tokenizer_config\.json is missing"):
        template_of(str(tmp_path))
