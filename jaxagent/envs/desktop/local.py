"""Guests of our own: desktops that run here, each inside the locks of the sandbox. Needs Xvfb, xdotool and tkinter.

What the policy clicks and types reaches a program, so all of a desktop (X server, programs, the server of its protocol) runs
behind `sandbox_client/confine.py`, at level L2: a private tree, no network, a user of its own. It is spoken to over a socket
that listened before the lock closed. Where the machine gives no such lock no desktop starts, and the error says why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import sandbox_client
from jaxagent.envs.desktop.guest import GuestFault

_HERE = Path(__file__).parent
_PROGRAMS = ("Xvfb", "xdotool")
_START_S = 120.0
_MEMORY_MB = 4096  # of address space
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_VARIABLES = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
SCREEN = (800, 600)


def python() -> Path:
    """The interpreter that desktops run: the one behind a virtual environment, whose packages they do not need."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).absolute()


def missing() -> str:
    """What is to be installed for a desktop, in words; empty where all is there."""
    if absent := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"it needs the program {absent[0]}, which is not in PATH; install it, as in apt install xvfb xdotool"
    if wide := [path for path in _readable() if Path.home().resolve().is_relative_to(path)]:
        return (
            f"it needs Python, {' and '.join(_PROGRAMS)} outside of {wide[0]}, all of which a desktop would read: home is there"
        )
    if importlib.util.find_spec("_tkinter") is None:
        return f"it needs the package tkinter for {python()}; install it, as in apt install python3-tk"
    if hidden := [path for path in _readable() if path.startswith(("/tmp/", "/var/tmp/"))]:
        return f"it needs the program {hidden[0]} outside of /tmp, which is each desktop's own"
    return ""


def _readable() -> list[str]:
    """What a desktop reads beside the tools of the system."""
    places = [python().resolve().parents[1]]
    places += [Path(found).resolve().parents[1] for program in _PROGRAMS if (found := shutil.which(program))]
    return list(dict.fromkeys(str(place) for place in places if not place.is_relative_to("/usr")))


def command(programs: Sequence[str]) -> list[str]:
    """What starts a desktop, with a listening socket as its standard input."""
    sources = {name: (_HERE / f"{name}.py").read_text() for name in programs}
    folders = dict.fromkeys(str(Path(found).parent) for program in _PROGRAMS if (found := shutil.which(program)))
    path = ":".join([*folders, "/usr/local/bin", "/usr/bin", "/bin"])
    about = {"readable": _readable(), "path": path, "memory_mb": _MEMORY_MB}
    # The interpreter behind the virtual environment finds what the lock imports where this one does.
    places = [str(Path(sandbox_client.__file__).absolute().parents[1]), *(place for place in sys.path if place)]
    start = f"import sys; sys.path[:0] = {places!r}; from sandbox_client.confine import main; main()"
    inside = [str(python()), "-P", "-c", (_HERE / "machine.py").read_text(), json.dumps(sources), *map(str, SCREEN)]
    return [str(python()), "-P", "-c", start, json.dumps(about), *inside]


class Desk:
    """One desktop. It is started by a thread of its own, with which it would end, and lives until `close`."""

    def __init__(self, programs: Sequence[str]):
        if absent := missing():
            raise ValueError(f"a desktop cannot be started: {absent}")
        self.programs = programs
        self.url = ""
        self._fault = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._over, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, name="desk", daemon=True)
        self._thread.start()

    def start(self) -> str:
        """Waits until the desktop answers; returns its address. Raises GuestFault where it does not."""
        self._begun.wait()
        if self._fault:
            raise GuestFault(self._fault)
        return self.url

    @property
    def lost(self) -> bool:
        """Whether it has ended, or never started."""
        if self._over.is_set() or not self._begun.is_set():
            return self._over.is_set()
        return bool(self._fault) or self._process is None or self._process.poll() is not None

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _hold(self) -> None:
        try:
            with tempfile.TemporaryFile() as log:
                with socket.create_server(("127.0.0.1", 0)) as line:
                    url = f"http://127.0.0.1:{line.getsockname()[1]}"
                    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
                    process = subprocess.Popen(
                        command(self.programs), stdin=line.fileno(), stdout=log, stderr=log, env=given, start_new_session=True
                    )
                self._process = process
                try:
                    self._fault = self._wait(process, url, log)
                    self.url = url
                    self._begun.set()
                    while not self._over.wait(1.0) and process.poll() is None:
                        pass
                finally:
                    process.kill()  # the init of its namespace goes with it, and with that everything
                    process.wait()
        except OSError as error:
            self._fault = f"a desktop did not start: {type(error).__name__}: {error}"
        finally:
            self._begun.set()

    def _wait(self, process: subprocess.Popen[bytes], url: str, log: object) -> str:
        """What keeps it from answering."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until and not self._over.is_set():
            if process.poll() is not None:
                return f"a desktop did not start: {_last_words(log)}"
            with contextlib.suppress(urllib.error.URLError, TimeoutError, ConnectionError):
                # The socket listens already: this waits until somebody serves it.
                with _DIRECT.open(f"{url}/platform", timeout=5.0) as answer:
                    answer.read()
                return ""
        return f"a desktop did not start within {_START_S:g} s: {_last_words(log)}"


def _last_words(log: object) -> str:
    """The last line that a desktop wrote to its standard streams."""
    descriptor = log.fileno()  # type: ignore[attr-defined]
    text = os.pread(descriptor, 1 << 16, 0).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
