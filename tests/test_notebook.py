"""The notebooks: every cell runs in order, as a user runs it, with a run of seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_view import HOSTILE, episode, write_run

from jaxagent.notebook import curves, episodes

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "colab").glob("*.ipynb"))
# Runs the cells of a notebook in the shell that notebooks have, magics included, and stops at the first that fails. As in a
# kernel there is a loop that runs already.
SHELL = """
import asyncio, json, sys
from IPython.core.interactiveshell import InteractiveShell
async def whole():
    shell = InteractiveShell.instance()
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()
asyncio.run(whole())
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
        "JAXAGENT_SOURCE": str(REPOSITORY),
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


def test_the_pictures_of_a_run_are_inert_markup(tmp_path: Path) -> None:
    mixed = [episode("b", n, reward=n, text="<script>" if n else HOSTILE[:60]) for n in range(3)]
    for row in mixed:
        row.turns[0].advantage, row.turns[1].advantage = 0.5, -0.5
    same = [episode("a", n) for n in range(2)]
    write_run(tmp_path / "run", {"after": [*mixed, *same], "train-000001": [*same, *mixed]})
    drawn, after = curves(tmp_path / "run"), episodes(tmp_path / "run", "after", 2)
    assert re.findall("<figcaption>(.*?)</figcaption>", drawn.text) == ["reward/success", "sft/nll"]
    assert drawn._repr_html_() == drawn.text and "characters of HTML" in repr(drawn)
    assert after.text.count('<div class="episode">') == 2 and after.text.count("toy/b") == 2
    train = episodes(tmp_path / "run", "train-000001", 8).text
    assert train.count("toy/b") == 3 and "toy/a" not in train  # a group that has nothing to compare teaches nothing
    assert 'class="gained" title="advantage +0.5; A: ok, 0.01 s">&lt;call&gt;A37&lt;/call&gt;</span>' in train
    assert '<span class="tool"' in train and ">&lt;script&gt;" in train
    tags = set(re.findall(r"<(/?\w+)", drawn.text + after.text + train))
    assert not tags & {"script", "img", "iframe", "a"} and "\u202e" not in train


def test_indentation_and_every_kind_of_space_are_shown_as_they_are(tmp_path: Path) -> None:
    said = "def f():\n\treturn\u00a01\u3000"
    write_run(tmp_path / "run", {"after": [episode("b", text=said + "\x1b\u202e\u2028")]})
    assert said + 3 * "\ufffd" in episodes(tmp_path / "run", "after", 1).text


def test_the_pictures_of_a_run_that_has_just_begun_say_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {}, steps=0, warmup={"steps": 0}, finished=False)
    assert "no steps yet" in curves(tmp_path / "run").text
    with pytest.raises(ValueError, match="holds no run"):
        curves(tmp_path)


# What stands for pip where there is none: it writes down what it was asked for, and installs nothing.
PIP = 'import json, os, sys; open(os.environ["PIP_ASKED"], "a").write(json.dumps(sys.argv[1:]))'
GPU = "#!/bin/sh\necho 'GPU 0: Tesla T4 (UUID: GPU-1)'"
NO_DRIVER = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver'; exit 9"


def setup_of(notebook: Path) -> str:
    return next("".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that is really empty: it has not even a pip that could install anything anywhere."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def set_up(
    bare: Path, folder: Path, source: str, nvidia_smi: str = "", tpu: str = "", pip: str = PIP
) -> subprocess.CompletedProcess[str]:
    """Runs the first cell in an empty folder."""
    (folder / "site" / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "site" / "pip" / "__init__.py").touch()
    (folder / "site" / "pip" / "__main__.py").write_text(pip)
    (folder / "here").mkdir(exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "nvidia-smi").write_text(nvidia_smi or NO_DRIVER)
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.defpath}",
        "HOME": str(folder),
        "PYTHONPATH": str(folder / "site"),
        "PIP_ASKED": str(folder / "asked"),
        "JAXAGENT_SOURCE": source,
        "TPU_ACCELERATOR_TYPE": tpu,
    }
    command = [str(bare), "-c", setup_of(NOTEBOOKS[0])]
    return subprocess.run(command, env=environment, cwd=folder / "here", capture_output=True, text=True, check=False)


def test_all_notebooks_begin_with_the_same_cell() -> None:
    assert len({setup_of(notebook) for notebook in NOTEBOOKS}) == 1


@pytest.mark.skipif(any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*")), reason="this machine has a TPU")
@pytest.mark.parametrize(
    ("nvidia_smi", "tpu", "extra", "told"),
    [
        ("", "", "", "CPU cores, Python"),
        (GPU, "", "[gpu]", "GPU 0: Tesla T4, Python"),
        ("", "v5e-1", "[tpu]", "TPU v5e-1, Python"),
    ],
    ids=["cpu", "gpu", "tpu"],
)
def test_a_bare_runtime_installs_what_its_machine_computes_with(
    bare: Path, tmp_path: Path, nvidia_smi: str, tpu: str, extra: str, told: str
) -> None:
    done = set_up(bare, tmp_path, f"file://{REPOSITORY}", nvidia_smi, tpu)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout and f"jaxagent of {REPOSITORY}" in done.stdout
    assert json.loads((tmp_path / "asked").read_text()) == ["install", "--quiet", "-e", f"{REPOSITORY}{extra}"]


def test_a_mere_folder_of_its_name_is_no_jaxagent(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "here" / "jaxagent").mkdir(parents=True)
    done = set_up(bare, tmp_path, str(REPOSITORY))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "asked").read_text()) == ["install", "--quiet", "-e", str(REPOSITORY)]


def sources(folder: Path) -> dict[str, str]:
    """A repository that is little more than its name, and the same as a zip with one folder in it, as hosts of code do."""
    there = folder / "origin" / "jaxagent-main"
    (there / "configs").mkdir(parents=True)
    (there / "configs" / "quickstart.py").write_text("")
    shutil.make_archive(str(folder / "source"), "zip", there.parent)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main", "-C", str(there)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    bare = folder / "bare.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(there), str(bare)], check=True)
    return {
        "git": f"git+file://{bare}",
        "zip": str(folder / "source.zip"),
        "zip at an address": f"file://{folder / 'source.zip'}",
        "folder": str(there),
    }


@pytest.mark.parametrize("kind", ["git", "zip", "zip at an address", "folder"])
def test_a_source_is_fetched_once_and_found_again(bare: Path, tmp_path: Path, kind: str) -> None:
    source = sources(tmp_path)[kind]
    for _ in range(2):
        done = set_up(bare, tmp_path, source)
        assert done.returncode == 0, done.stderr
        assert ("jaxagent-main" if kind == "folder" else "jaxagent-source") in done.stdout.partition("jaxagent of ")[2]
        shutil.rmtree(tmp_path / "bare.git", ignore_errors=True)  # nothing is asked for again


def test_what_is_missing_or_fails_is_said(bare: Path, tmp_path: Path) -> None:
    assert "Put a git URL, a zip or a folder with its source into SOURCE" in set_up(bare, tmp_path, "").stderr
    assert "git clone" in set_up(bare, tmp_path, f"file://{tmp_path}/nowhere").stderr
    failed = set_up(bare, tmp_path, str(REPOSITORY), pip="import sys; sys.exit('no such thing')")
    assert failed.returncode == 1 and "failed:\nno such thing" in failed.stderr


@pytest.mark.learning
def test_an_empty_environment_gets_jaxagent_from_a_file_address(tmp_path: Path) -> None:
    """Outside the repository and without PYTHONPATH, with the pip and the index that this machine has; minutes."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    origin = tmp_path / "origin.git"
    subprocess.run(["git", "clone", "-q", "--bare", f"file://{REPOSITORY}", str(origin)], check=True)
    ask = "import jax, jaxagent; from jaxagent import config; print(jaxagent.__file__, len(jax.devices()) > 0)"
    environment = {**os.environ, "JAXAGENT_SOURCE": f"file://{origin}"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", f"{setup_of(NOTEBOOKS[0])}\n{ask}"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path / 'jaxagent-source' / 'jaxagent'}/__init__.py True" in done.stdout
