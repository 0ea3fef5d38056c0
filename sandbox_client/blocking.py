"""The client for scripts and notebooks: the same operations, each of which waits for its result.

Its event loop lives in a thread of its own, so that it works where another loop runs already.
"""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from . import wire
from .client import SandboxClient, Session, Snapshot, Ticket
from .wire import CallResult, ExecResult, GradeResult

T = TypeVar("T")


class _Loop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a KeyboardInterrupt must not leave it running
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingClient:
    """`with BlockingClient(url, token) as client: print(client.run_code("print(1)").stdout)`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes what SandboxClient takes."""
        self._loop = _Loop()
        self._client = SandboxClient(*arguments, **options)
        self._closed = False

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def run_code(self, code: str, *arguments: Any, **options: Any) -> ExecResult:
        """Runs a program in a fresh sandbox; see SandboxClient.run_code."""
        return self._loop.run(self._client.run_code(code, *arguments, **options))

    def open_session(self, key: str, *arguments: Any, **options: Any) -> "BlockingSession":
        """Returns the session of `key`; see SandboxClient.open_session."""
        return BlockingSession(self._loop, self._loop.run(self._client.open_session(key, *arguments, **options)))

    def join(self, ticket: Ticket) -> "BlockingSession":
        """Returns the session that another process has handed over; see SandboxClient.join."""
        return BlockingSession(self._loop, self._client.join(ticket))

    def ready(self) -> wire.Readiness:
        """Returns what the server is and what it lacks."""
        return self._loop.run(self._client.ready())

    def metrics(self) -> dict[str, float]:
        """Returns counts since the client was made, and the state of its endpoints."""
        return self._client.metrics()

    def close(self) -> None:
        """Closes the connections and ends the thread. Safe to repeat."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._client.close())
            self._loop.stop()


class BlockingSession:
    """A session whose operations wait; see Session."""

    def __init__(self, loop: _Loop, session: Session) -> None:
        self._loop, self._session = loop, session

    def __enter__(self) -> "BlockingSession":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def exec(self, code: str, *arguments: Any, **options: Any) -> ExecResult:
        """Runs a program in the session."""
        return self._loop.run(self._session.exec(code, *arguments, **options))

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float = 10.0) -> CallResult:
        """Calls a fixed function of the session."""
        return self._loop.run(self._session.call(name, arguments, timeout_s))

    def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, and the directories above it."""
        self._loop.run(self._session.write_file(path, content))

    def read_file(self, path: str) -> bytes:
        """Returns a file's content."""
        return self._loop.run(self._session.read_file(path))

    def grade(self, code: str, *arguments: Any, **options: Any) -> GradeResult:
        """Judges the session's files; see Session.grade."""
        return self._loop.run(self._session.grade(code, *arguments, **options))

    def ticket(self) -> Ticket:
        """Returns what opens this session alone."""
        return self._session.ticket()

    def snapshot(self) -> Snapshot:
        """Returns this point as the beginning of other sessions."""
        return self._loop.run(self._session.snapshot())

    def reset(self) -> None:
        """Returns the session to how it was opened."""
        self._loop.run(self._session.reset())

    def close(self) -> None:
        """Ends the session."""
        self._loop.run(self._session.close())
