"""What is sampled is kept as it happens: a run that is killed goes on with it, whatever the last line of it looks like."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedSampler, never
from toys import Lone

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import audit
from jaxagent.data.tasks import TaskStream
from jaxagent.envs.env import Env, Step, Task
from jaxagent.feed import Feed, FeedOptions
from jaxagent.journal import Journal, read
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Group, Message, Sample, SampleRequest, Sampling, StopReason, Trajectory

PLAIN = PlainTemplate()
TURNS = 4


class Echo(Lone):
    """Answers every turn with what was said and how often, and pays for the last one."""

    salt = ""

    def task(self, split: str, index: int) -> Task:
        return {"id": f"echo/{split}/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Echoing(self)


class Echoing:
    def __init__(self, world: Echo):
        self.world, self.turns = world, 0

    async def reset(self, task: Task, seed: int) -> Step:
        return Step([Message("user", f"task {seed}")])

    async def step(self, action: Message) -> Step:
        self.turns += 1
        if self.turns == TURNS:
            return Step(terminated=True, answered=True, reward=float(len(action.content)))
        return Step([Message("user", f"{action.content}{self.turns}{self.world.salt}")], reward=0.5)

    async def close(self) -> None:
        pass


def saying(text: str, request: SampleRequest) -> Any:
    """Words that depend on all that was said before."""
    return PLAIN.turn(Message("assistant", f"{sum(text.encode()) % 97}"))


class Killed(Exception):
    pass


class Stopping:
    """A policy that says no more than so many turns of all episodes together, and then nothing; then the run is killed."""

    ordered, waiting = True, True

    def __init__(self, turns: int):
        self.left = turns

    def __call__(self, text: str, request: SampleRequest) -> Any:
        self.left -= 1
        if self.left >= 0:
            return saying(text, request)
        return never()

    def add(self, group: Group) -> None:
        pass

    def work(self) -> bool:
        if self.left < 0:
            raise Killed
        return False


@contextmanager
def feeding(folder: Path, sampler: ScriptedSampler, world: Echo | None = None, redraw: bool = False) -> Iterator[Feed]:
    world, journal = world or Echo(), Journal(folder, redraw=redraw)
    agent = Agent(PLAIN, (), sampler, Limits(8, 300))
    rollouts = Rollouts(world, agent, lambda: None, seed=0, options=RolloutOptions(attempts=2, concurrency=3))
    feed = Feed(
        world, TaskStream(12, 0), rollouts, Sampling(max_tokens=12), FeedOptions(prompts=3, rollouts=2), journal=journal
    )
    journal.begin(feed.first)
    try:
        yield feed
    finally:
        rollouts.close()
        journal.close()


def killed(folder: Path, turns: int) -> None:
    """A run that is killed in its first step, after so many turns."""
    stopping = Stopping(turns)
    with feeding(folder, ScriptedSampler(PLAIN, stopping)) as feed, pytest.raises(Killed):
        feed.take(mixed=False, meanwhile=stopping)


def facts(groups: list[Group]) -> list[Any]:
    rows = [row for group in groups for row in group.trajectories]
    assert [audit(row) for row in rows] == [""] * len(rows)
    return [(r.group, r.rollout, r.tokens, r.logprob, r.version, r.stop, [t.reward for t in r.turns]) for r in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two steps of a run are trained on that is not killed."""
    with feeding(tmp_path_factory.mktemp("whole"), ScriptedSampler(PLAIN, saying)) as feed:
        return [facts(feed.take(mixed=False)[0]) for _ in range(2)]


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 3, 6, 11, 20, 23])
def test_wherever_a_run_is_killed_it_goes_on_with_what_was_sampled(
    turns: int, redraw: bool, whole: list[Any], tmp_path: Path
) -> None:
    killed(tmp_path, turns)
    episodes = sum("rows" in record for path in tmp_path.iterdir() for record in read(path))
    kept = sum("turn" in record for path in tmp_path.iterdir() for record in read(path))
    assert kept == turns
    again = ScriptedSampler(PLAIN, saying)
    with feeding(tmp_path, again, redraw=redraw) as feed:
        assert [facts(feed.take(mixed=False)[0]) for _ in range(2)] == whole
    asked = [request for request in again.requests if int(request.trajectory.partition("#")[0].partition("/")[2]) < 3]
    assert len(asked) == 6 * TURNS - (episodes * TURNS if redraw else turns)
    assert all(".1/" in request.trajectory for request in asked)  # nobody's first attempt failed


def test_turns_that_are_said_again_are_prefilled_with_the_next_one(tmp_path: Path) -> None:
    killed(tmp_path, 3)
    again = ScriptedSampler(PLAIN, saying)
    with feeding(tmp_path, again) as feed:
        feed.take(mixed=False)
    first: dict[str, SampleRequest] = {}
    for request in again.requests:
        first.setdefault(request.trajectory, request)
    assert {request.start for request in first.values()} == {0}  # what the sampler holds it was fed from the start
    texts = [PLAIN.text(list(request.tokens)) for request in first.values()]
    assert max(text.count("<turn>") for text in texts) >= 3


def test_a_run_killed_twice_keeps_the_turns_of_both(whole: list[Any], tmp_path: Path) -> None:
    killed(tmp_path, 7)
    killed(tmp_path, 6)
    again = ScriptedSampler(PLAIN, saying)
    with feeding(tmp_path, again) as feed:
        assert facts(feed.take(mixed=False)[0]) == whole[0]
    assert len(again.requests) == 6 * TURNS - 13


@pytest.mark.parametrize("redraw", [False, True])
def test_an_episode_whose_world_answers_otherwise_begins_again_under_its_key(redraw: bool, tmp_path: Path) -> None:
    killed(tmp_path, 3)
    world, again = Echo(), ScriptedSampler(PLAIN, saying)
    world.salt = "?"
    with feeding(tmp_path, again, world, redraw) as feed:
        groups, _ = feed.take(mixed=False)
    rows = [row for group in groups for row in group.trajectories]
    assert {row.stop for row in rows} == {StopReason.ANSWERED}
    begun = {(record["group"], record["rollout"]) for path in tmp_path.iterdir() for record in read(path) if record.get("turn")}
    assert {(row.group, row.rollout) for row in rows if row.attempts == 2} <= begun
    assert sum(row.attempts == 2 for row in rows) >= 1
    assert len({request.key for request in again.requests if request.trajectory.startswith("train/0#0")}) == 1


def test_a_journal_cut_or_damaged_anywhere_keeps_all_lines_that_are_whole(tmp_path: Path) -> None:
    killed(tmp_path / "run", 3)
    (path,) = (tmp_path / "run").iterdir()
    data = path.read_bytes()
    records, line = list(read(path)), data.index(b"\n") + 1
    torn = tmp_path / "torn.jsonl"
    for cut in range(line, len(data), 7):
        torn.write_bytes(data[:cut])
        assert list(read(torn)) == records[: data[:cut].count(b"\n")]
    for at in range(0, line - 1, 5):
        torn.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert list(read(torn)) == records[1:]
    torn.write_bytes(data[: line // 2] + b"\n\x00\x00\xff\n" + data[line:])
    assert list(read(torn)) == records[1:]


def test_files_are_dropped_when_no_checkpoint_needs_them_any_more(tmp_path: Path) -> None:
    with feeding(tmp_path, ScriptedSampler(PLAIN, saying)) as feed:
        assert feed.journal
        files = []
        for _ in range(4):
            feed.take(mixed=False)
            feed.journal.rotate(feed.first)  # a save
            files.append(sorted(path.name for path in tmp_path.iterdir()))
    names = [f"{n:08d}.jsonl" for n in range(5)]
    # When a save begins, only the one before it is known to be whole: what came after that one stays.
    assert files == [names[:2], names[1:3], names[2:4], names[3:5]]


def two_lines(journal: Journal, task: str = "t", seed: int = 0) -> Trajectory:
    """A finished episode of group 4 and one turn of an unfinished one of group 5."""
    row = Trajectory(task, seed, "train/4", 0, stop=StopReason.ANSWERED)
    journal.begin(0)
    journal.finish([row])
    place = {"group": "train/5", "rollout": 0, "turn": 0, "task": task, "seed": seed}
    journal.sampled(place, SampleRequest("train/5#0.1/agent", (1,), 0, (0, 0), ()), Sample([2], [0.0], [0], True, 0, [1]))
    return row


@pytest.mark.parametrize(("task", "seed"), [("t", 0), ("u", 0), ("t", 1)])
def test_what_was_sampled_for_another_task_is_not_taken(task: str, seed: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path, redraw=False)
    row = two_lines(journal)
    journal.close()
    again, same = Journal(tmp_path, redraw=False), (task, seed) == ("t", 0)
    assert again.begin(0) == (1, 1)
    again.close()
    place = {"task": task, "seed": seed, "turn": 0}
    assert again.episode("train/4", 0, {"id": task, "seed": seed}) == ([row] if same else [])
    assert (again.turn(place, "train/5#0.1/agent") is not None) == same


def test_a_run_goes_on_with_what_other_hosts_have_sampled_and_drops_only_files_of_its_own(tmp_path: Path) -> None:
    two = Journal(tmp_path, redraw=True, own="host-1", topology="2 x 4")
    two_lines(two)
    two.close()
    alone = Journal(tmp_path, redraw=True, topology="1 x 4")
    assert alone.begin(0) == (1, 1)
    assert not alone.redraw  # the other topology may have rounded otherwise
    for first in (6, 7):
        alone.rotate(first)
    alone.close()
    assert (tmp_path / "host-1" / "00000000.jsonl").is_file()
    for host in ("", "host-1"):
        again = Journal(tmp_path, redraw=True, own=host, topology="2 x 4")
        assert again.begin(5) == (0, 1)
        assert again.redraw
        again.close()


def test_an_episode_whose_experts_were_recorded_is_not_kept_since_they_are_not_stored(tmp_path: Path) -> None:
    journal = Journal(tmp_path, redraw=False)
    journal.begin(0)
    row = Trajectory("t", 0, "train/0", 0)
    row.feed([1])
    row.sampled(Sample([2], [0.0], [0], True, 0, [1], routing=[[[0]]]), "", "")
    journal.finish([row])
    journal.close()
    assert [record for path in tmp_path.iterdir() for record in read(path)] == []


def test_a_journal_that_cannot_be_written_says_why_and_lets_episodes_go_on(tmp_path: Path) -> None:
    journal, full = Journal(tmp_path, redraw=False), io.FileIO("/dev/full", "w")
    journal.begin(0)
    assert journal._file
    journal._file.close()
    journal._file = full
    journal.finish([Trajectory("t", 0, "train/0", 0)])
    assert journal.fault is not None and journal.fault.strerror == "No space left on device"
    journal.finish([Trajectory("t", 0, "train/1", 0)])
    journal.close()
