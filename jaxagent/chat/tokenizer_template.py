"""A chat template on any Hugging Face tokenizer: its own `chat_template` is the authority, a `Dialect` adds what it lacks.

What a turn and an observation add to a conversation is found by rendering a small dialogue with and without it and taking the
difference, so that prompts, turns and observations together equal `apply_chat_template`. A text that contains control tokens
is encoded as text. What the template can do is found out by trying: where it has no words for tools, the dialect's are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxagent.chat.dialect import Dialect, call_id, schema
from jaxagent.chat.history import PROBE_TOOL, ChatOptions, Rewriting, Tongue, compare, rewritings
from jaxagent.chat.vocabulary import call_constraint, vocabulary_of
from jaxagent.types import Constraint, Message, ToolCall, ToolSpec, Vocabulary

_MARK = "\ue000"
_HIDDEN = re.compile(f"{_MARK}([0-9]+);")  # stands for a control token inside a text while the template renders
_SAID = "\ue001"  # stands in the small dialogue's turn, to find it again
_USER = Message("user", "x")
_LOOKS_LIKE_CONTROL = re.compile(r"<\|.*\|>|\[/?[A-Z_]+\]")
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


class TokenizerTemplate:
    """Implements `chat.template.Template`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dialect: Dialect, options: ChatOptions | None = None):
        """Raises ValueError where conversations surely break: see `ChatOptions.history`."""
        self.tokenizer, self.dialect, self.options = tokenizer, dialect, options or ChatOptions()
        given = tokenizer.chat_template
        # Of several templates the one for tools is taken always: prompts and what follows must come from the same one.
        chosen = given.get("tool_use", given.get("default")) if isinstance(given, dict) else given
        self.jinja = str(chosen or "")
        added = tokenizer.get_added_vocab()
        if not self.jinja or not dialect.speaks(set(added)):
            raise ValueError(
                f"a {dialect.family} tokenizer has the tokens {' '.join(dialect.control)} and a chat template; this one has not"
            )
        ids = [added[token] for token in (dialect.end, *dialect.stops) if token in added]
        ends = [*ids, tokenizer.eos_token_id]
        self.stop = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._hideable = [*sorted(self._control(added), key=len, reverse=True), _MARK]
        self._any_hideable = re.compile("|".join(map(re.escape, self._hideable)))
        self._control_tokens = tuple(token for token in self._hideable if token != _MARK)
        # What a piece is encoded behind, after a control token and in a text: the same, where it makes no difference.
        end, line = dialect.end, f"{dialect.end}\n"
        spaces = self._raw(f"{end}x")[1:] != self._raw(f"{line}x")[len(self._raw(line)) :]
        self._behind = [(behind, len(self._raw(behind))) for behind in (end, line if spaces else end)]
        self._tongue = Tongue(
            lambda messages, tools, header: self._render(messages, tools, header=header), self._to_end, self._encode, self.text
        )
        self._find_abilities()
        self.rewritings = self._find_rewritings()

    # ------------------------------------------------------------------ the protocol

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if tools and any(message.role == "system" for message in messages):
            self._refuse("tool")
        return self._encode(self._render(messages, tools, header=True))

    def extend(self, messages: Sequence[Message], *, closed: bool = True, after: Message | None = None) -> list[int]:
        called = bool(messages) and messages[0].role == "tool"
        if any(message.role != "tool" for message in messages):
            self._refuse("user")
        # With a thought: Qwen3's template adds an empty one to a last turn that has none, and takes it back later.
        calls = self._calls_for(messages, after) if called else ()
        turn = Message("assistant", "" if called else _SAID, thinking="z", calls=calls)
        before = self._to_end(self._render([_USER, turn], (), header=False))
        whole = self._render([_USER, turn, *messages], (), header=True)
        if self.options.history == "refuse" and not whole.startswith(before):
            raise ValueError(str(self._compared(before, whole, "tool" if called else "user")))
        end = whole.index(self.dialect.end, whole.index(_SAID))
        return self._encode(whole[end + (len(self.dialect.end) if closed else 0) :])

    def restart(self, told: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if self.options.history != "segment" or not self.rewritings:
            return []
        asked = self._render(told[:-1], tools, header=False)  # what was there when the last turn was sampled
        said = self._to_end(self._render(told, tools, header=False))
        whole = self._render([*told, *messages], tools, header=True)
        return [] if whole.startswith(asked) and whole.startswith(said) else self._encode(whole)

    def turn(self, message: Message) -> list[int]:
        tools = [ToolSpec(call.name, "", {"properties": _types(call.name, message.calls)}) for call in message.calls]
        for in_words in [False] * self.native + [True] * self.worded:
            try:
                ids = self._turn(message, in_words)
            except TemplateError:  # such as several calls where the template takes one
                continue
            read = self.parse(ids, tools)
            if not read.error and read.calls == message.calls and read.content == message.content.strip():
                return ids
        raise ValueError(
            f"the chat template cannot say this turn so that it is read back: {message}. Its text may look like a call, or "
            "the template may have no place for it"
        )

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        stopped = bool(ids) and ids[-1] in self.stop
        text = self.text(ids[:-1] if stopped else ids)
        if not stopped:
            return Message("assistant", text, error="the turn did not end within its token budget")
        return self.dialect.read(text, tools)

    def text(self, ids: Sequence[int]) -> str:
        # Some tokenizers ask for spaces before punctuation to be taken out: a text must be what its ids say.
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def raw(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self._control_tokens)

    def constraint(self, tools: Sequence[ToolSpec], parallel: bool = True) -> Constraint:
        added = self.tokenizer.get_added_vocab()
        control = frozenset(added[token] for token in self._control_tokens)
        return call_constraint(self.turn, self.text, control, tools, parallel)

    # ------------------------------------------------------------------ what the template can do

    def _find_abilities(self) -> None:
        """Tries the template: system messages, user messages in a row, tools, calls, results, several calls in a turn."""
        self.takes_system = self.takes_rows = self.native = self.parallel = True
        self.takes_system = "so1" in self._tried([Message("system", "so1"), _USER])
        self.takes_rows = "so2" in self._tried([_USER, Message("user", "so2")])
        one, two = ToolCall(PROBE_TOOL.name, {"key": "so3"}), ToolCall(PROBE_TOOL.name, {"key": "so4"})
        result = Message("tool", "so5", name=PROBE_TOOL.name)
        called = self._tried([_USER, Message("assistant", calls=(one,)), result])
        told = self._tried([_USER], (PROBE_TOOL,)) != self._tried([_USER])
        self.native = told and "so3" in called and "so5" in called
        # Calls go in words where the template has none, or has the same words but refuses some turns or drops half of them.
        self.worded = not self.native or self.dialect.write((one,)) in called
        several = self._tried([_USER, Message("assistant", calls=(one, two)), result, result])
        self.parallel = "so3" in several and "so4" in several

    def _tried(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        try:
            return self._render(messages, tools, header=True)
        except (TemplateError, TypeError):  # a refusal, or words put together with nothing
            return ""

    def _find_rewritings(self) -> dict[str, Rewriting]:
        try:
            found = rewritings(self._tongue, parallel=self.parallel)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a dialogue with tools: {error}") from None
        by_role = {rewriting.after: rewriting for rewriting in found}
        if self.options.history == "refuse" and "tool" in by_role and not by_role["tool"].system:
            raise ValueError(str(by_role["tool"]))
        return by_role

    def _refuse(self, role: str) -> None:
        if self.options.history == "refuse" and role in self.rewritings:
            raise ValueError(str(self.rewritings[role]))

    # ------------------------------------------------------------------ small dialogues

    def _calls_for(self, messages: Sequence[Message], after: Message | None) -> tuple[ToolCall, ...]:
        """Calls that these results may follow, with the ids that the policy gave them."""
        count = sum(message.role == "tool" for message in messages)
        said = after.calls[:count] if after else ()
        made = [ToolCall(call.name, {"x": _SAID}, call.id) for call in said]
        return (*made, *(ToolCall("f", {"x": _SAID}) for _ in range(count - len(made))))

    def _turn(self, message: Message, in_words: bool) -> list[int]:
        if in_words and message.calls:
            message = self._in_words(self._hide_message(message))
        else:
            message = self._hide_message(message)
        before = self._apply([self._hide_message(_USER)], [], header=True)
        after = self._to_end(self._apply([self._hide_message(_USER), message], [], header=False))
        if not after.startswith(before):
            raise ValueError(str(self._compared(before, after, "turn")))
        return self._encode(after[len(before) :], before)

    def _to_end(self, rendered: str) -> str:
        """A rendered dialogue up to the end of its last turn."""
        return rendered[: rendered.rindex(self.dialect.end) + len(self.dialect.end)]

    def _compared(self, was: str, becomes: str, role: str) -> Rewriting:
        return compare(self._tongue, was, becomes, after=role, system=False, turn=1)

    # ------------------------------------------------------------------ rendering

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, header: bool) -> str:
        hidden = [self._hide_message(message) for message in messages]
        specs = [ToolSpec(*self._hide((tool.name, tool.description, tool.parameters))) for tool in tools]
        hidden = [
            self._in_words(message) if not self.native or (len(message.calls) > 1 and not self.parallel) else message
            for message in hidden
        ]
        if specs and not self.native:
            hidden = _with_system(hidden, self.dialect.tell(specs))
            specs = []
        if not self.takes_system:
            hidden = _folded(hidden)
        if not self.takes_rows:
            hidden = _merged(hidden)
        return self._apply(hidden, [schema(spec) for spec in specs], header=header)

    def _apply(self, hidden: Sequence[Message], tools: list[Any], *, header: bool) -> str:
        rendered = self.tokenizer.apply_chat_template(
            _to_hf(hidden), tools=tools or None, chat_template=self.jinja, add_generation_prompt=header, tokenize=False
        )
        return str(rendered)

    def _in_words(self, message: Message) -> Message:
        """The message without what a template without tools has no place for."""
        if message.role == "tool":
            return Message(self.dialect.result_role, self.dialect.result.replace("{}", message.content))
        if not message.calls:
            return message
        said = [message.content] if message.content else []
        return replace(message, content="\n".join([*said, self.dialect.write(message.calls)]), calls=())

    # ------------------------------------------------------------------ control tokens

    def _control(self, added: dict[str, int]) -> list[str]:
        """The added tokens that mean something; others are only words and white space that got an id of their own."""
        special = set(self.tokenizer.all_special_ids)
        for i, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                special.add(i)
        known = (self.jinja, self.dialect.form, self.dialect.result, *self.dialect.control)
        return [
            token
            for token, i in added.items()
            if token.strip()
            and (i in special or _LOOKS_LIKE_CONTROL.fullmatch(token) or any(token in place for place in known))
        ]

    def _hide_message(self, message: Message) -> Message:
        calls = tuple(ToolCall(self._hide(call.name), self._hide(call.arguments), call.id) for call in message.calls)
        content, thinking, name = self._hide((message.content, message.thinking, message.name))
        return Message(message.role, content, thinking, calls, name)

    def _hide(self, value: Any) -> Any:
        """Replaces control tokens in a text, or in all texts of a JSON value, by marks that no vocabulary holds."""
        if isinstance(value, str):
            return self._any_hideable.sub(lambda found: f"{_MARK}{self._hideable.index(found[0])};", value)
        if isinstance(value, dict):
            return {self._hide(name): self._hide(inner) for name, inner in value.items()}
        return [self._hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _encode(self, rendered: str, before: str = "") -> list[int]:
        """Ids of rendered text; the control tokens that were hidden come out as text, cut so that none is recognised.

        Args:
            before: the rendered text that it follows, or nothing where that ends with a control token.
        """
        ids: list[int] = []
        for i, piece in enumerate(_HIDDEN.split(rendered)):
            hidden = self._hideable[int(piece)] if i % 2 else ""
            halves = (hidden[:1], hidden[1:]) if i % 2 else (piece,)
            for half in halves:
                ids += self._ids(half, in_text=bool(before) and not before.endswith(self._control_tokens))
                before = half + "x" * (i % 2) or before  # half a control token is text, also where it looks like another
        return ids

    def _ids(self, text: str, *, in_text: bool) -> list[int]:
        """Ids of a piece of text. Some tokenizers put a space before a text that begins or follows a control token."""
        behind, length = self._behind[in_text]
        return self._raw(behind + text)[length:] if text else []

    def _raw(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def tokenizer_of(checkpoint: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def _to_hf(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them. A call has an id: its own, or its place in its turn; results go by order."""
    found: list[dict[str, Any]] = []
    open_calls: Iterator[str] = iter(())
    for message in messages:
        hf: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            hf["reasoning_content"] = message.thinking
        if message.calls:
            ids = [call_id(call, i) for i, call in enumerate(message.calls)]
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            pairs = zip(ids, functions, strict=True)
            hf["tool_calls"] = [{"id": name, "type": "function", "function": function} for name, function in pairs]
            open_calls = iter(ids)
        if message.role == "tool":
            hf["tool_call_id"] = next(open_calls, call_id(ToolCall(""), 0))
        if message.name:
            hf["name"] = message.name
        found.append(hf)
    return found


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The dialogue with `text` at the end of its system message."""
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _folded(messages: Sequence[Message]) -> list[Message]:
    """The dialogue with every system message at the beginning of what comes after it, or the user's where nothing does."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == "system":
            message = replace(message, content=f"{found.pop().content}\n\n{message.content}")
        found.append(message)
    if found and found[-1].role == "system":
        found[-1] = replace(found[-1], role="user")
    return found


def _merged(messages: Sequence[Message]) -> list[Message]:
    """The dialogue with messages of one role in a row made one."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == message.role and not message.calls:
            message = replace(message, content=f"{found.pop().content}\n{message.content}")
        found.append(message)
    return found


def _types(name: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The schema of a tool's parameters as its calls in a turn show it."""
    values = [item for call in calls if call.name == name for item in call.arguments.items()]
    return {key: {"type": _TYPES.get(type(value), "string")} for key, value in values}
