"""Every family against the chat templates that its checkpoints carry, as trl ships them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from made import LOOK, make, own

from jaxagent.chat.history import ChatOptions
from jaxagent.chat.template import render
from jaxagent.chat.tokenizer_template import TokenizerTemplate
from jaxagent.types import Message, ToolCall

pytestmark = pytest.mark.parity

CHATML = {
    *("qwen2_5", "qwen2_5_training", "qwen2_5_vl", "qwen2_5_vl_training"),
    *("qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_vl", "qwen3_vl_training"),
    *("qwen3_5_think", "qwen3_5_think_training", "qwen3_5_nothink", "qwen3_5_nothink_training"),
    *("qwen3_6", "qwen3_6_training", "qwen3_8", "qwen3_8_training"),
}
LLAMA = {"llama3", "llama3_training", "llama3_1", "llama3_2"}
GEMMA = {"gemma", "gemma_training", "gemma3", "gemma3_training"}
NAMES = [(family, name) for family, names in (("chatml", CHATML), ("llama", LLAMA), ("gemma", GEMMA)) for name in sorted(names)]
FORGET = {"qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}  # earlier thoughts, once the user speaks again
WITHOUT_TOOLS = {"qwen2_5_vl", "qwen2_5_vl_training", "llama3", "llama3_training", *GEMMA}
ONE_CALL = {"llama3_1", "llama3_2"}
THINK = {name for name in CHATML if name.startswith(("qwen3_5", "qwen3_6", "qwen3_8"))} | {"qwen3", "qwen3_training"}
EMPTY_THOUGHTS = {"qwen3_5_nothink", "qwen3_5_nothink_training"}  # the header holds them

CALL = ToolCall("look", {"key": "37"})
DIALOGUES = {
    "an answer": (Message("user", "What is it? ünïcode ☃"), Message("assistant", "Nothing 👩‍🚀.")),
    "an empty turn": (Message("system", "Be brief."), Message("user", "What?"), Message("assistant", "")),
    "a call": (
        Message("system", "Be brief."),
        Message("user", "What is 37?"),
        Message("assistant", calls=(CALL,)),
        Message("tool", "52", name="look"),
        Message("assistant", "52"),
    ),
    "a call with words": (
        Message("user", "What is 37?"),
        Message("assistant", "I look.", calls=(CALL,)),
        Message("tool", "", name="look"),
        Message("assistant", "Nothing."),
    ),
    "two calls in a turn": (
        Message("user", "What are they?"),
        Message("assistant", calls=(CALL, ToolCall("look", {"key": "ä☃", "deep": [1, 2.5, None, {"a": True}]}))),
        Message("tool", "52", name="look"),
        Message("tool", '{"not": "found"}', name="look"),
        Message("assistant", "52 and nothing"),
    ),
    "thoughts": (
        Message("user", "What is 37?"),
        Message("assistant", thinking="I should look.", calls=(CALL,)),
        Message("tool", "!!", name="look"),
        Message("assistant", thinking="It failed: again.", calls=(CALL,)),
        Message("tool", "52", name="look"),
        Message("assistant", "It is 52.", thinking="Now I know."),
    ),
    "another question": (
        Message("user", "What is 37?"),
        Message("assistant", "52", thinking="I know."),
        Message("user", "And 38?"),
        Message("assistant", "53", thinking="I know."),
    ),
}


def trl() -> Path:
    try:
        return Path(str(distribution("trl").locate_file("trl"))) / "chat_templates"  # found without importing it
    except PackageNotFoundError:
        pytest.skip("needs trl, which `make parity` installs")


def template_of(family: str, name: str, history: str = "refuse") -> TokenizerTemplate:
    return make(family, (trl() / f"{name}.jinja").read_text(), ChatOptions(history))


def fitting(name: str, dialogue: str) -> tuple[Message, ...]:
    """The dialogue as this template can say it by itself, or a skip."""
    messages = DIALOGUES[dialogue]
    calls = any(message.calls for message in messages)
    if messages[0].role == "system" and name in ("gemma", "gemma_training"):
        pytest.skip("a template without a system message")
    if calls and name in WITHOUT_TOOLS:
        pytest.skip("a template without tools")
    if name in ONE_CALL and any(len(message.calls) > 1 or (message.calls and message.content) for message in messages):
        pytest.skip("a template of one call and no words beside it")
    if dialogue == "another question" and name in FORGET:
        pytest.skip("a template that rewrites this one")
    thinks = name in THINK and name not in EMPTY_THOUGHTS
    return tuple(replace(m, thinking=(m.thinking or "So.") if thinks else "") if m.role == "assistant" else m for m in messages)


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize(("family", "name"), NAMES)
def test_a_dialogue_in_pieces_is_what_the_template_of_the_checkpoint_writes(family: str, name: str, dialogue: str) -> None:
    template, messages = template_of(family, name), fitting(name, dialogue)
    tools = () if name in WITHOUT_TOOLS else (LOOK,)
    whole = own(template.tokenizer, messages, tools, header=False)
    pieces, mask = render(template, messages, tools)
    text = template.text(pieces)
    assert template.text(whole).removesuffix("\n") == text  # what follows a turn is there once something is said after it
    assert whole[: len(pieces)] == pieces
    written = template.text([i for i, m in zip(pieces, mask, strict=True) if m])
    assert written.count(template.dialect.end) == sum(message.role == "assistant" for message in messages)
    if messages[-1].role == "assistant":
        asked = messages[:-1]
        assert render(template, asked, tools)[0] == own(template.tokenizer, asked, tools, header=True)


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize(("family", "name"), NAMES)
def test_every_turn_of_the_policy_is_read_back_as_it_was_written(family: str, name: str, dialogue: str) -> None:
    template = template_of(family, name)
    for message in DIALOGUES[dialogue]:
        if message.role == "assistant":
            thinking = message.thinking or "So." if name in THINK - EMPTY_THOUGHTS else ""
            said = replace(message, thinking=thinking)
            if any(isinstance(value, list) for call in said.calls for value in call.arguments.values()):
                tool = replace(LOOK, parameters={"properties": {"key": {"type": "string"}, "deep": {"type": "array"}}})
            else:
                tool = LOOK
            assert template.parse(template.turn(said), (tool,)) == said


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_what_a_template_can_do_and_whether_it_rewrites_is_found_out(family: str, name: str) -> None:
    template = template_of(family, name)
    assert template.native == (name not in WITHOUT_TOOLS)
    assert template.parallel == (name not in ONE_CALL)
    assert template.takes_system == (name not in ("gemma", "gemma_training"))
    assert template.takes_rows == (family != "gemma")
    assert set(template.rewritings) == ({"user"} if name in FORGET else set())


@pytest.mark.parametrize("name", sorted(FORGET))
def test_a_template_that_forgets_thoughts_names_the_token_and_goes_on_as_declared(name: str) -> None:
    dialogue, thinks = DIALOGUES["another question"], name not in EMPTY_THOUGHTS
    if not thinks:
        dialogue = tuple(replace(message, thinking="") for message in dialogue)
    asked, answered, again = dialogue[:3]
    with pytest.raises(ValueError, match=r"in turn 1 the token \d+ \('<think>'\)"):
        template_of("chatml", name).extend([again])
    kept = template_of("chatml", name, "keep")
    assert kept.text(kept.extend([again])).startswith("\n<|im_start|>user\nAnd 38?<|im_end|>\n<|im_start|>assistant\n")
    segment = template_of("chatml", name, "segment")
    fresh = segment.restart([asked, answered], [again], (LOOK,))
    assert fresh == own(segment.tokenizer, dialogue[:3], (LOOK,), header=True)
    assert "I know." not in segment.text(fresh)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, name in NAMES if name in WITHOUT_TOOLS])
def test_a_template_without_tools_says_everything_in_words(family: str, name: str) -> None:
    template, messages = template_of(family, name), DIALOGUES["two calls in a turn"]
    text = template.text(render(template, messages, (LOOK,))[0])
    for word in (LOOK.description, '"ä☃"', '{"not": "found"}', json.dumps(LOOK.parameters)):
        assert word in text
    if family == "gemma":
        assert text.count("<start_of_turn>user") == 2


def test_every_template_of_these_families_that_trl_ships_is_here() -> None:
    shipped = {path.stem for path in trl().glob("*.jinja") if path.stem.startswith(("qwen", "llama", "gemma"))}
    others = {name for name in shipped if name.startswith("gemma4")}  # Gemma 4 has control tokens and calls of its own
    assert shipped - others == CHATML | LLAMA | GEMMA
