"""Llama 3: calls in JSON, after the Python tag and in function tags, against what only looks like one."""

from __future__ import annotations

import pytest
from made import JINJA, LOOK, make, own

from jaxagent.chat.template import render
from jaxagent.types import Message, ToolCall, ToolSpec

TEMPLATE = make("llama")
TOKENIZER = TEMPLATE.tokenizer
EOT, EOM, END = TOKENIZER.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
MOVE = ToolSpec("move", "Moves.", {"type": "object", "properties": {"n": {"type": "integer"}}})
PYTHON = ToolSpec("python", "Runs code.", {"type": "object", "properties": {"code": {"type": "string"}}})
CALL = ToolCall("look", {"key": "37"})

DIALOGUE = (
    Message("system", "Be brief."),
    Message("user", "What is at 37?"),
    Message("assistant", calls=(CALL,)),
    Message("tool", '5"2\n', name="look"),
    Message("assistant", calls=(ToolCall("move", {"n": 3, "deep": [1.5, None, {"a": "é"}]}),)),
    Message("tool", "", name="move"),
    Message("assistant", "52"),
    Message("user", "And now?"),
    Message("assistant", "52 still"),
)


@pytest.mark.parametrize("length", range(1, len(DIALOGUE) + 1))
def test_every_beginning_of_a_dialogue_has_the_ids_of_the_tokenizers_own_template(length: int) -> None:
    dialogue, tools = DIALOGUE[:length], (LOOK, MOVE) if length > 1 else ()
    ids, _ = render(TEMPLATE, dialogue, tools)
    assert ids == own(TOKENIZER, dialogue, tools, header=dialogue[-1].role != "assistant")


def said(text: str, *tools: ToolSpec, stop: int = EOT) -> Message:
    return TEMPLATE.parse([*TOKENIZER.encode(text), stop], tools or (LOOK, MOVE, PYTHON))


LOOKED, MOVED = '{"name": "look", "parameters": {"key": "37"}}', '{"name": "move", "parameters": {"n": 3}}'
BOTH = (CALL, ToolCall("move", {"n": 3}))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LOOKED, (CALL,)),
        ('{"type": "function", "name": "look", "parameters": {"key": "37"}}', (CALL,)),
        ('{"name": "look", "arguments": {"key": "37"}}', (CALL,)),
        (f"<|python_tag|>{LOOKED}", (CALL,)),
        (f"{LOOKED}; {MOVED}", BOTH),
        (f"{LOOKED};{MOVED};", BOTH),
        (f"<|python_tag|>{LOOKED}\n{MOVED}", BOTH),
        ('<function=look>{"key": "37"}</function>', (CALL,)),
        ('<function=look>{"key": "37"}</function><function=move>{"n": 3}</function>', BOTH),
        ("<|python_tag|>print(37)\nprint(38)", (ToolCall("python", {"code": "print(37)\nprint(38)"}),)),
        ('<|python_tag|>look.call(key="37")', (CALL,)),
        ('<|python_tag|>{"a": 1}["a"]', (ToolCall("python", {"code": '{"a": 1}["a"]'}),)),
        ("<|python_tag|>np.call(1)", (ToolCall("python", {"code": "np.call(1)"}),)),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("stop", [EOT, EOM])
def test_every_form_of_a_call_is_read(text: str, calls: tuple[ToolCall, ...], stop: int) -> None:
    assert said(text, stop=stop) == Message("assistant", calls=calls)


def test_what_is_said_beside_a_call_is_kept() -> None:
    assert said(f"I look.\n{LOOKED}") == Message("assistant", "I look.", calls=(CALL,))
    assert said(f"{LOOKED}\nThen I see.") == Message("assistant", "Then I see.", calls=(CALL,))
    assert said('I look. <function=look>{"key": "37"}</function>') == Message("assistant", "I look.", calls=(CALL,))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "fly", "parameters": {}}',
        '{"name": ["look"]}',
        '{"key": "37"}',
        "{",
        "{}",
        f"It is called as {LOOKED}",
        '["look"]',
        "{{{{" * 50,
    ],
)
def test_what_only_looks_like_json_is_an_answer(text: str) -> None:
    assert said(text) == Message("assistant", text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "look", "parameters": {"key": 37}', "the tool call is not JSON: Expecting ',' delimiter"),
        ('{"name": "look", "parameters": "37"}', "the arguments must be a JSON object"),
        ('{"name": "look", "parameters": {"key": NaN}}', "NaN is not a number"),
        ('<|python_tag|>{"name": "fly", "parameters": {}}', "cannot be read; there are the tools look, move, python"),
        ('<function=look>{"key"</function>', "the tool call is not JSON"),
        ("<function=look>[]</function>", "the arguments must be a JSON object"),
        ("<|python_tag|>look.call(37, **x)", 'is called as look.call(key="value")'),
        ("<|python_tag|>look.call(key=open())", 'is called as look.call(key="value")'),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_is_no_call(text: str, error: str) -> None:
    message = said(text)
    assert error in message.error
    assert message.calls == ()


def test_good_calls_before_a_malformed_one_are_kept_with_its_error() -> None:
    message = said(f'{LOOKED}; {{"name": "look"')
    assert message.calls == (CALL,)
    assert "not JSON" in message.error


def test_code_without_a_tool_that_runs_it_is_an_error() -> None:
    assert "no tool that runs it (python, code_interpreter, ipython)" in said("<|python_tag|>print(37)", LOOK).error
    shell = ToolSpec("code_interpreter", "", {"type": "object", "properties": {"source": {"type": "string"}}})
    assert said("<|python_tag|>print(37)", shell).calls == (ToolCall("code_interpreter", {"source": "print(37)"}),)


@pytest.mark.parametrize("stop", [EOT, EOM, END])
def test_every_stop_token_ends_a_turn(stop: int) -> None:
    assert stop in TEMPLATE.stop
    assert said("52", stop=stop) == Message("assistant", "52")


def test_several_calls_go_in_words_where_the_template_takes_one() -> None:
    assert not TEMPLATE.parallel
    text = TEMPLATE.text(TEMPLATE.turn(Message("assistant", "Both.", calls=BOTH)))
    assert text == f"Both.\n{LOOKED}; {MOVED}<|eot_id|>"
    again = [DIALOGUE[1], Message("assistant", calls=BOTH), *DIALOGUE[5:8]]
    assert f"{LOOKED}; {MOVED}<|eot_id|>" in TEMPLATE.text(TEMPLATE.prompt(again, (LOOK,)))
    results = TEMPLATE.text(TEMPLATE.extend([Message("tool", "a", name="look"), Message("tool", "b", name="move")]))
    assert results.startswith('<|start_header_id|>ipython<|end_header_id|>\n\n"a"<|eot_id|><|start_header_id|>ipython')


BARE = """
{%- for m in messages %}{{ bos_token if loop.first }}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""


def test_a_template_that_ignores_tools_is_told_of_them_in_words() -> None:
    template = make("llama", BARE)
    assert not template.native
    ids, mask = render(template, DIALOGUE[:4], (LOOK,))
    text = template.text(ids)
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.\n\nYou may call these functions, described "
        'in JSON:\n{"name": "look", "description": "Looks up a key.", "parameters": {"type": "object"'
    )
    assert text.endswith(
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{LOOKED}<|eot_id|>"
        '<|start_header_id|>ipython<|end_header_id|>\n\n5"2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    assert template.text([i for i, sampled in zip(ids, mask, strict=True) if sampled]) == f"{LOOKED}<|eot_id|>"
    assert JINJA["llama"] != BARE
