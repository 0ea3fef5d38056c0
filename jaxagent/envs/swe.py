"""`swe`: repair a package whose tests fail, with its files in the sandbox. Tasks are made by `jaxagent swe`.

The policy has the tree with its bug, without history, and tools to look, to change, to run; a turn without a call hands in what
it has done. Then a grader of the sandbox, under a uid of its own, puts the package's files as the policy left them beside the
tests as they came with the task, and runs those. The reward is 1 where every test of FAIL_TO_PASS and of PASS_TO_PASS passed,
else 0; a test that does not report is one that failed. Files that the policy added, settings of pytest and tests that it
changed do not take part.

What is tested runs in one process with its tests, as everywhere in this kind of task. The report is marked by a number that the
process is told before anything of the package is imported: that stops a package that prints a report without looking for the
mark, or ends early. It does not stop one that was written for this grader: by `sys._getframe` it reaches the mark and all of
pytest, and can report that everything passed. Read what wins.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.data.records import read_records, split_of
from jaxagent.data.trials import PYTEST_ARGS
from jaxagent.envs.env import Env, Step, Task
from jaxagent.toolbox.box import Toolbox
from jaxagent.toolbox.kit import Workplace
from jaxagent.tools import dispatch_all
from jaxagent.types import Message
from sandbox_client import Outcome, ProtocolError, SessionLost

_FIELDS = ("instance_id", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS", "files", "test_files", "sources")
_PACKAGES_OWN = (Outcome.PROGRAM_TIMEOUT, Outcome.PROGRAM_OOM, Outcome.OUTPUT_TRUNCATED)
_GRADER = '''
import json, os, secrets, subprocess, sys
task = json.load(open("tests/task.json"))
for path, text in task["write"].items():
    place = os.path.join("submission", path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "w") as file:
        file.write(text)
run = """
import json, os, sys
def main(exit, write, dumps):  # what a package could replace is taken before it is imported
    mark = sys.stdin.readline().strip()
    asked = json.loads(sys.stdin.readline())
    import pytest
    ended = {}
    class Listener:
        def pytest_runtest_logreport(self, report):
            if report.failed or (report.when == "call" and not report.passed):
                ended[report.nodeid] = False
            elif report.when == "call":
                ended.setdefault(report.nodeid, True)
    out = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1); os.dup2(null, 2)
    sys.dont_write_bytecode = True
    sys.path[:0] = [os.path.abspath(root) for root in asked["roots"]]
    pytest.main(asked["arguments"], plugins=[Listener()])
    write(out, ("\\\\n" + mark + dumps([name for name, passed in ended.items() if passed]) + "\\\\n").encode())
    exit(0)
main(os._exit, os.write, json.dumps)
"""
mark = secrets.token_hex(16)
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
given = mark + "\\n" + json.dumps({"roots": task["roots"], "arguments": task["arguments"]}) + "\\n"
passed = []
try:
    done = run_submission([sys.executable, "-c", run], stdin=given, timeout_s=task["limit_s"])
    line = done.stdout.rpartition(mark)
    if done.returncode == 0 and line[1]:
        passed = [name for name in json.loads(line[2]) if isinstance(name, str)]
# What the package brings about is its failure: too late, no process left for it, a report that is none.
except (subprocess.SubprocessError, OSError, ValueError, TypeError, MemoryError, RecursionError):
    pass
counts = [len(set(task[name]) & set(passed)) for name in ("fails", "passes")]
print(*counts)
reward = float(counts == [len(task["fails"]), len(task["passes"])])
'''


class Swe:
    """The world.

    Args:
        path: tasks to train on, as `jaxagent swe` writes them.
        test_path: tasks to test on; without one, two tenths of `path` are held out by the id.
        toolbox: kits of toolbox/box.py.
        hide_tests: whether the policy's tree is without the tests, and the statement is all it knows of what is wrong.
        system: the system message; empty for none.
        test_timeout_s: of the grader's run of the tests.
        observation_chars: of a tool's result that the policy reads.
    """

    runs_code = True

    def __init__(
        self,
        path: str,
        test_path: str = "",
        toolbox: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("files", "bash", "tests"),
        hide_tests: bool = True,
        system: str = "",
        test_timeout_s: float = 120.0,
        observation_chars: int = 6000,
    ):
        self.toolbox = Toolbox(toolbox)
        self.tools, self.functions = self.toolbox.specs, self.toolbox.functions
        self.hide_tests, self.system = hide_tests, system
        self.test_timeout_s, self.observation_chars = test_timeout_s, observation_chars
        splits = ("train", "valid") if test_path else ("train", "valid", "test")
        self.tasks: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
        for record in _read(path):
            self.tasks[split_of(record["instance_id"], splits)].append(record)
        if test_path:
            self.tasks["test"] = _read(test_path)
        if empty := [split for split, records in self.tasks.items() if not records]:
            raise ValueError(f"{path}: too few tasks, none is left for {' and '.join(empty)}; some dozens are wanted")
        self.sizes = {split: len(records) for split, records in self.tasks.items()}

    def task(self, split: str, index: int) -> Task:
        record = self.tasks[split][index]
        files = {**record["files"], **({} if self.hide_tests else record["test_files"])}
        name = record["instance_id"]
        return {**record, "files": files, "id": f"swe/{name}", "seed": index, "difficulty": str(record.get("kind", "all"))}

    def episode(self, name: str, sandbox: Any) -> Env:
        return SweEpisode(self, name, sandbox)


def _read(path: str) -> list[dict[str, Any]]:
    found = []
    shared: dict[str, str] = {}  # a file's text once, however many tasks hold it
    for where, record in read_records(path, _FIELDS):
        try:
            names = {key: json.loads(record[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        except (TypeError, ValueError):
            raise ValueError(f"{path}, {where}: FAIL_TO_PASS and PASS_TO_PASS must be lists of names, as JSON texts") from None
        package = str(record.get("repo", ""))
        if package.isidentifier() and importlib.util.find_spec(package):
            raise ValueError(
                f"{path}, {where}: the package {package} is installed here, where programs of the sandbox could read it "
                "without its bug: train in an environment without it"
            )
        if not names["FAIL_TO_PASS"]:
            raise ValueError(f"{path}, {where}: FAIL_TO_PASS is empty: nothing could be repaired")
        for key in ("files", "test_files"):
            record[key] = {place: shared.setdefault(text, text) for place, text in record[key].items()}
        found.append({**record, **names})
    return found


class SweEpisode:
    """One episode, in one sandbox session, which is opened at the first call or graded as it came."""

    def __init__(self, world: Swe, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox
        self.place: Workplace | None = None

    async def reset(self, task: Task, seed: int) -> Step:
        self.task = task
        self.place = self.world.toolbox.workplace(self.name, self.sandbox, task)
        self.tools = self.world.toolbox.tools(self.place, task)
        system = [Message("system", self.world.system)] if self.world.system else []
        return Step([*system, Message("user", task["problem_statement"])])

    async def step(self, action: Message) -> Step:
        if action.error:
            return Step([Message("tool", f"error: {action.error}")])
        if not action.calls:
            return await self._grade()
        records = await dispatch_all(self.tools, action.calls, self.world.observation_chars)
        return Step([Message("tool", record.result, name=record.name) for record in records], tools=records)

    async def _grade(self) -> Step:
        assert self.place
        task, session = self.task, await self.place.session()
        fails, passes = task["FAIL_TO_PASS"], task["PASS_TO_PASS"]
        named = {name.partition("::")[0] for name in (*fails, *passes)}  # the tests of a large package take hours
        others = {path: text for path, text in task["files"].items() if path not in task["sources"]}
        about = {
            "write": {**others, **task["test_files"]},
            "roots": task.get("roots") or ["."],
            "arguments": [*PYTEST_ARGS, *(path for path in task["test_files"] if path in named)],
            "fails": fails,
            "passes": passes,
            "limit_s": self.world.test_timeout_s,
        }
        limit_s = self.world.test_timeout_s + 30.0
        try:
            result = await session.grade(_GRADER, {"task.json": json.dumps(about).encode()}, task["sources"], timeout_s=limit_s)
        except SessionLost as error:
            if not error.caused_by_program:
                raise
            return Step(reason=f"the policy's program ended its session: {error}", terminated=True, answered=True)
        if result.reward is None and result.outcome not in _PACKAGES_OWN:
            raise ProtocolError(f"the grader gave no reward ({result.outcome}): {result.error}", result.attempts)
        counts = [int(count) for count in result.stdout.split()] if result.reward is not None else [0, 0]
        reason = f"{counts[0]} of {len(fails)} broken tests pass, {counts[1]} of {len(passes)} others"
        return Step(reward=result.reward or 0.0, reason=reason, terminated=True, answered=True)

    async def close(self) -> None:
        if self.place:
            await self.place.close()


make_world = Swe
