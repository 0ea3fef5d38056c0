"""What a tokenizer's ids say in bytes, and what a turn's tool calls must look like: what the engine needs to hold a form.

A family's own chat template writes a call; the form is read from that, so that no family has to say it a second time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from jaxagent.chat.plain import bytes_to_unicode
from jaxagent.types import Again, Constraint, Either, Json, Message, ToolCall, ToolSpec, Vocabulary

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
NO_ARGUMENTS = "{}"

Marked: TypeAlias = "tuple[str | int, ...]"  # texts, and ids of control tokens


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
    parallel: bool,
) -> Constraint:
    """Free turns in which a call, wherever it begins, is one of a tool with arguments of its schema.

    Its form is that of one call or, if `parallel`, of calls in a row as the template writes them; of one alone where every
    place in the row is written otherwise, as where ids are numbered.

    Args:
        turn, text: of the template, whose turns of calls without arguments are taken apart.
    """

    def between(*names: str) -> list[Marked]:
        try:
            ids = turn(Message("assistant", calls=tuple(ToolCall(name) for name in names)))
        except ValueError:  # it has no place for several
            return []
        return _between_arguments(ids, text, control, names[0])

    def each(before: Sequence[Marked]) -> Either:
        pairs = zip(before, tools, strict=True)
        return Either(tuple((*marked, Json(json.dumps(tool.parameters))) for marked, tool in pairs))

    alone = [between(tool.name) for tool in tools]
    if not tools or any(len(parts) != 2 for parts in alone) or len({(parts[0][0], parts[1]) for parts in alone}) > 1:
        said = repr(text(turn(Message("assistant", calls=(ToolCall(tools[0].name),))))) if tools else "no tools"
        raise ValueError(
            "calls can be held to their tools' schemas where they stand in JSON between control tokens, the first of which "
            f"opens nothing else; in this family, or without tools, they cannot: {said}"
        )
    begin, end = alone[0]
    first, name = each([parts[0][1:] for parts in alone]), tools[0].name
    row = between(name, name, name) if parallel else []
    if len(row) != 4 or row[1] != row[2] or (row[0], row[3]) != (begin, end):
        return Constraint((first, *end), after=(int(begin[0]),))
    pairs = [between(name, tool.name) for tool in tools]
    if any(len(parts) != 3 for parts in pairs):
        return Constraint((first, *end), after=(int(begin[0]),))
    return Constraint((first, Again(each([parts[1] for parts in pairs])), *end), after=(int(begin[0]),))


def _between_arguments(
    ids: Sequence[int], text: Callable[[Sequence[int]], str], control: frozenset[int], name: str
) -> list[Marked]:
    """What stands before, between and behind the empty arguments of a turn's calls: from the control token before the first
    name to the one that closes the last call. Nothing where these are not there."""
    parts: list[list[str | int]] = [[]]
    for marked, run in groupby(ids, control.__contains__):
        if marked:
            parts[-1] += run
            continue
        before, *behind = text(list(run)).split(NO_ARGUMENTS)
        parts[-1] += [before] * bool(before)
        parts += [[piece] if piece else [] for piece in behind]
    opening = [i for i, one in enumerate(parts[0][1:]) if isinstance(one, str) and name in one and isinstance(parts[0][i], int)]
    closing = [i for i, one in enumerate(parts[-1]) if isinstance(one, int)]
    if len(parts) < 2 or not opening or not closing:
        return []
    return [tuple(parts[0][opening[-1] :]), *map(tuple, parts[1:-1]), tuple(parts[-1][: closing[0] + 1])]
