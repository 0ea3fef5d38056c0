"""Tree search over turns: where the policy's turns lead, found by continuing episodes from states that were already reached.

A node is a state, known by the tokens that led there; an edge is a turn that was sampled in it. A simulation goes down from the
root as UCT says (Kocsis and Szepesvari 2006) to a node that is to get another turn, and has the policy play on from there to
the end: all turns of that continuation become edges. So a simulation costs what is left of an episode, never a whole one.

    at a node with N visits: another turn where no more than sqrt(N) were drawn, and fewer than `width`;
    else down the edge with the largest Q + exploration spread sqrt(ln N / n)

Q is the mean return of the simulations through an edge; `spread` is the range of what the tree knows of returns. With a value
function, r + value(state after it) counts as one more visit of every edge, as in the search of ReST-MCTS* (arXiv:2406.03816).
Whoever searches may teach it with the labels that the search leaves: finetune.mode=rest_mcts does, round by round.

Two uses of what was found. `Tree.episodes` are whole trajectories, as if each had been played alone: the best are imitated.
`turn_labels` gives the Q of the *policy* for every turn (Math-Shepherd, arXiv:2312.08935, and AgentPRM, arXiv:2502.10325, at
turns): returns of continuations that begin right after the turn or pass through it. Simulations that the search sent further
down through it are left out: they were sent where it went well, and their mean would be above the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from jaxagent.envs.env import Task
from jaxagent.rollout import Rollouts, wait
from jaxagent.stem import Stem, stem_of, want_one_agent
from jaxagent.types import Sampling, Trajectory

Asked = tuple[Sequence[int], Sequence[int]]  # the tokens of a row, and places in them: the last token before some of its turns
Value = Callable[[Sequence[Asked]], Sequence[Sequence[float]]]  # the return from each of these turns on


@dataclass(frozen=True)
class SearchOptions:
    """How wide a node may become, and how much what was rarely tried is preferred to what went well."""

    width: int = 4
    exploration: float = 0.2  # in ranges of the returns

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"the width of a search must be at least 1, got {self.width}")
        if self.exploration < 0:
            raise ValueError(f"the exploration of a search must not be negative, got {self.exploration}")


@dataclass
class Edge:
    """A turn in a state. `visits` and `total` are of all simulations, `drawn` and `returned` of those that count for labels."""

    reward: float
    episode: int  # the first one that took it, and went on where any did; and the turn's number there
    turn: int
    after: Node | None = None  # None while no turn followed
    prior: float | None = None  # of the value function
    visits: int = 0
    total: float = 0.0
    drawn: int = 0
    returned: float = 0.0

    @property
    def q(self) -> float:
        known = self.prior is not None
        return (self.total + (self.prior or 0.0)) / max(1, self.visits + known)


@dataclass
class Node:
    """A state in which turns are sampled; its stem says how to come back to it."""

    stem: Stem
    edges: dict[tuple[int, ...], Edge] = field(default_factory=dict)
    visits: int = 0
    drawn: int = 0  # continuations that begin here, those lost to the infrastructure included


class Tree:
    """What the simulations of one task have found."""

    def __init__(self, group: str, task: Task, options: SearchOptions):
        self.group, self.task, self.options = group, task, options
        self.root: Node | None = None
        self.fresh: list[tuple[list[int], list[tuple[int, Edge]]]] = []  # of each episode the edges that no value is known of
        self.episodes: list[Trajectory] = []  # whole ones, in the order of the simulations
        self.sampled = 0  # tokens
        self.known: list[float] = []  # returns, and values of edges
        self.lost: list[Trajectory] = []  # what the infrastructure broke, or what sampled nothing

    def select(self) -> tuple[Node, list[Edge]]:
        """The node that gets another turn, and the edges that lead to it."""
        node, path = self.root, list[Edge]()
        if node is None:
            raise ValueError(f"{self.group}: a tree has nothing to select from before its first episode")
        spread = max(self.known) - min(self.known) or 1.0
        while node.drawn > min(math.sqrt(max(1, node.visits)), self.options.width - 1):
            ahead = [edge for edge in node.edges.values() if edge.after]
            if not ahead:  # all that was tried here ends the episode
                break
            scores = [self._score(edge, node, spread) for edge in ahead]
            edge = ahead[scores.index(max(scores))]
            path.append(edge)
            assert edge.after is not None
            node = edge.after
        return node, path

    def _score(self, edge: Edge, node: Node, spread: float) -> float:
        rarely = math.sqrt(math.log(max(node.visits, 2)) / max(1, edge.visits))
        return edge.q + self.options.exploration * spread * rarely

    def take(self, row: Trajectory, node: Node | None = None, path: Sequence[Edge] = ()) -> None:
        """Enters an episode, or a continuation from `node`, to which `path` leads."""
        self.sampled += sum(row.mask)
        if not row.stop.counts or not row.turns:
            self.lost.append(row)
            return
        if node is None:
            node = self.root = self.root or Node(stem_of(row, 0))
            node.drawn += 1
        stem, parent, fresh = node.stem, self.episodes[path[-1].episode] if path else None, list[tuple[int, Edge]]()
        self.episodes.append(whole(row, parent, self.group, len(self.episodes)))
        to_go = row.reward
        self.fresh.append((row.tokens, fresh))
        self.known.append(self.episodes[-1].reward)
        self._count(path, to_go)
        for number, turn in enumerate(row.turns):
            node.visits += 1
            tokens = tuple(row.tokens[turn.start : turn.end])
            edge = node.edges.setdefault(tokens, Edge(turn.reward, len(self.episodes) - 1, stem.turns + number))
            edge.visits, edge.total = edge.visits + 1, edge.total + to_go
            edge.drawn, edge.returned = edge.drawn + 1, edge.returned + to_go
            to_go -= turn.reward
            if number + 1 == len(row.turns):
                break
            if edge.after is None:
                edge.episode = len(self.episodes) - 1  # what goes on from there takes its beginning from this one
                edge.after = Node(stem.then(row, number + 1), drawn=1)
                fresh.append((row.turns[number + 1].start - 1, edge))
            node = edge.after
            if node.stem.tokens != tuple(row.tokens[: row.turns[number + 1].start]):
                break  # the world answered the same turn in another way: what follows is not of this state

    def _count(self, path: Sequence[Edge], to_go: float) -> None:
        """Tells the edges above a continuation what came of it."""
        for i, edge in enumerate(reversed(path)):
            to_go += edge.reward
            edge.visits, edge.total = edge.visits + 1, edge.total + to_go
            if i == 0:  # it begins right after this turn, and was not chosen for how it went on
                edge.drawn, edge.returned = edge.drawn + 1, edge.returned + to_go
        node = self.root
        for edge in path:
            assert node is not None
            node.visits += 1
            node = edge.after

    @staticmethod
    def judge(trees: Sequence[Tree], value: Value) -> None:
        """Asks for the values of the states that are new since the last time, of all trees together."""
        found = [(tree, tokens, edges) for tree in trees for tokens, edges in tree.fresh if edges]
        said = value([(tokens, [at for at, _ in edges]) for _, tokens, edges in found]) if found else []
        for (tree, _, edges), values in zip(found, said, strict=True):
            for (_, edge), after in zip(edges, values, strict=True):
                edge.prior = edge.reward + after
                tree.known.append(edge.prior)
        for tree in trees:
            tree.fresh = []

    @property
    def best(self) -> Trajectory:
        """The first of the episodes with the highest reward."""
        return max(self.episodes, key=lambda row: row.reward)


def whole(row: Trajectory, parent: Trajectory | None, group: str, number: int) -> Trajectory:
    """A continuation with the turns that it shares with its parent, as one trajectory that was sampled from its beginning."""
    made = deepcopy(row)
    made.group, made.rollout, made.trunk, made.trunk_turns = group, number, -1, 0
    if parent is None or not row.trunk_turns:
        return made
    shared, turns = row.turns[0].start, row.trunk_turns
    held = parent.turns[turns - 1].end
    made.turns[0].fed_start, made.turns[0].fed = held, row.tokens[held:shared]
    made.turns = deepcopy(parent.turns[:turns]) + made.turns
    for name in ("mask", "logprob", "version"):
        setattr(made, name, getattr(parent, name)[:shared] + getattr(row, name)[shared:])
    made.turn = parent.turn[:shared] + [turn + turns if turn >= 0 else turn for turn in row.turn[shared:]]
    made.routing = []  # that of the stem is not here
    return made


def search(
    rollouts: Rollouts,
    tasks: Sequence[tuple[str, Task]],
    sampling: Sampling,
    simulations: int,
    options: SearchOptions | None = None,
    value: Value | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Tree]:
    """A tree for every (group name, task), each of `simulations` episodes and continuations; all trees grow side by side.

    The draws depend on the run's seed, the group and the place in the tree, and the tree on what was drawn: the same again.

    Args:
        value: is asked once for each simulation of all trees.
        stop: whether the run is to stop. Raises Stopped where it says so.

    Raises ValueError for worlds of several agents, and where a conversation is begun anew in another row.
    """
    trees = [Tree(group, task, options or SearchOptions()) for group, task in tasks]
    for number in range(simulations):
        started: list[tuple[Tree, Any, Future[list[Trajectory]]]] = []
        for tree in trees:
            if tree.root is None:  # its first episode, or another where that broke
                ((future,),) = _alone(rollouts, tree, number, sampling)
                started.append((tree, (), future))
                continue
            node, path = tree.select()
            (future,) = rollouts.branch(node.stem, tree.task, [node.drawn], sampling)
            node.drawn += 1
            started.append((tree, (node, path), future))
        for tree, place, future in started:
            rows = wait([future], stop)
            want_one_agent(rows)
            if len(rows) > 1:
                raise ValueError(f"{rows[0].task}: its conversation was begun anew in another row; a search needs all in one")
            tree.take(rows[0], *place)
        if value:
            Tree.judge(trees, value)
    return trees


def _alone(rollouts: Rollouts, tree: Tree, number: int, sampling: Sampling) -> list[list[Future[list[Trajectory]]]]:
    name = tree.group if not number else f"{tree.group}+{number}"  # another name, other draws
    return rollouts.play([(name, tree.task)], 1, sampling)


def _edges(tree: Tree) -> Iterator[Edge]:
    ahead = [tree.root] if tree.root else []
    for node in ahead:
        for edge in node.edges.values():
            yield edge
            ahead += [edge.after] if edge.after else []


def turn_labels(tree: Tree) -> list[tuple[Trajectory, int, float, int]]:
    """(trajectory, number of the turn, Q of the policy for it, how many returns that is the mean of), for every turn found."""
    return [(tree.episodes[edge.episode], edge.turn, edge.returned / edge.drawn, edge.drawn) for edge in _edges(tree)]


def label_records(tree: Tree) -> list[dict[str, Any]]:
    """`turn_labels` as JSON objects, for process.read_labels.

    `tokens` are all up to and with the turn, which begins at `start`; `q` is clipped to [0, 1]. Where another turn followed,
    `then` is what was told before that, and `value` the return from there on, clipped too.
    """
    return [_record(tree.episodes[edge.episode], edge) for edge in _edges(tree)]


def _record(row: Trajectory, edge: Edge) -> dict[str, Any]:
    turn, q = row.turns[edge.turn], edge.returned / edge.drawn
    record: dict[str, Any] = {
        "trajectory": f"{row.group}#{row.rollout}",
        "task": row.task,
        "turn": edge.turn,
        "start": turn.start,
        "tokens": row.tokens[: turn.end],
        "q": _clipped(q),
        "visits": edge.drawn,
    }
    if edge.after:
        # Not the turn's own reward, which may have been shaped since.
        told = row.tokens[turn.end : row.turns[edge.turn + 1].start]
        record |= {"then": told, "value": _clipped(q - edge.reward)}
    return record


def _clipped(q: float) -> float:
    return min(1.0, max(0.0, q))
