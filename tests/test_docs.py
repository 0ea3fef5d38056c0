"""What the docs show is true: Python is run, commands are parsed, and files and config keys that are named exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxagent import config as configs
from jaxagent import parts
from jaxagent.__main__ import parser
from jaxagent.types import StopReason

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/concepts/*.md")])
CONCEPTS = [page for page in PAGES if page.parent.name == "concepts"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCREENS = 80  # lines of two screens


def blocks(page: Path, language: str) -> str:
    return "\n".join(text for of, text in BLOCK.findall(page.read_text()) if of == language)


def commands() -> list[str]:
    """Every command line of ours that stands in a block."""
    found = []
    for page in PAGES:
        for _, text in BLOCK.findall(page.read_text()):
            lines = (re.split(r"\s#", line)[0].strip() for line in text.splitlines())
            found += [line for line in lines if line.startswith("jaxagent ")]
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


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_a_concept_takes_two_screens(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= SCREENS


@pytest.mark.parametrize("line", commands())
def test_a_command_is_one_that_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    parser().parse_args([word for word in words if not word.startswith("--config.")])
    spec = next((word.partition("=")[2] for word in words if word.startswith("--config=")), "")
    overrides = [word.removeprefix("--config.") for word in words if word.startswith("--config.")]
    if spec:
        config, faults = configs.load(str(ROOT / spec), overrides)
        assert not faults
        assert parts.faults(config) == []  # what `train` and `finetune` would refuse


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
