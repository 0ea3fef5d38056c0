"""What a turn may go on with, guessed from its group: the longest end of it that occurred before, and what followed there.

An index of LZ77's kind (Ziv and Lempel 1977): chains link the places at which the same GRAM tokens stood, newest first, in
prompts, observations and turns of all trajectories of a group. To add a token is one entry of a dict, to look a draft up is at
most PLACES comparisons of LONGEST tokens. Plain Python, no JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GRAM = 2  # tokens that a place must share with the end of a trajectory
LONGEST = 16  # tokens that are compared; longer matches count as this
PLACES = 16  # newest places that are compared
FADE = 0.98  # of what was counted before, with each draft that is compared

Place = tuple[list[int], int, Any]  # tokens of a trajectory, where in them the gram ends, the next older place


@dataclass
class Share:
    """Of what was counted lately, how much came true. What was known before fades."""

    true: float
    counted: float

    def add(self, true: float, counted: float) -> None:
        self.true, self.counted = FADE * self.true + true, FADE * self.counted + counted

    @property
    def mean(self) -> float:
        return self.true / self.counted


class Drafts:
    """The index of one group."""

    def __init__(self) -> None:
        self.newest: dict[tuple[int, int], Place] = {}
        self._prompt: Sequence[int] = ()  # the last one that was indexed
        self.size = 0  # places
        self.share = Share(0.0, 0.0)  # tokens that came true, of positions where a draft was looked for

    def stream(self, prompt: Sequence[int]) -> Stream:
        """A trajectory that begins with a prompt, which is indexed once for all that share it."""
        known = list(prompt) if prompt == self._prompt else []
        self._prompt = prompt
        stream = Stream(self, known)
        stream.extend(prompt[len(known) :])
        return stream


class Stream:
    """The tokens of one trajectory as far as its group's index knows them."""

    def __init__(self, drafts: Drafts, tokens: list[int]):
        self.tokens, self.drafts = tokens, drafts

    def extend(self, tokens: Iterable[int]) -> None:
        held, newest, before = self.tokens, self.drafts.newest, len(self.tokens)
        for token in tokens:
            if len(held) >= GRAM:
                gram = held[-2], held[-1]
                newest[gram] = held, len(held), newest.get(gram)
            held.append(token)
        self.drafts.size += len(held) - before

    def draft(self, most: int) -> tuple[list[int], int]:
        """At most so many tokens that may come next, and how many tokens before them matched, up to LONGEST.

        Of equal matches the newest that has enough behind it. What a trajectory repeats of itself goes on in a circle.
        """
        held = self.tokens
        place = self.drafts.newest.get((held[-2], held[-1])) if most > 0 and len(held) >= GRAM else None
        best, past, start = (0, 0), held, 0
        for _ in range(PLACES):
            if place is None:
                break
            tokens, at, place = place
            match, limit = GRAM, min(at, len(held), LONGEST)
            while match < limit and tokens[at - 1 - match] == held[-1 - match]:
                match += 1
            found = match, most if tokens is held else min(most, len(tokens) - at)
            if found > best:
                best, past, start = found, tokens, at
                if best == (LONGEST, most):
                    break
        if not best[0]:
            return [], 0
        draft = past[start : start + most]
        return (draft * (most // len(draft) + 1))[:most] if past is held else draft, best[0]
