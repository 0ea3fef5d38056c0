"""Templates that rewrite what was said: found at loading, named, and carried on as declared."""

from __future__ import annotations

import asyncio
import re

import pytest
from made import JINJA, LOOK, make, own
from scripted import ScriptedSampler, episode
from toys import TASK, Lone

from jaxagent.agent import Limits
from jaxagent.algos.table import choose
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.template import render
from jaxagent.chat.tokenizer_template import TokenizerTemplate
from jaxagent.credit import training_rows
from jaxagent.data.pack import pack
from jaxagent.envs.env import Step, Task
from jaxagent.types import Group, Message, Sample, Sampling, ToolCall, Trajectory

CALL = ToolCall("look", {"key": "37"})
ASKED = (Message("system", "Be brief."), Message("user", "What is at 37?"))
CALLED = Message("assistant", thinking="I should look.", calls=(CALL,))
FOUND = Message("tool", "52", name="look")
ANSWERED = Message("assistant", "It is 52.", thinking="Now I know.")
AGAIN = Message("user", "And 38?")

# Drops the thoughts of turns before the last message of the user, as Qwen3's template does.
_ASSISTANT, _THOUGHT = "{%- if m.role == 'assistant' %}", "{%- if m.reasoning_content %}"
FORGETFUL = (
    "{%- set last = namespace(user=-1) %}{% for m in messages if m.role == 'user' %}{% set last.user = m %}{% endfor %}"
    "{%- set seen = namespace(last=false) %}"
    + JINJA["chatml"]
    .replace(_ASSISTANT, "{%- if m == last.user %}{% set seen.last = true %}{% endif %}" + _ASSISTANT)
    .replace(_THOUGHT, "{%- if m.reasoning_content and seen.last %}")
)
# Drops them as soon as anything follows.
BRIEF = JINJA["chatml"].replace("{%- if m.reasoning_content %}", "{%- if m.reasoning_content and loop.last %}")
# Puts the system message before the last message, if that is the user's, as Mistral's templates do.
MOVING = "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}" + (
    JINJA["chatml"]
    .replace("{%- elif not (tools and loop.first and m.role == 'system') %}", "{%- elif m.role == 'system' %}{% else %}")
    .replace("m.role + '\\n' + m.content", "m.role + '\\n' + (system if loop.last else '') + m.content")
    .replace("{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}", "")
)


@pytest.mark.parametrize("family", JINJA)
@pytest.mark.parametrize("history", ["refuse", "keep", "segment"])
def test_a_template_that_only_appends_has_nothing_to_declare(family: str, history: str) -> None:
    template = make(family, options=ChatOptions(history))
    assert template.rewritings == {}
    assert template.restart([*ASKED, CALLED], [FOUND], (LOOK,)) == []


def test_a_template_that_rewrites_after_tool_results_is_refused_at_loading_with_the_token_named() -> None:
    with pytest.raises(ValueError, match="rewrites what was said before once tool results follow so that") as raised:
        make("chatml", BRIEF)
    think = make("chatml").tokenizer.convert_tokens_to_ids("<think>")
    assert f"in turn 1 the token {think} ('<think>') in " in str(raised.value)
    assert "does not stay, which becomes '" in str(raised.value)
    assert "chat.history=keep" in str(raised.value)
    assert "chat.history=segment" in str(raised.value)


def test_a_template_that_rewrites_after_the_user_serves_worlds_of_tools_and_fails_at_the_first_other_extension() -> None:
    template = make("chatml", FORGETFUL)
    assert list(template.rewritings) == ["user"]
    assert (template.rewritings["user"].turn, template.rewritings["user"].text) == (1, "<think>")
    dialogue = (*ASKED, CALLED, FOUND, ANSWERED)
    ids, _ = render(template, dialogue, (LOOK,))
    assert [*ids, *template.tokenizer.encode("\n")] == own(template.tokenizer, dialogue, (LOOK,), header=False)
    with pytest.raises(ValueError, match=r"once a new user message follows .* in turn 1 the token \d+ \('<think>'\)"):
        template.extend([AGAIN])
    with pytest.raises(ValueError, match="once a new user message follows"):
        template.extend([FOUND, AGAIN])


def test_a_template_that_moves_the_system_message_fails_in_the_first_episode_that_has_one() -> None:
    template = make("chatml", MOVING)
    assert (template.rewritings["tool"].system, template.rewritings["tool"].turn) == (True, 0)
    assert template.prompt(ASKED[1:], (LOOK,))
    assert template.prompt(ASKED, ())  # no tools, no results
    with pytest.raises(ValueError, match=r"in dialogues with a system message, so that .* in turn 0 the token"):
        template.prompt(ASKED, (LOOK,))
    assert "Be brief." in make("chatml", MOVING, ChatOptions("keep")).text(
        make("chatml", MOVING, ChatOptions("keep")).prompt(ASKED, (LOOK,))
    )


@pytest.mark.parametrize("jinja", [FORGETFUL, BRIEF, MOVING], ids=["forgetful", "brief", "moving"])
def test_kept_history_stays_and_what_follows_is_as_if_nothing_had_been_rewritten(jinja: str) -> None:
    pure, template = make("chatml"), make("chatml", jinja, ChatOptions("keep"))
    assert template.rewritings
    for messages in ([FOUND], [FOUND, FOUND], [AGAIN], [FOUND, AGAIN], []):
        for closed in (True, False):
            assert template.extend(messages, closed=closed) == pure.extend(messages, closed=closed)
    assert template.restart([*ASKED, CALLED, FOUND, ANSWERED], [AGAIN], (LOOK,)) == []


def test_a_segment_begins_with_the_whole_history_as_the_template_renders_it_then() -> None:
    template = make("chatml", FORGETFUL, ChatOptions("segment"))
    told = [*ASKED, CALLED]
    assert template.restart(told, [FOUND], (LOOK,)) == []
    told += [FOUND, ANSWERED]
    fresh = template.restart(told, [AGAIN], (LOOK,))
    assert fresh == own(template.tokenizer, (*told, AGAIN), (LOOK,), header=True)
    assert "<think>" not in template.text(fresh)


def test_a_conversation_without_thoughts_has_nothing_to_forget_and_goes_on_in_its_segment() -> None:
    template = make("chatml", FORGETFUL, ChatOptions("segment"))
    assert template.restart([*ASKED, Message("assistant", "52")], [AGAIN], (LOOK,)) == []
    assert template.extend([AGAIN]) == make("chatml").extend([AGAIN])


class Interview(Lone):
    """Asks, lets the policy look, and asks again."""

    tools = (LOOK,)

    def __init__(self) -> None:
        self.steps = iter(
            [Step([FOUND]), Step([AGAIN], reward=0.5), Step([FOUND]), Step(terminated=True, answered=True, reward=1.0)]
        )

    async def reset(self, task: Task, seed: int) -> Step:
        return Step(ASKED)

    async def step(self, action: Message) -> Step:
        return next(self.steps)


def interview(history: str) -> tuple[TokenizerTemplate, list[Trajectory]]:
    template = make("chatml", FORGETFUL, ChatOptions(history))
    turns = [template.turn(message) for message in (CALLED, ANSWERED, CALLED, ANSWERED)]
    left = iter(turns)
    sampler = ScriptedSampler(template, lambda text, request: next(left))
    limits, sampling = Limits(max_turns=8, max_tokens=2000), Sampling(max_tokens=200)
    return template, asyncio.run(episode(Interview(), TASK, sampler, limits=limits, sampling=sampling))


def test_an_episode_with_kept_history_is_one_row_that_only_grew() -> None:
    template, (row,) = interview("keep")
    dialogue = (*ASKED, CALLED, FOUND, ANSWERED, AGAIN, CALLED, FOUND, ANSWERED)
    assert row.tokens == render(make("chatml"), dialogue, (LOOK,))[0]  # as if the template had forgotten nothing
    assert template.text(row.tokens).count("<think>") == 4


def test_an_episode_in_segments_is_rows_that_the_template_would_write_and_that_weigh_one_rollout() -> None:
    template, rows = interview("segment")
    early, late = (*ASKED, CALLED, FOUND, ANSWERED), (*ASKED, CALLED, FOUND, ANSWERED, AGAIN, CALLED, FOUND, ANSWERED)
    newline = template.tokenizer.encode("\n")
    assert [*rows[0].tokens, *newline] == own(template.tokenizer, early, (LOOK,), header=False)
    assert [*rows[1].tokens, *newline] == own(template.tokenizer, late, (LOOK,), header=False)
    written = [template.text([i for i, m in zip(row.tokens, row.mask, strict=True) if m]) for row in rows]
    assert written == [template.text([*template.turn(CALLED), *template.turn(ANSWERED)])] * 2
    assert [row.reward for row in rows] == [1.5, 1.5]
    other = Trajectory("toy/0", 3, "group", 1, stop=rows[0].stop)
    other.feed([1])
    other.sampled(Sample([2], [-0.5], [0], True, 0, [1]), "", "")
    trained, _ = training_rows([Group("group", [*rows, other])], choose("grpo"))
    assert len(trained) == 3
    shares = [sum(s for s, m in zip(row.share, row.mask, strict=True) if m) for row in trained]
    assert shares == pytest.approx([0.5, 0.5, 1.0])  # each rollout weighs one
    assert {a for row in trained[:2] for a, m in zip(row.advantage, row.mask, strict=True) if m} == {trained[0].advantage[-1]}
    assert sum(int(batch.mask.sum()) for batch in pack(trained, batch_rows=2, row_tokens=1000)) == 1 + sum(
        sum(row.mask) for row in rows
    )


def test_an_episode_with_refused_history_fails_with_the_reason() -> None:
    with pytest.raises(ValueError, match="once a new user message follows"):
        interview("refuse")


def test_a_history_that_is_none_of_the_three_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("chat.history must be one of refuse, keep, segment; got 'forget'")):
        ChatOptions("forget")


def test_a_template_that_refuses_tools_altogether_is_told() -> None:
    alone = "{%- elif m.role == 'user' and loop.index > 1 %}{{ raise_exception('one question') }}"
    stern = JINJA["chatml"].replace("{%- elif m.role == 'tool' %}", alone + "{%- elif m.role == 'tool' %}")
    with pytest.raises(ValueError, match="the chat template refuses a dialogue with tools: one question"):
        make("chatml", stern)
