"""debug-gym: a repository with a bug, its tools, its tests. What the policy writes is run: only for a worker that is locked.

An episode happens in this process's own pid namespace, as the same user: between episodes whatever still runs is killed, and
whatever was written is removed.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from debug_gym.gym.envs.local import LocalEnv
from debug_gym.gym.terminals.local import LocalTerminal
from debug_gym.gym.tools import Toolbox
from debug_gym.gym.tools.tool import ToolCall

_BOX = Path("/box")  # all that a locked process can write
_FOLDERS = ("work", "tmp", "shm")  # of it: HOME, TMPDIR and /dev/shm
# What is read before the tests or in their place; settings are not read at all (_ARGUMENTS).
_SETTINGS = {"conftest.py", "__pycache__"}
# pytest is imported before anything of the tree can be, and takes its settings from nowhere, as where the tasks are made.
_PYTEST = "import os, sys, pytest; sys.path[:0] = map(os.path.abspath, {roots!r}); sys.exit(pytest.main(sys.argv[1:]))"
_ARGUMENTS = "-q -p no:cacheprovider -c /dev/null --rootdir=. --confcutdir=. -o addopts="
# What differs from run to run of the same tests: the time they took, and where objects were.
_CHANCE = re.compile(r" in \d+\.\d\ds(?: \(\d+:\d\d:\d\d\))?$| at 0x[0-9a-f]+", re.MULTILINE)
_MOST = 20_000  # letters of an observation
_READ = 4 << 20  # bytes of what a command wrote


def run(
    self: Any, entrypoint: str | list[str], timeout: int | None = None, raises: bool = False, strip_output: bool = True
) -> tuple[bool, str]:
    """In place of the library's own, which waits as long as anything that a command left behind holds its pipes."""
    limit_s = timeout if timeout is not None else self.command_timeout
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            self.prepare_command(entrypoint),
            env=self.env_vars,
            cwd=self.working_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            late = f"Command timed out after {limit_s} seconds\n"
        output.seek(0)
        text = late + output.read(_READ).decode(errors="replace")
    if raises and process.returncode:
        raise ValueError(f"Failed to run command: {entrypoint}")
    return process.returncode == 0, text.strip("\r\n") if strip_output else text


LocalTerminal.run = run


class Repository(LocalEnv):
    """Before a run the tests and their list are put as they were, a conftest of the policy's own is taken away, and what it
    left running is ended."""

    def __init__(self, kept: dict[str, str], asked: Path, names: list[str], roots: list[str], **options: Any):
        program = shlex.quote(_PYTEST.format(roots=roots))
        super().__init__(entrypoint=f"python -I -B -c {program} {_ARGUMENTS} @{asked}", **options)
        self.kept, self.asked, self.names = kept, asked, names

    def eval(self, **kwargs: Any) -> Any:
        end_others()
        root = Path(self.working_dir)
        open_up(_BOX)
        put(self.asked, "\n".join(self.names))
        for place in [place for place in root.rglob("*") if place.name in _SETTINGS]:
            if str(place.relative_to(root)) not in self.kept:
                remove(place)
        for name, text in self.kept.items():
            put(root / name, text)
        return super().eval(**kwargs)


class World:
    def __init__(self, tools: list[str], timeout_s: float):
        if os.getpid() != 1 or [os.environ[name] for name in ("HOME", "TMPDIR")] != [f"{_BOX}/work", f"{_BOX}/tmp"]:
            raise RuntimeError("debug-gym runs what the policy wrote: only a confined worker may play it")
        self.tools, self.timeout_s = tools, timeout_s
        self.env: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self.close()
        source = Path(tempfile.mkdtemp(prefix="source-"))
        for name, text in {**task["files"], **task["test_files"]}.items():
            put(source / name, text)
        asked, names = source.with_name(f"{source.name}.tests"), [*task["FAIL_TO_PASS"], *task["PASS_TO_PASS"]]
        (source / ".debugreadonly").write_text("\n".join(task["test_files"]))
        roots = task.get("roots") or ["."]
        terminal = LocalTerminal(env_vars={"PYTHONPATH": os.pathsep.join(roots), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        options = {"path": str(source), "terminal": terminal, "run_timeout": int(self.timeout_s), "max_score": 1}
        settings = {name: text for name, text in task["files"].items() if Path(name).name in _SETTINGS}
        kept = {**settings, **task["test_files"]}
        self.env = Repository(kept, asked, names, roots, **options)
        for name in self.tools:
            self.env.add_tool(Toolbox.get_tool(name))
        info = self.env.reset()
        self.score = int(info.score)
        seen = _CHANCE.sub("", "\n".join(seen.observation for seen in info.all_observations))
        return {"text": f"{task['problem_statement']}\n{seen}"[:_MOST]}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        call = ToolCall(id="call", name=action["name"], arguments=action["arguments"])
        info = self.env.step(call)
        gained, self.score = int(info.score) - self.score, int(info.score)
        text = "\n".join(seen.observation for seen in info.all_observations)
        text = (_CHANCE.sub("", text) if action["name"] in ("eval", "submit") else text)[:_MOST]
        done = bool(info.terminated) or action["name"] == "submit"
        reason = "all tests pass" if info.resolved else "handed in with failing tests" if done else ""
        return {"text": text, "reward": float(gained), "done": done, "reason": reason}

    def close(self) -> None:
        end_others()
        clear()
        env, self.env = self.env, None
        if env is not None:
            with contextlib.suppress(OSError):  # its folders are gone already
                env.close()


def end_others() -> None:
    """Kills every other process of this namespace, which is all that earlier episodes have started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def clear() -> None:
    """Makes all that can be written as it was at the start, whatever has been done to its folders."""
    _BOX.chmod(0o755)
    for place in _BOX.iterdir():
        remove(place)
    for name in _FOLDERS:
        (_BOX / name).mkdir(0o700)
    os.chdir(_BOX / _FOLDERS[0])


def open_up(place: Path) -> None:
    """Takes back what `chmod` has shut."""
    subprocess.run(["chmod", "-R", "u+rwX", "--", str(place)], stderr=subprocess.DEVNULL, check=False)


def put(place: Path, text: str) -> None:
    """Writes a file, whatever the policy has put in its place."""
    if place.is_symlink() or place.is_dir():
        remove(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        open_up(place)
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def make(**options: Any) -> World:
    return World(**options)
