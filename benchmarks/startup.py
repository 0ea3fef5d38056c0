"""What stands before the first line of work: `python benchmarks/startup.py`, the time to import and to be told how to use it.

    python benchmarks/startup.py --wheels DIR      and what installing the core takes where nothing is to be downloaded

DIR is filled by `pip wheel`, with the versions of the constraints file of this Python, where it has no wheel of ours yet; then
pip installs from it alone (`--no-index`) into a new environment, which is thrown away.

wall: as a clock has it, the least of `--repeats`; CPU: of the processes that were started, which others here move less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = ROOT / f"constraints-{'3.11' if sys.version_info < (3, 12) else '3.12'}.txt"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import jaxagent": ["-c", "import jaxagent"],
    "jaxagent --help": ["-m", "jaxagent", "--help"],
    "jaxagent train --help": ["-m", "jaxagent", "train", "--help"],
}
HEAVY = ("torch", "nvidia", "triton")  # what the core must not bring


def spent(words: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a program."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def started(repeats: int) -> None:
    print(f"{'':<24}{'wall s':>8}{'CPU s':>8}")
    for name, words in COMMANDS.items():
        walls, cpus = zip(*(spent([sys.executable, *words]) for _ in range(repeats)), strict=True)
        print(f"{name:<24}{min(walls):>8.3f}{min(cpus):>8.3f}")


def installed(wheels: Path) -> None:
    """Installs the core from wheels alone. Raises SystemExit where it brings what it must not."""
    if not list(wheels.glob("jaxagent-*.whl")):
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "-w", str(wheels)]
        subprocess.run([*pip, "--find-links", str(wheels), "-c", str(PINS), str(ROOT)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder, "venv", "bin", "python"))
        made = spent([sys.executable, "-m", "venv", str(Path(folder, "venv"))])
        took = spent([python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), "jaxagent"])
        listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True)
        names = [package["name"].lower() for package in json.loads(listed.stdout)]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink())
    print(f"{'python -m venv':<24}{made[0]:>8.1f}{made[1]:>8.1f}\n{'pip install jaxagent':<24}{took[0]:>8.1f}{took[1]:>8.1f}")
    heavy = [name for name in names if name.startswith(HEAVY)]
    print(f"{len(names)} packages, {size / 1e6:.0f} MB; of {', '.join(HEAVY)}: {', '.join(heavy) or 'none'}")
    if heavy:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels")
    options = parser.parse_args()
    started(options.repeats)
    if options.wheels:
        installed(options.wheels)


if __name__ == "__main__":
    main()
