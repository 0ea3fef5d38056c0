"""Search in a corpus of documents: BM25 over postings in numpy, or Tantivy's index on disk where a corpus is large."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxagent.data.tasks import numbered

_WORD = re.compile(r"\w+")
K1, B = 1.5, 0.75
MAX_WORDS = 64  # different ones of a query; further ones do not count
_STAMP = "corpus.json"  # beside an index on disk, written last: which corpus it is of


@dataclass(frozen=True)
class Document:
    """`contents` is what Search-R1 calls so: the title in the first line, and the text."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        return f'"{self.title}"\n{self.text}'


class Index(Protocol):
    """What finds documents."""

    def search(self, query: str, top: int) -> list[tuple[Document, float]]:
        """The best documents and their scores, the best first; none that has no word of the query."""
        ...

    def get(self, id: str) -> Document | None: ...


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def counted(query: str) -> list[tuple[str, int]]:
    """The first MAX_WORDS words of a query, and how often each occurs: "the" a hundred times costs no more than once."""
    return list(Counter(words(query)).items())[:MAX_WORDS]


class Bm25:
    """BM25 with Lucene's idf, in memory. The score of a posting is computed once; a query adds up those of its words.

        score(q, d) = sum over w in q of  ln(1 + (N - n_w + 1/2) / (n_w + 1/2)) * f_wd / (f_wd + k1 (1 - b + b |d| / avg))

    k1 = 1.5 and b = 0.75; n_w documents have the word w, f_wd times in d. Equal scores come in the order of the corpus.
    """

    def __init__(self, documents: Iterable[Document]):
        self.documents = list(documents)
        self._by_id = {document.id: document for document in self.documents}
        if len(self._by_id) != len(self.documents):
            twice = next(id for id, count in Counter(d.id for d in self.documents).items() if count > 1)
            raise ValueError(f"ids of documents must differ; {twice!r} comes more than once")
        self._words: dict[str, int] = {}
        entries: list[tuple[int, int, int]] = []  # word, place of the document, count
        for place, document in enumerate(self.documents):
            counts = Counter(words(f"{document.title} {document.text}"))
            entries += [(self._words.setdefault(word, len(self._words)), place, count) for word, count in counts.items()]
        n = len(self.documents)
        word, places, count = np.array(entries, np.int64).reshape(-1, 3).T
        lengths = np.bincount(places, count, n)
        norm = K1 * (1 - B + B * lengths / max(1.0, lengths.mean() if n else 1.0))
        having = np.bincount(word, minlength=len(self._words))
        idf = np.log(1 + (n - having + 0.5) / (having + 0.5))
        order = np.argsort(word, kind="stable")
        self._places = places[order].astype(np.int32)
        self._scores = (idf[word] * count / (count + norm[places]))[order]
        self._starts = np.concatenate([[0], np.cumsum(having)])  # of each word's postings

    def search(self, query: str, top: int) -> list[tuple[Document, float]]:
        known = [(self._words[word], count) for word, count in counted(query) if word in self._words]
        if not known or top < 1:
            return []
        parts = [(slice(self._starts[word], self._starts[word + 1]), count) for word, count in known]
        places = np.concatenate([self._places[part] for part, _ in parts])
        weights = np.concatenate([self._scores[part] * count for part, count in parts])
        scores = np.bincount(places, weights, len(self.documents))
        candidates = np.unique(places)
        if len(candidates) > top:  # all that are as good as the last one wanted, then the order of the corpus
            line = np.partition(scores[candidates], -top)[-top]
            candidates = candidates[scores[candidates] >= line]
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:top]
        return [(self.documents[place], float(scores[place])) for place in best]

    def get(self, id: str) -> Document | None:
        return self._by_id.get(id)


class OnDisk:
    """A Tantivy index in a folder, opened where it is that of the corpus as it is now, and otherwise made.

    It is made in a folder beside it, which takes the name at the end: an index that is there is whole. Where the corpus is
    gone, the index that was made of it is used.
    """

    def __init__(self, corpus: Path, folder: Path):
        try:
            self._tantivy = tantivy = importlib.import_module("tantivy")
        except ImportError:
            raise ValueError(f"{folder}: an index on disk needs tantivy: pip install 'jaxagent[search]'") from None
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("id", stored=True, tokenizer_name="raw")
        for name in ("title", "text"):
            builder.add_text_field(name, stored=True)
        self._schema = builder.build()
        if not _is_of(folder, corpus):
            self._make(corpus, folder)
        self._index = tantivy.Index(self._schema, path=str(folder))

    def _make(self, corpus: Path, folder: Path) -> None:
        if folder.exists() and not (folder / "meta.json").exists() and any(folder.iterdir()):
            raise ValueError(f"{folder}: an index or an empty folder is wanted, something else is in it")
        stamp, documents = _stamp(corpus), read_corpus(corpus)
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        new.chmod(0o755)  # as other folders: an index may be shared
        try:
            index = self._tantivy.Index(self._schema, path=str(new))
            writer = index.writer()
            for document in documents:
                writer.add_document(self._tantivy.Document(id=document.id, title=document.title, text=document.text))
            writer.commit()
            writer.wait_merging_threads()
            (new / _STAMP).write_text(json.dumps(stamp))
            if folder.exists() and not _is_of(folder, corpus):  # another process may have been faster
                shutil.rmtree(folder)
            if not folder.exists():
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def search(self, query: str, top: int) -> list[tuple[Document, float]]:
        kinds, either = self._tantivy.Query, self._tantivy.Occur.Should
        parts = [
            (either, kinds.boost_query(kinds.term_query(self._schema, name, word), float(count)))
            for word, count in counted(query)
            for name in ("title", "text")
        ]
        return self._found(kinds.boolean_query(parts), top) if parts and top > 0 else []

    def get(self, id: str) -> Document | None:
        found = self._found(self._tantivy.Query.term_query(self._schema, "id", id), 1)
        return found[0][0] if found else None

    def _found(self, query: Any, top: int) -> list[tuple[Document, float]]:
        searcher = self._index.searcher()
        hits = [(searcher.doc(address), score) for score, address in searcher.search(query, top).hits]
        return [(Document(*(doc.get_first(name) for name in ("id", "title", "text"))), score) for doc, score in hits]


def _stamp(corpus: Path) -> dict[str, int]:
    """What a file that was changed has different."""
    found = corpus.stat() if corpus.is_file() else None
    return {"bytes": found.st_size, "changed_ns": found.st_mtime_ns} if found else {}


def _is_of(folder: Path, corpus: Path) -> bool:
    """Whether a whole index is in a folder, and no other corpus's."""
    try:
        known = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return not corpus.is_file() or bool(known == _stamp(corpus))


def read_corpus(path: str | Path) -> list[Document]:
    """The documents of a file, see `each_document`."""
    return list(each_document(path))


def each_document(path: str | Path) -> Iterator[Document]:
    """The documents of a JSONL file: `title` and `text`, or Search-R1's `contents`, whose first line is the title; and `id`,
    by default the number of the line.

    Raises ValueError naming file, line and fault.
    """
    seen = dict[str, int]()
    for number, record in numbered(path):
        if "contents" in record:
            title, _, text = str(record["contents"]).partition("\n")
            title = title.strip('"')
        elif "text" in record:
            title, text = str(record.get("title", "")), str(record["text"])
        else:
            raise ValueError(f"{path}, line {number}: missing text or contents; got {', '.join(record) or 'nothing'}")
        id_ = str(record.get("id", number))
        if id_ in seen:
            raise ValueError(f"{path}, line {number}: the id {id_!r} is that of line {seen[id_]}")
        seen[id_] = number
        yield Document(id_, title, text)


def open_index(corpus: str, folder: str = "") -> Index:
    """The index of a corpus file, in memory or in `folder`; made once for a file as it is."""
    path = Path(corpus)
    return _opened(corpus, folder, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=4)
def _opened(corpus: str, folder: str, changed_ns: int) -> Index:
    return OnDisk(Path(corpus), Path(folder)) if folder else Bm25(read_corpus(corpus))


def listed(found: Sequence[tuple[Document, float]], chars: int) -> str:
    """Search results for a policy: `[id] title` and the beginning of each text."""
    if not found:
        return "nothing found"
    return "\n".join(f"[{d.id}] {d.title}\n{d.text[:chars]}{'...' * (len(d.text) > chars)}" for d, _ in found)
