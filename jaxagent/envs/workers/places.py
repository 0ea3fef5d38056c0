"""Places that one episode at a time has: machines and servers that are no workers of ours; and a loop for who has none."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar


class Closed(Protocol):
    """What can be ended."""

    def close(self) -> None: ...


P = TypeVar("P", bound=Closed)
T = TypeVar("T")


class Places(Generic[P]):
    """Who comes when all are taken waits, in whatever loop."""

    def __init__(self, places: Sequence[P]):
        self.all = list(places)
        self._free, self._waiting = deque(places), deque[Future[P]]()
        self._lock = threading.Lock()

    async def take(self) -> P:
        """A place, to be given back."""
        future: Future[P] = Future()
        with self._lock:
            self._waiting.append(future)
            self._seat()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel() and not future.cancelled():  # it was granted while nobody waited any more
                self.give_back(future.result())
            raise

    def give_back(self, place: P) -> None:
        with self._lock:
            self._free.append(place)
            self._seat()

    def close(self) -> None:
        for place in self.all:
            place.close()

    def _seat(self) -> None:
        while self._waiting and self._free:
            future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(self._free.popleft())


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises, in a loop and a thread of its own: whoever asks may be in a loop that runs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(work))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return future.result()


def addresses_of(urls: str, whose: str) -> list[str]:
    """Addresses of `env.options.urls`, with commas. Raises ValueError where there are none, or one is no address."""
    found = [url.strip().rstrip("/") for url in urls.split(",") if url.strip()]
    counted(found, "urls")
    if wrong := [url for url in found if not url.startswith(("http://", "https://"))]:
        raise ValueError(f"env.options.urls must be those of {whose}, as in http://127.0.0.1:5000; got {wrong[0]!r}")
    return found


def counted(ids: Sequence[Any], named: str) -> None:
    """Raises ValueError where there is nothing, or one thing twice."""
    if not ids:
        raise ValueError(f"env.options.{named}: nothing is named")
    if len(set(ids)) < len(ids):
        raise ValueError(f"env.options.{named}: {max(ids, key=list(ids).count)!r} is named twice")
