"""What stands behind every fake service: programs really run, in a directory, and files really lie there."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web


@dataclass
class Run:
    """How a program ended; `code` is None when its time was over."""

    stdout: bytes
    stderr: bytes
    code: int | None


class Machine:
    """One directory and the programs that run in it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.executions: Counter[str] = Counter()
        self.running: set[int] = set()

    async def run(
        self,
        words: Sequence[str],
        timeout_s: float | None,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Run:
        """Runs a program to its end, or to the end of its time; a cancelled caller leaves it running."""
        self.executions[words[-1]] += 1
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=self.place / (cwd or ""),
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(self.place), **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.running.add(process.pid)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        drained = [asyncio.ensure_future(drain(process.stdout)), asyncio.ensure_future(drain(process.stderr))]
        with contextlib.suppress(OSError):
            process.stdin.write(stdin)
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
            code = process.returncode
        except TimeoutError:
            code = None
        finally:
            self.kill(process.pid)
            await asyncio.shield(process.wait())
        stdout, stderr = [bytes(data) for data in await asyncio.gather(*drained)]
        return Run(stdout, stderr, code)

    def kill(self, pid: int) -> None:
        """Ends a program and its children."""
        if pid in self.running:
            self.running.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def file(self, path: str, home: str) -> Path:
        """Returns where a path of the service's lies here: `home` is this directory."""
        found = Path(path)
        if found.is_absolute() and home and found.is_relative_to(home):
            found = found.relative_to(home)
        return self.place / found


async def drain(stream: asyncio.StreamReader) -> bytearray:
    data = bytearray()
    while part := await stream.read(1 << 16):
        data += part
    return data


@contextlib.asynccontextmanager
async def serving(app: web.Application, keepalive_s: float = 30.0) -> AsyncIterator[str]:
    """Serves `app` on a free port of the loopback address; yields its URL."""
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=keepalive_s, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
