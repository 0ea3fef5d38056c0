"""Mistral: both forms of its calls, and ids that the results repeat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from made import JINJA, LOOK, hf, make
from scripted import ScriptedSampler, episode
from toys import TASK, Lone

from jaxagent.agent import Limits
from jaxagent.chat.dialect import schema
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.template import render
from jaxagent.chat.tokenizer_template import TokenizerTemplate
from jaxagent.envs.env import Step
from jaxagent.types import Message, Sampling, ToolCall

TEMPLATE = make("mistral")
TOKENIZER = TEMPLATE.tokenizer
CALL, OTHER = ToolCall("look", {"key": "37"}), ToolCall("look", {"key": "38"})
DIALOGUE = (
    Message("system", "Be brief."),
    Message("user", "What is at 37?"),
    Message("assistant", calls=(CALL, OTHER)),
    Message("tool", "52", name="look"),
    Message("tool", "none", name="look"),
    Message("assistant", calls=(OTHER,)),
    Message("tool", "53", name="look"),
    Message("assistant", "52 and 53"),
    Message("user", "Sure?"),
)

# In the shape of version 3 proper: the system message and the tools go with the last message of the user.
MOVING = (
    JINJA["mistral"]
    .replace("{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}", "")
    .replace("(system if loop.first else '')", "(system if loop.last else '')")
    .replace(
        "{%- if m.role == 'user' %}",
        "{%- if m.role == 'user' %}{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
        "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}",
    )
)
NAMED = JINJA["mistral"].replace("{{ '[TOOL_CALLS] [' }}", "{{ m.content }}").replace(
    """(call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ')""",
    "'[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson",
)  # fmt: skip


def named(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """The dialogue for `apply_chat_template`, with the ids that a call gets by its place in its turn."""
    found, names = [], iter(())
    for message in messages:
        entry = hf(message)
        for i, call in enumerate(entry.get("tool_calls", ())):
            call["id"] = f"call0000{i}"
        if message.calls:
            names = iter([call["id"] for call in entry["tool_calls"]])
        found.append({**entry, "tool_call_id": next(names)} if message.role == "tool" else entry)
    return found


@pytest.mark.parametrize("jinja", [JINJA["mistral"], NAMED], ids=["a list", "one by one"])
@pytest.mark.parametrize("length", range(2, len(DIALOGUE) + 1))
def test_every_beginning_of_a_dialogue_has_the_ids_of_the_tokenizers_own_template(jinja: str, length: int) -> None:
    template = make("mistral", jinja)
    whole = template.tokenizer.apply_chat_template(named(DIALOGUE[:length]), tools=[schema(LOOK)], return_dict=False)
    assert render(template, DIALOGUE[:length], (LOOK,))[0] == whole


@pytest.mark.parametrize("jinja", [JINJA["mistral"], NAMED], ids=["a list", "one by one"])
def test_words_and_calls_of_a_turn_are_read_back(jinja: str) -> None:
    template = make("mistral", jinja)
    message = Message("assistant", "Both.", calls=(CALL, OTHER))
    assert template.parse(template.turn(message), (LOOK,)) == message


def said(text: str, template: TokenizerTemplate = TEMPLATE) -> Message:
    return template.parse([*template.tokenizer.encode(text), template.stop[0]], (LOOK,))


LISTED = '[TOOL_CALLS] [{"name": "look", "arguments": {"key": "37"}, "id": "aB3dE6gH9"}]'


@pytest.mark.parametrize(
    ("text", "calls", "names"),
    [
        (LISTED, (CALL,), ["aB3dE6gH9"]),
        ('[TOOL_CALLS][{"name": "look", "arguments": {"key": "37"}}]', (CALL,), [""]),
        ('[TOOL_CALLS]look[ARGS]{"key": "37"}', (CALL,), [""]),
        ('[TOOL_CALLS]look{"key": "37"}\n[TOOL_CALLS] look {"key": "38"}', (CALL, OTHER), ["", ""]),
        ('[TOOL_CALLS]look[CALL_ID]aB3dE6gH9[ARGS]{"key": "37"}', (CALL,), ["aB3dE6gH9"]),
        (LISTED.replace("37", "[TOOL_CALLS]"), (ToolCall("look", {"key": "[TOOL_CALLS]"}),), ["aB3dE6gH9"]),
    ],
    ids=range(6),
)
def test_every_form_of_a_call_is_read_with_its_id(text: str, calls: tuple[ToolCall, ...], names: list[str]) -> None:
    message = said(f"[THINK]So.[/THINK]I look. {text}")
    assert message == Message("assistant", "I look.", "So.", calls)
    assert [call.id for call in message.calls] == names


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[TOOL_CALLS] [", "the tool call is not JSON"),
        ("[TOOL_CALLS] []", "there must be one list of calls"),
        (f"{LISTED} Done.", "there must be one list of calls"),
        ('[TOOL_CALLS] [{"name": 3}]', 'a tool call is {"name": ...'),
        ("[TOOL_CALLS]", "a tool call is [TOOL_CALLS]name[ARGS]{...}"),
        ("[TOOL_CALLS]look[ARGS]{", "the tool call is not JSON"),
        ("[TOOL_CALLS]look[ARGS]37", "the arguments must be a JSON object"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_is_no_call(text: str, error: str) -> None:
    message = said(text)
    assert error in message.error
    assert message.calls == ()


def test_a_result_repeats_the_id_that_the_policy_gave_its_call() -> None:
    called, result = said(LISTED), [Message("tool", "52", name="look")]
    assert TEMPLATE.text(TEMPLATE.extend(result, after=called)).endswith('"call_id": "aB3dE6gH9"}[/TOOL_RESULTS]')
    short = said(LISTED.replace("aB3dE6gH9", "short"))
    assert TEMPLATE.text(TEMPLATE.extend(result, after=short)).endswith('"call_id": "call00000"}[/TOOL_RESULTS]')
    both = said(f'{LISTED[:-1]}, {{"name": "look", "arguments": {{}}, "id": "000000002"}}]')
    text = TEMPLATE.text(TEMPLATE.extend(result * 2, after=both))
    assert text.index("aB3dE6gH9") < text.index("000000002")


class Desk(Lone):
    """Answers one call, then ends."""

    tools = (LOOK,)

    async def step(self, action: Message) -> Step:
        return Step([Message("tool", "52", name="look")]) if action.calls else Step(terminated=True, answered=True)


def test_an_episode_repeats_the_ids_that_were_sampled() -> None:
    turns = iter([[*TOKENIZER.encode(LISTED), TEMPLATE.stop[0]], TEMPLATE.turn(Message("assistant", "52"))])
    sampler = ScriptedSampler(TEMPLATE, lambda text, request: next(turns))
    limits, sampling = Limits(max_tokens=1000), Sampling(max_tokens=200)
    (row,) = asyncio.run(episode(Desk(), TASK, sampler, limits=limits, sampling=sampling))
    assert TEMPLATE.text(row.tokens).endswith('[TOOL_RESULTS] {"content": 52, "call_id": "aB3dE6gH9"}[/TOOL_RESULTS] 52</s>')


def test_a_dialogue_with_ids_of_its_own_keeps_them_together() -> None:
    call = ToolCall("look", {"key": "37"}, "aB3dE6gH9")
    dialogue = (*DIALOGUE[:2], Message("assistant", calls=(call,)), DIALOGUE[3])
    assert TEMPLATE.text(render(TEMPLATE, dialogue, (LOOK,))[0]).count("aB3dE6gH9") == 2


def test_a_template_that_moves_system_message_and_tools_is_carried_on_as_declared() -> None:
    refusing = make("mistral", MOVING)
    assert set(refusing.rewritings) == {"tool", "user"}
    assert refusing.rewritings["tool"].system
    assert refusing.prompt(DIALOGUE[1:2], (LOOK,))
    with pytest.raises(ValueError, match="once tool results follow, in dialogues with a system message"):
        refusing.prompt(DIALOGUE[:2], (LOOK,))
    kept = make("mistral", MOVING, ChatOptions("keep"))
    assert render(kept, DIALOGUE[:8], (LOOK,))[0][-3:] == render(TEMPLATE, DIALOGUE[:8], (LOOK,))[0][-3:]
    assert kept.extend(DIALOGUE[3:5]) == TEMPLATE.extend(DIALOGUE[3:5])
    segment = make("mistral", MOVING, ChatOptions("segment"))
    fresh = segment.restart(DIALOGUE[:3], DIALOGUE[3:5], (LOOK,))
    assert segment.text(fresh) == segment.tokenizer.apply_chat_template(
        named(DIALOGUE[:5]), tools=[schema(LOOK)], tokenize=False
    )
