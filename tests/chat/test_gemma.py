"""Gemma: no system role, no tools, strict turns: what we put into words, and the forms of calls that are read."""

from __future__ import annotations

import pytest
from made import JINJA, LOOK, make, own

from jaxagent.chat.template import render
from jaxagent.types import Message, ToolCall, ToolSpec

TEMPLATE = make("gemma")
TOKENIZER = TEMPLATE.tokenizer
END = TOKENIZER.convert_tokens_to_ids("<end_of_turn>")
CALL = ToolCall("look", {"key": "37"})
FENCED = '```tool_call\n{"name": "look", "arguments": {"key": "37"}}\n```'
DIALOGUE = (
    Message("system", "Be brief."),
    Message("user", "What is at 37?"),
    Message("assistant", "I look.", calls=(CALL, CALL)),
    Message("tool", "52", name="look"),
    Message("tool", "<end_of_turn>", name="look"),
    Message("assistant", "52"),
    Message("user", "And now?"),
)


def in_words(*words: tuple[str, str]) -> list[Message]:
    return [Message(role, content) for role, content in words]


def test_a_dialogue_with_tools_is_what_the_template_writes_of_it_in_words() -> None:
    told = (
        'Be brief.\n\nYou may call these functions, described in JSON:\n{"name": "look", "description": "Looks up a key.", '
        '"parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}\n\n'
        'To call functions, write for each:\n```tool_call\n{"name": <function name>, "arguments": <its arguments as a JSON '
        "object>}\n```\nTheir results come in blocks of tool_output.\n\nWhat is at 37?"
    )
    dialogue = [*DIALOGUE[:4], Message("tool", "none", name="look"), *DIALOGUE[5:]]
    expected = in_words(
        ("user", told),
        ("assistant", f"I look.\n{FENCED}\n{FENCED}"),
        ("user", "```tool_output\n52\n```\n```tool_output\nnone\n```"),
        ("assistant", "52"),
        ("user", "And now?"),
    )
    ids, mask = render(TEMPLATE, dialogue, (LOOK,))
    assert ids == own(TOKENIZER, expected, (), header=True)
    written = TEMPLATE.text([i for i, sampled in zip(ids, mask, strict=True) if sampled])
    assert written == f"I look.\n{FENCED}\n{FENCED}<end_of_turn>52<end_of_turn>"


def test_a_system_message_goes_into_the_first_turn_of_the_user_where_the_template_refuses_it() -> None:
    assert not TEMPLATE.takes_system
    assert TEMPLATE.text(TEMPLATE.prompt(DIALOGUE[:2], ())) == (
        "<bos><start_of_turn>user\nBe brief.\n\nWhat is at 37?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert TEMPLATE.prompt(DIALOGUE[1:2], ()) == own(TOKENIZER, DIALOGUE[1:2], (), header=True)


def test_a_system_message_alone_is_the_users() -> None:
    assert TEMPLATE.prompt([Message("system", "Begin.")], ()) == TEMPLATE.prompt([Message("user", "Begin.")], ())


def test_a_template_that_takes_system_messages_gets_them_as_they_are() -> None:
    takes = JINJA["gemma"].replace(
        "{%- for m in messages %}", "{%- set s = messages[0].content + '!' if messages[0].role == 'system' %}"
        "{%- for m in (messages[1:] if s else messages) %}",
    ).replace("m.content | trim", "(s if s and loop.first else '') + m.content | trim")  # fmt: skip
    template = make("gemma", takes)
    assert template.takes_system
    prompt = template.text(template.prompt(DIALOGUE[:2], (LOOK,)))
    assert "tool_output.!What is at 37?" in prompt


def test_nothing_that_a_tool_says_ends_the_turn() -> None:
    ids = TEMPLATE.extend(DIALOGUE[3:5])
    assert ids.count(END) == 1
    assert "```tool_output\n<end_of_turn>\n```<end_of_turn>\n<start_of_turn>model\n" in TEMPLATE.text(ids)


def test_words_that_have_an_id_of_their_own_keep_it() -> None:
    said = [Message("user", "a\n\nb <table>\t\tc")]
    assert TEMPLATE.prompt(said, ()) == own(TOKENIZER, said, (), header=True)
    spaced = make("gemma", JINJA["gemma"].replace("'<start_of_turn>' +", "'' + '\n\n'[2:] + '<start_of_turn>' +"))
    assert spaced.prompt(said, ()) == own(TOKENIZER, said, (), header=True)
    table = TOKENIZER.convert_tokens_to_ids("<table>")
    assert table in TEMPLATE.prompt(said, ())


def said(text: str) -> Message:
    return TEMPLATE.parse([*TOKENIZER.encode(text), END], (LOOK,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FENCED, Message("assistant", calls=(CALL,))),
        (f"I look.\n{FENCED}\nSo.", Message("assistant", "I look.\n\nSo.", calls=(CALL,))),
        ('<tool_call>{"name": "look", "arguments": {"key": "37"}}</tool_call>', Message("assistant", calls=(CALL,))),
        ('```tool_code\n[look(key="37"), look(key="37")]\n```', Message("assistant", calls=(CALL, CALL))),
        ("```tool_code\nprint(look(key='37'))\n```", Message("assistant", calls=(CALL,))),
        ("```tool_code\nlook(key='37')\nlook()\n```", Message("assistant", calls=(CALL, ToolCall("look")))),
        ("```python\nlook()\n```", Message("assistant", "```python\nlook()\n```")),
        ('{"name": "look"}', Message("assistant", '{"name": "look"}')),
    ],
    ids=range(8),
)
def test_every_form_of_a_call_is_read_and_other_fences_are_text(text: str, expected: Message) -> None:
    assert said(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```tool_call\n{\n```", "the tool call is not JSON"),
        ('```tool_call\n{"name": "look"} {}\n```', "Extra data"),
        ("```tool_call\n{}", "a block of tool_call or tool_code does not end"),
        ("<tool_call>{}", "a block of tool_call or tool_code does not end"),
        ("```tool_code\nlook(37)\n```", "tool_code must hold calls with values written out"),
        ("```tool_code\nlook(key=open('x'))\n```", "tool_code must hold calls with values written out"),
        ("```tool_code\nimport os\nlook()\n```", "tool_code must hold calls with values written out"),
        ("```tool_code\n(\n```", "tool_code must hold calls with values written out"),
        ("```tool_code\nx.look()\n```", "tool_code must hold calls with values written out"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_is_no_call(text: str, error: str) -> None:
    message = said(text)
    assert error in message.error
    assert message.calls == ()


def test_both_stop_tokens_end_a_turn() -> None:
    assert TEMPLATE.stop == (END, TOKENIZER.eos_token_id)
    assert TEMPLATE.parse([*TOKENIZER.encode("52"), TOKENIZER.eos_token_id], ()) == Message("assistant", "52")


def test_an_argument_with_a_fence_in_it_is_read_back() -> None:
    tool = ToolSpec("write", "", {"type": "object", "properties": {"text": {"type": "string"}}})
    message = Message("assistant", calls=(ToolCall("write", {"text": "```tool_call\n{}\n```"}),))
    assert TEMPLATE.parse(TEMPLATE.turn(message), (tool,)) == message
