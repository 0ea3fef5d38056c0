"""A sandbox server as a child process of the trainer: started, watched and started again, and gone when it is gone.

The server's environment holds nothing but its own needs, so that no key of the trainer's is in reach of a program.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .wire import SandboxStartError

_START_S = 30.0
_STOP_S = 10.0


class EmbeddedServer:
    """`with EmbeddedServer(functions=("my.module",)) as server: SandboxClient(server.url, server.token)`."""

    def __init__(
        self,
        functions: Sequence[str] = (),
        code: str = "auto",
        min_isolation: str = "L2",
        token_file: str | Path | None = None,
        log_file: str | Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Nothing starts before start().

        Args:
          functions: modules with session_functions(options), registered at the server
          code: require, auto or off; see sandbox-server --help
          token_file: made if missing; None is a private temporary one
          log_file: gets the server's standard error; None keeps it for the text of a start that failed
          options: further flags of sandbox-server
        """
        self._flags = [f"--functions={','.join(functions)}", f"--code={code}", f"--min-isolation={min_isolation}"]
        self._flags += options
        self._given_token_file, self._log_file = token_file, log_file
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: dict[str, Any] = {}
        self._restarts = 0
        self._keeper: _Keeper | None = None
        self.url = self.token = self.level = self.ready_line = ""

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and returns when it serves. Raises SandboxStartError with the server's own sentence."""
        with self._lock:
            if self.alive():
                return
            try:
                self._start(port=0)
            except SandboxStartError:
                self.stop()
                raise

    def alive(self) -> bool:
        """Returns whether the server's process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def restart(self, only_if_dead: bool = False) -> None:
        """Ends the server, if it still runs, and starts it at the same port with the same token; sessions are lost.

        `only_if_dead`: do nothing to a server that runs, so that of several who notice its death one starts it again.
        """
        with self._lock:
            if only_if_dead and self.alive():
                return
            if not self.url:
                raise SandboxStartError("wanted a server that was started before, got none: call start()")
            self._end()
            self._restarts += 1  # before anyone can be answered by the new one
            self._start(port=int(self.url.rpartition(":")[2]))

    def restarts(self) -> int:
        """Returns how often it was started again."""
        return self._restarts

    def stop(self) -> None:
        """Ends the server and removes its temporary files. Safe to repeat."""
        with self._lock:
            self._end()
            if self._keeper:
                self._keeper.stop()
                self._keeper = None
            if self._directory:
                self._directory.cleanup()
                self._directory = None

    def _start(self, port: int) -> None:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="sandbox-server-")
        if self._keeper is None:
            self._keeper = _Keeper()
        token_file = self._given_token_file or Path(self._directory.name, "token")
        log = Path(self._log_file or Path(self._directory.name, "log"))
        with log.open("ab") as stream:
            said_before = stream.tell()
            process = self._process = self._keeper.run(lambda: self._spawn(port, token_file, stream))
        line = _first_line(process, _START_S)
        try:
            ready = json.loads(line)
        except ValueError:
            self._end()
            said = log.read_bytes()[said_before:].decode(errors="replace").strip()
            raise SandboxStartError(said.removeprefix("sandbox-server: ") or f"no ready line within {_START_S:g} s") from None
        self.ready_line = line.decode().strip()
        self.url, self.level = ready["url"], ready["level"]
        self.token = Path(token_file).read_text().strip()

    def _spawn(self, port: int, token_file: str | Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "sandbox_client.server", f"--port={port}", f"--token-file={token_file}"]
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "SYSTEMROOT") if name in os.environ}
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        return subprocess.Popen(
            [*command, *self._flags, f"--parent={os.getpid()}"],
            env={**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,  # never written: its closing tells the server that we are gone
            stdout=subprocess.PIPE,
            stderr=log,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class _Keeper:
    """A thread that starts processes and then only lives: a process set to die with its parent dies with its thread."""

    def __init__(self) -> None:
        self._work: Callable[[], subprocess.Popen[bytes]] | None = None
        self._result: list[subprocess.Popen[bytes] | OSError] = []
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._keep, daemon=True, name="sandbox-server")
        self._thread.start()

    def run(self, work: "Callable[[], subprocess.Popen[bytes]]") -> "subprocess.Popen[bytes]":
        self._work = work
        self._asked.release()
        self._answered.acquire()
        result = self._result.pop()
        if isinstance(result, OSError):
            raise SandboxStartError(f"cannot start {sys.executable}: {result}")
        return result

    def stop(self) -> None:
        self._work = None
        self._asked.release()
        self._thread.join()

    def _keep(self) -> None:
        while self._asked.acquire() and self._work:
            try:
                self._result.append(self._work())
            except OSError as error:
                self._result.append(error)
            self._answered.release()


def _first_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """Returns what the server says first, b"" when it ends or says nothing in time."""
    said: list[bytes] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda out: said.append(out.readline()), args=(process.stdout,), daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout_s
    reader.join(max(0.0, deadline - time.monotonic()))
    return said[0] if said else b""
