"""Stored trajectories: a file is whole or not there, and the auditor sees what was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxagent.data.store import Store, audit
from jaxagent.types import Sample, StopReason, Trajectory


def played(rollout: int = 0) -> Trajectory:
    row = Trajectory("t/☃", 5, "train/0", rollout, stop=StopReason.ANSWERED)
    row.feed([1, 2, 3])
    row.sampled(Sample([4, 5], [-0.5, -1.0], [3, 3], True, 0, [1, 2, 3]), "s", "a\u2028b")
    row.feed([6, 7])
    row.sampled(Sample([8, 9], [-2.0, -0.1], [3, 3], True, 5, [6, 7]), "s", "c")
    return row


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "trajectories")
    rows = [played(i) for i in range(3)]
    store.write("train-000002", rows)
    store.write("train-000001", [])
    assert store.labels() == ["train-000001", "train-000002"]
    assert store.read("train-000002") == rows
    assert store.read("train-000001") == []


def test_a_label_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("valid", [played(0), played(1)])
    store.write("valid", [played(2)])
    assert store.read("valid") == [played(2)]


def test_a_write_that_is_cut_short_leaves_what_was_there(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Trajectory]:
        yield played(7)
        raise KeyboardInterrupt

    store = Store(tmp_path)
    store.write("train", [played(0)])
    for label in ("train", "other"):
        with pytest.raises(KeyboardInterrupt):
            store.write(label, interrupted())
    assert store.labels() == ["train"]
    assert store.read("train") == [played(0)]


def test_a_file_that_is_being_written_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "train.partial").write_text("{")
    assert Store(tmp_path).labels() == []
    assert Store(tmp_path / "nothing").labels() == []


# ====================================================================== the audit


def test_an_honest_row_passes_also_with_an_observation_that_nobody_answered() -> None:
    row = played()
    assert audit(row) == ""
    row.feed([3, 3])
    assert audit(row) == ""
    assert audit(Trajectory("t", 0, "g", 0)) == ""


def change(name: str, at: int, value: object) -> Callable[[Trajectory], None]:
    return lambda row: getattr(row, name).__setitem__(at, value)


def turn(number: int, name: str, value: object) -> Callable[[Trajectory], None]:
    return lambda row: setattr(row.turns[number], name, value)


TAMPERINGS: list[tuple[Callable[[Trajectory], object], str]] = [
    (change("tokens", 1, 99), "turn 0, position 1: the sampler was fed 2, the row holds 99"),
    (change("tokens", 6, 99), "turn 1, position 6: the sampler was fed 7, the row holds 99"),
    (lambda row: row.turns[1].fed.__setitem__(0, 99), "turn 1, position 5: the sampler was fed 99, the row holds 6"),
    (lambda row: row.turns[1].fed.pop(), "turn 1: the sampler held 5 and was fed 1, the row had 5"),
    (lambda row: row.turns[1].fed.append(8), "turn 1: the sampler held 5 and was fed 3, the row had 5"),
    (turn(1, "fed_start", 4), "turn 1: the sampler held 4 and was fed 2, the row had 5"),
    (turn(0, "start", 2), "turn 0: the sampler held 0 and was fed 3, the row had 0"),
    (turn(0, "end", 4), "turn 1: the sampler held 5 and was fed 2, the row had 4"),
    (turn(1, "end", 99), "turn 1: tokens 7 to 99 of a row of 9"),
    (turn(1, "end", 7), "turn 1: tokens 7 to 7 of a row of 9"),
    (turn(1, "end", 8), "tokens after the last turn are said to be sampled"),
    (change("mask", 3, False), "turn 0: the mask is not true exactly on tokens 3 to 5"),
    (change("mask", 5, True), "turn 1: the mask is not true exactly on tokens 7 to 9"),
    (change("mask", 0, True), "turn 0: the mask is not true exactly on tokens 3 to 5"),
    (change("turn", 4, 1), "turn 0: tokens 3 to 5 are said to be of another turn"),
    (lambda row: row.turns.pop(), "tokens after the last turn are said to be sampled"),
    (lambda row: row.turns.pop(0), "turn 0: the sampler held 5 and was fed 2, the row had 0"),
    (lambda row: row.tokens.pop(), "8 tokens, but 9 entries of mask"),
    (lambda row: row.tokens.append(1), "10 tokens, but 9 entries of mask"),
    (lambda row: row.logprob.pop(), "9 tokens, but 8 entries of logprob"),
    (lambda row: row.version.append(1), "9 tokens, but 10 entries of version"),
    (lambda row: row.turn.clear(), "9 tokens, but 0 entries of turn"),
]


@pytest.mark.parametrize(("tamper", "found"), TAMPERINGS, ids=range(len(TAMPERINGS)))
def test_every_kind_of_tampering_is_found_and_named(tamper: Callable[[Trajectory], object], found: str) -> None:
    row = played()
    tamper(row)
    assert audit(row) == found
