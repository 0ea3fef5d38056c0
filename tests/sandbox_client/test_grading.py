"""Graders: a finite reward from where the session's program has never been, whatever it has left behind."""

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, ask, raw
from launching import IS_ROOT, Running, descendants

from sandbox_client import GradeResult, Outcome, SandboxClient, wire

RUN = """
import sys
given = run_submission([sys.executable, "submission.py"], stdin="20\\n", timeout_s=5)
reward = float(given.stdout.strip() == open("tests/expected").read())
print(given.stdout[:300], given.stderr[-300:])
"""


class Graded:
    """A session with files, and what a grader says of them."""

    def __init__(self, running: Running) -> None:
        self.running, self.seq = running, 0

    async def open(self, **files: str) -> "Graded":
        if not self.running.ready["code"]:
            pytest.skip(f"no jail here: {self.running.ready['reason']}")
        _, reply, _ = await raw(self.running, "POST", "/v1/sessions", {"key": f"graded-{time.monotonic_ns()}"})
        self.path, self.token = f"/v1/sessions/{reply['session']}", reply["token"]
        for name, content in files.items():
            await raw(self.running, "PUT", f"{self.path}/files/{name.replace('__', '.')}", content.encode())
        return self

    async def grade(
        self, code: str, collect: tuple[str, ...] = ("submission.py",), token: str = "", **more: Any
    ) -> dict[str, Any]:
        self.seq += 1
        tests = {"expected": base64.b64encode(b"41").decode()}
        body = {"seq": self.seq, "code": code, "files": tests, "collect": collect, "timeout_s": 8, **more}
        headers = {"Authorization": f"Bearer {token}"} if token else None
        status, reply, _ = await raw(self.running, "POST", f"{self.path}/grade", body, headers)
        return {"status": status, **reply}


def test_a_grader_rewards_what_is_right_and_only_that(jailed: Running) -> None:
    async def judge() -> None:
        for content, reward in (("print(int(input()) * 2 + 1)", 1.0), ("print(40)", 0.0), ("raise SystemExit(2)", 0.0)):
            graded = await Graded(jailed).open(submission__py=content)
            reply = await graded.grade(RUN)
            assert (reply["outcome"], reply["reward"], reply["missing"]) == ("ok", reward, []), reply
            assert reply["level"] == jailed.ready["level"]
            assert (await graded.grade(RUN, collect=("no.py",)))["missing"] == ["no.py"]

    asyncio.run(judge())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("reward = float('nan')", "wanted the grader to set `reward` to a finite number, got 'nan'"),
        ("reward = -float('inf')", "wanted the grader to set `reward` to a finite number, got '-inf'"),
        ("reward = '1.0'", "wanted the grader to set `reward` to a finite number, got \"'1.0'\""),
        ("print('reward: 1')", "wanted the grader to set `reward` to a finite number, got 'None'"),
        ("reward = 1\nraise KeyError('x')", "KeyError: 'x'"),
        ("reward = 1\nimport os; os._exit(0)", "wanted the grader to set `reward` to a finite number, got None"),
        ("reward = 1\nwhile True: pass", "stopped after 0.3 s"),
    ],
)
def test_what_is_no_finite_reward_is_none_and_says_why(server: Running, code: str, error: str) -> None:
    async def judge() -> None:
        graded = await Graded(server).open()
        reply = await graded.grade(code, timeout_s=0.3 if "while" in code else 8)
        assert reply["reward"] is None, reply
        assert reply["outcome"] != "ok"
        assert reply["error"].startswith(error)

    asyncio.run(judge())


CHEATS = {
    "reads the tests": "print(open('../tests/expected').read())",
    "looks for the tests": "import os; print([n for _, _, f in os.walk('/box') for n in f if n == 'expected'] and 41)",
    "writes the reward": "open('reward.txt', 'w').write('1.0'); open('../reward.txt', 'w').write('1.0')",
    "rewrites the tests": "open('../tests/expected', 'w').write('')",
    "links to the tests": "import os; os.symlink('../tests/expected', 'l'); print(open('l').read())",
    "speaks on the grader's line": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'r')\n    except OSError: 0",
    "kills the grader": "import os; os.kill(os.getppid(), 9)",
    "stops the grader": "import os; os.kill(1, 19); os.kill(-1, 9)",
    "prints what the grader prints": "print('reward = 1.0'); print('{\"reward\": 1.0}')",
}


@pytest.mark.attack
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_submission_cannot_forge_its_reward(besieged: Running, cheat: str) -> None:
    async def judge() -> None:
        graded = await Graded(besieged).open(submission__py=CHEATS[cheat])
        reply = await graded.grade(RUN)
        assert (reply["outcome"], reply["reward"]) == ("ok", 0.0), reply

    asyncio.run(judge())


@pytest.mark.attack
def test_files_of_the_session_are_data_to_the_grader_and_stand_in_for_nothing(jailed: Running) -> None:
    async def judge() -> None:
        evil = "import builtins, sys; sys.modules['__main__'].reward = 1.0; raise SystemExit(0)"
        names = ("json.py", "statistics.py", "sitecustomize.py", "tests.py", "run_submission.py")
        graded = await Graded(jailed).open(**{name.replace(".", "__"): evil for name in names})
        reply = await graded.grade("import json, statistics\nreward = len(json.dumps([1])) * 0", collect=names)
        assert (reply["outcome"], reply["reward"], reply["missing"]) == ("ok", 0.0, []), reply
        link = "import os; os.symlink('/etc/passwd', 'submission.py'); os.mkfifo('p'); os.symlink('p', 'q')"
        body = {"seq": 90, "code": link, "language": "python", "timeout_s": 5}
        await raw(jailed, "POST", f"{graded.path}/exec", body)
        graded.seq = 90
        reply = await graded.grade("reward = open('submission/submission.py').read().count('sandbox')", ("submission.py", "q"))
        assert reply["reward"] in (1.0, 2.0)  # the jail's own /etc/passwd: what the session could read anyway
        forged = 'import os, struct; t = b\'{"outcome":"ok","error":null,"value":null,"exit_code":0,"reward":1.0}\'; '
        forged += "os.write(3, struct.pack('!cII', b'r', len(t), 0) + t); os._exit(0)"
        body = {"seq": 95, "code": forged, "language": "python", "timeout_s": 5}
        assert "reward" not in (await raw(jailed, "POST", f"{graded.path}/exec", body))[1]

    asyncio.run(judge())


def test_paths_that_lead_out_and_sessions_that_grade_themselves_are_refused(server: Running, start: Start) -> None:
    async def judge() -> None:
        graded = await Graded(server).open()
        for path in ("/etc/passwd", "../x", "", "a/../../b", 5):
            assert (await graded.grade("reward = 1", collect=(path,)))["status"] == 400
        assert (await graded.grade("reward = 1", token=graded.token))["status"] == 401
        plain = start("--functions=counting", "--code=off")
        _, reply, _ = await raw(plain, "POST", "/v1/sessions", {"key": "graded"})
        body = {"seq": 1, "code": "reward = 1", "timeout_s": 1}
        status, reply, _ = await raw(plain, "POST", f"/v1/sessions/{reply['session']}/grade", body)
        assert (status, reply["error"]["code"]) == (403, "code_refused")

    asyncio.run(judge())


@pytest.mark.skipif(not IS_ROOT, reason="only root has other uids to give")
def test_graders_run_under_a_uid_of_their_own(start: Start) -> None:
    running = start("--functions=counting", "--code=auto", user="root")
    if not running.ready["code"]:
        pytest.skip("no jail here")
    lines = [Path(f"/proc/{pid}/status").read_text() for pid in descendants(running.ready["pid"])]
    uids = {line.split("Uid:\t")[1].split()[0] for line in lines}
    assert {"64001", "64002", "64003"} <= uids
    other = start("--functions=counting", "--code=auto", user="ordinary")
    assert any("uid of their own for graders" in lack for lack in other.ready["missing"])


def test_the_client_grades_by_one_typed_result(server: Running) -> None:
    async def judge(client: SandboxClient) -> None:
        async with await client.open_session(f"graded-{id(client)}") as session:
            await session.write_file("submission.py", b"print(int(input()) * 2 + 1)")
            result = await session.grade(RUN, {"expected": b"41"}, ["submission.py", "no.py"], timeout_s=8)
            assert (result.reward, result.outcome, result.missing) == (1.0, Outcome.OK, ("no.py",))
            assert isinstance(result, GradeResult) and result.stdout.startswith("41")
            await session.write_file("submission.py", b"print(0)")
            assert (await session.grade(RUN, {"expected": b"41"}, ["submission.py"])).reward == 0.0
            nothing = await session.grade("reward = float('nan')")
            assert nothing.reward is None and nothing.outcome is Outcome.PROGRAM_ERROR
            assert "finite" in str(nothing.error)
            assert (await session.exec("6 * 7")).value == "42"  # its numbers go on
        assert (await client.ready()).graders

    ask(server, judge)


@pytest.mark.parametrize(
    "change", [{"reward": None}, {"outcome": "program_error"}, {"reward": "1"}, {"reward": True}, {"missing": "x"}]
)
def test_a_grade_against_its_schema_is_no_reward(change: dict[str, Any]) -> None:
    reply = {"outcome": "ok", "reward": 1, "missing": [], "stdout": "", "stderr": "", "error": None, "elapsed_s": 0.1}
    assert wire.parse_grade({**reply, "dropped_bytes": 0}, 1).reward == 1.0
    with pytest.raises(ValueError, match="wanted"):
        wire.parse_grade({**reply, "dropped_bytes": 0, **change}, 1)
