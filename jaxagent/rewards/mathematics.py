"""Whether two mathematical answers are equal: at once where both are numbers, otherwise by math-verify in a process apart.

What is parsed is hostile: it may hang the parser or eat the memory. So a process of its own does it, with limits, and is
killed at the deadline. Only LaTeX is parsed, by a grammar: the other readers of the library evaluate Python.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from jaxagent.rewards.compose import Case, Score, Scorer
from jaxagent.tools import in_thread
from sandbox_client import Unreachable

MAX_CHARS = 500  # of an answer
_START_S = 60.0
_MEMORY_BYTES = 2 << 30
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+|/[1-9]\d*)?|[-+]?\.\d+", re.ASCII)
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
# What may stand before and after a number: a name and "=", signs of currency, per cent and degrees, words and units.
_BEFORE = re.compile(r"\s*(?:[A-Za-z]\s*=\s*)?(?:\\?\$)?\s*")
_AFTER = re.compile(
    r"(?:\s|\\[,;:! ]|\^\{?\\circ\}?|\\?[%$]|\\(?:text|mathrm|mbox)\{[A-Za-z .]*\}|(?<![\\a-zA-Z])[a-zA-Z]+|\.)+$"
)
_LETTERS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]+[\s.$]*$")  # of 2a, which is no number
_WITHIN = re.compile(r"(?<!\d)\s+|\s+(?!\d)|(?<=,)\\!", re.ASCII)
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", re.ASCII)
_RATIO = re.compile(r"[-+]?(?:\d+_|_)?-?(\d+)/(\d+)", re.ASCII)
_PLAIN = re.compile(
    r"[-+]?(?:\d{1,3}(?:\{?,\}?\d{3})+|\d+)?(?:(?<=\d)|\.\d+)(?:\\(?:times|cdot)10\^(?:\{-?\d+\}|\d))?", re.ASCII
)


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of a text, braces counted; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[begin:at]
    return None


def number_of(text: str) -> Fraction | None:
    """The number that a text is, exactly: 1,234.5, 3/4, \\frac{3}{4}; None for anything else."""
    bare = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.strip().strip("$").strip())
    if len(bare) > 100:
        return None
    found = _FRACTION.fullmatch(bare)
    if found and int(found[3]):
        return Fraction(int(found[1] + found[2]), int(found[3]))
    return Fraction(bare) if _NUMBER.fullmatch(bare) else None


def bare(text: str) -> str:
    """A text without spaces and the signs around formulas."""
    return re.sub(r"\\[,;! ]|[\s$]", "", text)


def form_of(text: str) -> str:
    """How a text says a number that is worked out: "plain", "scientific" or, in lowest terms, "fraction"; else nothing.

    200+200, 600/3 and \\binom{5}{2} are how to compute one.
    """
    rest = _WITHIN.sub("", _AFTER.sub("", _BEFORE.sub("", _FRAC.sub(r"_\1\2/\3\4", text), count=1)))
    if ratio := _RATIO.fullmatch(rest):
        above, below = int(ratio[1]), int(ratio[2])
        return "fraction" if below > 1 and math.gcd(above, below) == 1 else ""
    return ("scientific" if "\\" in rest else "plain") if _PLAIN.fullmatch(rest) else ""


def _says(question: str, answer: str) -> bool:
    """Whether a question says an answer, and not only a part of a longer number."""
    return bool(re.search(rf"(?<![\d.]){re.escape(bare(answer))}(?!\.?\d)", bare(question)))


class Verifier:
    """The process that compares, one question at a time. After a question that it does not survive there is a new one."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)  # worlds are not closed

    def equal(self, answer: str, right: str) -> bool | None:
        """Whether the two LaTeX texts are equal; None where that could not be decided in time, or in the memory there is.

        Raises Unreachable where no process takes the question.
        """
        with self._lock:
            process = self._asked(json.dumps({"answer": answer, "right": right}).encode() + b"\n")
            try:
                return bool(json.loads(self._line(process, self.timeout_s))["equal"])
            except (ValueError, KeyError, TypeError):  # it ended, or wrote something else: what follows would be late by one
                self._end()
                return None

    def _asked(self, line: bytes) -> subprocess.Popen[bytes]:
        """The process, which has read nothing of this line yet. One that has died meanwhile gets a successor, once."""
        for _ in range(2):
            process = self._running()
            try:
                assert process.stdin
                process.stdin.write(line)
                process.stdin.flush()
                return process
            except BrokenPipeError:
                self._end()
        raise Unreachable("the process that compares mathematical answers ends before it is asked anything")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env={**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if not self._line(self._process, _START_S):
                self._end()
                raise Unreachable("the process that compares mathematical answers did not start: is math-verify whole?")
        return self._process

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        """The next line of the process; nothing where it ends or the time does, and then the process is killed."""
        assert process.stdout
        alarm = threading.Timer(timeout_s, process.kill)
        alarm.start()
        try:
            return process.stdout.readline()
        finally:
            alarm.cancel()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if stream:
                        stream.close()

    def close(self) -> None:
        with self._lock:
            self._end()


def math_match(timeout_s: float = 5.0) -> Scorer:
    r"""The scorer `math_match`: 1 if the answer in the last `\boxed{...}`, or else the whole turn, is worth the right one.

    Equal is not enough: what the question says is no answer, and where a number is wanted it must be worked out: see
    `form_of`. A whole number is wanted plain or in scientific form, any other may also be a fraction in lowest terms.

    Raises ValueError where the package is missing.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the reward math_match needs math-verify: pip install 'jaxagent[math]'")
    verifier = Verifier(timeout_s)

    async def score(case: Case) -> Score:
        right = str(case.task["answer"])
        inside = boxed(case.answer)
        answer = case.answer.strip() if inside is None else inside
        why = f"answered {answer[:100]!r}, right was {right!r}"
        if not answer or len(answer) > MAX_CHARS:
            return 0.0, f"no \\boxed{{...}} and no short answer; right was {right!r}"
        wanted = boxed(right) or right
        if bare(answer) == bare(wanted):
            return 1.0, "right answer"
        numbers = number_of(answer), number_of(wanted)
        form, wanted_form = form_of(answer), form_of(wanted)
        if (not form or form != wanted_form) and _says(str(case.task.get("question", "")), answer):
            return 0.0, f"repeats the question: {why}"
        if numbers[1] is not None or (wanted_form and not _LETTERS.search(wanted)):
            whole = wanted_form in ("plain", "scientific") and (numbers[1] is None or numbers[1].denominator == 1)
            if not form or (whole and form == "fraction"):
                return 0.0, f"a number was wanted, not how to compute it: {why}"
        if None not in numbers:
            return (1.0, "right number") if numbers[0] == numbers[1] else (0.0, why)
        equal = await in_thread(functools.partial(verifier.equal, answer, wanted))
        if equal is None:
            return 0.0, f"not decided within {timeout_s:g} s: {why}"
        return (1.0, "equal to the right answer") if equal else (0.0, why)

    return score


def _answers(lines: Iterator[str]) -> Iterator[dict[str, bool]]:
    """The other end, in the process apart."""
    verify = importlib.import_module("math_verify")
    reading: dict[str, Any] = {"extraction_config": [verify.LatexExtractionConfig()], "parsing_timeout": None}
    yield {"ready": True}
    for line in lines:
        asked = json.loads(line)
        try:
            right, answer = (verify.parse(f"$\\boxed{{{asked[name]}}}$", **reading) for name in ("right", "answer"))
            equal = bool(right and answer and verify.verify(right, answer, timeout_seconds=None))
        except Exception:  # whatever the parser does not understand is not equal
            equal = False
        yield {"equal": equal}


def main() -> None:
    """Answers until its input ends. It can write no file, and its memory is bounded."""
    resource = importlib.import_module("resource")  # not everywhere, and wanted here alone
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for answer in _answers(iter(sys.stdin)):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
