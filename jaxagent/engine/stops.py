"""Where a turn ends: stop tokens and sequences, which the device finds too, and stop strings, which only the host can find.

A string may be cut into tokens in many ways, so it is looked for in the bytes of the turn, once per decode call. What was
sampled behind it is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from jaxagent.types import SampleRequest


def end_of(tokens: Sequence[int], since: int, request: SampleRequest, pieces: Sequence[bytes]) -> int | None:
    """How many tokens the turn has if it ends within tokens[since:], or None.

    Args:
        tokens: of the turn, without an end before `since`.
        pieces: the bytes of every token id; ids beyond them have none.
    """
    ends = [i + 1 for i in range(since, len(tokens)) if tokens[i] in request.stop]
    for sequence in request.sampling.stop_sequences:
        size, wanted = len(sequence), list(sequence)
        found = (i for i in range(max(since + 1, size), len(tokens) + 1) if list(tokens[i - size : i]) == wanted)
        ends += [next(found, len(tokens) + 1)]
    if request.sampling.stop_strings:
        ends += [_end_of_string(tokens, since, request.sampling.stop_strings, pieces)]
    end = min(ends, default=len(tokens) + 1)
    return end if end <= len(tokens) else None


def _end_of_string(tokens: Sequence[int], since: int, strings: Sequence[str], pieces: Sequence[bytes]) -> int:
    """The number of tokens up to the one that completes a string, beyond all tokens where none does."""
    wanted = [string.encode() for string in strings]
    first, missing = since, max(map(len, wanted)) - 1
    while first and missing > 0:  # a string may have begun in an earlier call
        first -= 1
        missing -= len(_piece(tokens[first], pieces))
    parts = [_piece(token, pieces) for token in tokens[first:]]
    text, widths = b"".join(parts), list(accumulate(map(len, parts)))
    # Not one that was complete before: without that a string whose end was known could be found again.
    known = widths[since - first - 1] if since > first else 0
    ends = [at + len(string) for string in wanted if (at := text.find(string, max(known - len(string) + 1, 0))) >= 0]
    if not ends:
        return len(tokens) + 1
    return first + next(i for i, width in enumerate(widths) if width >= min(ends)) + 1


def _piece(token: int, pieces: Sequence[bytes]) -> bytes:
    return pieces[token] if token < len(pieces) else b""
