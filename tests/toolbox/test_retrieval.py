"""Search in a corpus: scores by hand and against others' code, files with faults, a server, and the tools over both."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from calling import called
from serving import serving

from jaxagent.__main__ import main
from jaxagent.toolbox.box import Toolbox
from jaxagent.toolbox.retrieval import MAX_WORDS, Bm25, Document, OnDisk, counted, open_index, read_corpus
from jaxagent.toolbox.retriever import app
from sandbox_client import InfrastructureError

TOWNS = (
    Document("ulm", "Ulm", "a town on the Danube with a tall tower"),
    Document("bonn", "Bonn", "a town on the Rhine"),
    Document("hof", "Hof", "a town with a tower and a tower"),
)


def corpus(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def towns(tmp_path: Path) -> str:
    return corpus(tmp_path / "towns.jsonl", [{"id": d.id, "title": d.title, "text": d.text} for d in TOWNS])


def test_a_score_is_the_formula_by_hand() -> None:
    found = Bm25(TOWNS).search("Tower!", 3)
    assert [document.id for document, _ in found] == ["hof", "ulm"]
    idf, average = math.log(1 + 1.5 / 2.5), (10 + 6 + 9) / 3
    for (_, score), (count, length) in zip(found, ((2, 9), (1, 10)), strict=True):
        assert score == pytest.approx(idf * count / (count + 1.5 * (0.25 + 0.75 * length / average)))


def test_nothing_is_found_by_words_that_are_nowhere_and_equals_keep_the_order_of_the_corpus() -> None:
    index = Bm25(TOWNS)
    assert index.search("xyzzy", 3) == index.search("", 3) == index.search("tower", 0) == []
    same = Bm25(Document(str(n), "", "one word") for n in range(20))
    assert [document.id for document, _ in same.search("word", 5)] == ["0", "1", "2", "3", "4"]
    assert Bm25([]).search("word", 5) == []
    with pytest.raises(ValueError, match="'1' comes more than once"):
        Bm25([Document("1", "", "a"), Document("1", "", "b")])


def drawn_documents(rng: random.Random, count: int) -> list[Document]:
    words = [f"w{n}" for n in range(300)]
    odds = [1 / (n + 1) for n in range(300)]
    return [Document(str(n), "", " ".join(rng.choices(words, odds, k=rng.randint(5, 60)))) for n in range(count)]


def test_a_word_that_is_repeated_counts_as_often_and_costs_once() -> None:
    index = Bm25(TOWNS)
    once, often = ({d.id: score for d, score in index.search(query, 3)} for query in ("town", "town " * 250))
    assert often == pytest.approx({id: 250 * score for id, score in once.items()})
    assert counted("the " * 250 + "end") == [("the", 250), ("end", 1)]
    assert len(counted(" ".join(f"w{n}" for n in range(500)))) == MAX_WORDS


def test_scores_are_those_of_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s", reason="bm25s is the oracle here; it is not installed")
    rng = random.Random(0)
    documents = drawn_documents(rng, 400)
    theirs = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    theirs.index([document.text.split() for document in documents], show_progress=False)
    ours = Bm25(documents)
    for _ in range(50):
        query = [f"w{rng.randrange(300)}" for _ in range(4)]
        scores = theirs.get_scores(query)
        best = sorted(scores, reverse=True)[:5]
        assert [score for _, score in ours.search(" ".join(query), 5)] == pytest.approx([s for s in best if s > 0], rel=1e-4)


def test_an_index_on_disk_finds_the_same_and_is_opened_again(tmp_path: Path, towns: str) -> None:
    pytest.importorskip("tantivy", reason="the extra `search` is not installed")
    for _ in range(2):
        index = open_index(towns, str(tmp_path / "index"))
        assert isinstance(index, OnDisk)
        assert [document.id for document, _ in index.search("tower", 3)] == ["hof", "ulm"]
        assert [document.id for document, _ in index.search("title:( Rhine OR", 3)] == ["bonn"]
        assert index.get("ulm") == TOWNS[0] and index.get("Ulm") is None
        assert index.search("", 3) == []
    assert len(open_index("no corpus needed", str(tmp_path / "index")).search("town", 9)) == 3


def test_an_index_of_a_corpus_that_changed_or_that_was_not_finished_is_made_again(tmp_path: Path, towns: str) -> None:
    pytest.importorskip("tantivy", reason="the extra `search` is not installed")
    folder = tmp_path / "index"
    assert [d.id for d, _ in open_index(towns, str(folder)).search("tower tower", 3)] == ["hof", "ulm"]
    changed = corpus(Path(towns), [{"id": "jena", "title": "Jena", "text": "a tower far away"}])
    assert [d.id for d, _ in open_index(changed, str(folder)).search("tower", 3)] == ["jena"]
    (folder / "corpus.json").unlink()  # as far as an interrupted build came
    assert [d.id for d, _ in OnDisk(Path(changed), folder).search("tower", 3)] == ["jena"]
    assert (folder / "corpus.json").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["index", "towns.jsonl"]
    with pytest.raises(ValueError, match="something else is in it"):
        OnDisk(Path(changed), tmp_path)


def test_a_corpus_is_read_in_either_form_and_its_faults_name_the_line(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", [{"contents": '"Ulm"\na town'}, {"title": "Bonn", "text": "x"}, {"text": "y", "id": 9}])
    assert read_corpus(path) == [Document("1", "Ulm", "a town"), Document("2", "Bonn", "x"), Document("9", "", "y")]
    for records, said in (
        ([{"text": "a"}, {"body": "b"}], "line 2: missing text or contents; got body"),
        ([{"text": "a", "id": 1}, {"text": "b", "id": "1"}], "line 2: the id '1' is that of line 1"),
    ):
        with pytest.raises(ValueError, match=said):
            read_corpus(corpus(tmp_path / "faulty.jsonl", records))


def test_a_policy_searches_and_opens(towns: str) -> None:
    box = Toolbox({"search": {"corpus": towns, "top": 1, "chars": 6}})
    calls = (("search", {"query": "Danube"}), ("open", {"id": "ulm"}), ("open", {"id": "x"}), ("search", {"query": "q" * 2000}))
    records = called(box, *calls)
    assert [record.result for record in records] == [
        "[ulm] Ulm\na town...",
        "[ulm] Ulm\na town on the Danube with a tall tower",
        "error: no document 'x'",
        "error: a query of at most 1000 characters is wanted, got 2000",
    ]


def test_a_server_speaks_search_r1s_words_and_the_tool_understands_them(towns: str) -> None:
    with serving(app(open_index(towns))) as url:
        box = Toolbox({"retriever": {"url": f"{url}/retrieve", "top": 2}})
        found, nothing = called(box, ("search", {"query": "tower"}), ("search", {"query": "xyzzy"}))
        assert found.result.splitlines()[0] == 'Doc 1 (Title: "Hof") a town with a tower and a tower'
        assert len(found.result.splitlines()) == 2
        assert nothing.result == "nothing found"

        async def ask(body: Any) -> tuple[int, Any]:
            async with aiohttp.ClientSession() as http, http.post(f"{url}/retrieve", json=body) as reply:
                return reply.status, await reply.json()

        status, reply = asyncio.run(ask({"queries": ["tower", "rhine"], "topk": 1}))
        assert (status, reply) == (
            200,
            {"result": [[{"id": d.id, "contents": d.contents}] for d in (TOWNS[2], TOWNS[1])]},
        )
        status, reply = asyncio.run(ask({"queries": ["tower"], "topk": 1, "return_scores": True}))
        assert reply["result"][0][0]["document"]["contents"] == '"Hof"\na town with a tower and a tower'
        assert reply["result"][0][0]["score"] > 0
        for body in ({"query": "x"}, {"queries": [3]}, {"queries": ["x" * 20_000]}, {"queries": ["x"], "topk": 10**9}, ["x"]):
            assert asyncio.run(ask(body))[0] == 400


@pytest.mark.parametrize("status", [200, 503])
def test_a_server_that_fails_is_no_observation(status: int) -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=status, text="not json")

    application = web.Application()
    application.add_routes([web.post("/retrieve", broken)])
    with serving(application) as url, pytest.raises(InfrastructureError):
        called(Toolbox({"retriever": {"url": url}}), ("search", {"query": "x"}))
    with pytest.raises(InfrastructureError):
        called(Toolbox({"retriever": {"url": url}}), ("search", {"query": "x"}))  # nobody listens any more


def test_the_command_tells_what_is_wrong_with_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieve", f"--corpus={corpus(tmp_path / 'c.jsonl', [{'body': 'x'}])}"]) == 2
    assert "line 1: missing text or contents" in capsys.readouterr().err
