"""What stands around a command's work: nothing heavy is imported to be told how to use it, nor installed for the core; and
who reads no further ends it without a word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxagent.__main__ import main

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "numpy", "flax", "transformers", "orbax", "ml_collections", "aiohttp")
PINS = sorted(ROOT.glob("constraints-*.txt"))


@pytest.mark.parametrize("words", [[], ["--help"], ["train", "--help"], ["eval", "--help"], ["serve", "--help"]])
def test_to_be_told_how_to_use_it_nothing_heavy_is_imported(words: list[str]) -> None:
    call = f"\nwith contextlib.suppress(SystemExit):\n    importlib.import_module('jaxagent.__main__').main({words})"
    code = f"import contextlib, importlib, sys\nimport jaxagent{call * bool(words)}\n"
    code += f"print('loaded:', *(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert len(done.stdout.splitlines()) > 5 or not words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config.seed", "1"], "--config.seed: a value is wanted in the same word, as --config.seed=VALUE"),
        (["--seed=1"], "jaxagent train does not know --seed=1; a key of the config is changed by --config.KEY=VALUE"),
    ],
)
def test_a_flag_that_is_not_known_is_told_with_how_a_key_is_written(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["train", "--config=configs/maze.py", "--workdir=nowhere", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("words", [["env", "list"], ["--help"]])
def test_a_command_ends_quietly_when_its_reader_is_gone(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "jaxagent", *words], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141 or (done.returncode == 0 and words == ["--help"])  # argparse does not mind


def test_the_core_wants_no_torch_and_nothing_of_one_vendor() -> None:
    """The pinned versions are those of the core and of its tests: what is not among them is not brought in by any of them."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=;\[ ]", wanted)[0].lower() for wanted in core}
    assert PINS and "jax" in names
    for path in PINS:
        pinned = {line.partition("==")[0].lower().replace("_", "-") for line in path.read_text().splitlines() if "==" in line}
        assert names - pinned == set(), f"{path.name} pins all that the core names"
        for listed in (pinned, names):
            assert [name for name in listed if re.match(r"torch|nvidia|triton|jax-cuda|libtpu|tensorflow", name)] == []
