"""Rewards that compare a final answer with the right one."""

from __future__ import annotations

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces (SQuAD's rule, as in Search-R1).

    We differ where that would leave nothing: an answer "A" or "+" stays what it is, and is not equal to silence.
    """
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    steps = (_ARTICLES.sub(" ", bare), bare, text.lower())
    return next((words for step in steps if (words := " ".join(step.split()))), "")


def exact_match(answer: str, right: str) -> tuple[float, str]:
    """1 if the answer equals the right one after `normalise`, else 0; and why."""
    if normalise(answer) == normalise(right):
        return 1.0, "right answer"
    return 0.0, f"answered {answer!r}, right was {right!r}"


def last_number(answer: str, right: str) -> tuple[float, str]:
    """1 if the last number of the answer equals the right one; and why."""
    found = re.findall(r"-?\d[\d,]*\.?\d*", answer)
    if not found:
        return 0.0, f"no number in {answer!r}, right was {right!r}"
    value = float(found[-1].replace(",", ""))
    if value == float(right.replace(",", "")):
        return 1.0, "right number"
    return 0.0, f"last number was {found[-1]}, right was {right}"
