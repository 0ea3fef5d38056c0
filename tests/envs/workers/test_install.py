"""An environment is made, found, used and renewed; whoever has none is told how to get it."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from jaxagent.__main__ import main
from jaxagent.envs.workers import install
from jaxagent.envs.workers.install import LIBRARIES, Library, most_workers, python_of
from jaxagent.envs.workers.pool import Kind, Pool

MINE = f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel(folder: Path, version: str) -> str:
    """A library `only_there` as a wheel, which answers with its version."""
    path, info = folder / f"only_there-{version}-py3-none-any.whl", f"only_there-{version}.dist-info"
    files = {
        "only_there.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: only-there\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={digest(text)},{len(text)}" for name, text in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,", ""])}.items():
            archive.writestr(name, text)
    return str(path)


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXAGENT_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


def test_what_is_installed_is_used_by_workers_and_not_by_the_trainer(
    envs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LIBRARIES, "there", Library((wheel(tmp_path, "1.0"),), ("only_there",), (MINE,)))
    with pytest.raises(ValueError, match=r"env\.name=there: .*1\.0.* is not installed; run: jaxagent env install there"):
        python_of("there")
    assert main(["env", "install", "there"]) == 0
    assert f"there: installed in {envs / 'there'}" in capsys.readouterr().out
    assert python_of("there") == envs / "there" / "bin" / "python"
    (tmp_path / "adapter.py").write_text(
        "import only_there, sys\nclass World:\n"
        "    def reset(self, task, seed): return {'text': only_there.VERSION + ' ' + str('jaxagent' in sys.modules)}\n"
        "    def close(self): pass\nmake = World\n"
    )
    pool = Pool(Kind("there", python_of("there"), tmp_path / "adapter.py"))
    try:
        place = pool.take().result(60.0)
        assert place.call("reset", task={}, seed=0).result(60.0) == {"text": "1.0 False"}
    finally:
        pool.close()
    monkeypatch.setitem(LIBRARIES, "there", Library((wheel(tmp_path, "2.0"),), ("only_there",), (MINE,)))
    with pytest.raises(ValueError, match="holds another version than is wanted; run: jaxagent env install there"):
        python_of("there")


def test_an_installation_that_fails_is_told_in_a_sentence_and_is_none(
    envs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LIBRARIES, "there", Library(("/nowhere/at_all-1.0-py3-none-any.whl",), ("at_all",), (MINE,)))
    python = tmp_path / "python"  # a venv takes seconds to make
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit\n'
        'echo "ERROR: no wheel"; echo hint; exit 1\n'
    )
    python.chmod(0o755)
    assert main(["env", "install", "there", f"--python={python}"]) == 2
    log = envs / "there.log"
    said = f"pip could not install /nowhere/at_all-1.0-py3-none-any.whl: ERROR: no wheel (all that it wrote: {log})\n"
    assert capsys.readouterr().err == said and "hint" in log.read_text()
    with pytest.raises(ValueError, match="is not installed"):
        python_of("there")
    assert main(["env", "install", "there", "--python=/nowhere/python"]) == 2
    assert "cannot make a virtual environment" in capsys.readouterr().err


def test_a_library_that_this_python_has_is_taken_from_it_unless_it_must_be_apart(
    envs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIBRARIES, "here", Library(("json==1",), ("json",)))
    assert python_of("here") == Path(sys.executable)
    monkeypatch.setitem(LIBRARIES, "here", Library(("json==1",), ("json",), apart=True))
    with pytest.raises(ValueError, match="jaxagent env install here"):
        python_of("here")


def test_a_program_that_is_missing_and_a_python_that_is_are_told(envs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "here", Library(("json==1",), ("json",), programs=("no_such_program",)))
    with pytest.raises(ValueError, match="it needs the program no_such_program, which is not in PATH"):
        python_of("here")
    monkeypatch.setitem(LIBRARIES, "here", Library(("json==1",), ("json",), pythons=("2.9",)))
    with pytest.raises(
        ValueError, match=rf"here runs on Python 2\.9; this is {MINE}, and none of them that has venv is in PATH"
    ):
        install.install("here")
    with pytest.raises(ValueError, match="'nothing' is no world that can be installed; there are textworld"):
        install.install("nothing")


def test_an_environment_is_made_by_an_interpreter_that_runs_and_not_by_the_name_of_one(
    envs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIBRARIES, "there", Library(("/nowhere/at_all-1.0-py3-none-any.whl",), ("at_all",), ("2.9",)))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/bin:/usr/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))

    def program(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    program(tmp_path / "shims" / "python2.9", "echo not chosen >&2; exit 127")
    with pytest.raises(ValueError, match=r"runs on Python 2\.9; .* none of them that has venv is in PATH"):
        install.install("there")
    program(tmp_path / ".local/share/uv/python/cpython-2.9.4-linux/bin/python2.9", '[ "$1" = -c ] && exit; echo of uv; exit 1')
    with pytest.raises(ValueError, match=r"/uv/python/.* cannot make a virtual environment in .*: of uv"):
        install.install("there")
    program(tmp_path / "pyenv/versions/2.9.1/bin/python2.9", '[ "$1" = -c ] && exit; echo of pyenv; exit 1')
    with pytest.raises(ValueError, match=r"cannot make a virtual environment in .*: of pyenv"):
        install.install("there")


def test_the_list_says_of_every_world_whether_it_can_be_played(
    envs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LIBRARIES, "here", Library((), ("json",)))
    assert main(["env", "list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == {*LIBRARIES, "desk"}  # which needs programs and no library
    assert lines["here"] == "in this Python"


def test_heavy_worlds_get_fewer_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 10_000)
    monkeypatch.setitem(LIBRARIES, "light", Library((), (), memory_mb=10))
    monkeypatch.setitem(LIBRARIES, "heavy", Library((), (), memory_mb=1000))
    monkeypatch.setitem(LIBRARIES, "hopeless", Library((), (), memory_mb=10**9))
    assert most_workers("light") > 50 * most_workers("heavy") >= 50
    assert most_workers("hopeless") == 1


def test_versions_are_pinned_and_every_adapter_has_its_row() -> None:
    assert all("==" in requirement for library in LIBRARIES.values() for requirement in library.requirements)
    adapters = Path(install.__file__).parents[1] / "adapters"
    assert {path.stem for path in adapters.glob("*.py")} - {"__init__"} <= LIBRARIES.keys()
