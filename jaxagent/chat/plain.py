"""A byte-level template for small policies trained from scratch: 256 bytes and eight control tokens.

    <user>37AB<turn>  <call>A 37</call>  <result>52<turn>  ...  64<eos>

A turn is one call, `name` then its arguments in the order of the tool's parameters, or a text that ends the episode. Text
is encoded byte by byte, so no text can produce a control token. Tools are not described: small policies learn them from
demonstrations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxagent.types import Constraint, Message, ToolCall, ToolSpec, Vocabulary

CONTROL = ("<pad>", "<system>", "<user>", "<result>", "<turn>", "<call>", "</call>", "<eos>")
PAD, SYSTEM, USER, RESULT, TURN, CALL, END_CALL, EOS = range(256, 264)
_HEADER = {"system": SYSTEM, "user": USER, "tool": RESULT}
_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
_NAMED = re.compile(r"([A-Za-z_]+)\s?(.*)", re.DOTALL)


class PlainTemplate:
    """Implements `chat.template.Template`."""

    vocab_size = 264
    stop: tuple[int, ...] = (END_CALL, EOS)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self.extend(messages)

    def extend(self, messages: Sequence[Message], *, closed: bool = True, after: Message | None = None) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [_HEADER[message.role], *message.content.encode()]
        return [*ids, TURN]

    def restart(self, told: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return []  # it never rewrites

    def turn(self, message: Message) -> list[int]:
        if not message.calls:
            return [*message.content.encode(), EOS]
        if len(message.calls) > 1:
            raise ValueError("the plain template holds one call per turn")
        call = message.calls[0]
        arguments = ",".join(str(value) for value in call.arguments.values())
        gap = " " if arguments[:1].isalpha() or arguments[:1].isspace() or arguments[:1] == "_" else ""
        return [CALL, *f"{call.name}{gap}{arguments}".encode(), END_CALL]

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        body = list(ids[1:-1] if ids and ids[0] == CALL else ids[:-1])
        if not ids or ids[-1] not in self.stop:
            return Message("assistant", self.text(ids), error="the turn did not end within its token budget")
        if any(i >= 256 for i in body) or (ids[0] == CALL) != (ids[-1] == END_CALL):
            return Message("assistant", self.text(ids), error="control tokens in the wrong place")
        text = bytes(body).decode(errors="replace")
        if ids[0] != CALL:
            return Message("assistant", text)
        named = _NAMED.fullmatch(text)
        if not named:
            return Message("assistant", self.text(ids), error="a call needs a name")
        spec = next((tool for tool in tools if tool.name == named[1]), None)
        if spec is None:
            known = ", ".join(tool.name for tool in tools)
            return Message("assistant", self.text(ids), error=f"no tool {named[1]!r}; there are {known}")
        values = named[2].split(",", len(spec.parameter_names) - 1) if spec.parameter_names and named[2] else []
        arguments: dict[str, object] = dict(zip(spec.parameter_names, values, strict=False))
        return Message("assistant", calls=(ToolCall(spec.name, arguments),))

    def vocabulary(self) -> Vocabulary:
        names = [name.encode() for name in CONTROL]
        return Vocabulary((*(bytes([i]) for i in range(256)), *names), frozenset(range(256, self.vocab_size)))

    def constraint(self, tools: Sequence[ToolSpec], parallel: bool = True) -> Constraint:
        raise ValueError("calls of the plain template have no schema to be held to: their arguments are texts")

    def raw(self, text: str) -> list[int]:
        pieces = _CONTROL.split(text)
        return [i for piece in pieces for i in ([256 + CONTROL.index(piece)] if piece in CONTROL else piece.encode())]

    def text(self, ids: Sequence[int]) -> str:
        parts = [bytes([i]) if i < 256 else CONTROL[i - 256].encode() for i in ids]
        return b"".join(parts).decode(errors="replace")


# The same format for transformers: `apply_chat_template` gives what `PlainTemplate.prompt` gives.
_JINJA = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<turn>' }}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set a = f.arguments.values() | join(',') %}"
    "{{ '<call>' + f.name + (' ' if a[:1].isalpha() or a[:1].isspace() or a[:1] == '_' else '') + a + '</call>' }}"
    "{% else %}{{ m.content + '<eos>' }}{% endif %}"
    "{% else %}{{ {'system': '<system>', 'user': '<user>', 'tool': '<result>'}[m.role] + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>' }}{% endif %}"
)


def tokenizer_files() -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json of the byte-level vocabulary, as transformers loads them."""
    alphabet = bytes_to_unicode()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "chat_template": _JINJA,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def is_plain(checkpoint: Path) -> bool:
    """Whether a checkpoint directory carries this template's tokenizer."""
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    return settings.get("chat_template") == _JINJA


def bytes_to_unicode() -> dict[int, str]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
