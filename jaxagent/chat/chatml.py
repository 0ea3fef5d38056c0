"""ChatML with Hermes tool calls, as Qwen2.5 and Qwen3 speak it. The tokenizer's own chat template is the authority.

    <|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n
    <tool_call>\\n{"name": "look", "arguments": {"key": "37"}}\\n</tool_call><|im_end|>

What follows a turn is found by rendering a small dialogue with and without it and taking the difference, so that prompts,
turns and observations together equal `apply_chat_template`. A text that contains control tokens is encoded as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxagent.types import Message, ToolCall, ToolSpec

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_MARK = "\ue000"
_HIDDEN = re.compile(f"{_MARK}([0-9]+);")  # stands for a control token inside a text while the template renders
_USER = Message("user", "x")


class ChatMLTemplate:
    """Implements `chat.template.Template` on a Hugging Face tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.control = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        if "<|im_end|>" not in self.control or not tokenizer.chat_template:
            raise ValueError("a ChatML tokenizer needs the token <|im_end|> and a chat template; this one has not both")
        ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
        self.stop = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._hideable = [*self.control, _MARK]
        self._any_hideable = re.compile("|".join(map(re.escape, self._hideable)))

    @classmethod
    def load(cls, path: str | Path) -> ChatMLTemplate:
        return cls(AutoTokenizer.from_pretrained(str(path)))

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self._encode(self._render(messages, tools, header=True))

    def extend(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
        called = messages and messages[0].role == "tool"
        # With a thought: Qwen3's template adds an empty one to a last turn that has none, and takes it back later.
        turn = Message("assistant", "" if called else "y", thinking="z", calls=(ToolCall("f", {}),) if called else ())
        before = self._render([_USER, turn], (), header=False)
        after = self._render([_USER, turn, *messages], (), header=True)
        cut = before.rindex("<|im_end|>") + (len("<|im_end|>") if closed else 0)
        self._same(before[:cut], after)
        return self._encode(after[cut:])

    def turn(self, message: Message) -> list[int]:
        before = self._render([_USER], (), header=True)
        after = self._render([_USER, message], (), header=False)
        self._same(before, after)
        end = after.rindex("<|im_end|>") + len("<|im_end|>")
        return self._encode(after[len(before) : end])

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        stopped = bool(ids) and ids[-1] in self.stop
        text = self.text(ids[:-1] if stopped else ids)
        if not stopped:
            return Message("assistant", text, error="the turn did not end within its token budget")
        thought = _THINK.match(text)
        thinking, rest = (thought[1].strip(), text[thought.end() :]) if thought else ("", text)
        calls, faults = [], []
        for body in _CALL.findall(rest):
            call = _read_call(body)
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                faults.append(call)
        content = _CALL.sub("", rest).strip()
        if "<tool_call>" in content or "</tool_call>" in content:
            faults.append("<tool_call> and </tool_call> do not match")
        return Message("assistant", content, thinking, tuple(calls), error="; ".join(faults))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, header: bool) -> str:
        rendered = self.tokenizer.apply_chat_template(
            [self._to_hf(message) for message in messages],
            tools=[self._hide(_schema(tool)) for tool in tools] or None,
            add_generation_prompt=header,
            tokenize=False,
        )
        return str(rendered)

    def _to_hf(self, message: Message) -> dict[str, Any]:
        hf: dict[str, Any] = {"role": message.role, "content": self._hide(message.content)}
        if message.thinking:
            hf["reasoning_content"] = self._hide(message.thinking)
        if message.calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            hf["tool_calls"] = [{"type": "function", "function": self._hide(function)} for function in functions]
        if message.name:
            hf["name"] = self._hide(message.name)
        return hf

    def _hide(self, value: Any) -> Any:
        """Replaces control tokens in a text, or in all texts of a JSON value, by marks that no vocabulary holds."""
        if isinstance(value, str):
            return self._any_hideable.sub(lambda found: f"{_MARK}{self._hideable.index(found[0])};", value)
        if isinstance(value, dict):
            return {self._hide(name): self._hide(inner) for name, inner in value.items()}
        return [self._hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _encode(self, rendered: str) -> list[int]:
        """Ids of rendered text; the control tokens that were hidden come out as text, cut so that none is recognised."""
        ids: list[int] = []
        for i, piece in enumerate(_HIDDEN.split(rendered)):
            hidden = self._hideable[int(piece)] if i % 2 else ""
            halves = (hidden[:1], hidden[1:]) if i % 2 else (piece,)
            for half in halves:
                ids += self.tokenizer.encode(half, add_special_tokens=False) if half else []
        return ids

    @staticmethod
    def _same(prefix: str, whole: str) -> None:
        if not whole.startswith(prefix):
            at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), len(whole))
            raise ValueError(
                "the chat template rewrites what was said before: a conversation is not a pure append. It first differs at "
                f"{prefix[max(0, at - 20) : at + 20]!r}, which becomes {whole[max(0, at - 20) : at + 20]!r}"
            )


def _schema(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _read_call(body: str) -> ToolCall | str:
    """The call in a <tool_call> block, or what is wrong with it."""
    try:
        call = json.loads(body, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        return f"the tool call is not JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:  # NaN, a number without end, brackets without end
        return f"the tool call is not JSON that can be read: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'a tool call is {"name": ..., "arguments": {...}}'
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else "the arguments must be a JSON object"


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number")
