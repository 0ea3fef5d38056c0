"""Programs under test: graded where they cannot reach, told inputs and never what is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from jaxagent.rewards.compose import Case
from jaxagent.rewards.programs import code_tests, fault_of_tests, program_of
from sandbox_client import EmbeddedServer, SandboxClient, SandboxStartError

CALLS = [{"call": "double(4)", "value": "8"}, {"call": "double('a')", "value": "'aa'"}]
LINES = [{"stdin": "3\n", "stdout": "6"}, {"stdin": "5\n", "stdout": "10\n"}]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    try:
        with EmbeddedServer(functions=(), code="require", min_isolation="L2") as running:
            yield running
    except SandboxStartError as error:
        pytest.skip(f"no isolation here: {error}")


def scored(server: EmbeddedServer, tests: Any, *answers: str) -> list[tuple[float, str]]:
    async def play() -> list[tuple[float, str]]:
        async with SandboxClient(server.url, server.token) as sandbox:
            scorer, found = code_tests(timeout_s=2.0), []
            for number, answer in enumerate(answers):
                case = Case({"tests": tests}, answer, session=lambda n=number: sandbox.open_session(f"{id(answers)}-{n}"))
                found.append(await scorer(case))
            return found

    return asyncio.run(play())


def test_a_program_is_the_last_fenced_block_or_the_whole_answer() -> None:
    assert program_of("first\n```python\na\n```\nthen\n```\nb\n```\n") == "b\n"
    assert program_of("x = 1") == "x = 1"


def test_a_program_wins_that_passes_every_test(server: EmbeddedServer) -> None:
    right, half, broken = scored(
        server,
        CALLS,
        "Here:\n```python\ndef double(x):\n    print('noise')\n    return x + x\n```",
        "def double(x): return 8",
        "def double(x) return",
    )
    assert right == (1.0, "2 of 2 tests passed before the first that did not")
    assert half == (0.0, "1 of 2 tests passed before the first that did not")
    assert broken[0] == 0.0
    right, wrong, endless = scored(server, LINES, "print(int(input()) * 2)", "print(6)", "while True: pass")
    assert [score for score, _ in (right, wrong, endless)] == [1.0, 0.0, 0.0]


CHEATS = {
    "reads the tests": "import glob\nPLACES = glob.glob('/**/cases.json', recursive=True)\n"
    "def double(x): return [open(p).read() for p in PLACES]",
    "ends well": "import os\nos._exit(0)",
    "forges equality": "class Any:\n    def __eq__(self, o): return True\n    def __repr__(self): return '__import__'\n"
    "def double(x): return Any()",
    "reads the frame": "import sys\ndef double(x):\n    f = sys._getframe(1)\n    while f:\n"
    "        print(dict(f.f_globals).get('asked')); f = f.f_back\n    return None",
    "says what cannot be read": "class Odd:\n    def __repr__(self): return '{[]: 1}'\ndef double(x): return Odd()",
    "writes the reward": "open('reward.txt', 'w').write('1.0'); reward = 1.0\ndef double(x): return None",
}


@pytest.mark.attack
def test_a_program_cannot_pass_by_anything_but_the_right_values(server: EmbeddedServer) -> None:
    assert [score for score, _ in scored(server, CALLS, *CHEATS.values())] == [0.0] * len(CHEATS)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "a list `tests`"),
        ([], "a list `tests`"),
        ([{"stdin": "x"}], "test 0 must have"),
        ([CALLS[0], {"call": "f()", "value": 3}], "test 1 must have"),
        (CALLS, ""),
        (LINES, ""),
    ],
)
def test_faulty_tests_are_told(tests: Any, said: str) -> None:
    assert said in fault_of_tests({"tests": tests}) and bool(said) == bool(fault_of_tests({"tests": tests}))
