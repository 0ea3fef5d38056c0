"""The server's end of one child: its line, its two streams, its end. What comes from it is hostile.

A child is single-use. Frames are bounded and strictly decoded; a word out of turn ends it.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from . import frames, wire
from .output import Output

OrderEnd = Callable[[int, bytes], None]

_HEAD_MAX_BYTES = wire.REQUEST_MAX_BYTES + (1 << 16)
_READ_BYTES = 1 << 16
_EXIT_PATIENCE_S = 2.0


class ChildDied(Exception):
    """The child is gone. `cause`: exit, timeout, protocol, closed, expired, killed (by nobody here: neither its program nor
    this server); `status` as waitpid gives it.
    """

    def __init__(self, cause: str, status: int | None, oom: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.oom = oom


class Child:
    """One locked process. Ask it one thing at a time."""

    def __init__(self, order_end: OrderEnd, number: int, line: socket.socket, out: int, err: int) -> None:
        """`order_end` tells the zygote that the child of a number shall end; `line` and two pipes lead to it."""
        self._order_end = order_end
        self._loop = asyncio.get_running_loop()
        self._line = line
        self._number = number
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._waiter: asyncio.Future[tuple[bytes, bytes, bytes]] | None = None
        self._cause = "exit"
        self._gone = False
        self._end: tuple[int | None, bool] = (None, False)
        self.ordered: float | None = None  # when its end was
        self.deadline: float | None = None  # of the operation under way, on the loop's clock
        self.out, self.err = Output(self._loop, out), Output(self._loop, err)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.adopted: asyncio.Future[None] = self._loop.create_future()  # of a copy: it has its own files
        self.stem: Child | None = None
        self.copying = asyncio.Lock()  # it copies itself once at a time; what follows for a copy takes place beside the next
        self._copies = 0
        self._retired = False
        self._loop.add_reader(line.fileno(), self._readable)

    @property
    def alive(self) -> bool:
        return not self._gone

    @property
    def cause(self) -> str:
        """Returns why it ended, as ChildDied says it."""
        return self._cause

    @property
    def number(self) -> int:
        return self._number

    @property
    def line(self) -> socket.socket:
        return self._line

    def retire(self) -> None:
        """Ends the child as soon as the last of its copies has ended: they live in its namespaces."""
        self._retired = True
        if not self._copies:
            self.kill("closed")

    def count_copy(self, change: int) -> None:
        """Counts a copy more or less."""
        self._copies += change
        if self._retired and not self._copies:
            self.kill("closed")

    @property
    def copies(self) -> int:
        return self._copies

    def listen(self, timeout_s: float) -> asyncio.Future[tuple[bytes, bytes, bytes]]:
        """Returns the future of the next frame: kind, head, blob. It fails with ChildDied."""
        if self._gone:
            raise ChildDied(self._cause, *self._end)
        self._waiter = self._loop.create_future()
        self.deadline = self._loop.time() + timeout_s + wire.KILL_MARGIN_S
        return self._waiter

    async def ask(
        self, kind: bytes, head: bytes, timeout_s: float, blob: bytes = b"", descriptors: tuple[int, ...] = ()
    ) -> tuple[dict[str, Any], bytes]:
        """Sends one request and returns the reply's head and bytes. Raises ChildDied.

        `descriptors` go with the first byte, and stay the caller's to close.
        """
        if self._gone:
            await self.ended  # only then it is known how
        reply = self.listen(timeout_s)
        if descriptors:
            with contextlib.suppress(OSError):  # it has hung up: the reader notices
                socket.send_fds(self._line, [kind], descriptors)
            self._send((frames.FRAME.pack(kind, len(head), len(blob)) + head + blob)[1:])
        else:
            self._send(frames.FRAME.pack(kind, len(head), len(blob)) + head + blob)
        word, text, data = await reply
        try:
            if word != frames.REPLY or (data and kind != frames.READ):
                raise ValueError("out of turn")
            return wire.decode(text), data
        except ValueError:
            self.kill("protocol")
            await self.ended
            raise ChildDied("protocol", None, False) from None

    def kill(self, cause: str) -> None:
        """Ends the child; whoever waits for it learns `cause`."""
        if not self._gone:
            self._gone = True
            self._cause = cause
            self.ordered = self._loop.time()
            self._loop.remove_reader(self._line.fileno())
            if self._outgoing:
                self._loop.remove_writer(self._line.fileno())
            # the line is closed when it is dead: closed now, it would wake the child to read the end of it
            self._order_end(self._number, frames.BURY if cause == "exit" else frames.KILL)
            # should the kernel never finish with it, callers still get their answer
            self._loop.call_later(_EXIT_PATIENCE_S, self.finish, None, False)

    def finish(self, status: int | None, oom: bool, outside: bool = False) -> None:
        """Called when the zygote has reaped the child; `outside`: neither it nor this server has ended it."""
        if self.ended.done():
            return
        self.kill(self._cause)
        if outside and self._cause == "exit":
            self._cause = "killed"
        self._end = status, oom
        self.ended.set_result(None)
        if self.stem:
            self.stem.count_copy(-1)
        self._line.close()
        self.out.close()
        self.err.close()
        if self._waiter and not self._waiter.done():
            self._waiter.set_exception(ChildDied(self._cause, status, oom))

    def _send(self, data: bytes) -> None:
        try:
            sent = self._line.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has hung up: the reader notices
        if sent < len(data):
            self._outgoing += data[sent:]
            self._loop.add_writer(self._line.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            del self._outgoing[: self._line.send(self._outgoing)]
        except OSError:
            self._outgoing.clear()
        if not self._outgoing:
            self._loop.remove_writer(self._line.fileno())

    def _readable(self) -> None:
        try:
            data = self._line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.kill("exit")
            return
        self._buffer += data
        if len(self._buffer) < frames.FRAME.size:
            return
        kind, head_length, blob_length = frames.FRAME.unpack_from(self._buffer)
        size = frames.FRAME.size + head_length + blob_length
        waiter = self._waiter
        if waiter is None or waiter.done() or len(self._buffer) > size:
            self.kill("protocol")
            return
        if head_length > _HEAD_MAX_BYTES or blob_length > wire.FILE_MAX_BYTES:
            self.kill("protocol")
            return
        if len(self._buffer) < size:
            return
        body = bytes(self._buffer[frames.FRAME.size :])
        self._buffer.clear()
        self._waiter = self.deadline = None
        waiter.set_result((kind, body[:head_length], body[head_length:]))
