"""Search over turns: where it looks, what it finds at equal cost, and what it says of every turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from scripted import ScriptedSampler, script
from toys import InTurns, Stairs, climbing

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import audit
from jaxagent.rollout import RolloutOptions, Rollouts, wait
from jaxagent.search import Asked, Node, SearchOptions, Tree, Value, label_records, search, turn_labels
from jaxagent.types import Sample, SampleRequest, Sampling, StopReason, Trajectory

PLAIN = PlainTemplate()
SAMPLING = Sampling(max_tokens=4)


def wandering(odds: str) -> Callable[[str, SampleRequest], Sequence[int]]:
    """Moves drawn as the engine draws, from the request's key and the place in the row."""

    def write(text: str, request: SampleRequest) -> Sequence[int]:
        luck = random.Random(f"{request.key}/{request.start + len(request.tokens)}")
        return PLAIN.turn(climbing(luck.choice(odds))[0])

    return write


@contextmanager
def climbers(world: Stairs, turns: int, odds: str = "UUDF", sampler: ScriptedSampler | None = None) -> Iterator[Rollouts]:
    agent = Agent(PLAIN, world.tools, sampler or ScriptedSampler(PLAIN, wandering(odds)), Limits(turns, 200))
    made = Rollouts(world, agent, lambda: None, seed=5, options=RolloutOptions(attempts=1))
    try:
        yield made
    finally:
        made.close()


def named(world: Stairs, count: int) -> list[tuple[str, dict[str, object]]]:
    return [(f"train/{i}", world.task("train", i)) for i in range(count)]


def best_of(many: Rollouts, budgets: Sequence[int]) -> list[list[Trajectory]]:
    """For every task, episodes of their own until their sampled tokens reach its budget."""
    groups = many.play(named(many.world, len(budgets)), 14, SAMPLING)  # type: ignore[arg-type]
    found = list[list[Trajectory]]()
    for futures, budget in zip(groups, budgets, strict=True):
        kept: list[Trajectory] = []
        for row in wait(futures):
            if sum(sum(t.mask) for t in kept) >= budget:
                break
            kept.append(row)
        else:
            assert sum(sum(t.mask) for t in kept) >= budget
        found.append(kept)
    return found


def solved(groups: Sequence[Sequence[Trajectory]]) -> tuple[int, int]:
    """(tasks solved, episodes solved)."""
    return sum(any(row.solved for row in rows) for rows in groups), sum(row.solved for rows in groups for row in rows)


def height(asked: Sequence[Asked]) -> list[list[float]]:
    """What a critic may know: how far up the last observation says one is."""

    def said(text: str) -> float:
        return int(text.removesuffix("<turn>").rpartition(">")[2]) / 6

    return [[said(PLAIN.text(tokens[: place + 1])) for place in places] for tokens, places in asked]


def test_at_equal_sampled_tokens_search_solves_more_than_best_of_n_and_with_a_value_more_still() -> None:
    world = Stairs(6)
    with climbers(world, 10) as many:
        plain = search(many, named(world, 40), SAMPLING, 12)
        guided = search(many, named(world, 40), SAMPLING, 12, value=height)
        alone = [best_of(many, [tree.sampled for tree in trees]) for trees in (plain, guided)]
    one, two = (solved([tree.episodes for tree in trees]) for trees in (plain, guided))
    base = [solved(groups) for groups in alone]
    assert one[1] > 1.2 * base[0][1]  # episodes; until one is solved all returns are alike, so tasks are no more than before
    assert two[1] > 1.4 * base[1][1]
    assert two[0] > 1.1 * base[1][0]


def test_how_large_values_are_does_not_matter_while_nothing_else_is_known() -> None:
    """Nobody ever arrives: what is rarely tried is preferred by as much as the values differ, however little that is."""

    def found(value: Value | None) -> list[list[int]]:
        with climbers(Stairs(99), 8) as many:
            (tree,) = search(many, named(many.world, 1), SAMPLING, 20, value=value)
        return [row.tokens for row in tree.episodes]

    small = found(lambda asked: [[h / 100 for h in heights] for heights in height(asked)])
    assert small == found(height) != found(None)


def test_in_a_world_of_one_turn_search_is_best_of_n() -> None:
    world = Stairs(1)
    with climbers(world, 1, odds="UDFF") as many:
        trees = search(many, named(world, 80), SAMPLING, 6)
        alone = best_of(many, [tree.sampled for tree in trees])
    assert {len(tree.episodes) for tree in trees} == {len(rows) for rows in alone} == {6}
    of = solved([tree.episodes for tree in trees])[1], solved(alone)[1]
    assert of == pytest.approx((120, 120), abs=3.5 * (480 * 3 / 16) ** 0.5)
    assert all(tree.root and len(tree.root.edges) <= 3 for tree in trees)


def test_what_was_found_are_whole_trajectories_as_if_each_had_been_played_alone() -> None:
    world = Stairs(5)
    with climbers(world, 10) as many:
        (tree,) = search(many, named(world, 1), SAMPLING, 20)
        (again,) = search(many, named(world, 1), SAMPLING, 20)
    assert len(tree.episodes) == 20
    assert [row.tokens for row in again.episodes] == [row.tokens for row in tree.episodes]
    assert len({str(row.tokens) for row in tree.episodes}) > 10
    for number, row in enumerate(tree.episodes):
        assert audit(row) == ""
        assert (row.group, row.rollout, row.trunk_turns) == ("train/0", number, 0)
        moves = [PLAIN.text(row.tokens[turn.start : turn.end])[6] for turn in row.turns]
        at, states = 0, []
        for move in moves:
            states.append(str(at))
            at = {"U": at + 1, "D": max(0, at - 1), "F": 0}[move]
        assert [turn.state for turn in row.turns] == states
        assert (row.reward, row.stop == StopReason.ENV_TERMINATED) == (float(at == 5), at == 5)
        assert sum(row.mask) == sum(turn.end - turn.start for turn in row.turns) == 3 * len(row.turns)
    assert tree.best.reward == max(row.reward for row in tree.episodes)
    assert tree.sampled < sum(sum(row.mask) for row in tree.episodes)  # what is shared was sampled once


def nodes(tree: Tree) -> list[Node]:
    found = [tree.root] if tree.root else []
    for node in found:
        found += [edge.after for edge in node.edges.values() if edge.after]
    return found


def test_visits_add_up_and_no_node_is_wider_than_allowed() -> None:
    world = Stairs(5)
    with climbers(world, 10) as many:
        (tree,) = search(many, named(world, 1), SAMPLING, 40, SearchOptions(width=2))
    assert tree.root
    assert tree.root.visits == len(tree.episodes) == 40
    for node in nodes(tree):
        assert sum(edge.visits for edge in node.edges.values()) == node.visits
        open_ended = [edge for edge in node.edges.values() if edge.after]
        assert node.drawn <= 2 or not open_ended
        for edge in open_ended:
            assert edge.after
            assert edge.after.visits == edge.visits  # no turn was taken without one after it
    rewards = [row.reward for row in tree.episodes]
    assert sum(edge.total for edge in tree.root.edges.values()) == pytest.approx(sum(rewards))


def test_a_label_is_the_mean_return_of_the_continuations_from_behind_the_turn() -> None:
    tree = Tree("g", Stairs(2).task("train", 0), SearchOptions())
    with climbers(Stairs(2), 3, sampler=script(PLAIN, *climbing("U", "D", "U"))) as many:
        task = many.world.task("train", 0)
        ((first,),) = many.play([("g", task)], 1, SAMPLING)
        tree.take(first.result()[0])
        up = tree.root.edges[tuple(PLAIN.turn(climbing("U")[0]))] if tree.root else None
        assert up
        assert up.after
        assert (up.q, up.drawn, tree.episodes[0].reward) == (0.0, 1, 0.0)
        many.agent.sampler = script(PLAIN, *climbing("U"))  # from the first step one more arrives
        (future,) = many.branch(up.after.stem, task, [1], SAMPLING)
        tree.take(future.result()[0], up.after, [up])
        (deeper,) = [edge for edge in up.after.edges.values() if edge.after]
        assert deeper.after
        (future,) = many.branch(deeper.after.stem, task, [1], SAMPLING)
        tree.take(future.result()[0], deeper.after, [up, deeper])
    labels = {(row.rollout, turn): (q, visits) for row, turn, q, visits in turn_labels(tree)}
    # U, then D and U in vain; U then U arrives; and U once more after U D, which is in vain and says nothing of the first U
    assert labels == {(0, 0): (0.5, 2), (0, 1): (0.0, 2), (0, 2): (0.0, 2), (1, 1): (1.0, 1)}
    assert up.q == pytest.approx(1 / 3)
    (record,) = [record for record in label_records(tree) if record["q"] == 1.0]
    row = tree.episodes[1]
    assert (record["trajectory"], record["turn"], record["visits"]) == ("g#1", 1, 1)
    assert record["tokens"] == row.tokens[: row.turns[1].end]
    assert PLAIN.text(record["tokens"][record["start"] :]) == "<call>U</call>"
    assert "then" not in record  # nothing followed
    first = next(record for record in label_records(tree) if not record["turn"])
    assert (PLAIN.text(first["then"]), first["q"], first["value"]) == ("<result>1<turn>", 0.5, 0.5)


def test_labels_are_the_policys_values_and_not_those_of_the_search() -> None:
    """Two steps up in three turns, each up or down with 1/2: after a first U only U arrives, for D U is one turn too many."""
    world, up = Stairs(2), tuple(PLAIN.turn(climbing("U")[0]))
    with climbers(world, 3, odds="UD") as many:
        trees = search(many, named(world, 150), SAMPLING, 12)
    labels = [
        (q, n) for tree in trees for row, turn, q, n in turn_labels(tree) if not turn and row.turns[0].text == "<call>U</call>"
    ]
    assert sum(q * n for q, n in labels) / sum(n for _, n in labels) == pytest.approx(0.5, abs=0.08)
    edges = [tree.root.edges[up] for tree in trees if tree.root and up in tree.root.edges]
    assert sum(edge.drawn for edge in edges) == sum(n for _, n in labels) < sum(edge.visits for edge in edges)


def test_simulations_that_break_are_counted_and_nothing_else() -> None:
    world = Stairs(5, restless=True)
    with climbers(world, 10) as many:
        (tree,) = search(many, named(world, 1), SAMPLING, 8)
    assert len(tree.lost) + len(tree.episodes) == 8
    assert tree.lost
    assert all("Diverged" in row.error for row in tree.lost)
    assert tree.root
    assert tree.root.visits == len(tree.episodes)


def test_worlds_of_several_agents_are_refused() -> None:
    world = InTurns(9)
    with climbers(world, 6) as many, pytest.raises(ValueError, match=r"turns of several agents \(agent, black, white\)"):
        search(many, named(world, 1), SAMPLING, 3)


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("exploration", -1.0)])
def test_a_search_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"the {name} of a search must"):
        SearchOptions(**{name: value})


def test_what_goes_on_takes_its_beginning_from_an_episode_that_went_on() -> None:
    def row(turns: int, trunk_turns: int = 0) -> Trajectory:
        """Turns of one token after one of the world; those of a stem are its prompt."""
        made = Trajectory("t", 0, "g", 0, trunk_turns=trunk_turns, stop=StopReason.ANSWERED)
        made.feed([1, 2] * trunk_turns)
        for number in range(turns):
            start = len(made.tokens) if number else 0
            made.feed([1])
            made.sampled(Sample([2], [0.0], [0], True, start, made.tokens[start:]), "", "")
        return made

    tree = Tree("g", {"id": "t", "seed": 0}, SearchOptions())
    for turns in (1, 3):  # the same first turn, after which the first episode ended
        tree.take(row(turns), tree.root)
    assert tree.root
    (first,) = tree.root.edges.values()
    assert first.after and first.episode == 1
    (second,) = first.after.edges.values()
    assert second.after
    tree.take(row(1, trunk_turns=1), first.after, [first])
    tree.take(row(1, trunk_turns=2), second.after, [first, second])
    assert [audit(episode) for episode in tree.episodes] == [""] * 4
    assert [len(episode.turns) for episode in tree.episodes] == [1, 3, 2, 3]
