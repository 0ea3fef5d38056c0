"""ChatML: against the tokenizer's own chat template, its two forms of calls, thoughts, and malformed turns."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import drawn
from growing import growth
from hypothesis import given
from hypothesis import strategies as st
from made import JINJA, LOOK, make, own
from test_tokenizer_template import spoken, texts, values

from jaxagent.chat.chatml import read
from jaxagent.chat.template import render
from jaxagent.types import Message, ToolCall, ToolSpec

TEMPLATE = make("chatml")
TOKENIZER = TEMPLATE.tokenizer
START, END = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

# ====================================================================== equal to the tokenizer's own template

DIALOGUE = (
    Message("system", "Be brief."),
    Message("user", "What is at 37? ünïcode ☃"),
    Message("assistant", "", "I should look.", (ToolCall("look", {"key": "37"}), ToolCall("look", {"key": "38"}))),
    Message("tool", "52", name="look"),
    Message("tool", "error: none", name="look"),
    Message("assistant", "Once more.", calls=(ToolCall("look", {"key": "38", "deep": [1, 2.5, None, {"a": "é"}]}),)),
    Message("tool", "", name="look"),
    Message("assistant", ""),
    Message("user", "And now?"),
    Message("assistant", "52"),
)


@pytest.mark.parametrize("tools", [(), (LOOK,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("length", range(1, len(DIALOGUE) + 1))
def test_every_beginning_of_a_dialogue_has_the_ids_of_the_tokenizers_own_template(
    length: int, tools: tuple[ToolSpec, ...]
) -> None:
    dialogue = DIALOGUE[:length]
    ids, _ = render(TEMPLATE, dialogue, tools)
    if dialogue[-1].role == "assistant":  # the newline after the last turn is not the policy's and comes with what follows
        assert [*ids, *TOKENIZER.encode("\n")] == own(TOKENIZER, dialogue, tools, header=False)
    else:
        assert ids == own(TOKENIZER, dialogue, tools, header=True)


def test_a_dialogue_that_grows_turn_by_turn_equals_the_whole() -> None:
    whole, mask = render(TEMPLATE, DIALOGUE, (LOOK,))
    ids = TEMPLATE.prompt(DIALOGUE[:2], (LOOK,))
    ids += TEMPLATE.turn(DIALOGUE[2]) + TEMPLATE.extend(DIALOGUE[3:5])
    ids += TEMPLATE.turn(DIALOGUE[5]) + TEMPLATE.extend(DIALOGUE[6:7])
    ids += TEMPLATE.turn(DIALOGUE[7]) + TEMPLATE.extend(DIALOGUE[8:9])
    ids += TEMPLATE.turn(DIALOGUE[9])
    assert ids == whole
    assert sum(mask) == sum(len(TEMPLATE.turn(m)) for m in DIALOGUE if m.role == "assistant")


def test_an_observation_without_messages_only_asks_for_the_next_turn() -> None:
    assert TEMPLATE.extend([]) == TOKENIZER.encode("\n<|im_start|>assistant\n")


# ====================================================================== thoughts and calls


@drawn
@given(spoken, spoken.filter(bool), st.lists(st.dictionaries(texts, values, max_size=3), max_size=3))
def test_thinking_and_calls_are_read_back_as_they_were_written(
    content: str, thinking: str, arguments: list[dict[str, Any]]
) -> None:
    calls = tuple(ToolCall("look", given) for given in arguments if "tool_call>" not in str(given))
    message = Message("assistant", content, thinking, calls)
    ids = TEMPLATE.turn(message)
    assert TEMPLATE.parse(ids, (LOOK,)) == message
    assert ids[-1] == END
    assert END not in ids[:-1]


TAGGED = JINJA["chatml"].replace(
    """'<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n</tool_call>'""",
    """'<tool_call>\\n<function=' + f.name + '>\\n' }}{% for k, v in f.arguments.items() %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>'""",
)
OPEN = TAGGED[: TAGGED.rindex("{{ '<|im_start|>assistant")] + "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
OPEN = OPEN.replace(
    "{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content", "{{- '<think>\\n' + m.reasoning_content | d('')"
)
OPEN = OPEN.replace("'\\n</think>\\n\\n' }}{% endif %}", "'\\n</think>\\n\\n' }}")
MOVE = ToolSpec(
    "move",
    "",
    {
        "type": "object",
        "properties": {n: {"type": t} for n, t in {"to": "string", "n": "integer", "by": "array", "on": "null"}.items()},
    },
)


@pytest.mark.parametrize("jinja", [TAGGED, OPEN], ids=["tags", "tags and a thought that the header opens"])
def test_calls_in_tags_are_read_by_the_types_of_the_tools_schema(jinja: str) -> None:
    template = make("chatml", jinja)
    arguments = {"to": '37\nor "38"', "n": 5, "by": [1, {"a": None}], "on": None}
    message = Message("assistant", "Now.", "I must move.", (ToolCall("move", arguments), ToolCall("move", {"to": "5"})))
    ids = template.turn(message)
    assert template.parse(ids, (MOVE,)) == message
    assert "<parameter=n>\n5\n</parameter>" in template.text(ids)
    assert template.text(ids).startswith("<think>") == (jinja is TAGGED)


def test_a_call_that_tags_cannot_say_is_refused_and_not_put_into_other_words() -> None:
    with pytest.raises(ValueError, match="cannot say this turn so that it is read back"):
        make("chatml", TAGGED).turn(Message("assistant", calls=(ToolCall("move", {"to": "a</parameter>b"}),)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<parameter=n>\nmany\n</parameter>", {"n": "many"}),
        ("<parameter=on>None</parameter><parameter=lost>\nTrue\n</parameter>", {"on": None, "lost": "True"}),
        ("", {}),
    ],
)
def test_a_value_that_is_not_of_its_type_stays_text(text: str, expected: dict[str, Any]) -> None:
    message = said(f"<tool_call>\n<function=move>\n{text}</function>\n</tool_call>", MOVE)
    assert message.calls == (ToolCall("move", expected),)


@pytest.mark.parametrize(
    "text", ["<function=move>", "<function=move>x</function>", "<function=move>\n<parameter=to>\n5</function>"]
)
def test_a_malformed_call_in_tags_says_so(text: str) -> None:
    message = said(f"<tool_call>{text}</tool_call>", MOVE)
    assert message.error == "a tool call is <function=name><parameter=name>value</parameter></function>"
    assert message.calls == ()


# ====================================================================== malformed turns


def said(text: str, tool: ToolSpec = LOOK) -> Message:
    return TEMPLATE.parse([*TOKENIZER.encode(text), END], (tool,))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{", "the tool call is not JSON: Expecting property name"),
        ("", "the tool call is not JSON: Expecting value"),
        ("[1]", 'a tool call is {"name": ..., "arguments": {...}}'),
        ('{"arguments": {}}', 'a tool call is {"name": ..., "arguments": {...}}'),
        ('{"name": 3}', 'a tool call is {"name": ..., "arguments": {...}}'),
        ('{"name": "f", "arguments": "{}"}', "the arguments must be a JSON object"),
        ('{"name": "f", "arguments": {"x": NaN}}', "the tool call is not JSON that can be read: NaN is not a number"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "-Infinity is not a number"),
        ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "the tool call is not JSON that can be read"),
        ('{"name": "f", "arguments": ' + "[" * 200_000 + "}", "the tool call is not JSON"),
    ],
    ids=range(10),
)
def test_a_malformed_call_says_what_is_wrong_and_is_no_call(body: str, error: str) -> None:
    message = said(f"<tool_call>{body}</tool_call>")
    assert error in message.error
    assert message.calls == ()


def test_good_calls_beside_a_malformed_one_are_kept_with_its_error() -> None:
    message = said('<tool_call>{"name": "look"}</tool_call><tool_call>{</tool_call>')
    assert message.calls == (ToolCall("look", {}),)
    assert "not JSON" in message.error


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f"}', '{"name": "f"}</tool_call>', "<tool_call>"])
def test_call_brackets_that_do_not_match_are_an_error(text: str) -> None:
    assert said(text).error == "<tool_call> and </tool_call> do not match"


def test_a_turn_that_did_not_end_is_an_error_that_keeps_its_text() -> None:
    message = TEMPLATE.parse(TOKENIZER.encode("half a th"), ())
    assert (message.content, message.error) == ("half a th", "the turn did not end within its token budget")
    assert TEMPLATE.parse([], ()).error


@pytest.mark.parametrize("piece", ["<tool_call>", " ", "<tool_call></tool_call>", "<tool_call><function=f><parameter=a>"])
def test_hostile_turns_are_read_in_linear_time(piece: str) -> None:
    assert growth(lambda text: read(text, ()), piece, 25_000, 100_000) < 10


@pytest.mark.parametrize("piece", [" ", "<parameter=a>", "<parameter=a></parameter>", "<parameter=", "</parameter>"])
def test_hostile_parameters_are_read_in_linear_time(piece: str) -> None:
    def call_of(text: str) -> Message:
        return read(f"<tool_call><function=f>{text}</function></tool_call>", ())

    assert growth(call_of, piece, 25_000, 100_000) < 10


def test_a_schema_may_name_several_types_or_be_no_more_than_true() -> None:
    properties = {"a": {"type": ["string", "null"]}, "b": {"type": ["integer", "null"]}, "c": True}
    tool = ToolSpec("f", "", {"type": "object", "properties": properties})
    body = "".join(f"<parameter={name}>\n7\n</parameter>\n" for name in "abc")
    (call,) = read(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>", (tool,)).calls
    assert call.arguments == {"a": "7", "b": 7, "c": "7"}
