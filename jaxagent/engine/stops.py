"""Where a turn ends, and what is then answered. Stop tokens and sequences the device finds too, stop strings only the host.

A string may be cut into tokens in many ways, so it is looked for in the bytes of the turn, once per decode call. What was
sampled behind it is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from jaxagent.engine.slots import Row
from jaxagent.types import Sample, SampleRequest


def end_of(tokens: Sequence[int], since: int, request: SampleRequest, pieces: Sequence[bytes]) -> int | None:
    """How many tokens the turn has if it ends within tokens[since:], or None.

    Args:
        tokens: of the turn, without an end before `since`, and nothing behind a stop token or sequence: the device sees to it.
        pieces: the bytes of every token id; ids beyond them have none.
    """
    asked = request.sampling
    ends = [len(tokens)] if tokens[-1] in request.stop else []
    if not (asked.stop_sequences or asked.stop_strings):
        return ends[0] if ends else None
    if any(tuple(tokens[-len(sequence) :]) == sequence for sequence in asked.stop_sequences):
        ends.append(len(tokens))
    if asked.stop_strings:
        ends.append(_end_of_string(tokens, since, asked.stop_strings, pieces))
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


def sample_of(row: Row, end: int | None) -> Sample:
    """The row's turn up to `end` tokens, or all of it where only its budget ended; what was sampled behind is forgotten.

    The row is then what it would be if it had been stopped there: what the cache holds further on is written anew before it is
    read, and every turn brings its own controls.
    """
    request = row.request
    assert request is not None
    asked, n = request.sampling, len(row.tokens) if end is None else end
    routing = np.concatenate(row.routing) if row.routing else None
    if n < len(row.tokens):
        routing = None if routing is None else routing[: n - len(row.tokens)]
        del row.tokens[n:], row.logprobs[n:], row.versions[n:]
    top: list[list[tuple[int, float]]] = []
    if asked.top_logprobs:
        tokens, logprobs = (np.concatenate(part)[:n, : asked.top_logprobs].tolist() for part in zip(*row.top, strict=True))
        top = [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]
    fed = row.fed_logprobs if asked.prompt_logprobs else []
    return Sample(
        row.tokens, row.logprobs, row.versions, end is not None, request.start, list(request.tokens), routing, fed, top
    )
