"""What a tokenizer's ids say in bytes, and what a turn's tool calls must look like: what the engine needs to hold a form.

A family's own chat template writes a call; the form is read from that, so that no family has to say it a second time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from jaxagent.chat.plain import bytes_to_unicode
from jaxagent.types import Constraint, Either, Form, Json, Message, ToolCall, ToolSpec, Vocabulary

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
NO_ARGUMENTS = "{}"


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, control: Iterable[str]) -> Vocabulary:
    """The bytes of every id of a byte-level tokenizer or one with SentencePiece's letters.

    Args:
        control: the tokens that mean something and are never part of a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} does not say the bytes of its tokens: a fast tokenizer is wanted")
    named, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    piece_of = _byte_level if "ByteLevel" in str(backend.decoder) else _sentence_piece
    pieces = [b""] * (max(named.values()) + 1)
    for token, i in named.items():
        pieces[i] = token.encode() if token in added else piece_of(token)
    return Vocabulary(tuple(pieces), frozenset(added[token] for token in control if token in added))


def _byte_level(token: str) -> bytes:
    return bytes(_OF_LETTER[letter] for letter in token) if all(letter in _OF_LETTER for letter in token) else b""


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def call_constraint(
    turn: Callable[[Message], list[int]],
    text: Callable[[Sequence[int]], str],
    control: frozenset[int],
    tools: Sequence[ToolSpec],
) -> Constraint:
    """Free turns in which a call, wherever it begins, is one of a tool with arguments of its schema.

    Args:
        turn, text: of the template, whose turns of one call without arguments are taken apart.
    """
    opening, forms = set[int](), list[Form]()
    for tool in tools:
        ids = turn(Message("assistant", calls=(ToolCall(tool.name),)))
        marks = [i for i, token in enumerate(ids) if token in control]
        for start, end in pairwise(marks):
            body = text(ids[start + 1 : end])
            if tool.name in body and body.count(NO_ARGUMENTS) == 1:
                before, after = body.split(NO_ARGUMENTS)
                opening.add(ids[start])
                forms.append((before, Json(json.dumps(tool.parameters)), after, ids[end]))
                break
    if not tools or len(forms) < len(tools) or len(opening) != 1:
        raise ValueError(
            "calls can be held to their tools' schemas where they stand in JSON between control tokens, the first of which "
            f"opens nothing else; in this family, or without tools, they cannot: {text(ids) if tools else 'no tools'!r}"
        )
    return Constraint(Either(tuple(forms)), after=tuple(opening))
