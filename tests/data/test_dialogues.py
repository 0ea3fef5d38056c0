"""Files to learn from: what is read from them, and every fault with its file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxagent.chat.plain import CALL, END_CALL, EOS, RESULT, TURN, USER, PlainTemplate
from jaxagent.data.dialogues import Examples, by_group, message_of, records
from jaxagent.data.store import Store
from jaxagent.envs.chain import Chain
from jaxagent.types import Message, Sample, StopReason, ToolCall, ToolSpec, Trajectory

PLAIN = PlainTemplate()
KEY = {"type": "object", "properties": {"key": {"type": "string"}}}
EXAMPLES = Examples(PLAIN, (ToolSpec("A", "", KEY),), row_tokens=40)
USER_37A = {"role": "user", "content": "37A"}
CALL_A = {"role": "assistant", "tool_calls": [{"function": {"name": "A", "arguments": '{"key": "37"}'}}]}
SHIPPED = Path(__file__).parents[2] / "configs" / "dialogues.jsonl"


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "A"}


def file(folder: Path, *lines: Any) -> str:
    path = folder / "lines.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_a_dialogue_is_what_the_policy_would_sample_and_its_observations_are_masked(tmp_path: Path) -> None:
    path = file(tmp_path, {"messages": [USER_37A, CALL_A, result("52"), answer("52")]})
    (((ids, mask),), stored) = EXAMPLES.dialogues(path)
    assert stored == []
    assert ids == [USER, *b"37A", TURN, CALL, *b"A37", END_CALL, RESULT, *b"52", TURN, *b"52", EOS]
    assert [i for i, own in zip(ids, mask, strict=True) if own] == [CALL, *b"A37", END_CALL, *b"52", EOS]


def test_messages_are_read_as_chat_completions_write_them() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert message_of("", said) == Message("assistant", "ab")
    thought = {**answer("c"), "reasoning_content": "hm"}
    assert message_of("", thought) == Message("assistant", "c", "hm")
    parsed = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x1", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    message = message_of("", parsed)
    assert (message.content, message.calls, message.calls[0].id) == ("", (ToolCall("f", {"a": 1}),), "x1")


def test_a_pair_has_its_prompt_once_or_twice(tmp_path: Path) -> None:
    once = {"prompt": [USER_37A], "chosen": [answer("52")], "rejected": [answer("25")]}
    twice = {"chosen": [USER_37A, answer("52")], "rejected": [USER_37A, answer("25")]}
    found, _ = EXAMPLES.pairs(file(tmp_path, once, twice))
    assert found[0] == found[1]
    chosen, rejected = found[0]
    assert chosen[0] == [USER, *b"37A", TURN, *b"52", EOS]
    assert rejected[0] == [USER, *b"37A", TURN, *b"25", EOS]


def trajectory(group: str, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    row = Trajectory("t", 0, group, 0, stop=stop)
    row.feed([USER, 0xFF, TURN])  # no text has these tokens
    row.sampled(Sample([0xC3, 0x28, EOS], [-0.1] * 3, [0] * 3, True, 0, [USER, 0xFF, TURN]), "", "")
    return row


def test_a_stored_trajectory_keeps_its_tokens_as_they_were_sampled(tmp_path: Path) -> None:
    rows = [trajectory("a"), trajectory("a", StopReason.INFRA_FAILURE), trajectory("b"), trajectory("b")]
    rows[-1].past = True  # what an earlier version played is nobody's example
    Store(tmp_path).write("train-000001", rows)
    Store(tmp_path).write("train-000002", [trajectory("c")])
    Store(tmp_path).write("after", [trajectory("held out")])
    rendered, stored = EXAMPLES.dialogues(str(tmp_path))
    assert rendered == []
    assert [row.tokens for row in stored] == [[USER, 0xFF, TURN, 0xC3, 0x28, EOS]] * 3
    assert [[row.group for row in group] for group in by_group(stored)] == [["a"], ["b"], ["c"]]
    assert [row.tokens for row in EXAMPLES.pairs(str(tmp_path))[1]] == [row.tokens for row in stored]


DIALOGUE = {"messages": [USER_37A, answer("52")]}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"messages": [', "not JSON"),
        ("[1]", "an object is wanted, got list"),
        ({"text": "hello"}, "'messages' is wanted, or 'tokens' of a stored trajectory; got text"),
        ({"messages": "hello"}, "messages must be a list, got str"),
        ({"messages": []}, "the last message of messages must be the assistant's, it is missing"),
        ({"messages": [USER_37A]}, "the last message of messages must be the assistant's, it is user's"),
        ({"messages": [USER_37A, CALL_A, result("52")]}, "must be the assistant's, it is tool's"),
        ({"messages": [USER_37A, answer("a"), answer("b")]}, "messages 2 and 3 of messages are both the assistant's"),
        ({"messages": [{"role": "robot"}, answer("a")]}, "message 1 of messages: an object with a role of .* got 'robot'"),
        ({"messages": ["hello", answer("a")]}, "message 1 of messages: .* got 'str'"),
        ({"messages": [{"role": "user", "content": 3}, answer("a")]}, "message 1 of messages: content must be a text, got int"),
        ({"messages": [{**USER_37A, "tool_calls": CALL_A["tool_calls"]}, answer("a")]}, "only the assistant makes tool_calls"),
        (
            {"messages": [USER_37A, {"role": "assistant", "tool_calls": [{"name": 3}]}]},
            "a tool call needs a function with a name",
        ),
        (
            {"messages": [USER_37A, {"role": "assistant", "tool_calls": [{"name": "A", "arguments": "{"}]}]},
            "message 2 of messages: the arguments of A are not JSON",
        ),
        (
            {"messages": [USER_37A, {"role": "assistant", "tool_calls": [{"name": "A", "arguments": "[1]"}]}]},
            "the arguments of A must be an object, got list",
        ),
        ({"messages": [USER_37A, {**CALL_A, "tool_calls": CALL_A["tool_calls"] * 2}]}, "holds one call per turn"),
        ({**DIALOGUE, "tools": [{"type": "function"}]}, "a tool needs a name"),
        ({"messages": [{"role": "user", "content": "x" * 40}, answer("a")]}, "44 tokens do not fit .* learner.row_tokens=40"),
        ({"tokens": [1, 2]}, "not a trajectory as a run stores them"),
        ({**trajectory("a").to_json(), "mask": [False]}, "6 tokens with a mask of 1"),
        ({**trajectory("a").to_json(), "tokens": [1, 2, 3, 4, 5, 264]}, "token 264 is not among the 264"),
    ],
)
def test_a_fault_is_told_with_file_and_line(tmp_path: Path, line: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"lines\.jsonl, line 3.*{fault}"):
        EXAMPLES.dialogues(file(tmp_path, DIALOGUE, "", line))


PAIR = {"prompt": [USER_37A], "chosen": [answer("52")], "rejected": [answer("25")]}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (DIALOGUE, "'chosen' is wanted, or 'tokens' of a stored trajectory; got messages"),
        ({**PAIR, "rejected": [answer("52")]}, "no token differs"),
        ({**PAIR, "rejected": [USER_37A]}, "the last message of rejected must be the assistant's"),
        (
            {"chosen": [USER_37A, answer("1")], "rejected": [{"role": "user", "content": "38A"}, answer("1")]},
            "chosen and rejected answer different prompts .*37A.*38A",
        ),
    ],
)
def test_a_fault_of_a_pair_is_told_with_file_and_line(tmp_path: Path, line: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"lines\.jsonl, line 2.*{fault}"):
        EXAMPLES.pairs(file(tmp_path, PAIR, line))


def test_a_folder_without_lines_and_a_file_that_is_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.jsonl file in this folder"):
        list(records(str(tmp_path)))
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        list(records(str(tmp_path / "none.jsonl")))


def test_a_tool_of_the_line_is_told_to_the_template_in_place_of_the_worlds(tmp_path: Path) -> None:
    told: list[Any] = []

    class Listening(PlainTemplate):
        def prompt(self, messages: Any, tools: Any) -> list[int]:
            told.append([tool.name for tool in tools])
            return super().prompt(messages, tools)

    tool = {"type": "function", "function": {"name": "search", "parameters": KEY}}
    Examples(Listening(), EXAMPLES.tools, 40).dialogues(file(tmp_path, {**DIALOGUE, "tools": [tool]}, DIALOGUE))
    assert told == [["search"], ["A"]]


def test_the_dialogues_that_are_shipped_are_right_answers_through_the_tool() -> None:
    rendered, _ = EXAMPLES.dialogues(str(SHIPPED))
    assert len(rendered) == 64
    world = Chain(hops=(1,), flaky=0.0)
    for i, (_, record) in enumerate(records(str(SHIPPED))):
        task = world.task("demo", i)
        question, call, _, said = record["messages"]
        assert question["content"] == task["question"]
        assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"key": task["question"][:2]}
        assert said["content"] == world.gold(task)
