"""Files to learn from without rollouts: dialogues, pairs of them, and stored trajectories. All faults name file and line.

One JSON object per line:

    {"messages": [{"role": "user", "content": "37A"}, {"role": "assistant", "tool_calls": [...]}, ...], "tools": [...]}
    {"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...]}        for preferences; the prompt may be left away
    {"tokens": [...], "mask": [...], "group": ..., ...}                          a trajectory that a run has stored

Messages, calls and tools are written as in OpenAI's chat completions. A trajectory's tokens are used as they were sampled:
nothing of it is rendered or tokenised again. The path may be a folder, of which all .jsonl files are read, in order; of a run's
`trajectories/` those of its training, `train-*.jsonl`, because the tasks of its evaluations are held out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from jaxagent.chat.template import Template, render
from jaxagent.data.tasks import numbered
from jaxagent.types import Message, ToolCall, ToolSpec, Trajectory

ROLES = ("system", "user", "assistant", "tool")

Rendered = tuple[list[int], list[bool]]  # ids and mask
Record = tuple[str, dict[str, Any]]  # where it stands, and what


class Examples:
    """Reads lines into ids and masks.

    Args:
        template: writes messages as ids.
        tools: of dialogues that name none.
        row_tokens: the longest row that can be trained on.
    """

    def __init__(self, template: Template, tools: Sequence[ToolSpec], row_tokens: int):
        self.template, self.tools, self.row_tokens = template, tuple(tools), row_tokens

    def dialogues(self, path: str) -> tuple[list[Rendered], list[Trajectory]]:
        """All dialogues of the file, rendered, and all trajectories of it that count."""
        rendered, stored = [], []
        for where, record in records(path):
            if "tokens" in record:
                stored += self._stored(where, record)
            else:
                rendered.append(self._dialogue(where, record, "messages"))
        return rendered, stored

    def pairs(self, path: str) -> tuple[list[tuple[Rendered, Rendered]], list[Trajectory]]:
        """All pairs of the file as (chosen, rejected), rendered, and all trajectories of it that count."""
        rendered, stored = [], []
        for where, record in records(path):
            if "tokens" in record:
                stored += self._stored(where, record)
                continue
            chosen, rejected = (self._dialogue(where, record, name) for name in ("chosen", "rejected"))
            first = [ids[: mask.index(True)] for ids, mask in (chosen, rejected)]
            if first[0] != first[1]:
                raise ValueError(
                    f"{where}: chosen and rejected answer different prompts ({self.template.text(first[0])!r} and "
                    f"{self.template.text(first[1])!r}): a preference is between answers to one prompt"
                )
            if chosen == rejected:
                raise ValueError(f"{where}: chosen and rejected are the same, token by token: no token differs")
            rendered.append((chosen, rejected))
        return rendered, stored

    def _stored(self, where: str, record: dict[str, Any]) -> list[Trajectory]:
        try:
            row = Trajectory.from_json(record)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{where}: not a trajectory as a run stores them: {error}") from None
        lengths = {len(row.tokens), len(row.mask)}
        if len(lengths) > 1 or (row.mask and row.mask[0]):
            raise ValueError(
                f"{where}: {len(row.tokens)} tokens with a mask of {len(row.mask)}; the first token is not sampled"
            )
        self._check_length(where, len(row.tokens))
        if wrong := [i for i in row.tokens if not 0 <= i < self.template.vocab_size]:
            raise ValueError(f"{where}: token {wrong[0]} is not among the {self.template.vocab_size} of the policy's tokenizer")
        return [row] if row.stop.counts and not row.past and any(row.mask) else []

    def _dialogue(self, where: str, record: dict[str, Any], name: str) -> Rendered:
        """The prompt and what is under `name` as one dialogue."""
        if name not in record:
            raise ValueError(
                f"{where}: {name!r} is wanted, or 'tokens' of a stored trajectory; got {', '.join(record) or 'nothing'}"
            )
        said = [*_list(where, "prompt", record.get("prompt", [])), *_list(where, name, record[name])]
        messages = [message_of(f"{where}, message {i + 1} of {name}", value) for i, value in enumerate(said)]
        if not messages or messages[-1].role != "assistant":
            last = f"{messages[-1].role}'s" if messages else "missing"
            raise ValueError(f"{where}: the last message of {name} must be the assistant's, it is {last}")
        for i, (one, other) in enumerate(pairwise(messages), start=1):
            if one.role == other.role == "assistant":
                raise ValueError(f"{where}: messages {i} and {i + 1} of {name} are both the assistant's; make them one")
        tools = self.tools
        if record.get("tools"):
            tools = tuple(tool_of(where, value) for value in _list(where, "tools", record["tools"]))
        try:
            ids, mask = render(self.template, messages, tools)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"{where}: {error}") from None
        self._check_length(where, len(ids))
        return ids, mask

    def _check_length(self, where: str, length: int) -> None:
        if length > self.row_tokens:
            raise ValueError(
                f"{where}: {length} tokens do not fit a training row of learner.row_tokens={self.row_tokens}: raise it, or "
                "leave the line out"
            )


def records(path: str) -> Iterator[Record]:
    """The objects of a file, or of all .jsonl files of a folder, each with the words for where it stands."""
    folder = Path(path)
    files = sorted(folder.glob("train-*.jsonl")) or sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    if not files:
        raise ValueError(f"{path}: no .jsonl file in this folder")
    for file in files:
        yield from ((f"{file}, line {number}", record) for number, record in numbered(file))


def by_group(rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Stored trajectories by their group: neighbours of one name, as a run stores them."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.group)]


def message_of(where: str, value: Any) -> Message:
    """A message as OpenAI's chat completions write it. `reasoning_content` and `thinking` are the same."""
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        got = value.get("role") if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where}: an object with a role of {', '.join(ROLES)} is wanted, got {got!r}")
    content = value.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: content must be a text, got {type(content).__name__}")
    calls = tuple(call_of(where, call) for call in _list(where, "tool_calls", value.get("tool_calls") or []))
    if calls and value["role"] != "assistant":
        raise ValueError(f"{where}: only the assistant makes tool_calls, this message is the {value['role']}'s")
    thinking = value.get("reasoning_content") or value.get("thinking") or ""
    return Message(value["role"], content or "", str(thinking), calls, str(value.get("name") or ""))


def call_of(where: str, value: Any) -> ToolCall:
    """A tool call; its arguments may be an object or the JSON of one."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call needs a function with a name, got {value!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: the arguments of {function['name']} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of {function['name']} must be an object, got {type(arguments).__name__}")
    return ToolCall(function["name"], arguments, str(value.get("id") or ""))


def tool_of(where: str, value: Any) -> ToolSpec:
    """A tool; `{"type": "function", "function": {...}}` or the function alone."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool needs a name, got {value!r}")
    spec = ToolSpec(function["name"], str(function.get("description") or ""))
    return ToolSpec(spec.name, spec.description, function.get("parameters") or spec.parameters)


def _list(where: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name} must be a list, got {type(value).__name__}")
    return value
