"""`jaxagent view RUN --serve`: a run's page that follows it, over HTTP on loopback, with every episode instead of a selection.

    GET /TOKEN/                 the page
    GET /TOKEN/run              config, curves, evaluations; those of the run beside it
    GET /TOKEN/rows?from=N      what there is to know of episode N and those after it, and of their groups
    GET /TOKEN/episode?at=N     one episode with its tokens

Whoever has the token in the address reads the run; a Host that is not loopback, or another page's Origin, is refused. Files of
trajectories appear whole, so each is read once, by a thread of its own, and an episode is read again when it is opened.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxagent import badcases, view
from jaxagent.metrics import EVALUATIONS, want_alike
from jaxagent.types import Trajectory

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TEXT_CHARS = 3000  # of an episode that can be searched
_BATCH = 1000  # episodes of one answer
_POLL_S = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Index:
    """The episodes of runs, as rows without tokens, in the order in which they were found."""

    def __init__(self, workdirs: list[Path]):
        self.workdirs = workdirs
        self.rows: list[dict[str, Any]] = []
        self.groups: dict[str, list[dict[str, Any]]] = {}  # what separated their winners from their losers
        self.faults: list[str] = []  # files that could not be read
        self.reading = True  # for the first time
        self.epoch = 0  # counts how often the rows were dropped, because a file had been written anew
        self._places: list[tuple[Path, int]] = []
        self._read: dict[Path, int] = {}
        self._shelves = [view.shelf_of(workdir) for workdir in workdirs]
        self._tools = [False] * len(workdirs)

    def update(self) -> int:
        """Reads the files that have appeared since, and returns how many. A run that is resumed writes some of them anew."""
        there = {
            path: (number, path.stat().st_mtime_ns)
            for number, workdir in enumerate(self.workdirs)
            for path in sorted((workdir / "trajectories").glob("*.jsonl"))
        }
        if any(path not in there or there[path][1] != written for path, written in self._read.items()):
            self.epoch += 1
            self._read, self._places, self.rows, self.groups, self.faults = {}, [], [], {}, []
        new = [path for path in there if path not in self._read]
        for path in new:
            number, self._read[path] = there[path]
            try:
                self._take(number, path)
            except (ValueError, KeyError, TypeError, OSError) as error:
                self.faults.append(f"{path.name}: {type(error).__name__}: {error}")
        self.reading = False
        return len(new)

    def _take(self, number: int, path: Path) -> None:
        label, _, step = path.stem.rpartition("-") if path.stem[-1].isdigit() else (path.stem, "", "0")
        if not self._tools[number]:
            with path.open("rb") as lines:
                self._tools[number] = any(b'"tools": [{' in line for line in lines)
        for name, members in groupby(_lines(path), key=lambda pair: pair[1].group):
            group = list(members)
            key = f"{number}/{path.stem}/{name}"
            if facts := badcases.separated([t for _, t in group]):
                self.groups[key] = facts
            for start, t in group:
                row = self._row(t, label, int(step), self._tools[number])  # may raise: both get it, or neither
                self._places.append((path, start))
                self.rows.append({**row, "run": number, "family": key})

    def _row(self, t: Trajectory, label: str, step: int, has_tools: bool) -> dict[str, Any]:
        texts = [t.task, t.error]
        for turn in t.turns:
            texts += [turn.text, turn.reason, turn.error]
            texts += [f"{tool.name} {json.dumps(tool.arguments)} {tool.outcome} {tool.result}" for tool in turn.tools]
        about = view.about(t, label, step)
        text = "\n".join(filter(None, texts)).lower()[:_TEXT_CHARS]
        return {**about, "bad": badcases.kinds(t, has_tools), "plain": text, "length": [len(t.turns), len(t.tokens)]}

    def since(self, start: int) -> dict[str, Any]:
        """Rows from one on, the total, and the facts of their groups."""
        rows = self.rows[start : start + _BATCH]
        facts = {row["family"]: self.groups[row["family"]] for row in rows if row["family"] in self.groups}
        written = str([path.stat().st_mtime_ns for path in self._figures() if path.is_file()])
        state = {
            "written": written,
            "total": len(self.rows),
            "reading": self.reading,
            "epoch": self.epoch,
            "faults": self.faults,
        }
        return {"rows": rows, "groups": facts, **state}

    def _figures(self) -> list[Path]:
        """What `run` reads."""
        return [workdir / name for workdir in self.workdirs for name in ("metrics.jsonl", EVALUATIONS, "eval.json")]

    def episode(self, number: int) -> dict[str, Any]:
        """One episode whole, with the texts of its tokens. Raises IndexError where there is none."""
        if not 0 <= number < len(self._places):
            raise IndexError(number)
        path, start = self._places[number]
        row = self.rows[number]
        shelf = self._shelves[row["run"]]
        with path.open("rb") as file:
            file.seek(start)
            t = Trajectory.from_json(json.loads(file.readline()))
        texts = {str(i): shelf.piece(i) for i in set(t.tokens)} if shelf.template else {}
        return {"item": shelf.item(t, row["set"], row["step"]), "vocab": texts}

    def run(self) -> dict[str, Any]:
        """What the page says above the episodes, of the run and of the one beside it."""
        first, *others = map(view.overview, self.workdirs, self._shelves)
        apart: dict[str, str] = {}  # evaluations that are of other settings than those of the run beside it
        for label, figures in first["evaluations"].items():
            for other in (other["evaluations"] for other in others if label in other["evaluations"]):
                try:
                    want_alike({"A": figures, "B": other[label]})
                except ValueError as fault:
                    apart[label] = str(fault)
        names = [str(workdir) for workdir in self.workdirs]
        return {
            **first,
            "trajectories": [],
            "vocab": {},
            "live": True,
            "kinds": badcases.KINDS,
            "names": names,
            "beside": others,
            "apart": apart,
            "epoch": self.epoch,
        }


def _lines(path: Path) -> Iterator[tuple[int, Trajectory]]:
    """The trajectories of a file, each with the byte at which it begins."""
    at = 0
    with path.open("rb") as lines:
        for line in lines:
            yield at, Trajectory.from_json(json.loads(line))
            at += len(line)


class Door(BaseHTTPRequestHandler):
    """Answers one request. `server` holds the index and the token."""

    server: LiveServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        token, _, name = place.path.removeprefix("/").partition("/")
        host = self.headers.get("Host", "")
        own = f"http://{host}"
        if urlsplit(f"//{host}").hostname not in LOOPBACK or self.headers.get("Origin", own) != own:
            return self._send(403, "text/plain", b"this page answers to itself, on loopback")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(
                404, "text/plain", b"the address printed by jaxagent view --serve has a token: it is not this one"
            )
        asked = {key: values[-1] for key, values in parse_qs(place.query).items()}
        try:
            kind, body = self._found(name, asked)
        except (KeyError, ValueError, IndexError, OSError) as error:
            return self._send(404, "text/plain", f"nothing here: {error}".encode(errors="replace"))
        return self._send(200, kind, body)

    def _found(self, name: str, asked: dict[str, str]) -> tuple[str, bytes]:
        index = self.server.index
        if name == "":
            return "text/html; charset=utf-8", view.write(index.run()).encode()
        answers = {
            "run": index.run,
            "rows": lambda: index.since(max(0, int(asked.get("from", "0")))),
            "episode": lambda: index.episode(int(asked["at"])),
        }
        return "application/json", json.dumps(view.finite(answers[name]()), allow_nan=False).encode()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for header, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for every second of every page would say nothing."""


class LiveServer(ThreadingHTTPServer):
    """Serves an index on loopback; `follow` keeps it up with its runs."""

    daemon_threads = True

    def __init__(self, workdirs: list[Path], port: int = 0):
        self.index, self.token = Index(workdirs), secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), Door)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away before its answer is nothing to tell."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def follow(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a file that has just gone: the next look sees that
                self.index.update()
            time.sleep(_POLL_S)


def watch(workdir: str, beside: str, port: int) -> int:
    """The command: serves until it is interrupted. Raises ValueError where a directory holds no run, or the port is taken."""
    try:
        server = LiveServer([Path(one) for one in (workdir, beside) if one], port)
    except OSError as error:
        raise ValueError(f"--port={port}: {error.strerror or error}") from None
    threading.Thread(target=server.follow, daemon=True).start()
    print(f"{server.address}\nfollows {workdir}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        server.server_close()
    return 0
