"""Rewards that compare a final answer with the right one."""

from __future__ import annotations

import math
import re
import string
from collections import Counter

CALIBRATION = 0.2  # of an outcome, at most lost by a wrong confidence
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_OPEN, _CLOSE = "<answer>", "</answer>"
_CONFIDENCE = re.compile(r"\bconfidence:", re.IGNORECASE)
_STATED = re.compile(r"\s*+([0-9]++(?:\.[0-9]++)?|\.[0-9]++)\s*+")


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


def f1_match(answer: str, right: str) -> tuple[float, str]:
    """F1 of the words of both after `normalise` (SQuAD), in [0, 1]; and why.

    With p = common / words of the answer and r = common / words of the right one: 2 p r / (p + r); words count as often as they
    occur. yes, no and noanswer pay only where they are the whole of both (HotpotQA, as in Search-R1).
    """
    said, wanted = normalise(answer), normalise(right)
    why = f"answered {answer!r}, right was {right!r}"
    if said != wanted and {said, wanted} & {"yes", "no", "noanswer"}:
        return 0.0, why
    a, b = Counter(said.split()), Counter(wanted.split())
    common, total = (a & b).total(), a.total() + b.total()
    score = 2 * common / total if total else 1.0
    return score, "right answer" if score == 1 else f"F1 {score:.2f}: {why}"


def last_number(answer: str, right: str) -> tuple[float, str]:
    """1 if the last number of the answer equals the right one; and why."""
    found = re.findall(r"-?\d[\d,]*\.?\d*", answer)
    if not found:
        return 0.0, f"no number in {answer!r}, right was {right!r}"
    value = float(found[-1].replace(",", ""))
    if value == float(right.replace(",", "")):
        return 1.0, "right number"
    return 0.0, f"last number was {found[-1]}, right was {right}"


def tagged_match(answer: str, right: str) -> tuple[float, str]:
    """1 if the text in the last `<answer>...</answer>` equals the right one, after `normalise` (Search-R1, arXiv:2503.09516).

    `answer` is what the policy wrote in its last turn and nothing else. Search-R1's code scores prompt and answer together
    and wants at least two tags, because its prompt shows one as an example; here an example cannot be mistaken for an answer.
    """
    found, place = None, 0
    while (start := answer.find(_OPEN, place)) >= 0 and (end := answer.find(_CLOSE, start)) >= 0:
        found, place = answer[start + len(_OPEN) : end], end + len(_CLOSE)
    if found is None:
        return 0.0, f"no <answer>...</answer> in {answer!r}, right was {right!r}"
    return exact_match(found, right)


def calibrated_match(answer: str, right: str) -> tuple[dict[str, float], str]:
    """The outcome of `exact_match` before `confidence: q`, and as a part of its own CALIBRATION times -(q - outcome)^2.

    The Brier score is proper: the stated q that pays best is the true chance of being right. The part is small, so that no
    confidence makes a wrong answer worth a right one. An answer that states no confidence in [0, 1] loses the most.
    """
    last = max(_CONFIDENCE.finditer(answer), key=re.Match.start, default=None)
    found = _STATED.fullmatch(answer, last.end()) if last else None
    outcome, why = exact_match(answer[: last.start()] if last and found else answer, right)
    q = float(found[1]) if found else math.nan
    score = brier(q, outcome) if 0 <= q <= 1 else -1.0
    said = f"confidence {q:g}" if 0 <= q <= 1 else "no confidence stated"
    return {"outcome": outcome, "calibration": CALIBRATION * score}, f"{why}; {said}"


def brier(confidence: float, outcome: float) -> float:
    """-(q - y)^2 (Brier 1950), in [-1, 0]: the higher the better."""
    return -((confidence - outcome) ** 2)
