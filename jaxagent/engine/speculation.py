"""Which turns go on by decoding and which by a draft that one forward verifies, as it is expected to pay. No JAX.

The draw at a position is a function of the tokens before it and of the trajectory's key (sampling.py). A verified position is
drawn in just this way, and the drawing goes on only where the drawn token is the draft's: drafts change when a token is
computed, never which. That is stronger than the rejection scheme of Leviathan et al. 2023, which keeps the distribution only.

What pays is reckoned anew for every call of the device: expected tokens per second, from how often drafts of such a match have
come true lately, also those that were only decoded, and from what the calls took lately.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from jaxagent.engine.drafts import LONGEST, Drafts
from jaxagent.engine.slots import Row

FADE = 0.98  # of what drafts of one match have come to, with each draft that is compared
CHEAPEST = 1.25  # of a decode step: what a verification is thought to take until it is measured
AGAIN = 100.0  # a cost is measured again when that takes a hundredth of the time since


@dataclass
class Guess:
    """A row, a draft of its next tokens, how many tokens before it matched, and how many of it should come true."""

    row: Row
    draft: list[int]
    match: int
    expected: float


class Costs:
    """What calls of each kind and width took: the least of the last few."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], deque[float]] = {}
        self._measured: dict[tuple[bool, int], float] = {}
        self._busy = 0.0

    def add(self, verified: bool, width: int, seconds: float) -> None:
        self._busy += seconds
        call = verified, width
        if call not in self._seconds:  # the first may have waited for the compiler
            self._seconds[call] = deque(maxlen=8)
        else:
            self._seconds[call].append(seconds)
            self._measured[call] = self._busy

    def least(self, verified: bool, width: int) -> float | None:
        """Seconds, or None where they are not known."""
        return min(self._seconds.get((verified, width), ()), default=None)

    def of(self, verified: bool, width: int) -> float | None:
        """Seconds, or None where they are not known, or were long ago."""
        least = self.least(verified, width)
        late = least is None or self._busy - self._measured[verified, width] > AGAIN * least
        return None if late else least


class Speculation:
    """The drafts of one engine's rows."""

    def __init__(
        self,
        draft_tokens: int,
        decode_tokens: int,
        widths: Sequence[int],
        remembered: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Takes the sizes of calls and how their cost is told.

        Args:
            draft_tokens: most of a draft; 0 is off.
            widths: rows of a call.
            remembered: tokens that indices may hold.
            clock: what calls cost is its advance.
        """
        self.draft_tokens, self._decode_tokens, self._widths = draft_tokens, decode_tokens, widths
        self._remembered, self._clock = remembered, clock
        self._groups: dict[str, Drafts] = {}  # the longest unused first
        self._came_true, self._compared = [0.5] * (LONGEST + 1), [1.0] * (LONGEST + 1)
        self.costs = Costs()

    def calls(self, rows: list[Row]) -> Iterator[tuple[list[Row], np.ndarray | None]]:
        """The calls that bring all rows forward: rows and their drafts [n, draft_tokens], -1 behind them, or None to decode.

        The caller makes each call, and hands its tokens to the rows, before it asks for the next.
        """
        if not self.draft_tokens:
            yield rows, None
            return
        guesses = sorted((self._guess(row) for row in rows), key=lambda guess: -guess.expected)
        count = self.verified(guesses)
        for part, verified in ((guesses[:count], True), (guesses[count:], False)):
            if not part:
                continue
            drafts = None
            if verified:
                drafts = np.full((len(part), self.draft_tokens), -1, np.int32)
                for i, guess in enumerate(part):
                    drafts[i, : len(guess.draft)] = guess.draft
            began = self._clock()
            yield [guess.row for guess in part], drafts
            self.costs.add(verified, self._width(len(part)), self._clock() - began)
            for guess in part:
                self._compare(guess)

    def verified(self, guesses: Sequence[Guess]) -> int:
        """How many of the guesses, the best first, are to be verified; the others are decoded."""
        rows = len(guesses)
        whole = self.costs.of(False, self._width(rows)) if rows and guesses[0].expected else None
        if whole is None:  # nothing is expected of drafts, or decoding must be measured first
            return 0
        cheapest = CHEAPEST * whole / self._decode_tokens
        decoded = [min(self._decode_tokens, _left(guess.row)) for guess in guesses]
        rest = sum(decoded)
        best, most = 0, rest / whole
        for count, expected in enumerate(accumulate(1 + guess.expected for guess in guesses), 1):
            rest -= decoded[count - 1]
            seconds = self.costs.of(True, self._width(count)) or cheapest
            if count < rows:
                seconds += self.costs.of(False, self._width(rows - count)) or whole
            if (expected + rest) / seconds > most:
                best, most = count, (expected + rest) / seconds
        return best

    def _width(self, rows: int) -> int:
        return next(width for width in self._widths if width >= rows)

    def _guess(self, row: Row) -> Guess:
        self._tell(row)
        draft, match = row.stream.draft(min(self.draft_tokens, _left(row) - 1))
        share = self._came_true[match] / self._compared[match]
        return Guess(row, draft, match, sum(share**i for i in range(1, len(draft) + 1)))

    def _tell(self, row: Row) -> None:
        """Adds to the index what a row was fed and has sampled since."""
        name = row.group or row.trajectory
        other = self._groups.pop(name, None)  # of siblings that came after the row's own index was forgotten
        drafts = self._groups[name] = row.stream.drafts if row.stream else other or Drafts()
        if row.stream is None:
            self._forget()
            row.stream = drafts.stream(row.prompt)
        known = len(row.stream.tokens)
        row.stream.extend(row.held[known:])
        if row.request:  # else they are held
            row.stream.extend(row.tokens[max(known - row.known, 0) :])

    def _forget(self) -> None:
        """Drops the indices that were not used for the longest time, where all of them hold too much."""
        held = sum(drafts.size for drafts in self._groups.values())
        for name in list(self._groups)[:-1]:
            if held <= self._remembered:
                return
            held -= self._groups.pop(name).size

    def _compare(self, guess: Guess) -> None:
        """Counts how many tokens of a draft have come true, by the tokens that its row now has."""
        known = len(guess.row.stream.tokens)
        self._tell(guess.row)
        new = guess.row.stream.tokens[known:]
        pairs = list(zip(guess.draft, new, strict=False))
        true = next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs))
        tried = min(true + 1, len(pairs))
        self._came_true[guess.match] = FADE * self._came_true[guess.match] + true
        self._compared[guess.match] = FADE * self._compared[guess.match] + tried


def _left(row: Row) -> int:
    assert row.request is not None
    return row.request.sampling.max_tokens - len(row.tokens)
