"""Servers of worlds on this machine, each by one function that answers whatever is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def answering(handlers: Sequence[Callable[[web.Request], Awaitable[web.StreamResponse]]]) -> AsyncIterator[str]:
    """The addresses, with commas between. The path without its first slash is the request's `match_info["name"]`."""
    urls, runners = [], []
    for handler in handlers:
        app = web.Application()
        app.router.add_route("*", "/{name:.*}", handler)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
    try:
        yield ",".join(urls)
    finally:
        for runner in runners:
            await runner.cleanup()
