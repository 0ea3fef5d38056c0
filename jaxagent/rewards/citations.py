"""Whether an answer's citations hold, `[id: quote]`: retrieved in this episode, word for word, and with the answer in one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

MAX_CITATIONS = 8
_CITED = re.compile(r"\[([^\[\]:]+):([^\[\]]*)\]")
_WHOLE = re.compile(r"([^\[\]]*+)(?:\[[^\[\]:]++:[^\[\]]*+\]\s*+)+\.?\s*+")


def cited(said: str) -> list[tuple[str, str]]:
    """The citations of an answer, as id and quote."""
    return [(id_.strip(), quote.strip()) for id_, quote in _CITED.findall(said)]


def answer_of(said: str) -> tuple[str, bool]:
    """What stands before the citations, and whether the whole is in the form `answer [id: quote] [id: quote]`."""
    whole = _WHOLE.fullmatch(said)
    return (whole[1], True) if whole else (said.partition("[")[0], False)


def citations(
    said: str, retrieved: Mapping[str, str], holds_answer: Callable[[str], bool], words: int = 1
) -> tuple[float, str]:
    """The share of an answer's citations that hold, in [0, 1], and why.

    One holds whose id was retrieved and whose quote stands there word for word. All together are worth nothing unless one
    that holds has the answer in it.

    Args:
        retrieved: what was shown of each document in this episode, by id.
        holds_answer: whether a quote has the answer in it.
        words: of a quote at least.
    """
    found = cited(said)
    if not found or len(found) > MAX_CITATIONS:
        return 0.0, f"{len(found)} citations, 1 to {MAX_CITATIONS} are wanted"
    holding = [(id_, quote) for id_, quote in found if len(quote.split()) >= words and quote in retrieved.get(id_, "")]
    if not any(holds_answer(quote) for _, quote in holding):
        return 0.0, f"{len(holding)} of {len(found)} citations hold, none with the answer"
    return len(holding) / len(found), f"{len(holding)} of {len(found)} citations hold"
