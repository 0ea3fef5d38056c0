"""The notebooks: every cell runs in order, as a user runs it, with a run of seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "colab").glob("*.ipynb"))
# Runs the cells of a notebook in the shell that notebooks have, magics included, and stops at the first that fails.
SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
"""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_carries_no_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.learning
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(notebook: Path, tmp_path: Path) -> None:
    settings = {
        "JAXAGENT_ARG": "runlocal",
        "JAXAGENT_WORKDIR": str(tmp_path / "run"),
        "JAXAGENT_WORLDS": str(tmp_path / "my_worlds"),
        "JAXAGENT_CHECKOUT": str(REPOSITORY),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    environment = {**os.environ, **settings}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    command = [sys.executable, "-c", SHELL, str(notebook)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    told = {"quickstart": "'model.safetensors'", "your_own_environment": "my_worlds.guess"}[notebook.stem]
    assert told in done.stdout
