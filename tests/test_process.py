"""Process rewards: values of turns pooled by hand, potentials that sum to nothing new, files of a search, and a whole run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train_algorithms import cut, trained

from jaxagent.algos.table import TABLE
from jaxagent.chat.plain import EOS, TURN, USER
from jaxagent.credit import assign, rows_of
from jaxagent.data.pack import Batch, pack
from jaxagent.data.store import Store
from jaxagent.objective import ProcessObjective
from jaxagent.process import MEMORY, Labels, Process, places_of, read_labels, said_of
from jaxagent.types import Group, Sample, StopReason, Trajectory

GAMMA = 1.0


def rollout(number: int, *turns: tuple[str, str, float], task: str = "t", role: str = "agent") -> Trajectory:
    """A row whose turns are (state, one letter, reward)."""
    row = Trajectory(task, 0, "g", number, role=role, stop=StopReason.ANSWERED)
    for state, letter, reward in turns:
        fed = [USER, 65, TURN]
        row.feed(fed)
        sample = Sample([ord(letter), EOS], [-0.5, -0.5], [0, 0], True, 0, fed)
        turn = row.sampled(sample, state, f"{letter}<eos>")
        turn.reward = reward
    return row


def logits_of(*rows: Trajectory, value: float = 0.0) -> dict[int, np.ndarray]:
    return {id(row): np.full(len(row.tokens), value, np.float32) for row in rows}


# ====================================================================== Monte-Carlo values


def test_a_turn_is_worth_the_mean_of_what_came_of_it_wherever_it_was_taken() -> None:
    # outcomes 1, 0, 0, 1 after the same first turn: the soft label of Math-Shepherd is one half
    ends = [("s2", "c", 1.0), ("s2", "d", 0.0), ("s2", "d", 0.0), ("s2", "c", 1.0)]
    rows = [rollout(i, ("s", "a", 0.0), end) for i, end in enumerate(ends)]
    process = Process(0)
    found, metrics = process.learn([Group("g", rows)], GAMMA)
    target, weight = found[id(rows[1])]
    assert np.flatnonzero(weight).tolist() == [2, 4, 9]  # the end of the prompt, of the first turn and of the second
    assert target[[2, 4, 9]].tolist() == [0.5, 0.5, 0.0]
    assert found[id(rows[0])][0][9] == 1.0
    assert metrics == {"process/visits": pytest.approx((4 + 4 + 2 + 2) / 4), "process/turns_known": 4.0}
    again = rollout(0, ("s", "a", 0.0), ("s2", "c", 0.0))  # a later step, another group
    later, _ = process.learn([Group("h", [again])], GAMMA)
    assert later[id(again)][0][[2, 4, 9]].tolist() == pytest.approx([2 / 5, 2 / 5, 2 / 3])


def test_turns_of_other_tasks_roles_states_and_texts_are_others() -> None:
    same = rollout(0, ("s", "a", 1.0))
    others = [rollout(0, ("s", "b", 1.0)), rollout(0, ("z", "a", 1.0)), rollout(0, ("s", "a", 1.0), task="u")]
    others.append(rollout(0, ("s", "a", 1.0), role="second"))
    keys = [places_of([row], GAMMA)[1].key for row in (same, *others)]
    assert len(set(keys)) == 5
    assert keys[0] == places_of([rollout(3, ("s", "a", 0.0))], GAMMA)[1].key
    nameless = [rollout(0, ("", "a", 0.0), ("", "c", 0.0)), rollout(1, ("", "b", 0.0), ("", "c", 0.0))]
    first, second = ([place.key for place in places_of([row], GAMMA)] for row in nameless)
    assert first[0] == second[0]
    assert first[2] != second[2]  # the same text after other tokens


def test_what_a_turn_brought_later_is_discounted_and_kept_within_nought_and_one() -> None:
    row = rollout(0, ("s", "a", 0.0), ("s2", "b", 0.5), ("s3", "c", 1.0))
    assert [place.value for place in places_of([row], 0.5)] == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert [place.value for place in places_of([rollout(0, ("s", "a", -2.0))], 1.0)] == [0.0, 0.0]


def test_old_visits_fade_and_old_turns_are_forgotten() -> None:
    labels = Labels(most=2)
    for _ in range(10 * MEMORY):
        labels.tell("a", 1.0)
    for _ in range(MEMORY):
        labels.tell("a", 0.0)
    assert labels.visits("a") == MEMORY
    assert labels.value("a") == pytest.approx((1 - 1 / MEMORY) ** MEMORY)
    labels.tell("b", 1.0)
    labels.tell("a", 0.0)
    labels.tell("c", 1.0)
    assert set(labels.known) == {"a", "c"}
    process = Process(0, labels=labels)
    copied = Process(0)
    copied.restore(json.loads(json.dumps(process.state())))
    assert copied.labels.known == labels.known


# ====================================================================== potentials


def test_the_differences_are_worked_out_by_hand() -> None:
    row = rollout(0, ("s", "a", 0.0), ("s2", "b", 1.0))
    logits = logits_of(row)
    logits[id(row)][4] = math.log(3)  # after the first turn 3/4; the beginning and the last turn say one half
    metrics = Process(0).pay([Group("g", [row])], logits, GAMMA)
    assert [turn.parts["process"] for turn in row.turns] == pytest.approx([0.25, -0.75])
    assert [turn.reward for turn in row.turns] == pytest.approx([0.25, 0.25])
    assert row.outcome == 1.0
    assert row.solved
    assert row.reward == pytest.approx(1.0 - 0.5)
    assert metrics["process/potential_mean"] == pytest.approx(1.75 / 3)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_no_potential_changes_by_how_much_one_way_on_is_better_than_another(gamma: float) -> None:
    rng = np.random.default_rng(0)
    # Two rollouts part after their first turn: whatever the model says of what follows, their difference stays.
    rows = [
        rollout(0, ("s", "a", 0.0), ("s2", "b", 0.2), ("s3", "c", 1.0)),
        rollout(1, ("s", "a", 0.0), ("s2", "d", 0.0)),
    ]
    logits = {id(row): rng.normal(0, 3, len(row.tokens)).astype(np.float32) for row in rows}
    logits[id(rows[1])][:5] = logits[id(rows[0])][:5]  # the same tokens so far
    Process(0).pay([Group("g", rows)], logits, gamma)
    to_go = [sum(gamma**k * turn.reward for k, turn in enumerate(row.turns[1:])) for row in rows]
    assert to_go[0] - to_go[1] == pytest.approx(0.2 + gamma * 1.0, abs=1e-6)
    whole = [sum(gamma**k * turn.parts["process"] for k, turn in enumerate(row.turns)) for row in rows]
    begun = 1 / (1 + math.exp(-logits[id(rows[0])][2]))
    assert whole == pytest.approx([-begun, -begun], abs=1e-6)


def test_with_full_returns_a_turn_is_compared_with_what_was_expected_before_it() -> None:
    row = rollout(0, ("s", "a", 0.0), ("s2", "b", 1.0))
    logits = logits_of(row)
    logits[id(row)][4] = math.log(3)
    process = Process(0)
    process.pay([Group("g", [row])], logits, 1.0)
    (credits,) = assign([Group("g", [row])], replace(TABLE["agent_prm"], whiten=False))
    assert [turn.advantage for turn in row.turns] == pytest.approx([1 - 0.5, 1 - 0.75])
    process.teach([Group("g", [row])], credits, 1.0)
    (batch,) = pack(rows_of(credits, keep_idle=True)[0], batch_rows=1, row_tokens=16)
    assert np.flatnonzero(batch.judged[0]).tolist() == [2, 4, 9]
    assert batch.target[0, [2, 4, 9]].tolist() == [1.0, 1.0, 1.0]
    assert batch.mask[0, 2] == 0  # the prompt is judged, and no policy gradient goes there


# ====================================================================== the loss


def test_the_cross_entropy_and_its_gradient_by_hand() -> None:
    objective = ProcessObjective(TABLE["agent_prm"])
    given = {"target": jnp.asarray([[0.75, 0.0, 0.5, 9.0]]), "judged": jnp.asarray([[2.0, 1.0, 1.0, 0.0]])}
    z = jnp.asarray([[0.0, math.log(3), -math.log(3), 5.0]])

    def loss(z: jax.Array) -> jax.Array:
        return objective.loss({"value": z}, given, jnp.asarray(False))[0]

    # 2 ln 2, -ln(1 - 3/4) = ln 4, and -(ln(1/4) + ln(3/4)) / 2; the gradient is w (sigmoid(z) - q)
    by_hand = 2 * math.log(2) + math.log(4) - (math.log(0.25) + math.log(0.75)) / 2
    assert float(loss(z)) == pytest.approx(by_hand, rel=1e-6)
    assert np.asarray(jax.grad(loss)(z))[0].tolist() == pytest.approx([-0.5, 0.75, -0.25, 0.0], abs=1e-6)
    metrics = objective.metrics(objective.loss({"value": z}, given, jnp.asarray(False))[1], 0.0)
    assert metrics["critic/loss"] == pytest.approx(by_hand / 4, rel=1e-6)
    assert metrics["critic/target_mean"] == pytest.approx((1.5 + 0.0 + 0.5) / 4)
    assert metrics["critic/value_mean"] == pytest.approx((1.0 + 0.75 + 0.25) / 4)


# ====================================================================== values of a search


def written(tmp_path: Path, *lines: dict[str, object]) -> str:
    path = tmp_path / "searched.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def turn_of(row: Trajectory, turn: int, q: float, visits: float) -> dict[str, object]:
    """A line of a file of labels."""
    name = f"{row.group}#{row.rollout}"
    return {"trajectory": name, "tokens": row.tokens[: row.turns[turn].end], "q": q, "visits": visits}


def test_a_file_of_searched_turns_becomes_rows_that_weigh_their_visits(tmp_path: Path) -> None:
    one, other = rollout(0, ("s", "a", 0.0), ("s2", "b", 1.0)), rollout(1, ("s", "c", 0.0))
    rows = read_labels(written(tmp_path, turn_of(one, 0, 0.75, 8), turn_of(other, 0, 0.25, 4), turn_of(one, 1, 1, 2)), 16)
    assert [(np.flatnonzero(row.judged).tolist(), row.tokens) for row in rows] == [([4, 9], one.tokens), ([4], other.tokens)]
    assert [rows[0].target[i] for i in (4, 9)] == [0.75, 1.0]
    assert [rows[0].judged[i] for i in (4, 9)] == [8.0, 2.0]
    process = Process(0, rows)
    drawn = [row.tokens for turn in range(3) for row in process.rows(turn, 2)]
    assert drawn.count(one.tokens) == drawn.count(other.tokens) == 3
    assert Process(0).rows(0, 2) == []


def test_what_was_told_after_a_turn_has_a_value_of_its_own(tmp_path: Path) -> None:
    one = rollout(0, ("s", "a", 0.5), ("s2", "b", 0.25))
    first, last = turn_of(one, 0, 0.75, 8), turn_of(one, 1, 0.25, 2)
    told = {**first, "then": one.tokens[one.turns[0].end : one.turns[1].start], "value": 0.125}
    (row,) = read_labels(written(tmp_path, told, last), 16, told=True)
    assert row.tokens == one.tokens[: one.turns[1].start]
    assert (np.flatnonzero(row.judged).tolist(), row.target[-1], row.judged[-1]) == ([len(row.tokens) - 1], 0.125, 8.0)
    (turns,) = read_labels(written(tmp_path, told, last), 16)
    assert (turns.tokens, np.flatnonzero(turns.judged).tolist()) == (one.tokens, [4, 9])


def test_what_is_said_of_a_place_is_said_of_its_own_row_and_token() -> None:
    """Log-odds that are the token itself: every value tells from where it was read, however the rows were packed."""

    def score(batch: Batch) -> np.ndarray:
        return batch.tokens / 10 - 1.0

    asked = [([3, 4, 5, 6], [1, 3]), ([9, 8], [1]), ([7] * 6, []), ([1, 2, 3, 30, 5], [0, 3, 4])]
    wanted = [[1 / (1 + math.exp(1 - tokens[at] / 10)) for at in places] for tokens, places in asked]
    for shape in ((1, 6), (2, 12), (4, 40)):
        for said, want in zip(said_of(score, *shape, asked), wanted, strict=True):
            assert said == pytest.approx(want)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tokens": []}, "tokens some"),
        ({"q": 1.5}, "q must be in"),
        ({"visits": 0}, "visits above 0"),
        ({"q": "high"}, "q and visits numbers"),
        ({"tokens": [99, 98]}, "do not go on from"),
    ],
)
def test_a_line_that_says_something_else_is_named(change: dict[str, object], fault: str, tmp_path: Path) -> None:
    good = turn_of(rollout(0, ("s", "a", 0.0), ("s2", "b", 1.0)), 1, 0.5, 1)
    with pytest.raises(ValueError, match=rf"searched\.jsonl, line 2: .*{fault}"):
        read_labels(written(tmp_path, good, {**good, **change}), 16)
    with pytest.raises(ValueError, match=r"line 1: 10 tokens do not fit a training row of learner\.row_tokens=8"):
        read_labels(written(tmp_path, good), 8)


# ====================================================================== a whole run


def test_a_run_teaches_the_model_pays_its_potentials_and_resumes(tmp_path: Path) -> None:
    row = rollout(0, ("s", "a", 0.0), ("s2", "b", 1.0))
    (tmp_path / "whole" / "labels").mkdir(parents=True)
    Path(written(tmp_path, turn_of(row, 0, 0.75, 5))).rename(tmp_path / "whole" / "labels" / "search.jsonl")
    given = ("algo.name=agent_prm", "critic.lr=0.01")
    records = trained(tmp_path / "whole", *given)
    assert records[0]["process/potential_mean"] == pytest.approx(0.5)  # it knows nothing yet
    assert records[0]["process/potential_std"] == pytest.approx(0.0, abs=1e-6)
    assert records[-1]["process/potential_std"] > 0
    assert records[-1]["process/turns_known"] > records[0]["process/turns_known"] > 0
    assert all(record["critic/loss"] > 0 and record["critic/tokens"] > 10 for record in records)
    rows = [row for row in Store(tmp_path / "whole" / "trajectories").read("train-000004") if row.stop.counts]
    assert all("process" in turn.parts for row in rows for turn in row.turns)
    assert all(abs(row.outcome - round(row.outcome)) < 1e-6 for row in rows)
    cut(tmp_path / "whole", 21, tmp_path / "cut")
    assert trained(tmp_path / "cut", *given)[-1]["policy/param_norm"] == records[-1]["policy/param_norm"]
    again = Store(tmp_path / "cut" / "trajectories").read("train-000004")
    assert [turn.reward for row in again for turn in row.turns] == [turn.reward for row in rows for turn in row.turns]
