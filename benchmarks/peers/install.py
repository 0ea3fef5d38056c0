"""Makes the peers' virtual environments: `python benchmarks/peers/install.py`, or `--venvs DIR` for another place.

One for google-tunix and one for TRL, with the versions below: google-tunix 0.1.7 needs safetensors < 0.8, which newer
transformers refuses, so one environment would hand TRL an older transformers than its users get. An environment that stands is
left as it is. Takes 2.7 GB and some minutes of downloads, from the index that pip is configured for; where that serves torch
with CUDA, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares 4 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

# What is installed, in this order: torch alone first, so that nothing pulls another one.
PINS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trl": (
        ("torch==2.13.0",),
        ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"),
    ),
    "tunix": (
        ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax==0.2.8", "transformers==5.12.1"),
    ),
}


def main() -> None:
    """Makes those that are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, default=default_place(), help="where they are made; default: %(default)s")
    parser.add_argument("--python", default=sys.executable, help="a Python 3.11, the last that jax 0.10.2 is for")
    parser.add_argument("--only", choices=PINS)
    options = parser.parse_args()
    for name in [options.only] if options.only else PINS:
        install(name, options.venvs / name, options.python)
        print(interpreter(options.venvs, name))


def default_place() -> Path:
    """A folder of the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxagent" / "peers"


def interpreter(venvs: Path, name: str) -> Path:
    return venvs / name / "bin" / "python"


def standing(venv: Path, name: str) -> bool:
    """Whether the environment was made to its end, with the versions that are wanted now."""
    made = venv / "made-of"
    return made.exists() and made.read_text() == repr(PINS[name])


def install(name: str, venv: Path, python: str) -> None:
    """Makes the environment, unless it stands. Raises SystemExit where the interpreter is another than the pins are for."""
    if standing(venv, name):
        return
    version = subprocess.check_output([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], text=True).strip()
    if version != "3.11":
        raise SystemExit(f"the peers' versions are pinned for Python 3.11, {python} is {version}: name one with --python")
    subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
    for packages in PINS[name]:
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
    (venv / "made-of").write_text(repr(PINS[name]))


if __name__ == "__main__":
    main()
