"""What every service is reduced to: the operations of one session model, and which of them an adapter has.

An adapter turns an operation into requests and replies into results, and holds no policy: attempts, deadlines, limits and
health are the caller's. What a service cannot do is a typed refusal, `Unsupported`, before anything is sent.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import wire
from ..calls import Again, Call, judge
from ..endpoints import Endpoint
from ..transport import Reply, Safety
from ..wire import CallResult, ExecResult, GradeResult, RequestRefused


class Unsupported(RequestRefused):
    """The service has no such operation, and nothing was sent."""

    def __init__(self, backend: str, what: str) -> None:
        super().__init__("unsupported", f"{backend} has no {what}", "choose another backend, or do without")
        self.backend, self.what = backend, what


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an adapter can do. The conformance tests hold it to this, both ways."""

    run_code: bool = False  # stateless programs
    sessions: bool = False
    exec: bool = False  # programs in a session
    call: bool = False  # named functions in a session
    functions: bool = False  # which modules of the operator's bring
    read_file: bool = False
    write_file: bool = False
    snapshot: bool = False
    branch: bool = False
    grade: bool = False  # by a program of the trainer's, where the session's has never been
    imports: bool = False  # modules that a session has from its beginning
    tokens: bool = False  # of one session each
    stdin: bool = False  # of a stateless program
    session_stdin: bool = False
    cwd: bool = False
    env: bool = False
    files: bool = False  # sent and fetched with a stateless program
    stderr: bool = True  # apart from stdout
    exit_code: bool = True
    binary_files: bool = True
    timeout: bool = True  # a program's own, told apart from its failure
    partial_output: bool = True  # of a program whose time was over
    state: str = ""  # what a Python program leaves for the next one: "names" or, by files alone, "files"
    languages: tuple[str, ...] = ("python", "bash")
    output_bytes: int = wire.RUN_OUTPUT_BYTES  # of one stream, known to come back whole


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run and all that surrounds it."""

    code: str
    language: str = "python"
    timeout_s: float = 10.0
    stdin: str = ""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    max_output_bytes: int | None = None
    pure: bool = False  # declared by the caller: running it twice is running it once
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def safety(self) -> Safety:
        return Safety.PURE if self.pure else Safety.ONCE


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session is opened with."""

    key: str
    functions: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None
    branching: bool = False  # it will be branched from
    imports: str | None = None  # one of the sets of modules that the server has imported beforehand


@dataclass(frozen=True, slots=True)
class Grading:
    """A program of the trainer's that judges a session's files, and sets `reward`."""

    code: str
    tests: Mapping[str, bytes] = field(default_factory=dict)  # which the session never sees
    collect: tuple[str, ...] = ()  # the session's files that are judged
    timeout_s: float = 10.0


@dataclass(slots=True)
class Seat:
    """A session at its server."""

    id: str
    endpoint: Endpoint
    level: str = ""
    seq: int = 0
    token: str = ""  # opens this session and nothing else
    facts: dict[str, Any] = field(default_factory=dict)  # the adapter's own: addresses, tokens, an open socket


class Backend:
    """An adapter that can do nothing yet."""

    name = "nothing"
    can = Abilities()

    def headers(self, token: str) -> dict[str, str]:
        """Returns what goes with every request."""
        return {"Authorization": f"Bearer {token}"} if token else {}

    def judge(self, call: Call, reply: Reply) -> Again | None:
        """Returns None for a reply to be parsed, Again for one that decides nothing; raises what is final."""
        return judge(call, reply)

    def check(self, program: Program, in_session: bool) -> None:
        """Raises Unsupported for what the service cannot do with `program`."""
        wanted: dict[str, Any] = {"exec" if in_session else "run_code": True, "cwd": program.cwd, "env": program.env}
        wanted["session_stdin" if in_session else "stdin"] = program.stdin
        if program.files or program.fetch_files:
            if in_session:
                raise Unsupported(self.name, "files of a program in a session: use read_file and write_file")
            wanted["files"] = True
        for what, value in wanted.items():
            if value and not getattr(self.can, what):
                raise Unsupported(self.name, what)
        if program.language not in self.can.languages:
            raise Unsupported(self.name, f"language {program.language!r}; there are {', '.join(self.can.languages)}")

    async def ready(self, call: Call) -> wire.Readiness:
        """Returns what the service is."""
        raise Unsupported(self.name, "readiness")

    async def run_code(self, call: Call, program: Program) -> ExecResult:
        """Runs a stateless program."""
        raise Unsupported(self.name, "run_code")

    async def open(self, call: Call, opening: Opening) -> Seat:
        """Opens a session."""
        raise Unsupported(self.name, "sessions")

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        """Runs a program in a session."""
        raise Unsupported(self.name, "exec")

    async def call(self, call: Call, seat: Seat, name: str, arguments: dict[str, Any], timeout_s: float) -> CallResult:
        """Calls a named function of a session."""
        raise Unsupported(self.name, "call")

    async def read_file(self, call: Call, seat: Seat, path: str) -> bytes:
        """Returns a file's content. Raises RequestRefused with code no_such_file."""
        raise Unsupported(self.name, "read_file")

    async def write_file(self, call: Call, seat: Seat, path: str, content: bytes) -> None:
        """Writes a whole file, and the directories above it."""
        raise Unsupported(self.name, "write_file")

    async def snapshot(self, call: Call, seat: Seat) -> str:
        """Returns the name of a copy of the session, from which others can be opened."""
        raise Unsupported(self.name, "snapshot")

    async def branch(self, call: Call, seat: Seat, keys: list[str]) -> list[Seat]:
        """Returns sessions that go on from where this one is, one per key."""
        raise Unsupported(self.name, "branch")

    async def grade(self, call: Call, seat: Seat, grading: Grading) -> GradeResult:
        """Judges a session's files."""
        raise Unsupported(self.name, "grade")

    async def reset(self, call: Call, seat: Seat) -> bool:
        """Returns the session to how it was opened, or False where it must be closed and another opened."""
        return False

    async def abandon(self, call: Call, seat: Seat) -> None:
        """Ends, as well as it can, what an operation that was given up may have left running."""

    async def close(self, call: Call, seat: Seat) -> None:
        """Ends a session; one that is gone is ended already."""


def no_such_file(path: str) -> RequestRefused:
    """Returns the refusal to read what is not there, the same one from every service."""
    return RequestRefused("no_such_file", f"no file {path!r} in the session")


def command(program: Program) -> list[str]:
    """Returns the argument list that runs `program` where a service knows nothing but commands."""
    runner = {"python": ["python3", "-c"], "bash": ["bash", "-c"]}[program.language]
    if len(program.code.encode()) > _ARGUMENT_BYTES:
        size = len(program.code.encode())
        raise RequestRefused(
            "too_large", f"wanted a program of at most {_ARGUMENT_BYTES} bytes, got {size}", "write it to a file"
        )
    return [*runner, program.code]


_ARGUMENT_BYTES = 120_000  # Linux takes 128 KiB in one argument
