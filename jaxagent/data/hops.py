"""Questions over several hops, made of a corpus of one's own: documents that name each other, with a gap where the name stood.

A hop is a sentence of one document that names another by its title. The question tells each sentence with the next name left
out and calls what fills the gap by a letter, so that no hop can be skipped and nobody but a reader knows the answer:

    One document is titled "Kutora". A sentence there reads: "The mentor of Kutora is ____." Call what fills the gap A.
    A sentence in the document titled A reads: "The rival of A is ____." What fills the gap?
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxagent.toolbox.retrieval import Document

GAP = "____"
_LETTERS = "ABCDEFGH"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")
_TITLE_CHARS, _TITLE_WORDS = 3, 8  # at least, at most: shorter titles stand everywhere
_SENTENCE_CHARS = 300
QUOTE_WORDS = 3  # of a quote at least: to cite a word is not to cite, and a shorter sentence could not be cited
_CHAINS = 32  # of one start


@dataclass(frozen=True)
class Hop:
    """A sentence of document `id` that names the title `names`, once."""

    id: str
    sentence: str
    names: str

    @property
    def gapped(self) -> str:
        return self.sentence.replace(self.names, GAP)


def hops_of(documents: Sequence[Document]) -> dict[str, list[Hop]]:
    """The hops from every document that has some, by its id. Documents that share a title are left out."""
    counts = Counter(document.title for document in documents)
    titles = {tuple(_WORD.findall(title)): title for title, count in counts.items() if count == 1 and _usable(title)}
    longest = max(map(len, titles), default=0)
    found: dict[str, list[Hop]] = {}
    for document in (one for one in documents if counts[one.title] == 1):
        hops = [
            Hop(document.id, sentence, name)
            for sentence in _SENTENCE.split(document.text)
            if len(sentence) <= _SENTENCE_CHARS and len(sentence.split()) >= QUOTE_WORDS and not set("[]") & set(sentence)
            for name in _named(sentence, titles, longest)
            if name != document.title and sentence.count(name) == 1 and document.text.count(sentence) == 1
        ]
        gaps = Counter(hop.gapped for hop in hops)
        if kept := [hop for hop in hops if gaps[hop.gapped] == 1]:  # else two names would be right
            found[document.id] = kept
    return found


def _usable(title: str) -> bool:
    return len(title) >= _TITLE_CHARS and len(_WORD.findall(title)) <= _TITLE_WORDS and not set("[]") & set(title)


def _named(sentence: str, titles: Mapping[tuple[str, ...], str], longest: int) -> Iterator[str]:
    """The titles that a sentence names as whole words, the longest where one is in another."""
    words = _WORD.findall(sentence)
    place = 0
    while place < len(words):
        for length in range(min(longest, len(words) - place), 0, -1):
            title = titles.get(tuple(words[place : place + length]))
            if title is not None and title in sentence:
                yield title
                place += length
                break
        else:
            place += 1


def chains(documents: Sequence[Document], lengths: Sequence[int], seed: int = 0) -> dict[str, list[list[Hop]]]:
    """Chains of hops by the id of the document where they start, some for each start, no title twice in a chain.

    One whose question tells a name that is to be found, as where a sentence names two documents of the chain, is none.
    """
    hops, by_title = hops_of(documents), {document.title: document.id for document in documents}
    titles = {document.id: document.title for document in documents}
    found: dict[str, list[list[Hop]]] = {}
    for start in hops:
        rng = random.Random(f"{seed}/{start}/chains")
        drawn: dict[tuple[Hop, ...], None] = {}
        for _ in range(4 * _CHAINS):
            if len(drawn) >= _CHAINS:
                break
            chain, here, seen = list[Hop](), start, {titles[start]}
            for _ in range(rng.choice(lengths)):
                if not (ahead := [hop for hop in hops.get(here, ()) if hop.names not in seen]):
                    break
                chain.append(rng.choice(ahead))
                seen.add(chain[-1].names)
                here = by_title[chain[-1].names]
            if len(chain) in lengths and not any(hop.names in asked(chain, titles[start]) for hop in chain):
                drawn[tuple(chain)] = None
        if drawn:
            found[start] = [list(chain) for chain in drawn]
    return found


def asked(chain: Sequence[Hop], start: str) -> str:
    """The question of a chain. Args: start: the title of its first document."""
    told = [f'One document is titled "{start}".']
    for number, hop in enumerate(chain):
        here = f"A sentence in the document titled {_LETTERS[number - 1]} reads" if number else "A sentence there reads"
        gapped = hop.gapped
        for earlier in range(number):  # names that are asked for must not stand in what follows
            gapped = gapped.replace(chain[earlier].names, _LETTERS[earlier])
        ends = f"Call what fills the gap {_LETTERS[number]}." if number + 1 < len(chain) else "What fills the gap?"
        told.append(f'{here}: "{gapped}" {ends}')
    return " ".join(told)
