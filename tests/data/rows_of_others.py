"""A repository with a bug and its fix, and the rows that SWE-bench, SWE-smith and R2E-Gym would have of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from package_with_tests import FILES

WALK, TEST, NEW = "src/pathlen/walk.py", "tests/test_walk.py", "src/pathlen/step.py"
STABLE = {name: f"{TEST}::test_{name}" for name in ("forth", "back", "none", "longest", "constant")}
RIGHT = FILES[WALK].replace(
    "if a < b:\n            total += b - a\n        else:\n            total += a - b", "total += step(a, b)"
)
RIGHT = RIGHT.replace('"""Lengths of paths."""\n', '"""Lengths of paths."""\n\nfrom .step import step\n')
STEP = "def step(a, b):\n    return abs(a - b)\n"
BACK = "\n\ndef test_back():\n    assert length([4, 1]) == 3\n"


def git(folder: Path, *arguments: str) -> str:
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
    done = subprocess.run(
        ["git", *who, "-C", str(folder), *arguments], capture_output=True, text=True, check=True, env=settings
    )
    return done.stdout


def commit(folder: Path, files: dict[str, str | None]) -> str:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (folder / path).unlink()
        else:
            (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD").strip()


def make(clones: Path) -> dict[str, dict[str, Any]]:
    """One task in three schemas. The fix brings a file, and its test is another than before."""
    here = clones / "own__pathlen"
    here.mkdir(parents=True)
    git(here, "init", "-q")
    (here / "blob.bin").write_bytes(b"\xff\x00")
    (here / "link").symlink_to("/etc")
    wrong = FILES[WALK].replace("total += a - b", "total += a + b")
    base = commit(here, {**FILES, WALK: wrong, TEST: FILES[TEST].replace(BACK, ""), "docs/x.md": "x", ".ci/y": "y"})
    right = commit(here, {WALK: RIGHT, NEW: STEP, TEST: FILES[TEST]})
    patch, test_patch = git(here, "diff", base, right, "--", "src"), git(here, "diff", base, right, "--", "tests")
    bug = git(here, "diff", right, base, "--", "src")
    fails, passes = [STABLE["back"]], [name for key, name in STABLE.items() if key != "back"]
    told = "The length of a way back is wrong."
    lists = {"FAIL_TO_PASS": fails, "PASS_TO_PASS": passes}
    said = {name.partition("::")[2]: "PASSED" for name in (*fails, *passes)}
    ran = {
        "test_file_names": [],
        "test_file_codes": [],
        "old_commit_res_stdout": "".join(f"PASSED {name}\n" for name in passes),
    }
    bench = {"instance_id": "own__pathlen-1", "repo": "own/pathlen", "base_commit": base, "problem_statement": told}
    bench |= {"patch": patch, "test_patch": test_patch, **{key: json.dumps(value) for key, value in lists.items()}}
    smith = {"instance_id": f"own__pathlen.{right[:8]}.combine__x", "repo": f"mirrors/own__pathlen.{right[:8]}"}
    smith |= {"patch": bug, "problem_statement": told, "image_name": "x", **lists}
    gym = {"repo_name": "pathlen", "commit_hash": right, "problem_statement": told, "docker_image": "x"}
    gym |= {"expected_output_json": json.dumps(said), "execution_result_content": json.dumps(ran)}
    return {"bench": bench, "smith": smith, "gym": gym}
