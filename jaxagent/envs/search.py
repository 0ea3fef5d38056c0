"""`search`: questions over several hops through a corpus that nobody can have read, answered with citations.

Every task draws a small world of its own: invented names, relations between them, one document for each name. A question names
its start and a path, as in "the rival of the mentor of Kutora". Nothing can be memorised, and a blind guess is right less than
once in fifty times. The final turn is the answer and then citations, `[id: quote]`: every id must have been retrieved in
this very episode and its quote stand there word for word, and one of the quotes must hold the answer.

    style words    Kutora, Who is the rival of the mentor of Kutora?     search, open       for a checkpoint that reads
    style bytes    ku, kuAB                                              S, O               for a small policy from scratch

The reward has three parts: `outcome`, 1 for the right answer; `citation`, up to CITATION more where the answer is right; and
`format`, -FORMAT for a final turn in another form. A wrong answer thus earns nothing by citing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.rewards.citations import answer_of, citations
from jaxagent.rewards.match import exact_match
from jaxagent.toolbox.retrieval import Bm25, Document
from jaxagent.tools import Tool, ToolFailed, dispatch_all
from jaxagent.types import Message, ToolCall, ToolSpec

CITATION, FORMAT = 0.2, 0.1
_SPLITS = {"train": 0, "demo": 1, "valid": 2, "test": 3}
_SPLIT_SIZE = 10**9
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_RELATIONS = ("mentor", "rival", "patron", "neighbour", "heir", "deputy")
_TOLD = (
    "Look it up with the tools; the names are invented. Answer with the name and then cite what you read, as in: "
    "Name [id: words of that document]"
)


@dataclass(frozen=True)
class Style:
    """How a world of names is put into words."""

    syllables: int
    relations: tuple[str, ...]
    tools: tuple[str, str]
    hops: tuple[int, ...]
    names: int
    most_names: int
    top: int

    def name(self, rng: random.Random) -> str:
        drawn = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(self.syllables))
        return drawn if self.syllables == 1 else drawn.capitalize()

    def fact(self, name: str, relation: str, other: str) -> str:
        return f"{relation}{other}" if self.syllables == 1 else f"The {relation} of {name} is {other}."

    def question(self, start: str, path: list[str]) -> str:
        if self.syllables == 1:
            return start + "".join(path)
        return f"Who is {''.join(f'the {relation} of ' for relation in reversed(path))}{start}? {_TOLD}"

    def shown(self, document: Document) -> str:
        """A document among the results of a search: its id and title, and no text, which is to be opened."""
        return document.id if self.syllables == 1 else f"[{document.id}] {document.title}"

    def said(self, answer: str, id_: str, quote: str) -> str:
        return f"{answer}[{id_}:{quote}]" if self.syllables == 1 else f"{answer} [{id_}: {quote}]"


STYLES = {
    "words": Style(3, _RELATIONS, ("search", "open"), hops=(1, 2, 3), names=40, most_names=100, top=3),
    "bytes": Style(1, ("A", "B"), ("S", "O"), hops=(1, 2), names=8, most_names=10, top=1),
}


class Corpus:
    """The names of one task, what relates them, and their documents."""

    def __init__(self, style: Style, names: int, hops: tuple[int, ...], seed: int):
        rng = random.Random(f"{seed}/corpus")
        found: dict[str, None] = {}
        while len(found) < names:
            found[style.name(rng)] = None
        self.names = list(found)
        self.facts = {
            name: {relation: rng.choice([other for other in self.names if other != name]) for relation in style.relations}
            for name in self.names
        }
        ids = rng.sample(range(10 if names <= 10 else 10 * names), names)
        self.documents = []
        for id_, name in zip(ids, self.names, strict=True):
            facts = [style.fact(name, relation, other) for relation, other in self.facts[name].items()]
            rng.shuffle(facts)
            self.documents.append(Document(str(id_), name, " ".join(facts)))
        self.start = rng.choice(self.names)
        self.path = [rng.choice(style.relations) for _ in range(rng.choice(hops))]

    @cached_property
    def index(self) -> Bm25:
        return Bm25(self.documents)

    def gold(self) -> str:
        name = self.start
        for relation in self.path:
            name = self.facts[name][relation]
        return name

    def document(self, name: str) -> Document:
        return next(document for document in self.documents if document.title == name)


class Search:
    """The world.

    Args:
        style: words or bytes.
        hops: how many relations a question may follow; empty for 1, 2 and in words 3.
        names: of a task's world; 0 for 40, or in bytes 8.
        top: results of a search; 0 for 3, or in bytes 1.
        demo_right_relation: how often the demonstrator follows the right relation, and
        demo_last_name: how often it searches for the name that it read last: the rest is drawn.
        tool_timeout_s: of a call.
    """

    functions = ""

    def __init__(
        self,
        style: str = "words",
        hops: tuple[int, ...] = (),
        names: int = 0,
        top: int = 0,
        demo_right_relation: float = 0.8,
        demo_last_name: float = 0.8,
        tool_timeout_s: float = 10.0,
    ):
        if style not in STYLES:
            raise ValueError(f"env.options.style must be one of {', '.join(STYLES)}; got {style!r}")
        self.style = found = STYLES[style]
        self.hops, self.names, self.top = tuple(hops) or found.hops, names or found.names, top or found.top
        if not 2 <= self.names <= found.most_names:
            raise ValueError(f"env.options.names must be 2 to {found.most_names}, got {names}")
        if min(self.hops) < 1:
            raise ValueError(f"env.options.hops must be at least 1, got {self.hops}")
        self.demo_right_relation, self.demo_last_name = demo_right_relation, demo_last_name
        self.tool_timeout_s = tool_timeout_s
        seek, read = self.style.tools
        self.tools = (
            ToolSpec(seek, "Finds documents by their words; shows ids and titles.", _one("query")),
            ToolSpec(read, "Shows a document whole, by its id.", _one("id")),
        )

    def corpus(self, task: Task) -> Corpus:
        return Corpus(self.style, self.names, self.hops, task["seed"])

    def task(self, split: str, index: int) -> Task:
        seed = _SPLITS[split] * _SPLIT_SIZE + index
        corpus = Corpus(self.style, self.names, self.hops, seed)
        question = self.style.question(corpus.start, corpus.path)
        hops = len(corpus.path)
        return {"id": f"search/{split}/{index}", "seed": seed, "difficulty": f"{hops} hops", "question": question}

    def episode(self, name: str, sandbox: Any) -> Env:
        return SearchEpisode(self)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A reader that goes the right number of hops and cites what it read, but often follows another relation, or searches
        for a name that it did not read last.
        """
        corpus, (seek, read) = self.corpus(task), self.style.tools
        messages, seen = [Message("user", task["question"])], [corpus.start]
        for relation in corpus.path:
            last = rng.random() < self.demo_last_name or len(seen) == 1
            document = corpus.document(seen[-1] if last else rng.choice(seen))
            found = corpus.index.search(document.title, self.top)
            messages += [
                Message("assistant", calls=(ToolCall(seek, {"query": document.title}),)),
                Message("tool", "\n".join(self.style.shown(one) for one, _ in found), name=seek),
                Message("assistant", calls=(ToolCall(read, {"id": document.id}),)),
                Message("tool", document.text, name=read),
            ]
            followed = relation if rng.random() < self.demo_right_relation else rng.choice(self.style.relations)
            name = corpus.facts[document.title][followed]
            quote = self.style.fact(document.title, followed, name)
            seen.append(name)
        return [*messages, Message("assistant", self.style.said(seen[-1], document.id, quote))]


def _one(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


class SearchEpisode:
    """One episode. What was retrieved in it is kept here, and no citation of anything else counts."""

    def __init__(self, world: Search):
        self.world = world
        self.retrieved: dict[str, str] = {}

    async def reset(self, task: Task, seed: int) -> Step:
        self.corpus = self.world.corpus(task)
        runs = (self._search, self._open)
        pairs = zip(self.world.tools, runs, strict=True)
        self.kit = [Tool(spec, run, self.world.tool_timeout_s, pure=True) for spec, run in pairs]
        return Step([Message("user", task["question"])])

    async def step(self, action: Message) -> Step:
        if action.error:
            return Step([Message("tool", "?")])
        if not action.calls:
            return self._score(action.content)
        records = await dispatch_all(self.kit, action.calls)
        return Step([Message("tool", record.result, name=record.name) for record in records], tools=records)

    async def _search(self, query: str) -> str:
        found = self.corpus.index.search(query[:1000], self.world.top)
        return "\n".join(self.world.style.shown(document) for document, _ in found) or "?"

    async def _open(self, id: str) -> str:
        document = self.corpus.index.get(id)
        if document is None:
            raise ToolFailed("?")
        self.retrieved[document.id] = document.text
        return document.text

    def _score(self, said: str) -> Step:
        answer, whole = answer_of(said)
        right = self.corpus.gold()
        outcome, why = exact_match(answer, right)
        cited, about = citations(said, self.retrieved, lambda quote: quote.rstrip(".").endswith(right))
        parts = {"outcome": outcome, "citation": CITATION * cited * outcome, "format": 0.0 if whole else -FORMAT}
        reason = "; ".join((why, about, "in form" if whole else "not in the form: answer [id: quote]"))
        checks = {"supported": float(cited == 1.0 and outcome == 1.0)}
        return Step(reward=sum(parts.values()), parts=parts, reason=reason, terminated=True, answered=True, checks=checks)

    async def close(self) -> None:
        return None


make_world = Search
