"""Rewards for programs: tests that the sandbox's graders run, under a uid and in a place that no program of the policy sees.

A task's `tests` are a list of `{"stdin": ..., "stdout": ...}` or `{"call": "f(1, 2)", "value": "3"}`. What is wanted stays
with the grader: the program is told a test's input and never what should come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxagent.rewards.compose import Case, Score, Scorer
from sandbox_client import Outcome, ProtocolError, SessionLost

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_PROGRAMS_OWN = (Outcome.PROGRAM_TIMEOUT, Outcome.PROGRAM_OOM, Outcome.OUTPUT_TRUNCATED)
_GRADER = '''
import ast, json, secrets, subprocess, sys
cases = json.load(open("tests/cases.json"))
# The mark is told after the program can no longer be the first to speak; what is after it is a value, right or wrong.
driver = """
import json, sys
asked = json.loads(sys.stdin.readline())
space = {"__name__": "submission"}
exec(compile(open("submission.py").read(), "submission.py", "exec"), space)
value = eval(asked["call"], space)
sys.stdout.flush()
print("\\\\n" + asked["mark"] + repr(value))
"""

def value_of(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text.strip()

def passes(case):
    try:
        if "call" in case:
            mark = secrets.token_hex(8)
            asked = json.dumps({"call": case["call"], "mark": mark}) + "\\n"
            done = run_submission([sys.executable, "-c", driver], stdin=asked, timeout_s=limit_s)
            said = done.stdout.rpartition(mark)
            return done.returncode == 0 and bool(said[1]) and value_of(said[2]) == value_of(case["value"])
        done = run_submission([sys.executable, "submission.py"], stdin=case["stdin"], timeout_s=limit_s)
        lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
        return done.returncode == 0 and lines == [line.rstrip() for line in case["stdout"].rstrip().splitlines()]
    # What the program brings about is its failure: too late, no process left for it, what nobody can read or compare.
    except (subprocess.SubprocessError, OSError, ValueError, TypeError, MemoryError, RecursionError):
        return False

passed = 0
for case in cases:
    if not passes(case):
        break
    passed += 1
print(passed)
reward = float(passed == len(cases))
'''


def program_of(answer: str) -> str:
    """The last fenced block of Python, or the whole answer."""
    found = _FENCED.findall(answer)
    return found[-1] if found else answer


def code_tests(timeout_s: float = 5.0) -> Scorer:
    """The scorer `code_tests`: 1 if the program passes every test of the task, else 0. Args: timeout_s: of one test."""

    async def score(case: Case) -> Score:
        assert case.session
        tests = case.task["tests"]
        session = await case.session()
        try:
            await session.write_file("submission.py", program_of(case.answer).encode(errors="replace"))
            result = await session.grade(
                f"limit_s = {timeout_s!r}\n{_GRADER}",
                {"cases.json": json.dumps(tests).encode()},
                ["submission.py"],
                timeout_s=min(600.0, 10.0 + len(tests) * (timeout_s + 1.0)),
            )
        except SessionLost as error:
            if not error.caused_by_program:
                raise
            return 0.0, f"the program ended its session: {error}"
        finally:
            await session.close()
        if result.reward is None and result.outcome not in _PROGRAMS_OWN:
            raise ProtocolError(f"the grader gave no reward ({result.outcome}): {result.error}", result.attempts)
        passed = result.stdout.strip() if result.reward is not None else "0"
        return result.reward or 0.0, f"{passed} of {len(tests)} tests passed before the first that did not"

    return score


def fault_of_tests(task: Mapping[str, Any]) -> str:
    """What is wrong with a task's tests, or nothing."""
    tests = task.get("tests")
    if not isinstance(tests, list) or not tests:
        return "a list `tests` is wanted"
    for number, test in enumerate(tests):
        given = set(test) if isinstance(test, dict) else set()
        if not (given >= {"stdin", "stdout"} or given >= {"call", "value"}) or not all(
            isinstance(test[key], str) for key in given
        ):
            return f"test {number} must have the texts stdin and stdout, or call and value; got {test!r:.100}"
    return ""
