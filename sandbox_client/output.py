"""What a child prints: each stream drained while the program runs, its head and tail kept, the rest counted."""

import asyncio
import os

_READ_BYTES = 1 << 16
_BURST_BYTES = 1 << 18  # after so much output in one go the loop turns to the others
_BURST_PAUSE_S = 0.005
_PATIENCE_S = 0.002  # most programs have ended by then, and what they wrote fits into the pipe


class Output:
    """One stream of a child: drained while the program runs, first and last half of `limit` kept, the rest counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = loop
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._pause: asyncio.TimerHandle | None = None
        self.at_end = False  # no process holds the writing end any more
        self._used = False

    def begin(self, limit: int) -> None:
        """Starts a new record."""
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self._total = self._burst = 0
        self._used = True
        if self._descriptor >= 0:
            self._pause = self._loop.call_later(_PATIENCE_S, self._resume)

    def _read(self) -> int:
        """Reads once. Returns the number of bytes, 0 at the end, -1 when there is nothing now."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return -1
        self._total += len(data)
        self.at_end = not data
        room = max(0, self._half - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half + _READ_BYTES:
            del self._tail[: len(self._tail) - self._half]
        return len(data)

    def _readable(self) -> None:
        count = self._read()
        self._burst += count
        if count == 0:  # every writer is gone
            self._loop.remove_reader(self._descriptor)
        elif self._burst >= _BURST_BYTES:
            self._burst = 0
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_BURST_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._readable)

    def _drain(self, least: int) -> None:
        """Stops listening and takes what is still in the pipe, until a read brings less than `least` bytes."""
        if self._pause:
            self._pause.cancel()
            self._pause = None
        elif self._used and self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
        if self._used and self._descriptor >= 0:
            for _ in range(32):  # bounded, for a background program may refill the pipe as fast
                if self._read() < least:
                    break

    def end(self) -> tuple[str, int]:
        """Returns the text of the record and the count of bytes dropped."""
        self._drain(_READ_BYTES)
        del self._tail[: max(0, len(self._tail) - self._half)]
        dropped = self._total - len(self._head) - len(self._tail)
        if not dropped:
            return (self._head + self._tail).decode(errors="replace"), 0
        gap = f"\n[... {dropped} bytes dropped ...]\n"
        return self._head.decode(errors="replace") + gap + self._tail.decode(errors="replace"), dropped

    def close(self) -> None:
        """Closes the pipe; the record can still be asked for."""
        self._drain(1)  # to its end, should every writer be gone
        os.close(self._descriptor)
        self._descriptor = -1
