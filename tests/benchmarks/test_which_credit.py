"""What benchmarks/credit.py says: its measures by hand, and that it goes on where it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxagent.envs.maze import DOORS, SIGNS, Maze
from jaxagent.types import ToolRecord, Trajectory, Turn


@pytest.fixture(scope="module")
def credit() -> Any:
    """The benchmark; its neighbours are found beside it, as when it is run."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import credit
    finally:
        sys.path.pop(0)
    return credit


def test_what_is_there_is_not_run_again(credit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [f"--out={tmp_path}", "--worlds=corridor", "--distances=2", "--methods", "grpo", "exact"]
    credit.main([*command, "--seeds=1"])
    first = (tmp_path / "runs.jsonl").read_text()
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "corridor 2 grpo 0 8",
        "corridor 2 exact 0 8",
    ]
    credit.main([*command, "--seeds=2"])
    told = capsys.readouterr()
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["corridor 2 grpo 1 8", "corridor 2 exact 1 8"]
    assert (tmp_path / "runs.jsonl").read_text().startswith(first)
    rows = {line.split(" | ")[0]: line.strip("| ").split(" | ") for line in told.out.splitlines() if line.count("±") > 4}
    assert rows["| exact"][8:11] == ["0.957 ± 0.012", "1.00 ± 0.00", "1.00 ± 0.00"]
    assert float(rows["| grpo"][9].split()[0]) < 0.5


def test_runs_with_other_groups_are_other_runs_and_a_torn_line_is_run_again(
    credit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = [{"success": [1.0] * 5, "turns": [1] * 5, "cpu_s": [1.0] * 5, "correlation": value} for value in (0.1, 0.9)]
    rest = {"world": "corridor", "distance": 2, "method": "grpo", "seed": 0, "blame": 0.5, "noise": 1.0, "all_cpu_s": 1.0}
    lines = [json.dumps({**rest, **curve[0]}), json.dumps({**rest, **curve[1], "rollouts": 4})]  # the first one of old
    path = tmp_path / "runs.jsonl"

    def told(torn: str = "", *more: str) -> tuple[list[str], list[str]]:
        path.write_text("\n".join(lines) + "\n" + torn)
        credit.main([f"--out={tmp_path}", "--worlds=corridor", "--distances=2", "--methods", "grpo", "--seeds=1", *more])
        out, err = capsys.readouterr()
        cells = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| grpo")]
        assert len(cells) == 1
        return cells[0][9:10], [line.split(":")[0] for line in err.splitlines()]

    assert told() == (["0.10"], [])
    assert told("", "--rollouts=4") == (["0.90"], [])
    assert told(lines[0][:30], "--rollouts=2")[1] == ["corridor 2 grpo 0 2"]
    assert path.read_text().splitlines()[:2] == lines
    assert json.loads(path.read_text().splitlines()[2])["rollouts"] == 2


def test_methods_are_compared_seed_by_seed(credit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    late, soon = [[0.0] * n + [1.0] * (20 - n) for n in (9, 5)]
    runs = [
        {"method": method, "seed": seed, "success": late if method == "grpo" else soon, "turns": [1000 * (seed + 1)] * 20}
        for seed in (0, 1)
        for method in ("grpo", "gigpo, F = 1")
    ]
    credit.print_differences("ring", [*runs, {**runs[0], "method": "exact"}], "turns")
    title, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert title == "| ring | seeds | 1000 turns to 90 %, less grpo's | area, less grpo's |"
    assert rows == ["| grpo | 2 | 0.0 ± 0.0 | 0.000 ± 0.000 |", "| gigpo, F = 1 | 2 | -6.0 ± 25.4 | 0.200 ± 0.000 |"]


@pytest.mark.parametrize(("seeds", "t"), [(2, 12.706), (7, 2.447), (9, 2.306), (11, 2.228), (31, 2.042), (50, 2.042)])
def test_an_interval_is_students(credit: Any, seeds: int, t: float) -> None:
    values = [0.0, 1000.0] * (seeds // 2) + [500.0] * (seeds % 2)
    half = t * float(np.std(values, ddof=1)) / seeds**0.5
    assert credit.interval(values, 3) == f"500.000 ± {half:.3f}"


def test_blame_is_whole_where_it_belongs_and_half_where_half_of_it_does(credit: Any) -> None:
    exact = np.asarray([0.5, -0.2, -0.2, 0.0])
    blame = credit.credit_corridor.blame
    assert blame(3 * exact, exact) == pytest.approx(1.0)
    assert blame(np.asarray([0.0, -1.0, 0.0, -1.0]), exact) == pytest.approx(0.5)
    assert blame(np.asarray([-1.0, 1.0, 1.0, -1.0]), exact) == 0.0


def test_a_level_is_reached_by_the_mean_of_five_steps(credit: Any) -> None:
    assert credit.until([0, 1, 1, 1, 0, 1, 1], np.cumsum([10.0] * 7), 0.8) == 60.0
    assert credit.until([0, 1, 1, 1, 0, 1, 1], np.cumsum([10.0] * 7), 0.9) == float("inf")


def test_a_correlation_with_noisy_values_is_freed_of_their_noise(credit: Any) -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=20000)
    noisy = true + rng.normal(size=20000)
    found = {"exact": noisy.tolist(), "variance": 1.0, "grpo": {"advantage": (2 * true + rng.normal(size=20000)).tolist()}}
    assert credit.credit_maze.correlation(found, "grpo") == pytest.approx(2 / 5**0.5, abs=0.02)
    assert np.corrcoef(noisy, found["grpo"]["advantage"])[0, 1] == pytest.approx(2 / 10**0.5, abs=0.02)


def test_traps_and_turning_back_are_mistakes_in_a_maze(credit: Any) -> None:
    world = Maze()
    maze, row = world.map(5), Trajectory("maze", 5, "g", 0)
    for sign in "oo-o!o":
        door = DOORS[maze.signs()[1:].index(sign)]
        row.turns.append(Turn(0, 0, 0, maze.signs(), tools=[ToolRecord(door, {}, "ok", "")]))
        maze.move(door)
    row.turns.append(Turn(0, 0, 0, maze.signs(), tools=[ToolRecord("", {}, "bad_arguments", "?")]))
    assert set("oo-o!o") == set(SIGNS)
    assert credit.credit_maze.mistakes(world, row) == [False, False, True, False, True, False, True]
