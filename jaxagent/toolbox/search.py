"""Tools that search: in an index of this process, or at a server that speaks Search-R1's `/retrieve`."""

from __future__ import annotations

from jaxagent.toolbox.kit import Kit, Task, Workplace
from jaxagent.toolbox.retrieval import listed, open_index
from jaxagent.toolbox.web import Service, wanted_url
from jaxagent.tools import PURE_ATTEMPTS, Tool, ToolFailed, tool
from sandbox_client import ProtocolError

MAX_QUERY_CHARS = 1000


def asked(query: str) -> str:
    """The query. Raises ToolFailed for one that is too long."""
    if len(query) > MAX_QUERY_CHARS:
        raise ToolFailed(f"error: a query of at most {MAX_QUERY_CHARS} characters is wanted, got {len(query)}")
    return query


def search(corpus: str, top: int = 3, chars: int = 400, index: str = "") -> Kit:
    """The kit `search`: `search` finds documents, `open` shows one whole.

    Args:
        corpus: JSONL, see `retrieval.read_corpus`.
        top: documents found.
        chars: shown of each.
        index: folder of an index on disk, for large corpora; empty keeps one in memory.
    """
    found = open_index(corpus, index)

    def search(query: str) -> str:
        """Finds documents by their words; shows the beginning of each."""
        return listed(found.search(asked(query), top), chars)

    def open(id: str) -> str:
        """Shows a document whole, by its id."""
        document = found.get(id)
        if document is None:
            raise ToolFailed(f"error: no document {id!r}")
        return f"[{document.id}] {document.title}\n{document.text}"

    def tools(place: Workplace, task: Task) -> list[Tool]:
        return [tool(function, pure=True) for function in (search, open)]

    return Kit(tools)


def retriever(url: str, top: int = 3, timeout_s: float = 10.0) -> Kit:
    """The kit `retriever`: a `search` tool that asks a server. Args: url: without `/retrieve`."""
    base = wanted_url(url, "toolbox.retriever.url").removesuffix("/retrieve")

    def tools(place: Workplace, task: Task) -> list[Tool]:
        service = Service(place, base, timeout_s=timeout_s)

        async def search(query: str) -> str:
            """Finds documents."""
            wanted = {"queries": [asked(query)], "topk": top, "return_scores": True}
            reply = await service.ask_json("POST", "/retrieve", wanted)
            try:
                documents = [str(hit["document"]["contents"]) for hit in reply["result"][0]]
            except (KeyError, IndexError, TypeError):
                raise ProtocolError(f'{base}/retrieve: {{"result": [[...]]}} was wanted, got {reply!r:.200}', 1) from None
            entries = []
            for number, contents in enumerate(documents, 1):
                title, _, text = contents.partition("\n")
                entries.append(f"Doc {number} (Title: {title}) {text}")
            return "\n".join(entries) or "nothing found"

        return [tool(search, timeout_s * (PURE_ATTEMPTS + 1), pure=True)]

    return Kit(tools)
