"""Process rewards: how well an episode is going after every turn, learnt from how such episodes ended, paid as a potential.

The model is a critic with another objective (objective.ProcessObjective): it has read a turn to its end and says how likely the
episode ends well. What it is taught are Monte-Carlo values of turns (Math-Shepherd, arXiv:2312.08935; of an agent's turns:
AgentPRM, arXiv:2502.10325): the mean return of all visits to the same turn in the same state, over rollouts and steps; and
values that a tree search has written to `labels/*.jsonl` in the workdir.

Its word s is no reward by itself, or many hopeful turns would be worth more than an answer. Turn k gets a difference

    F_k = gamma P_{k+1} - P_k        P_0 = s of the beginning, P_{k+1} = s of turn k, and 0 after the last turn

and all that follow a turn sum to -P_k, whatever is done (potential-based shaping, Ng et al. 1999). So with full returns
(gae_lambda = 1) no potential, however wrong, changes what is best: it is the baseline of every turn. Below 1 it stands in for
what came of a turn, and may mislead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.credit import Credit, counted
from jaxagent.data.pack import Batch, Row, pack, unpack
from jaxagent.data.tasks import examples_at, numbered
from jaxagent.rewards.shaping import settle
from jaxagent.types import Group, Trajectory, Turn, by_rollout

MEMORY = 64  # visits of a turn that its value is a mean of; older ones fade, since they were another policy's
MOST = 20_000  # turns that are remembered


@dataclass(frozen=True)
class Place:
    """Where the model speaks of a rollout: at the end of its prompt, and of each of its turns."""

    row: Trajectory
    at: int  # the last token that it has read
    key: str  # the same for the same turn in the same state
    value: float  # the return from here on, in [0, 1]


class Labels:
    """The mean return of every turn, pooled by key. What was not visited for the longest time is forgotten first."""

    def __init__(self, most: int = MOST):
        self.most = most
        self.known: dict[str, tuple[float, float]] = {}  # sum of the returns, visits

    def tell(self, key: str, value: float) -> None:
        total, visits = self.known.pop(key, (0.0, 0.0))
        kept = min(visits, MEMORY - 1.0)
        self.known[key] = (total * kept / visits if visits else 0.0) + value, kept + 1.0
        if len(self.known) > self.most:
            del self.known[next(iter(self.known))]

    def value(self, key: str) -> float:
        total, visits = self.known[key]
        return total / visits

    def visits(self, key: str) -> float:
        return self.known[key][1]


class Process:
    """Pays potentials and teaches the model that says them."""

    def __init__(self, seed: int, searched: Sequence[Row] = (), labels: Labels | None = None):
        """Args: searched: rows with values from elsewhere, as `read_labels` gives them."""
        self.seed, self.searched, self.labels = seed, list(searched), labels or Labels()

    def pay(self, groups: Sequence[Group], logits: Mapping[int, np.ndarray], gamma: float) -> dict[str, float]:
        """Adds F_k to the reward of every turn of the rollouts that count, as its part `process`.

        Args:
            logits: what the model says at every token of the row with this id().
        """
        said = []
        for segments in _counting(groups):
            places = places_of(segments, gamma)
            potential = [float(_sigmoid(logits[id(place.row)][place.at])) for place in places]
            said += potential
            for k, turn in enumerate(_turns(segments)):
                after = potential[k + 1] if k + 2 < len(places) else 0.0
                _pay(turn, gamma * after - potential[k])
            settle(segments)
        return {"process/potential_mean": float(np.mean(said)), "process/potential_std": float(np.std(said))} if said else {}

    def learn(self, groups: Sequence[Group], gamma: float) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], dict[str, float]]:
        """Takes in how the rollouts ended; (targets and weights per token of the row with this id(), metrics)."""
        places = [place for segments in _counting(groups) for place in places_of(segments, gamma)]
        for place in places:
            self.labels.tell(place.key, place.value)
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for place in places:
            n = len(place.row.tokens)
            target, weight = found.setdefault(id(place.row), (np.zeros(n, np.float32), np.zeros(n, np.float32)))
            # A later visit may have pushed a key out of the memory; its own return is then all that is known.
            target[place.at] = self.labels.value(place.key) if place.key in self.labels.known else place.value
            weight[place.at] = 1.0
        keys = {place.key for place in places} & self.labels.known.keys()
        visits = [self.labels.visits(key) for key in keys]
        return found, {
            "process/visits": float(np.mean(visits)),
            "process/turns_known": float(len(self.labels.known)),
        } if keys else {}

    def teach(self, groups: Sequence[Group], credits: Iterable[Credit], gamma: float) -> dict[str, float]:
        """`learn`, written where the training rows are made from."""
        found, metrics = self.learn(groups, gamma)
        for credit in credits:
            nothing = np.zeros(len(credit.row.tokens), np.float32)  # of a segment in which nothing was sampled
            credit.target, credit.judged = found.get(id(credit.row), (nothing, nothing))
        return metrics

    def rows(self, turn: int, count: int) -> list[Row]:
        """Which rows of the search are taught beside `count` rows of rollouts; all come in turns, in a seeded order."""
        count = min(count, len(self.searched))
        return [self.searched[i] for i in examples_at(len(self.searched), self.seed, turn * count, count)] if count else []

    def state(self) -> dict[str, Any]:
        return {"known": [[key, *pair] for key, pair in self.labels.known.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        self.labels.known = {key: (total, visits) for key, total, visits in state["known"]}


def places_of(segments: Sequence[Trajectory], gamma: float) -> list[Place]:
    """The beginning of a rollout and the end of each of its turns, with what was earned from there on.

    At the end of a turn that is from this turn on: its own reward counts, as in Q(s, a). Outcomes only, without shaping, and
    clipped to [0, 1]: in a game with rewards of both signs the model says how likely it is won. A turn is the same in the same
    task, role and state of the world (`Step.state`) with the same text; in a world that names no states, after the same tokens.
    """
    turns = _turns(segments)
    to_go, following = [], 0.0
    for turn in reversed(turns):
        following = (turn.reward if turn.outcome is None else turn.outcome) + gamma * following
        to_go.append(min(1.0, max(0.0, following)))
    to_go.reverse()
    first = next(row for row in segments if row.turns)
    found = [Place(first, first.turns[0].start - 1, _key(first, "begin", first.turns[0].state), to_go[0])]
    left = iter(to_go)
    for row in segments:
        for turn in row.turns:
            same = (turn.state, turn.text) if turn.state else (row.segment, *row.tokens[: turn.end])
            found.append(Place(row, turn.end - 1, _key(row, "turn", *same), next(left)))
    return found


def _key(row: Trajectory, *same: object) -> str:
    return hashlib.blake2b(json.dumps([row.task, row.role, *same]).encode(), digest_size=8).hexdigest()


def _counting(groups: Sequence[Group]) -> list[list[Trajectory]]:
    return by_rollout(counted(groups))


def _turns(segments: Sequence[Trajectory]) -> list[Turn]:
    return [turn for row in segments for turn in row.turns]


def _pay(turn: Turn, amount: float) -> None:
    """What parts leave of a reward is its outcome, so that it stays what it is."""
    turn.outcome = turn.reward if turn.outcome is None else turn.outcome
    turn.parts = {**turn.parts, "process": amount}
    turn.reward += amount


def take_back(rows: Iterable[Trajectory]) -> None:
    """Undoes `Process.pay` in rows that were read again: their rewards are what was known before the step's update."""
    for segments in by_rollout(rows):
        paid = [turn for turn in _turns(segments) if "process" in turn.parts]
        for turn in paid:
            amount = turn.parts.pop("process")
            # Without other parts the outcome is all of the reward, to the last bit.
            turn.reward = turn.reward - amount if turn.parts or turn.outcome is None else turn.outcome
        if paid:
            settle(segments)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def said_of(
    score: Callable[[Batch], np.ndarray], batch_rows: int, row_tokens: int, asked: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[list[float]]:
    """What the model says at places of rows: how likely the episode ends well, as far as it has been read.

    Args:
        score: gives its log-odds at every token of a micro-batch of this shape.
        asked: tokens and places of every row.
    """
    rows = [reading(tokens) for tokens, _ in asked]
    batches = pack(rows, batch_rows=batch_rows, row_tokens=row_tokens)
    logits = unpack(rows, [score(batch) for batch in batches], batch_rows=batch_rows, row_tokens=row_tokens)
    return [_sigmoid(said[list(places)]).tolist() for said, (_, places) in zip(logits, asked, strict=True)]


def read_labels(path: str | Path, longest: int, *, told: bool = False) -> list[Row]:
    """Rows with values of turns from a JSONL file, as a tree search writes them: one turn a line.

        {"trajectory": "train/3#0", "tokens": [...], "q": 0.75, "visits": 8}

    `tokens` are all of a trajectory up to and with the turn, `q` in [0, 1] is the mean return of `visits` episodes that went
    on from there. Lines of the same trajectory become one row. A value weighs what its visits weigh.

    Args:
        longest: tokens of a training row.
        told: values of what was told after turns (`then` of the line, and its `value`) and not of turns; others are left out.

    Raises ValueError naming file and line.
    """
    turns: dict[str, list[tuple[list[int], float, float]]] = {}
    for number, record in numbered(path, ("trajectory", "tokens", "q", "visits")):
        where = f"{path}, line {number}"
        if told and "then" not in record:
            continue
        if told:
            record = {**record, "tokens": [*record["tokens"], *record["then"]], "q": record["value"]}
        try:
            tokens, q, visits = [int(token) for token in record["tokens"]], float(record["q"]), float(record["visits"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: tokens must be a list of ids, q and visits numbers: {error}") from None
        if not (0 <= q <= 1 and visits > 0 and tokens):
            raise ValueError(
                f"{where}: q must be in [0, 1], visits above 0 and tokens some, got {q:g}, {visits:g}, {len(tokens)}"
            )
        if len(tokens) > longest:
            raise ValueError(f"{where}: {len(tokens)} tokens do not fit a training row of learner.row_tokens={longest}")
        known = turns.setdefault(str(record["trajectory"]), [])
        if any(was[: len(tokens)] != tokens[: len(was)] for was, _, _ in known):
            raise ValueError(f"{where}: these tokens do not go on from, or towards, other lines of {record['trajectory']}")
        known.append((tokens, q, visits))
    return [_labelled(known) for known in turns.values()]


def reading(tokens: Sequence[int]) -> Row:
    """A row that is read and says nothing."""
    nothing = [0.0] * len(tokens)
    return Row(tokens, [False] * len(tokens), nothing, nothing, nothing, nothing)


def _labelled(turns: Sequence[tuple[list[int], float, float]]) -> Row:
    tokens = max((tokens for tokens, _, _ in turns), key=len)
    target, weight = [0.0] * len(tokens), [0.0] * len(tokens)
    for turn, q, visits in turns:
        target[len(turn) - 1], weight[len(turn) - 1] = q, visits
    return replace(reading(tokens), target=target, judged=weight)
