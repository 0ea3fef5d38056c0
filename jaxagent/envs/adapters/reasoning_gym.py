"""Reasoning Gym: one procedurally generated question, one answer, the library's own scorer."""

import ast
import contextlib
import re
from typing import Any

import reasoning_gym

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


# Some scorers run an answer as Python. Only literals and plain words reach these, and only sums of plain numbers those.
_LITERAL = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
_SUMS = {"countdown", "puzzle24"}
_WORDS, _SUM = re.compile(r"[\w\s,]*", re.ASCII), re.compile(r"[-0-9+/*().=\s]*")
_LONGEST = 2000  # letters of such an answer, and of any that is much longer than a right one
_HUGE = re.compile(r"(?<![0-9a-z.])[\d.]+e[-+]?\d{4}")  # a number whose digits, written out, may fill the memory
SETS: dict[tuple[str, str], Any] = {}  # by name and split, for all worlds of this process: some take long to be made


class World:
    def __init__(self, settings: dict[str, Any], size: int):
        self.settings, self.size = settings, size

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        key = (task["task"], task["split"])
        if key not in SETS:
            SETS[key] = reasoning_gym.create_dataset(key[0], size=self.size, seed=task["base"], **self.settings)
        self.set = SETS[key]
        self.task, self.item = task["task"], self.set[task["index"]]
        return {"text": self.item["question"]}

    def step(self, action: str) -> dict[str, Any]:
        tagged = _TAGGED.findall(action)
        answer = (tagged[-1] if tagged else action).strip()
        right = self.item.get("answer")
        score = 0.0
        if is_harmless(self.task, answer) and (answer == right or is_bounded(answer, str(right))):
            with contextlib.suppress(ArithmeticError, RecursionError):  # of a number too large, a form too deep
                score = float(self.set.score_answer(answer, self.item))
        reason = "right answer" if score == 1 else f"answered {answer[:80]!r}, one right answer is {str(right)[:80]!r}"
        return {"reward": score, "done": True, "answered": True, "reason": reason}

    def oracle(self) -> list[str]:
        return [str(self.item["answer"])]

    def close(self) -> None:
        pass


def is_bounded(answer: str, right: str) -> bool:
    """Whether a scorer reads an answer in little time and memory: some write out every digit, after their own cleaning."""
    forms = (re.sub(dropped, "", answer.lower()) for dropped in ("[,_]", r"[\s,_]"))
    return len(answer) <= max(_LONGEST, 4 * len(right)) and not any(map(_HUGE.search, forms))


def is_harmless(task: str, answer: str) -> bool:
    """Whether a task's scorer may see an answer."""
    if task not in _LITERAL | _SUMS:
        return True
    if len(answer) > _LONGEST:
        return False
    if task in _SUMS:
        return bool(_SUM.fullmatch(answer)) and "**" not in answer
    if _WORDS.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def make(**options: Any) -> World:
    return World(**options)
