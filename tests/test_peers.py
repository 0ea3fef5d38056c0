"""The comparison with other trainers: what all runners are given, which steps count, and the table. No runner is started."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.workload import RESULT, RESULT_TOKENS, Workload
from benchmarks.peers.world import make_world
from jaxagent.types import Message


def workload(**changes):
    sizes = {"prompts": 4, "group": 8, "turns": 3, "turn_tokens": 24, "budget": 192, "new_tokens": 128, "even": False}
    rest = {"model": Path("m"), "work": "agentic", "tool_ms": (50.0,), "beta": 0.04, "micro": 4}
    return Workload(**{**sizes, **rest, **changes})


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "peers"))
    import compare

    return compare


def test_every_runner_is_given_the_same_turn_lengths_and_every_episode_fits_its_budget():
    lengths = workload().lengths(3)
    assert lengths == workload(model=Path("elsewhere"), tool_ms=(2000.0, 50.0)).lengths(3)
    assert lengths != workload().lengths(4)
    assert len(lengths) == 32
    assert all(len(turns) == 3 and min(turns) >= 2 for turns in lengths)
    assert all(sum(turns) + 2 * RESULT_TOKENS <= 192 for turns in lengths)
    mean = sum(workload().tokens(step) for step in range(50)) / (50 * 96)
    assert 20 < mean < 24.5  # episodes that do not fit are drawn again, which takes some of the longest turns


def test_even_turns_and_a_single_turn_have_the_length_that_was_asked_for():
    assert workload(even=True).lengths(0) == [[24, 24, 24]] * 32
    assert workload(work="single").lengths(0) == [[128]] * 32


def run(runner, steps, peak_mib, work="agentic"):
    found = [{"tool_ms": ms, "wall_s": wall, "cpu_s": cpu, "tokens": 1000} for ms, wall, cpu in steps]
    return {"runner": runner, "steps": found, "peak_mib": peak_mib, "work": work, "model": "small"}


def rows(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]


def test_the_table_has_medians_of_the_steps_that_count_and_ratios_to_ours(compare):
    ours = run("jaxagent", [(50, 90.0, 90.0), (50, 2.0, 3.0), (50, 4.0, 3.0), (2000, 8.0, 3.0)], 600)
    again = run("jaxagent", [(50, 90.0, 90.0), (50, 3.0, 3.0)], 500)
    theirs = run("trl", [(50, 20.0, 18.0), (50, 12.0, 9.0), (2000, 120.0, 9.0)], 1800)
    short, long = compare.table([ours, theirs, again]).split("\n\n")
    assert rows(short) == [
        ["agentic, small, tool of 50 ms", *rows(short)[0][1:]],
        ["jaxagent", "3", "3.00", "1.00", "333", "3.00", "1.00", "600", "1.00"],
        ["trl", "1", "12.00", "4.00", "83", "9.00", "3.00", "1800", "3.00"],
    ]
    assert [row[:4] for row in rows(long)[1:]] == [["jaxagent", "1", "8.00", "1.00"], ["trl", "1", "120.00", "15.00"]]


def test_a_first_step_counts_only_where_there_is_no_other_of_its_tool_and_has_a_star(compare):
    ours = run("jaxagent", [(50, 9.0, 9.0), (50, 2.0, 2.0)], 600)
    slow = run("tunix", [(50, 160.0, 300.0), (2000, 140.0, 270.0)], 7000)
    short, long = compare.table([ours, slow]).split("\n\n")
    assert rows(short)[2][:4] == ["tunix", "1*", "160.00", "80.00"]
    assert rows(long)[1:] == [["tunix", "1", "140.00", "", "7", "270.00", "", "7000", ""]]


def test_runs_of_other_sizes_stand_in_parts_of_their_own_that_say_so(compare):
    sizes = {"prompts": 4, "group": 8}
    runs = [run("jaxagent", [(50, 9.0, 9.0), (50, wall, 2.0)], 600) for wall in (2.0, 4.0, 8.0)]
    runs[0] |= {"sizes": sizes}
    runs[1] |= {"sizes": sizes | {"beta": 0.04, "micro": 4, "set": []}}  # the same, by a file that says it
    runs[2] |= {"sizes": sizes | {"micro": 1, "set": ["learner.batch_rows=2"]}}
    first, second = compare.table(runs).split("\n\n")
    assert rows(first)[0][0] == "agentic, small, tool of 50 ms, micro 4, set []"
    assert rows(second)[0][0] == "agentic, small, tool of 50 ms, micro 1, set ['learner.batch_rows=2']"
    assert [row[:3] for row in (*rows(first)[1:], *rows(second)[1:])] == [["jaxagent", "2", "3.00"], ["jaxagent", "1", "8.00"]]


RUNNER = """
import argparse, sys, time
sys.path.insert(0, {peers!r})
from workload import Report, arguments, workload_of
workload = workload_of(arguments(__doc__).parse_known_args()[0])
report = Report({name!r}, workload)
report.begin()
for number in range(workload.steps):
    if {fails} and number == 2:
        raise SystemExit("no memory")
    time.sleep(0.01)
    report.sampled = workload.tokens(number)
    report.step()
print("what a library says last")
"""


def test_who_fails_ends_nobody_elses_run_and_what_it_told_is_kept(compare, monkeypatch, tmp_path, capfd):
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "small" / "prompts.json").write_text("{}")
    peers = str(Path(__file__).parents[1] / "benchmarks" / "peers")
    runners = {}
    for name, fails in (("trl", True), ("jaxagent", False)):
        script = tmp_path / f"{name}.py"
        script.write_text(RUNNER.format(peers=peers, name=name, fails=fails))
        runners[name] = (str(script), "", ())
    monkeypatch.setattr(compare, "RUNNERS", runners)
    monkeypatch.setattr(compare, "standing", lambda *_: True)
    out, works = tmp_path / "runs.jsonl", ("agentic", "single")
    words = ["--work", *works, "--runners", "trl", "jaxagent", "--trl-steps", "1", "1", "--steps", "1", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--venvs", str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"failed: agentic, trl ended with exit code 1: .*; single, trl ended with exit code 1"
    ):
        compare.main()
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    told = [(found["work"], found["runner"], len(found["steps"])) for found in runs]
    assert told == [(work, name, steps) for work in works for name, steps in (("trl", 2), ("jaxagent", 3))]
    assert "| trl | 1 |" in capfd.readouterr().out


def test_a_process_takes_one_step_that_does_not_count_and_then_those_of_every_tool(compare):
    given = {"tool_ms": [50.0, 2000.0], "steps": [2, 1], "trl_steps": [1, 1], "tunix_steps": [0, 1], "single_steps": 2}
    options = argparse.Namespace(**given)
    assert compare.steps_of(options, "agentic", "jaxagent") == [50.0, 50.0, 50.0, 2000.0]
    assert compare.steps_of(options, "agentic", "tunix") == [50.0, 2000.0]
    assert compare.steps_of(options, "single", "trl") == [0.0, 0.0, 0.0]
    options.trl_steps = [1]
    with pytest.raises(SystemExit, match="as many numbers of steps are wanted as tools"):
        compare.steps_of(options, "agentic", "trl")


@pytest.mark.parametrize(
    ("together", "order"), [(2, ["sampled 0", "sampled 1", "told", "told"]), (0, ["sampled 0", "told", "sampled 1", "told"])]
)
def test_in_lock_step_no_tool_begins_before_all_have_sampled(tmp_path, together, order):
    (tmp_path / "prompts.json").write_text(json.dumps({"messages": ["a", "b"], "texts": ["a", "b"], "tokens": 1}))
    world, seen = make_world(str(tmp_path), prompts=2, turns=2, together=together), []

    async def play(number):
        episode = world.episode(f"train/{number}", None)
        await episode.reset(world.task("train", number), number)
        await asyncio.sleep(0.05 * number)  # the second samples for longer
        seen.append(f"sampled {number}")
        step = await episode.step(Message("assistant", "x"))
        seen.append("told")
        assert [message.content for message in step.messages] == [RESULT]
        assert (await episode.step(Message("assistant", "x"))).terminated

    async def both():
        await asyncio.gather(play(0), play(1))

    asyncio.run(both())
    assert seen == order
    assert world.clock.take()["tools_at_once"] == (2 if together else 1)
