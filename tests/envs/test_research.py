"""`research`: questions made of a corpus's own links, and citations that count where their words were shown in this episode."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from growing import growth

from jaxagent.data.hops import GAP, asked, chains, hops_of
from jaxagent.envs.check import check
from jaxagent.envs.env import Step
from jaxagent.envs.research import CITATION, FORMAT, Research
from jaxagent.envs.search import STYLES, Corpus
from jaxagent.rewards.citations import citations, cited
from jaxagent.toolbox.retrieval import Document
from jaxagent.types import Message, ToolCall

TOWNS = [
    Document("1", "Ulm", "Ulm lies on the Danube. Its cathedral was begun by Ensinger. It is old."),
    Document("2", "Danube", "The Danube ends in the Black Sea. It begins near Donaueschingen Castle."),
    Document("3", "Black Sea", "The Black Sea borders on Varna. A port is Varna too."),
    Document("4", "Ensinger", "Ensinger also worked in Ulm."),
    Document("5", "Varna", "Varna [old] is a town by the Danube."),
    Document("6", "It", "Short titles stand everywhere."),
]


def write(path: Path, documents: list[Document]) -> str:
    path.write_text("".join(json.dumps({"id": d.id, "title": d.title, "text": d.text}) + "\n" for d in documents))
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = Corpus(STYLES["words"], 60, (1,), 3).documents
    return write(tmp_path_factory.mktemp("research") / "corpus.jsonl", made)


@pytest.fixture(scope="module")
def world(corpus: str) -> Research:
    return Research(corpus)


def play(world: Research, task: dict[str, Any], *turns: Message) -> Step:
    async def game() -> Step:
        env = world.episode("", None)
        step = await env.reset(task, 0)
        for turn in turns:
            step = await env.step(turn)
        await env.close()
        return step

    return asyncio.run(game())


def call(name: str, **arguments: str) -> Message:
    return Message("assistant", calls=(ToolCall(name, arguments),))


def say(text: str) -> Message:
    return Message("assistant", text)


# ---------------------------------------------------------------------- questions


def test_hops_are_sentences_that_name_one_other_title_once() -> None:
    found = {(hop.id, hop.gapped) for hops in hops_of(TOWNS).values() for hop in hops}
    assert found == {
        ("1", f"Ulm lies on the {GAP}."),
        ("1", f"Its cathedral was begun by {GAP}."),
        ("2", f"The Danube ends in the {GAP}."),
        ("3", f"The Black Sea borders on {GAP}."),
        ("3", f"A port is {GAP} too."),
        ("4", f"Ensinger also worked in {GAP}."),
    }  # not a sentence with brackets, which nobody could quote; not a title of two letters; not a document's own


def test_a_sentence_whose_gap_two_names_would_fill_is_left_out() -> None:
    twice = [*TOWNS[1:4], Document("1", "Ulm", "A friend is Danube. A friend is Ensinger. A town is Varna."), TOWNS[4]]
    assert [hop.names for hop in hops_of(twice)["1"]] == ["Varna"]


def test_a_sentence_too_short_to_be_quoted_is_no_hop() -> None:
    short = [Document("1", "Ulm", "See Danube. Ulm has Varna."), *TOWNS[1:2], TOWNS[4]]
    assert [hop.names for hop in hops_of(short)["1"]] == ["Varna"]


def test_a_chain_whose_sentences_tell_a_later_name_is_none() -> None:
    told = [Document("1", "Ulm", "Ulm lies on the Danube before Varna."), Document("2", "Danube", "The Danube passes Varna.")]
    made = chains([*told, Document("5", "Varna", "x")], (2,))
    assert made == {}
    assert chains([*told, Document("5", "Varna", "x")], (1,)).keys() == {"1", "2"}
    assert chains([*told, told[1], Document("5", "Varna", "x")], (1,)).keys() == {"1"}  # which Danube?


def test_a_question_names_its_start_and_nothing_that_is_asked_for() -> None:
    (chain,) = [c for c in chains(TOWNS, (3,))["1"] if c[0].names == "Danube"][:1]
    assert [hop.names for hop in chain][:2] == ["Danube", "Black Sea"]
    assert asked(chain, "Ulm") == (
        f'One document is titled "Ulm". A sentence there reads: "Ulm lies on the {GAP}." Call what fills the gap A. '
        f'A sentence in the document titled A reads: "The A ends in the {GAP}." Call what fills the gap B. '
        f'A sentence in the document titled B reads: "{chain[2].gapped.replace("Black Sea", "B")}" What fills the gap?'
    )


def test_questions_of_a_corpus_have_all_lengths_and_splits_start_elsewhere(world: Research) -> None:
    tasks = {split: [world.task(split, i) for i in range(size)] for split, size in world.sizes.items()}
    assert {task["difficulty"] for task in tasks["train"]} == {"1 hops", "2 hops", "3 hops"}
    starts = {split: {task["sources"][0] for task in several} for split, several in tasks.items()}
    assert all(starts[a].isdisjoint(starts[b]) for a in starts for b in starts if a != b)
    for task in (one for several in tasks.values() for one in several):
        assert task["answer"] not in task["question"]
    questions = [task["question"] for several in tasks.values() for task in several]
    assert len(set(questions)) == len(questions)


# ---------------------------------------------------------------------- who is paid


def test_the_reader_of_the_demonstrations_earns_everything(world: Research) -> None:
    for i in range(40):
        task = world.task("test", i % world.sizes["test"])
        shown = world.demonstrate(task, random.Random(0))
        step = play(world, task, *[turn for turn in shown if turn.role == "assistant"])
        assert step.parts == {"outcome": 1.0, "citation": CITATION, "format": 0.0}
        assert step.checks == {"supported": 1.0, "sources": 1.0}
        assert [m.content for m in shown if m.role == "tool"][-1].startswith(f"[{task['sources'][-1]}]")


Ending = Callable[[str, str, str], str]


@pytest.mark.parametrize(
    ("said", "parts", "supported"),
    [
        (lambda a, i, q: f"{a} [{i}: {q}]", (1.0, CITATION, 0.0), 1.0),
        (lambda a, i, q: f"{a} [{i}: {q[4:]}]", (1.0, CITATION, 0.0), 1.0),
        (lambda a, i, q: f"{a}", (1.0, 0.0, -FORMAT), 0.0),
        (lambda a, i, q: f"{a} [{i}: {a}]", (1.0, 0.0, 0.0), 0.0),  # a word is no quote
        (lambda a, i, q: f"{a} [{i}: {q.replace('The', 'the')}]", (1.0, 0.0, 0.0), 0.0),  # other letters
        (lambda a, i, q: f"{a} [{i}: {q}] [999: {q}]", (1.0, CITATION / 2, 0.0), 0.0),
        (lambda a, i, q: f"nobody [{i}: {q}]", (0.0, 0.0, 0.0), 0.0),
        (lambda a, i, q: "", (0.0, 0.0, -FORMAT), 0.0),
    ],
)
def test_outcome_citation_and_form_by_hand(
    said: Ending, parts: tuple[float, float, float], supported: float, world: Research
) -> None:
    task = next(task for i in range(99) if (task := world.task("train", i))["difficulty"] == "1 hops")
    hop = task["chain"][0]
    step = play(world, task, call("open", id=hop["id"]), say(said(task["answer"], hop["id"], hop["sentence"])))
    assert tuple(step.parts.values()) == pytest.approx(parts)
    assert step.checks["supported"] == supported
    assert step.reward == pytest.approx(sum(parts))


def test_right_words_of_a_document_that_was_not_shown_in_this_episode_pay_nothing(world: Research) -> None:
    task = world.task("train", 0)
    hop = task["chain"][-1]
    said = say(f"{task['answer']} [{hop['id']}: {hop['sentence']}]")
    assert play(world, task, said).parts["citation"] == 0.0
    assert play(world, task, call("open", id=hop["id"]), said).parts["citation"] == CITATION


def test_of_a_search_only_what_it_showed_can_be_cited(tmp_path: Path, corpus: str) -> None:
    world = Research(corpus, chars=10)
    task = next(task for i in range(99) if (task := world.task("train", i))["difficulty"] == "1 hops")
    hop, title = task["chain"][0], task["question"].partition('"')[2].partition('"')[0]
    said = say(f"{task['answer']} [{hop['id']}: {hop['sentence']}]")
    assert play(world, task, call("search", query=title), said).parts["citation"] == 0.0
    assert play(Research(corpus, chars=2000), task, call("search", query=title), said).parts["citation"] == CITATION


def test_a_title_is_no_evidence(tmp_path: Path) -> None:
    borders = "It borders on Old Town Number {} in the east."
    towns = [Document(str(n), f"Old Town Number {n}", borders.format(n + 1)) for n in range(150)]
    world = Research(write(tmp_path / "towns.jsonl", [*towns, Document("150", "Old Town Number 150", "x")]), hops=(1,))
    task = world.task("train", 0)
    title = towns[int(task["sources"][0])].title
    said = f"{task['answer']} [{int(task['sources'][0]) + 1}: {task['answer']}]"
    assert (
        play(world, task, call("search", query=title), call("search", query=task["answer"]), say(said)).parts["citation"] == 0.0
    )


def test_many_citations_of_anything_are_worth_nothing() -> None:
    shown = {"1": "a b c d e Ulm"}
    assert citations("[1: a b c Ulm]" * 9, shown, lambda quote: "Ulm" in quote)[0] == 0.0
    assert citations("[1: a b c] [1: b c d]", shown, lambda quote: "Ulm" in quote)[0] == 0.0
    assert citations("[1: d e Ulm] [1: b c d]", shown, lambda quote: "Ulm" in quote)[0] == 1.0
    assert cited("x [ 1 : a b ]") == [("1", "a b")]


# ---------------------------------------------------------------------- questions of one's own, and the world as others


def test_questions_of_a_file_may_have_several_answers_and_no_sources(corpus: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"Who is number {n}?", "answer": ["Ada", "the Ada Ito"]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = Research(corpus, str(path), reward="f1_match")
    assert sum(world.sizes.values()) == 40
    assert not hasattr(world, "demonstrate")
    step = play(world, world.task("test", 0), say("Ada Ito"))
    assert step.parts["outcome"] == 1.0
    assert step.checks == {"supported": 0.0}
    assert play(world, world.task("test", 0), say("Ada Lopez")).parts["outcome"] == pytest.approx(2 / 3)
    assert Research(corpus, str(path), str(path)).sizes["test"] == 40


def test_the_contract_is_kept(world: Research) -> None:
    assert [(finding.question, finding.said) for finding in check(world) if finding.ok is False] == []


def test_faults_are_told(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of exact_match, f1_match"):
        Research(corpus, reward="judge")
    with pytest.raises(ValueError, match="numbers from 1 to 8"):
        Research(corpus, hops=(0,))
    with pytest.raises(ValueError, match=r"ids with \[, \] or : cannot be cited, got 'a:1'"):
        Research(write(tmp_path / "a.jsonl", [Document("a:1", "Ulm", "x")]))
    with pytest.raises(ValueError, match="too few documents name each other"):
        Research(write(tmp_path / "b.jsonl", TOWNS[5:]))


@pytest.mark.parametrize("piece", ["[1: a] ", "[1:", "x [", "]"])
def test_hostile_answers_are_scored_in_linear_time(piece: str, world: Research) -> None:
    assert growth(lambda text: play(world, world.task("train", 0), say(text)), piece, 20_000, 80_000) < 10
