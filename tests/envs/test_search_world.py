"""`search`: who reads wins, who guesses does not, and only what was read can be cited."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from growing import growth
from scripted import ScriptedSampler, episode, script

from jaxagent import config as configs
from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.search import CITATION, FORMAT, Search
from jaxagent.rewards.citations import citations
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, Trajectory

PLAIN = PlainTemplate()
CONFIG, _ = configs.load(str(Path(__file__).parents[2] / "configs" / "search.py"))
WORLD = Search(**CONFIG.env.options)


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", calls=(ToolCall(name, arguments),))


def reader(text: str, request: SampleRequest) -> Sequence[int]:
    """Goes hop by hop: searches the last name, opens what is found, follows the relation."""
    found = re.match(r"<user>(..)([AB]+)<turn>", text)
    assert found
    name, path = found[1], list(found[2])
    results = re.findall(r"<result>(.*?)<turn>", text)
    id_ = quote = ""
    for result in results:
        if result.isdigit():
            id_ = result
        elif facts := {fact[0]: fact[1:] for fact in result.split() if fact[0] in "AB"}:
            quote = path[0] + facts[path[0]]
            name, path = facts[path.pop(0)], path
    opened = bool(results) and not results[-1].isdigit()
    if not path or (results and not opened and not id_):
        return PLAIN.turn(Message("assistant", f"{name}[{id_}:{quote}]"))
    return PLAIN.turn(call("S", query=name) if not results or opened else call("O", id=id_))


def play(sampler: ScriptedSampler, tasks: range, *, ablated: bool = False, world: Search = WORLD) -> list[Trajectory]:
    limits = {"limits": Limits(**CONFIG.agent), "sampling": Sampling(**CONFIG.sampling)}

    async def games() -> list[Trajectory]:
        return [row for i in tasks for row in await episode(world, world.task("test", i), sampler, ablated=ablated, **limits)]

    return asyncio.run(games())


def test_who_reads_hop_by_hop_answers_and_cites() -> None:
    rows = play(ScriptedSampler(PLAIN, reader), range(60))
    assert {WORLD.task("test", i)["difficulty"] for i in range(60)} == {"1 hops", "2 hops"}
    assert [row.outcome for row in rows] == [1.0] * 60
    assert [row.reward for row in rows] == pytest.approx([1 + CITATION] * 60)
    assert all(row.turns[-1].checks == {"supported": 1.0} for row in rows)
    assert max(len(row.tokens) for row in rows) <= CONFIG.learner.row_tokens


def test_without_the_tools_words_the_same_reader_does_not_win() -> None:
    rows = play(ScriptedSampler(PLAIN, reader), range(30), ablated=True)
    assert sum(row.outcome for row in rows) == 0


def test_the_longest_episode_ends_by_turns_and_never_by_tokens() -> None:
    (row,) = play(script(PLAIN, call("S", query="ku"), call("O", id="8")), range(1))
    assert row.stop is StopReason.MAX_TURNS


def test_a_guess_is_right_less_than_once_in_fifty_times() -> None:
    golds = [WORLD.corpus(WORLD.task("test", i)).gold() for i in range(1000)]
    assert max(golds.count(name) for name in set(golds)) / len(golds) < 0.05
    assert sum(gold == "ku" for gold in golds) / len(golds) < 0.02


RETRIEVED = {"7": "The heir of Ulmo is Bonni. The rival of Ulmo is Hofa."}


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("Bonni [7: The heir of Ulmo is Bonni.]", 1.0),
        ("Bonni [7: heir of Ulmo is Bonni]", 1.0),
        ("Bonni [7: heir of Ulmo is Bonni] [7: The rival of Ulmo is Hofa.]", 1.0),
        ("Bonni [7: heir of Ulmo is Bonni] [8: The rival of Ulmo is Hofa.]", 0.5),
        ("Bonni [8: The heir of Ulmo is Bonni.]", 0.0),  # never retrieved
        ("Bonni [7: The heir of Ulmo was Bonni.]", 0.0),  # other words
        ("Bonni [7: The rival of Ulmo is Hofa.]", 0.0),  # does not hold the answer
        ("Bonni [7: ]", 0.0),
        ("Bonni", 0.0),
        ("Bonni " + "[7: is Bonni.]" * 9, 0.0),  # more than anybody needs
    ],
)
def test_a_citation_holds_where_its_words_were_read(said: str, share: float) -> None:
    assert citations(said, RETRIEVED, lambda quote: quote.rstrip(".").endswith("Bonni"))[0] == share


def test_a_citation_of_what_was_not_opened_in_this_episode_pays_nothing_though_its_words_are_right() -> None:
    corpus = WORLD.corpus(WORLD.task("test", 0))
    last = corpus.start
    for relation in corpus.path[:-1]:
        last = corpus.facts[last][relation]
    said = f"{corpus.gold()}[{corpus.document(last).id}:{corpus.path[-1]}{corpus.gold()}]"
    (row,) = play(script(PLAIN, Message("assistant", said)), range(1))
    assert row.turns[-1].parts == {"outcome": 1.0, "citation": 0.0, "format": 0.0}
    assert row.turns[-1].checks == {"supported": 0.0}


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ("xx[1:Axx]", {"outcome": 0.0, "citation": 0.0, "format": 0.0}),
        ("xx", {"outcome": 0.0, "citation": 0.0, "format": -FORMAT}),
        ("[1:Axx]", {"outcome": 0.0, "citation": 0.0, "format": 0.0}),
        ("xx[1:Axx]??", {"outcome": 0.0, "citation": 0.0, "format": -FORMAT}),
    ],
)
def test_outcome_citation_and_form_are_parts_of_their_own(said: str, parts: dict[str, float]) -> None:
    (row,) = play(script(PLAIN, Message("assistant", said)), range(1))
    assert row.turns[-1].parts == parts
    assert row.reward == pytest.approx(sum(parts.values()))


def test_a_task_is_the_same_for_ever_and_splits_do_not_meet() -> None:
    assert WORLD.task("train", 5) == WORLD.task("train", 5)
    seeds = [WORLD.task(split, i)["seed"] for split in ("train", "demo", "valid", "test") for i in range(50)]
    assert len(set(seeds)) == 200


@pytest.mark.parametrize("world", [WORLD, Search()], ids=["bytes", "words"])
def test_demonstrations_have_the_right_number_of_hops_and_are_often_wrong(world: Search) -> None:
    right = 0
    for i in range(40):
        task = world.task("demo", i)
        dialogue = world.demonstrate(task, random.Random(i))
        corpus = world.corpus(task)
        assert len(dialogue) == 4 * len(corpus.path) + 2
        retrieved = {m.calls[0].arguments["id"]: d.content for m, d in zip(dialogue[3::4], dialogue[4::4], strict=False)}
        said = dialogue[-1].content
        answer = re.match(r"\w+", said)
        assert answer
        assert citations(said, retrieved, lambda quote, name=answer[0]: quote.rstrip(".").endswith(name))[0] == 1.0
        right += answer[0] == corpus.gold()
    assert 8 < right < 36


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"style": "verse"}, "must be one of words, bytes; got 'verse'"),
        ({"style": "bytes", "names": 11}, "must be 2 to 10, got 11"),
        ({"hops": (0,)}, "at least 1"),
    ],
)
def test_options_that_make_no_world_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Search(**options)


@pytest.mark.parametrize("piece", [" ", "[a:b] ", "[a:", "["])
def test_hostile_answers_are_scored_in_linear_time(piece: str) -> None:
    world = Search()

    async def score(text: str) -> float:
        env = world.episode("", None)
        await env.reset(world.task("train", 0), 0)
        return (await env.step(Message("assistant", f"x{text}!"))).reward

    assert growth(lambda text: asyncio.run(score(text)), piece, 50_000, 200_000) < 10
