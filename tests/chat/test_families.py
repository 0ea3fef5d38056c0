"""ChatML against the chat templates that Qwen's checkpoints carry, as trl ships them."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from test_chatml import LOOK, hf, make_tokenizer

from jaxagent.chat.chatml import ChatMLTemplate
from jaxagent.chat.template import render
from jaxagent.types import Message, ToolCall

pytestmark = pytest.mark.parity

CALL = ToolCall("look", {"key": "37"})
DIALOGUES = {
    "an answer": (Message("user", "What is it?"), Message("assistant", "Nothing.")),
    "a call": (
        Message("system", "Be brief."),
        Message("user", "What is 37?"),
        Message("assistant", "I look.", calls=(CALL,)),
        Message("tool", "52", name="look"),
        Message("assistant", "52"),
    ),
    "two calls in a turn": (
        Message("user", "What are they?"),
        Message("assistant", calls=(CALL, ToolCall("look", {"key": "38"}))),
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
}


def family(name: str) -> ChatMLTemplate:
    try:
        package = Path(str(distribution("trl").locate_file("trl")))  # found without importing it: that would want more
    except PackageNotFoundError:
        pytest.skip("needs trl, which `make parity` installs")
    return ChatMLTemplate(make_tokenizer((package / "chat_templates" / f"{name}.jinja").read_text()))


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_a_dialogue_in_pieces_is_what_the_template_of_the_checkpoint_writes(name: str, dialogue: str) -> None:
    template, messages = family(name), DIALOGUES[dialogue]
    if name == "qwen3":  # its policy thinks in every turn; its template puts an empty thought into a last turn without one
        messages = tuple(replace(m, thinking=m.thinking or "So.") if m.role == "assistant" else m for m in messages)
    elif any(message.thinking for message in messages):
        pytest.skip("a family without thoughts")
    tools = [
        {"type": "function", "function": {"name": LOOK.name, "description": LOOK.description, "parameters": LOOK.parameters}}
    ]
    whole = template.tokenizer.apply_chat_template([hf(m) for m in messages], tools=tools, tokenize=True, return_dict=False)
    pieces, mask = render(template, messages, (LOOK,))
    text = template.text(pieces)
    assert template.text(whole) == text + "\n"  # nothing follows a turn until something is said after it
    assert whole[: len(pieces)] == pieces
    written = [template.text([i for i, m in zip(pieces, mask, strict=True) if m])]
    assert written[0].count("<|im_end|>") == sum(message.role == "assistant" for message in messages)
