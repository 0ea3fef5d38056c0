"""`research`: questions over a corpus of one's own, answered with citations of what was read in this very episode.

    corpus    documents, JSONL: `title` and `text`, or Search-R1's `contents`, and `id`; see toolbox/retrieval.py
    path      questions, one record per task: `question`, `answer` (or a list of them), and optionally `id`, `difficulty`,
              `sources` (ids of the documents it rests on); without one, questions over `hops` hops are made of the corpus by
              data/hops.py, no two splits starting from the same document

The tools are those of the kit `search`. The last turn is the answer and then citations, `[id: quote]`. The reward's parts
are kept apart: `outcome`, by the scorer; `citation`, up to CITATION times the outcome; `format`, -FORMAT for another form.
A citation holds whose quote was shown of that document by a tool in this episode, word for word: what a search shows is the
beginning, what `open` shows the whole. One that holds must have the answer in it. The check `supported` says that all of
it held, `sources` which share of a task's sources was cited.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from jaxagent.data.hops import QUOTE_WORDS, Hop, asked, chains
from jaxagent.data.records import read_records, split_of
from jaxagent.envs.env import Env, Step, Task
from jaxagent.rewards.citations import MAX_CITATIONS, answer_of, citations, cited
from jaxagent.rewards.match import exact_match, f1_match, normalise
from jaxagent.toolbox.retrieval import Document, each_document, listed, open_index
from jaxagent.toolbox.search import asked as asked_query
from jaxagent.tools import ToolFailed, dispatch_all, tool
from jaxagent.types import Message, ToolCall

CITATION, FORMAT = 0.2, 0.1
SCORERS = {"exact_match": exact_match, "f1_match": f1_match}
_SPLITS = ("train", "demo", "valid", "test")
_TOLD = (
    "Look it up with the tools. Then answer, and cite what you read, each as the id of a document and words that stand there "
    "exactly so, as in: Answer [id: words of that document] [id: words of another]"
)


class Research:
    """The world.

    Args:
        corpus, path: see above.
        test_path: questions to test on; without one, tenths of `path` are held out.
        hops: of questions that are made.
        reward: exact_match or f1_match; of several right answers the best counts.
        top, chars: documents that a search finds, and what it shows of each.
        index: folder of an index on disk, for large corpora.
    """

    functions = ""

    def __init__(
        self,
        corpus: str,
        path: str = "",
        test_path: str = "",
        hops: tuple[int, ...] = (1, 2, 3),
        reward: str = "exact_match",
        top: int = 3,
        chars: int = 200,
        index: str = "",
    ):
        if reward not in SCORERS:
            raise ValueError(f"env.options.reward must be one of {', '.join(SCORERS)}; got {reward!r}")
        if not hops or min(hops) < 1 or max(hops) > 8:
            raise ValueError(f"env.options.hops must be numbers from 1 to 8, got {hops}")
        self.index = open_index(corpus, index)
        self.reward, self.top, self.chars = SCORERS[reward], top, chars
        documents = list[Document]()  # kept where questions are made of them: a large corpus is not held
        for one in each_document(corpus):
            if set("[]:") & set(one.id):
                raise ValueError(f"{corpus}: ids with [, ] or : cannot be cited, got {one.id!r}")
            if not path:
                documents.append(one)
        self.rows = _read(path, test_path) if path else _made(corpus, documents, hops)
        self.sizes = {split: len(rows) for split, rows in self.rows.items()}
        self.tools = tuple(one.spec for one in ResearchEpisode(self).tools)
        if not path:  # of other questions nobody knows the way
            self.demonstrate = self._demonstrate

    def task(self, split: str, index: int) -> Task:
        row = self.rows[split][index]
        return {"difficulty": "all", **row, "id": f"research/{split}/{index}", "seed": index}

    def episode(self, name: str, sandbox: Any) -> Env:
        return ResearchEpisode(self)

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A reader who searches the title, opens the document and goes on to what the sentence names."""
        messages = [Message("user", f"{task['question']}\n{_TOLD}")]
        for hop in task["chain"]:
            document = self.index.get(hop["id"])
            assert document is not None  # the chain was made of this corpus
            shown = listed(self.index.search(document.title, self.top), self.chars)
            messages += [
                Message("assistant", calls=(ToolCall("search", {"query": document.title}),)),
                Message("tool", shown, name="search"),
                Message("assistant", calls=(ToolCall("open", {"id": document.id}),)),
                Message("tool", whole(document), name="open"),
            ]
        quotes = " ".join(f"[{hop['id']}: {hop['sentence']}]" for hop in task["chain"][-MAX_CITATIONS:])
        return [*messages, Message("assistant", f"{task['answer']} {quotes}")]


def whole(document: Document) -> str:
    return f"[{document.id}] {document.title}\n{document.text}"


def _read(path: str, test_path: str) -> dict[str, list[dict[str, Any]]]:
    """The questions of files, by split."""
    splits = ("train", "valid") if test_path else ("train", "valid", "test")
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
    for _, record in read_records(path, ("question", "answer")):
        rows[split_of(str(record.get("id", record["question"])), splits)].append(record)
    if test_path:
        rows["test"] = [record for _, record in read_records(test_path, ("question", "answer"))]
    if empty := [split for split in rows if not rows[split]]:
        raise ValueError(f"{path}: too few questions, none is left for {' and '.join(empty)}; some dozens are wanted")
    return rows


def _made(corpus: str, documents: Sequence[Document], lengths: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Questions of a corpus, by split: those from one document are all in one."""
    titles = {document.id: document.title for document in documents}
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in _SPLITS}
    for start, several in chains(documents, lengths).items():
        rows[split_of(start, _SPLITS)] += [_row(chain, titles[start]) for chain in several]
    if empty := [split for split in _SPLITS if not rows[split]]:
        raise ValueError(f"{corpus}: too few documents name each other, no question is left for {' and '.join(empty)}")
    for split in _SPLITS:
        random.Random(split).shuffle(rows[split])
    return rows


def _row(chain: Sequence[Hop], start: str) -> dict[str, Any]:
    made = {"question": asked(chain, start), "answer": chain[-1].names, "difficulty": f"{len(chain)} hops"}
    return {**made, "sources": [hop.id for hop in chain], "chain": [{"id": hop.id, "sentence": hop.sentence} for hop in chain]}


class ResearchEpisode:
    """One episode, and what was shown in it: no citation of anything else counts."""

    def __init__(self, world: Research):
        self.world = world
        self.shown: dict[str, str] = {}
        self.tools = [tool(self.search, pure=True), tool(self.open, pure=True)]

    async def reset(self, task: Task, seed: int) -> Step:
        self.task = task
        self.shown.clear()
        return Step([Message("user", f"{task['question']}\n{_TOLD}")])

    async def step(self, action: Message) -> Step:
        if action.error:
            return Step([Message("tool", f"error: {action.error}")])
        if not action.calls:
            return self._score(action.content)
        records = await dispatch_all(self.tools, action.calls)
        return Step([Message("tool", record.result, name=record.name) for record in records], tools=records)

    def search(self, query: str) -> str:
        """Finds documents by their words; shows the beginning of each."""
        found = self.world.index.search(asked_query(query), self.world.top)
        for document, _ in found:
            self._show(document, document.text[: self.world.chars])
        return listed(found, self.world.chars)

    def open(self, id: str) -> str:
        """Shows a document whole, by its id."""
        document = self.world.index.get(id)
        if document is None:
            raise ToolFailed(f"error: no document {id!r}")
        self._show(document, document.text)
        return whole(document)

    def _show(self, document: Document, text: str) -> None:
        """A document is shown from its beginning, so the longer of two pieces holds the other. Titles are no evidence."""
        if len(text) > len(self.shown.get(document.id, "")):
            self.shown[document.id] = text

    def _score(self, said: str) -> Step:
        answer, formed = answer_of(said)
        right = self.task["answer"]
        rights = [str(one) for one in (right if isinstance(right, list) else [right])]
        outcome, why = max((self.world.reward(answer, one) for one in rights), key=lambda scored: scored[0])

        def holds(quote: str) -> bool:
            return any(f" {normalise(one)} " in f" {normalise(quote)} " for one in rights)

        share, about = citations(said, self.shown, holds, QUOTE_WORDS)
        parts = {"outcome": outcome, "citation": CITATION * share * outcome, "format": 0.0 if formed else -FORMAT}
        checks = {"supported": float(share == 1.0 and outcome == 1.0)}
        if sources := set(map(str, self.task.get("sources") or ())):
            held = {id_ for id_, quote in cited(said) if quote and quote in self.shown.get(id_, "")}
            checks["sources"] = outcome * len(sources & held) / len(sources)
        reason = "; ".join((why, about, "in form" if formed else "not in the form: answer [id: quote]"))
        return Step(reward=sum(parts.values()), parts=parts, reason=reason, terminated=True, answered=True, checks=checks)

    async def close(self) -> None:
        return None


make_world = Research
