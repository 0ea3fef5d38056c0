"""Which turns go on by decoding and which by a draft that one forward verifies, as it is expected to pay. No JAX.

The draw at a position is a function of the tokens before it and of the trajectory's key (sampling.py). A verified position is
drawn in just this way, and the drawing goes on only where the drawn token is the draft's: drafts change when a token is
computed, never which. That is stronger than the rejection scheme of Leviathan et al. 2023, which keeps the distribution only.

What pays is reckoned anew for every call of the device, by what is left of the turns: a verification brings few tokens, and a
turn that is brought forward by less than a call of decoding takes as many of these as before. What drafts come to is learned
from decoding too, by going through what was decoded as if it had been verified, and what calls take is measured with all that
the host does for them. Where nothing is gained, nothing is verified but for a hundredth of the time, to measure it again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxagent.engine.drafts import LONGEST, Drafts, Share
from jaxagent.engine.slots import Row

CHEAPEST = 1.25  # of a decode step: what a verification is thought to take until it is measured
AGAIN = 200.0  # a cost is measured again when that takes this part of the time since: one in a hundred, of both widths
CHANGED = 0.5  # what it may have become meanwhile, of what it was
GAIN = 0.3  # of the seconds of a call that verifies: what it must spare at least, or the turns are decoded
LASTS = 0.5  # of a draft that comes true less than usual: how far those behind it will, too
REPLAYED = 4  # rows of a call of decoding that are gone through as if they had been verified
TRUSTED = 16.0  # drafts of a group that count as much as those of all groups together
LENGTHS = 64  # of the last turns, by which it is told when others will end


@dataclass
class Guess:
    """A row, a draft of its next tokens, how many tokens before it matched, and how many of it should come true."""

    row: Row
    draft: list[int]
    match: int
    expected: float
    usual: float = 0.0  # how many come true on average, draft or none, where all of the group's are verified


class Costs:
    """What calls of each kind and width took, as the quickest quarter of the last few: others compute beside them."""

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

    def known(self, verified: bool, width: int) -> float | None:
        """Seconds, or None where they are not known."""
        last = sorted(self._seconds.get((verified, width), ()))
        return last[len(last) // 4] if last else None

    def of(self, verified: bool, width: int) -> float | None:
        """Seconds, fewer where they were measured long ago, or None where they are not known."""
        known = self.known(verified, width)
        late = known is not None and self._busy - self._measured[verified, width] > AGAIN * known
        return known * CHANGED if known is not None and late else known


class Turns:
    """How long the last turns were, and so how much others still have to sample."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=LENGTHS)

    def ended(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def left(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that rows may still have to sample, [n, turns to go by], and how likely each is: as turns no shorter had."""
        so_far, most = (np.array(x)[:, None] for x in ([len(row.tokens) for row in rows], [_left(row) for row in rows]))
        more = np.array(self._lengths or [0]) - so_far
        longer = more > 0
        longer |= ~longer.any(axis=1, keepdims=True)
        return np.where(more > 0, np.minimum(more, most), most), longer / longer.sum(axis=1, keepdims=True)


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
        # By the length of the match: tokens that came true, of those up to the first that did not.
        self._matches = [Share(0.5, 1.0) for _ in range(LONGEST + 1)]
        self._all, self._turns, self._replayed = Share(0.0, 1.0), Turns(), 0
        self.costs = Costs()

    def calls(self, rows: list[Row]) -> Iterator[tuple[list[Row], np.ndarray | None]]:
        """The calls that bring all rows forward: rows and their drafts [n, draft_tokens], -1 behind them, or None to decode.

        The caller makes each call, and hands its tokens to the rows, before it asks for the next.
        """
        if not self.draft_tokens:
            yield rows, None
            return
        began = self._clock()
        verified, decoded = self.parted([self._guess(row) for row in rows])
        for part in (verified, decoded):
            if not part:
                continue
            drafts = None
            if part is verified:
                drafts = np.full((len(part), self.draft_tokens), -1, np.int32)
                for i, guess in enumerate(part):
                    drafts[i, : len(guess.draft)] = guess.draft
            yield [guess.row for guess in part], drafts
            self._replayed += REPLAYED
            for i, guess in enumerate(part):
                self._compare(guess, part is verified or (i + self._replayed) % len(part) < REPLAYED)
            ended = self._clock()
            self.costs.add(part is verified, self._width(len(part)), ended - began)
            began = ended

    def parted(self, guesses: Sequence[Guess]) -> tuple[list[Guess], list[Guess]]:
        """The guesses to be verified, and those whose rows are decoded: as all turns are over soonest, as far as is known.

        What follows is reckoned as if a row were only decoded, or only verified, from then on.
        """
        rows = len(guesses)
        whole = self.costs.of(False, self._width(rows)) if any(guess.draft for guess in guesses) else None
        if whole is None:  # there are no drafts, or decoding must be measured first
            return [], list(guesses)
        left, chance = self._turns.left([guess.row for guess in guesses])
        expected, usual = (np.array(x) for x in zip(*((guess.expected, guess.usual) for guess in guesses), strict=True))
        cheapest = CHEAPEST * whole / self._decode_tokens
        verification = self.costs.of(True, self._width(rows)) or cheapest

        def rest(more: np.ndarray, true: np.ndarray) -> np.ndarray:
            """Seconds of the device for each row [n], which in each call has a part of it, when `more` tokens are left."""
            more = np.maximum(more, 0)
            decoding = whole * (np.ceil(more / self._decode_tokens) * chance).sum(axis=1)
            return np.minimum(decoding, verification * (more * chance).sum(axis=1) / (1 + true)) / rows

        after_decoding = rest(left - self._decode_tokens, usual)
        after_verifying = rest(left - 1 - expected[:, None], np.minimum(usual, LASTS * expected + (1 - LASTS) * usual))
        order = np.argsort(after_verifying - after_decoding, kind="stable")
        spared = np.cumsum((after_decoding - after_verifying)[order])
        best, most = 0, 0.0
        for count in range(1, rows + 1):
            verifying = self.costs.of(True, self._width(count)) or cheapest
            decoding = (self.costs.of(False, self._width(rows - count)) or whole) if count < rows else 0.0
            gain = whole - decoding - verifying + float(spared[count - 1]) - GAIN * verifying
            if gain > most:
                best, most = count, gain
        return [guesses[i] for i in order[:best]], [guesses[i] for i in order[best:]]

    def _width(self, rows: int) -> int:
        return next(width for width in self._widths if width >= rows)

    def _guess(self, row: Row) -> Guess:
        self._tell(row)
        draft, match = row.stream.draft(min(self.draft_tokens, _left(row) - 1))
        share = self._matches[match].mean
        expected = sum(share**i for i in range(1, len(draft) + 1))
        group = row.stream.drafts.share
        usual = (group.true + TRUSTED * self._all.mean) / (group.counted + TRUSTED)
        return Guess(row, draft, match, expected, usual)

    def _tell(self, row: Row) -> None:
        """Adds to the index what a row was fed and has sampled since."""
        name = row.group or row.trajectory
        other = self._groups.pop(name, None)  # of siblings that came after the row's own index was forgotten
        drafts = self._groups[name] = row.stream.drafts if row.stream else other or Drafts()
        if row.stream is None:
            self._forget()
            row.stream = drafts.stream(row.prompt)
        row.stream.extend(_unknown(row))

    def _forget(self) -> None:
        """Drops the indices that were not used for the longest time, where all of them hold too much."""
        held = sum(drafts.size for drafts in self._groups.values())
        for name in list(self._groups)[:-1]:
            if held <= self._remembered:
                return
            held -= self._groups.pop(name).size

    def _compare(self, guess: Guess, all_of: bool) -> None:
        """Counts how many tokens of a draft have come true, by the tokens that its row now has.

        With `all_of`, also of the drafts that there would have been behind it.
        """
        row, new, draft, match, at = guess.row, _unknown(guess.row), guess.draft, guess.match, 0
        while at < len(new):
            true = 0
            while true < min(len(draft), len(new) - at) and draft[true] == new[at + true]:
                true += 1
            known = true == len(draft) or at + true < len(new)  # else more of it may come true than is known
            if draft:
                self._matches[match].add(true, min(true + 1, len(draft), len(new) - at))
            if not all_of:
                break
            if known:
                for share in (row.stream.drafts.share, self._all):
                    share.add(true, 1.0)
            row.stream.extend(new[at : at + true + 1])
            at += true + 1
            if at < len(new):
                draft, match = row.stream.draft(self.draft_tokens)
        self._tell(row)
        if row.request is None:
            self._turns.ended(len(row.tokens))


def _left(row: Row) -> int:
    assert row.request is not None
    return row.request.sampling.max_tokens - len(row.tokens)


def _unknown(row: Row) -> list[int]:
    """What a row was fed and has sampled that its stream does not have yet."""
    known = len(row.stream.tokens)
    return row.held[known:] + (row.tokens[max(known - row.known, 0) :] if row.request else [])  # else they are held
