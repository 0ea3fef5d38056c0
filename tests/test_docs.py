"""What the docs show is true: Python is run, commands are parsed, and files and config keys that are named exist."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from jaxagent import config as configs
from jaxagent import parts
from jaxagent.__main__ import parser
from jaxagent.types import StopReason

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/concepts/*.md")])
CONCEPTS = [page for page in PAGES if page.parent.name == "concepts"]
ADDING = ROOT / "docs" / "ADDING.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCREENS = 80  # lines of two screens
RECIPES = ("A world", "A tool", "An algorithm", "A model family", "A sandbox service")  # each with an example that runs
VARIABLES = re.compile(r"^(?:[A-Z_]+=\S* )+")  # of the environment, before a command
PLACEHOLDER = re.compile(r"=(?:[A-Z]+|\.\.\.)$|(?<=://)HOST")


def blocks(page: Path, language: str) -> str:
    return "\n".join(text for of, text in BLOCK.findall(page.read_text()) if of == language)


def commands(*pages: Path) -> list[str]:
    """Every command line of ours that stands in a block, whole."""
    found = []
    for page in pages:
        for _, text in BLOCK.findall(page.read_text()):
            lines = (re.split(r"\s#", line)[0].strip() for line in text.splitlines())
            found += [line for line in lines if line.startswith("jaxagent ")]
    return found


def mentions(*programs: str) -> list[str]:
    """What the text, its blocks and its indented lines show of these programs; a command may be named without what it needs."""
    found = []
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text())
        shown = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
        shown += [line.strip() for line in re.findall(r"^ {4,}(.*)$", prose, re.MULTILINE)]
        shown += [line.strip() for _, text in BLOCK.findall(page.read_text()) for line in text.splitlines()]
        shown = [VARIABLES.sub("", re.split(r"\s#", line)[0].strip()) for line in shown]
        found += [line for line in shown if line.startswith(tuple(f"{program} " for program in programs))]
    return sorted(set(found))


def relaxed(whole: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser that takes a command without what it needs, and refuses what it does not know."""
    for action in whole._actions:
        action.required = False
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                relaxed(one)
        elif not action.option_strings and action.nargs is None:
            action.nargs = "?"
    for group in whole._mutually_exclusive_groups:
        group.required = False
    return whole


def flags_of(program: Path) -> set[str]:
    """The flags that a program declares, and those of the programs beside it that it imports."""
    tree, found = ast.parse(program.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            found |= {word.value for word in node.args if isinstance(word, ast.Constant)}
        if isinstance(node, ast.ImportFrom) and node.module and (beside := program.with_name(f"{node.module}.py")).exists():
            found |= flags_of(beside)
    return found


def known_keys() -> set[str]:
    found, faults = configs.load(str(ROOT / "configs" / "base.py"), [])
    assert not faults
    return set(configs.leaves(found)) | {f"{section}.{key}" for section in found for key in _keys(found[section])}


def _keys(section: object) -> list[str]:
    return list(section) if hasattr(section, "items") else []


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    code = blocks(page, "python")
    assert "assert" in code, "a page shows what it says"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [code for language, code in BLOCK.findall(ADDING.read_text()) if language == "python"])
def test_an_example_of_adding_runs_by_itself(code: str) -> None:
    assert "assert" in code, "an example shows that the thing works"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_an_example(recipe: str) -> None:
    (section,) = re.findall(rf"^## {recipe} \(.*?(?=^## |\Z)", ADDING.read_text(), re.DOTALL | re.MULTILINE)
    assert "```python\n" in section


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_a_concept_takes_two_screens(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= SCREENS


@pytest.mark.parametrize("line", commands(*PAGES))
def test_a_command_is_one_that_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    parser().parse_args([word for word in words if not word.startswith("--config.")])
    spec = next((word.partition("=")[2] for word in words if word.startswith("--config=")), "")
    overrides = [word.removeprefix("--config.") for word in words if word.startswith("--config.")]
    if spec:
        config, faults = configs.load(str(ROOT / spec), overrides)
        assert not faults
        assert parts.faults(config) == []  # what `train` and `finetune` would refuse


@pytest.mark.parametrize("line", mentions("jaxagent"))
def test_a_command_that_is_mentioned_has_what_is_shown_of_it(line: str) -> None:
    words = [PLACEHOLDER.sub("=1", word) for word in shlex.split(line)[1:]]
    overrides = [word.removeprefix("--config.") for word in words if word.startswith("--config.")]
    relaxed(parser()).parse_args([word for word in words if not word.startswith("--config.") and word != "--help"])
    assert {override.partition("=")[0] for override in overrides} <= known_keys()
    assert [word for word in words if "configs/" in word and not (ROOT / word.split("=")[-1].split(":")[0]).exists()] == []


@pytest.mark.parametrize("line", mentions("make"))
def test_a_target_that_is_shown_exists(line: str) -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(line.split()[1:]) <= targets


@pytest.mark.parametrize("line", mentions("python"))
def test_a_program_that_is_shown_exists_and_takes_the_flags_shown(line: str) -> None:
    words = [word for word in shlex.split(line)[1:] if word not in ("-m", "pytest", "parity")]
    assert [word for word in words if "/" in word and not (ROOT / word).exists()] == []
    program = ROOT / next(word for word in words if word.endswith(".py"))
    overrides = {word.removeprefix("--config.").partition("=")[0] for word in words if word.startswith("--config.")}
    flags = {word.partition("=")[0] for word in words if word.startswith("--") and not word.startswith("--config.")}
    assert flags <= flags_of(program)
    assert overrides <= known_keys()
    assert not overrides or "--config." in program.read_text()


@pytest.mark.parametrize("line", mentions("pip"))
def test_an_extra_that_is_installed_exists(line: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"(?:jaxagent|\.)\[(\w+)\]", line)) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:jaxagent|configs|docs|benchmarks|tests|launch|colab|sandbox_client)/[\w./-]*)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_config_keys_that_are_named_exist(page: Path) -> None:
    known = known_keys()
    free = {"env", "reward"}  # their keys are keyword arguments of worlds and of shaping
    sections = {key.partition(".")[0] for key in known} - free
    named = re.findall(r"`(?:--config\.)?([a-z_]+)\.(\w+)(?:=[^`]*)?`", page.read_text())
    keys = {f"{section}.{key}" for section, key in named if section in sections and key not in ("py", "jsonl", "json")}
    assert keys - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_are_named_exist(page: Path) -> None:
    code = "".join(path.read_text() for path in (ROOT / "jaxagent").rglob("*.py"))
    named = set(re.findall(r"`((?:engine|feed|rollout|policy|credit|critic|reward|time)/[a-z_]+)`", page.read_text()))
    named -= {f"rollout/stop_{reason}" for reason in StopReason}
    assert {name for name in named if f'"{name}' not in code and f"/{name.partition('/')[2]}" not in code} == set()


# ---------------------------------------------------------------------- README's list, from its first line to its last

_SHORT = "train.steps=13 checkpoint.every=4 evaluate.every=0 warmup.steps=60 warmup.demos=960 warmup.batch=16"
_SHORT += " reward.failed_calls=0.3"  # nobody solves a task so soon: in these groups rewards differ all the same
_TUNED = "train.steps=4 finetune.batch=8 evaluate.final_tasks=4"
SHORT = {  # what makes a command of the list a matter of seconds
    "train": [f"--config.{override}" for override in _SHORT.split()],
    "finetune": [f"--config.{override}" for override in _TUNED.split()],
    "view --serve": ("--port=0",),
    "generate": ("--max-tokens=8",),
    "serve": ("--port=0", "--context=128", "--slots=2"),
}
UNTIL_STOPPED = ("view --serve", "serve")  # they end with Ctrl-C


def shortened(line: str) -> tuple[str, list[str]]:
    """The command's name, told apart where a flag makes it another, and its words with what makes it short."""
    words = shlex.split(line)[1:]
    name = next((f"{words[0]} --{flag}" for flag in ("follow", "serve") if f"--{flag}" in words), words[0])
    words = [word.replace("quickstart.py", "quickstart.py:runlocal") if name == "train" else word for word in words]
    return name, [*words, *SHORT.get(name, ())]


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """By this process, and so by those that it starts: what a script in the background starts ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def answered(name: str, said: str, place: Path) -> None:
    """Asks what a command serves."""
    if name == "serve":
        url, headers = json.loads(said)["url"] + "/models", {"Authorization": f"Bearer {(place / 'TOKEN').read_text().strip()}"}
    else:
        url, headers = said.strip(), {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300) as answer:
        assert ("policy" if name == "serve" else "<html") in answer.read().decode()


LEFT: dict[str, Callable[[Path, str], object]] = {  # what must be there after each command of the list, or what it has said
    "train": lambda place, _: json.loads((place / "runs/mine/eval.json").read_text())["after"]["n"] == 4,
    "finetune": lambda place, _: (place / "runs/sft/checkpoints/4").is_dir(),
    "plan": lambda _, said: "the most at once" in said and "programs to compile" in said,
    "eval": lambda place, said: "pass@8" in said and len(list((place / "runs/mine/evals").iterdir())) == 1,
    "eval --follow": lambda place, _: (
        [json.loads(line)["step"] for line in (place / "runs/mine/evaluations.jsonl").read_text().splitlines()] == [72, 73]
    ),
    "view --serve": lambda _, said: True,
    "replay": lambda _, said: re.search(r"^gradient +[1-9]", said, re.MULTILINE) and "the same, to the last bit" in said,
    "export": lambda place, _: {"config.json", "model.safetensors"} <= {path.name for path in (place / "policy").iterdir()},
    "generate": lambda _, said: said.strip(),
    "serve": lambda place, _: (place / "TOKEN").stat().st_mode & 0o077 == 0,
    "env": lambda _, said: "textworld" in said,
}


@pytest.mark.learning
@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_the_list_of_the_readme_runs_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    """Not whether anything is learnt: whether every command works on what those before it have left."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copy(ROOT / "configs" / "dialogues.jsonl", tmp_path / "DIALOGUES.jsonl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    listed = [shortened(line) for line in commands(ROOT / "README.md")]
    assert [name for name, _ in listed] == list(LEFT)
    for name, words in listed:
        command = [sys.executable, "-m", "jaxagent", *words]
        streams: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True}
        with subprocess.Popen(command, cwd=tmp_path, env=environment, **streams) as running:
            assert running.stdout is not None
            first = running.stdout.readline() if name in UNTIL_STOPPED else ""
            try:
                if first:
                    answered(name, first, tmp_path)
                    running.send_signal(signal.SIGINT)
                said, faults = running.communicate(timeout=1200)
            finally:
                running.kill()
        assert running.returncode == 0, f"{shlex.join(words)}\n{first}{said}\n{faults}"
        assert "Traceback" not in faults and "Warning" not in faults, f"{shlex.join(words)}\n{faults}"
        assert LEFT[name](tmp_path, first + said), f"{shlex.join(words)}\n{first}{said}\n{faults}"
