"""`jaxagent retrieve`: a search server with Search-R1's request and reply, so that its clients work with it unchanged.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id": "7", "contents": "\"title\"\ntext"}, "score": 4.2}]]}

Without `return_scores` a result is the list of the documents themselves. One server serves many trainers, and holds the index
once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from jaxagent.toolbox.retrieval import Document, Index, open_index

TOP = 3  # Search-R1's
MAX_TOP, MAX_QUERIES, MAX_QUERY_CHARS = 100, 1024, 10_000


def app(index: Index, top: int = TOP) -> web.Application:
    """The server's one door and `GET /health`."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, wanted, scores = _understood(await request.json(), top)
        except ValueError as fault:
            return web.json_response({"error": str(fault)}, status=400)
        found = await asyncio.to_thread(lambda: [index.search(query, wanted) for query in queries])
        result = [[{"document": _told(d), "score": s} if scores else _told(d) for d, s in hits] for hits in found]
        return web.json_response({"result": result})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    made = web.Application(client_max_size=4 << 20)
    made.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return made


def _understood(body: Any, top: int) -> tuple[list[str], int, bool]:
    """Queries, how many documents, whether scores are wanted. Raises ValueError."""
    if not isinstance(body, dict) or not isinstance(body.get("queries"), list):
        raise ValueError('{"queries": [...]} is wanted')
    queries, wanted = body["queries"], body.get("topk") or top
    if len(queries) > MAX_QUERIES or not all(isinstance(query, str) and len(query) <= MAX_QUERY_CHARS for query in queries):
        raise ValueError(f"queries must be at most {MAX_QUERIES} texts of at most {MAX_QUERY_CHARS} characters")
    if type(wanted) is not int or not 1 <= wanted <= MAX_TOP:
        raise ValueError(f"topk must be 1 to {MAX_TOP}, got {wanted!r}")
    return queries, wanted, bool(body.get("return_scores"))


def _told(document: Document) -> dict[str, str]:
    return {"id": document.id, "contents": document.contents}


def retrieve(corpus: str, port: int, host: str, index: str, top: int) -> int:
    """The command. Raises ValueError for a corpus that cannot be read."""
    found = open_index(corpus, index)
    print(f"searching {corpus}: http://{host}:{port}/retrieve", flush=True)
    web.run_app(app(found, top), host=host, port=port, print=None)
    return 0
