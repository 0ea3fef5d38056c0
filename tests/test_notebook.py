"""The notebook: every cell runs in order, as a user runs it, with a run of seconds."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
NOTEBOOK = REPOSITORY / "colab" / "quickstart.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_python_and_carries_no_outputs() -> None:
    assert len(cells()) == 5
    for cell in cells():
        ast.parse(cell)
    notebook = json.loads(NOTEBOOK.read_text())
    assert [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"] == [[]] * 5


@pytest.mark.learning
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="IPython is not installed: a notebook's own display is wanted")
    script = tmp_path / "notebook.py"
    script.write_text("\n".join(cells()))
    settings = {"JAXAGENT_ARG": "runlocal", "JAXAGENT_WORKDIR": str(tmp_path / "run"), "JAXAGENT_CHECKOUT": str(REPOSITORY)}
    environment = {**os.environ, **settings, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'model.safetensors'" in done.stdout.splitlines()[-1]
    assert done.stdout.count("chain/test/") == 3
