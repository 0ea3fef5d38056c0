"""What the worlds that are not ours need, and where it is: in the trainer's Python, or in a virtual environment of its own.

`jaxagent env install NAME` makes that environment, under $JAXAGENT_ENVS or ~/.cache/jaxagent/envs. Versions are pinned: a world
that changes under a run changes what its scores mean.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxagent.envs.desktop import local
from jaxagent.envs.workers import chromium


@dataclass(frozen=True)
class Library:
    """What a world needs.

    Args:
        requirements: for pip; `{chromium}` in one is the major version of the browser that is here.
        modules: that must be importable.
        pythons: versions that it runs on, the best first.
        apart: its requirements fight with those of the trainer, so that only an environment of its own will do.
        programs: that the system must have.
        memory_mb: of a worker with one world.
        reserves: it takes far more address space than memory, so that no limit on that can be set.
        variables: of the environment, that its workers are given beside those of every worker.
        browser: it drives the browser of the system.
        start_s: for it to be imported.
        confined: it runs programs that the policy wrote, so that its workers run inside the locks of the sandbox.
    """

    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    pythons: tuple[str, ...] = ("3.12", "3.11", "3.13")
    apart: bool = False
    programs: tuple[str, ...] = ()
    memory_mb: int = 110
    reserves: bool = False
    variables: tuple[str, ...] = ()
    browser: bool = False
    start_s: float = 120.0
    confined: bool = False

    def pinned(self) -> list[str]:
        """The requirements here. Raises ValueError where a browser is needed and there is none."""
        major = chromium.major() if self.browser else ""
        return [requirement.replace("{chromium}", major) for requirement in self.requirements]


# The sites of WebArena: its package reads where they are from these variables, WA_SHOPPING and so on.
_WEB_ARENA = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE", "FULL_RESET")

LIBRARIES = {
    "textworld": Library(("textworld==1.7.0",), ("textworld",), ("3.12", "3.11"), variables=("INFORM_HOME",)),
    "reasoning_gym": Library(("reasoning-gym==0.1.25",), ("reasoning_gym",)),
    "textarena": Library(("textarena==0.7.4",), ("textarena",), memory_mb=60, variables=("NLTK_DATA",)),
    "gymnasium_text": Library(("gymnasium==1.2.2",), ("gymnasium",), memory_mb=60),
    "scienceworld": Library(
        ("scienceworld==1.2.3",),
        ("scienceworld",),
        programs=("java",),
        memory_mb=750,
        reserves=True,
        variables=("JAVA_HOME", "JAVA_TOOL_OPTIONS"),
    ),
    "crafter": Library(("crafter==1.8.3",), ("crafter",), memory_mb=60),
    "miniwob": Library(
        ("miniwob==1.1.0", "selenium==4.51.0", "chromedriver-py=={chromium}.*"),
        ("miniwob", "chromedriver_py"),
        ("3.12", "3.11"),
        memory_mb=460,
        reserves=True,
        browser=True,
    ),
    # Its playwright is so old that it needs a greenlet without wheels for later Pythons. The pages of MiniWoB are in `miniwob`.
    "browsergym": Library(
        ("browsergym-core==0.14.3", "browsergym-miniwob==0.14.3", "miniwob==1.1.0"),
        ("browsergym.core", "browsergym.miniwob", "miniwob"),
        ("3.12", "3.11"),
        apart=True,
        memory_mb=520,
        reserves=True,
        variables=(*(f"WA_{site}" for site in _WEB_ARENA), "NLTK_DATA"),
        browser=True,
    ),
    # The planner comes as source, 71 files of C++, which pip builds with cmake, make and a compiler.
    "alfworld": Library(
        ("alfworld==0.4.2", "textworld[pddl]==1.7.0", "fast-downward-textworld==20.6.4"),
        ("alfworld", "textworld", "fast_downward"),
        ("3.11",),
        memory_mb=200,
    ),
    # Its own metadata end at 3.12.0, and it pins another version of Reasoning Gym.
    "gem": Library(("gem-llm==0.1.0",), ("gem",), ("3.11",), apart=True, memory_mb=200, variables=("NLTK_DATA",)),
    # It pins transformers of last year, and takes twenty seconds of a core to import. The others are what fits its pins: pip,
    # left to find them, downloads dozens of versions of each.
    "debug_gym": Library(
        ("debug-gym==1.3.0", "litellm==1.80.0", "sglang==0.5.2", "huggingface-hub==0.36.2"),
        ("debug_gym",),
        ("3.12", "3.13"),
        apart=True,
        memory_mb=400,
        start_s=600.0,
        confined=True,
    ),
}


def folder() -> Path:
    """Where the environments are."""
    given = os.environ.get("JAXAGENT_ENVS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "jaxagent" / "envs"


def library_of(name: str) -> Library:
    if name not in LIBRARIES:
        raise ValueError(f"{name!r} is no world that can be installed; there are {', '.join(LIBRARIES)}")
    return LIBRARIES[name]


def python_of(name: str) -> Path:
    """The interpreter that has the library of a world.

    Raises ValueError, which says what to do, where there is none, or a program is missing that it needs.
    """
    library = library_of(name)
    if missing := [program for program in library.programs if shutil.which(program) is None]:
        raise ValueError(f"env.name={name}: it needs the program {missing[0]}, which is not in PATH; install it first")
    wanted = _pinned(name, library)
    home = folder() / name
    if (home / "installed.json").exists():
        if json.loads((home / "installed.json").read_text()) == wanted:
            return _python_in(home)
        raise ValueError(f"env.name={name}: {home} holds another version than is wanted; run: jaxagent env install {name}")
    if not library.apart and all(importlib.util.find_spec(module) for module in library.modules):
        return Path(sys.executable)
    raise ValueError(
        f"env.name={name}: {wanted[0]} is not installed; run: jaxagent env install {name} (an environment of its own, {home})"
    )


def install(name: str, python: str = "") -> Path:
    """Makes the environment of a world anew and installs into it; returns it.

    Args:
        python: the interpreter to make it with; by default this one, or one that is found, of a version that will do.

    Raises ValueError where no interpreter fits, the installation fails, or what was installed cannot be imported.
    """
    library = library_of(name)
    wanted = _pinned(name, library)
    chosen = python or _interpreter(name, library)
    home = folder() / name
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    log = home.with_name(f"{name}.log")
    _run([chosen, "-m", "venv", str(home)], f"{chosen} cannot make a virtual environment in {home}", log)
    inside = str(_python_in(home))
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    _run(pip, f"pip could not install {', '.join(wanted)}", log)
    imports = "; ".join(f"import {module}" for module in library.modules)
    _run([inside, "-c", imports], f"{name} was installed in {home}, but cannot be imported", log)
    (home / "installed.json").write_text(json.dumps(wanted))
    return home


def state_of(name: str) -> str:
    """Whether a world can be played, in words."""
    try:
        python = python_of(name)
    except ValueError as error:
        return str(error).removeprefix(f"env.name={name}: ")
    return "in this Python" if python == Path(sys.executable) else f"in {folder() / name}"


def report_install(name: str, python: str) -> int:
    """The command `jaxagent env install`."""
    print(f"{name}: {', '.join(_pinned(name, library_of(name)))}", flush=True)
    print(f"{name}: installed in {install(name, python)}")
    return 0


def report_list() -> int:
    """The command `jaxagent env list`: every world that needs what is not ours, and whether it is there."""
    for name in LIBRARIES:
        print(f"{name:16}{state_of(name)}")
    print(f"{'desk':16}{local.missing() or 'Xvfb and xdotool are in PATH'}")
    return 0


def most_workers(name: str) -> int:
    """As many workers as there are cores, and as half of the memory that is free holds."""
    cores = os.cpu_count() or 1
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free_mb = int(lines["MemAvailable"].split()[0]) >> 10
    except (OSError, KeyError):  # no Linux
        return cores
    return max(1, min(cores, free_mb // 2 // library_of(name).memory_mb))


def address_mb(name: str, slots: int) -> int:
    """The address space that a worker may take, with room for what libraries reserve and never use; 0 is no limit."""
    library = library_of(name)
    return 0 if library.reserves else 1024 + 8 * library.memory_mb + 16 * slots


def _pinned(name: str, library: Library) -> list[str]:
    try:
        return library.pinned()
    except ValueError as fault:
        raise ValueError(f"env.name={name}: {fault}") from None


def _python_in(home: Path) -> Path:
    return home / "bin" / "python"


def _interpreter(name: str, library: Library) -> str:
    """This interpreter, if its version will do, or the best in PATH."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if mine in library.pythons:
        return sys.executable
    found = (python for version in library.pythons for python in _pythons(version))
    if chosen := next(filter(_makes_environments, found), None):
        return chosen
    raise ValueError(
        f"{name} runs on Python {', '.join(library.pythons)}; this is {mine}, and none of them that has venv is in PATH: "
        f"install one, or name it: jaxagent env install {name} --python=/path/to/python{library.pythons[0]}"
    )


def _pythons(version: str) -> list[str]:
    """Interpreters of a version: in PATH, or where pyenv and uv keep those that no PATH leads to."""
    kept = (
        (Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions"), f"{version}.*"),
        (Path.home() / ".local" / "share" / "uv" / "python", f"cpython-{version}.*"),
    )
    apart = [str(path) for root, homes in kept for path in sorted(root.glob(f"{homes}/bin/python{version}"))]
    in_path = shutil.which(f"python{version}")
    return [in_path, *apart] if in_path else apart


def _makes_environments(python: str) -> bool:
    """Whether an interpreter runs, which pyenv's stand-in for one that is not chosen does not, and has what venv needs."""
    try:
        return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, timeout=60.0).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _run(command: list[str], fault: str, log: Path) -> None:
    """Raises ValueError with the error that a command wrote, where it fails; all that it wrote is in `log` then."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{fault}: {command[0]}: {error.strerror}") from None
    if done.returncode:
        log.write_text(f"{done.stdout}\n{done.stderr}")
        said = [line.strip() for line in log.read_text().splitlines() if line.strip()] or [f"status {done.returncode}"]
        errors = [line for line in said if line.lower().startswith("error")]  # pip's last line is often but a hint
        raise ValueError(f"{fault}: {(errors or said)[-1]} (all that it wrote: {log})")
