"""The words on the wire: outcomes, results, limits, strict decoding, and every error a caller can meet.

Imported by both ends and by nothing heavier than the standard library. The errors, as a tree:

    InfrastructureError             nothing was learnt about the program; never a reward; carries
    |                               attempts and may_have_executed
    |-- Unreachable                 no connection was made: the call was certainly not executed
    |-- Overloaded                  the server refused for load until the deadline: not executed
    |-- SessionLost                 expired, killed, or the server restarted; open another session
    |-- ProtocolError               the reply was too large, malformed, or against the schema
    |-- Unknown                     sent, but no usable reply came by the deadline
    `-- Cancelled                   this client was closed while the call was under way
    RequestRefused                  the server understood and will not: wrong token, wrong request; code, remedy
    `-- CodeRefused                 it runs no model-written code here; reason and remedy
    SandboxStartError               an embedded server did not come up; its own sentence
"""

import enum
import json
import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

REQUEST_MAX_BYTES = 1 << 20
FILE_MAX_BYTES = 16 << 20
REPLY_MAX_BYTES = 4 << 20  # two streams of 1 MiB once more for JSON's escapes
EXEC_OUTPUT_BYTES = 64 << 10
RUN_OUTPUT_BYTES = 1 << 20
KILL_MARGIN_S = 1.0  # the server kills this long after the program's own deadline
CLIENT_MARGIN_S = 5.0  # and the client gives up this long after it
ASK_AGAIN_S = 2.0  # so long after it a reply that is not here is a reply lost, and the server is asked again where that is safe
SERVER_KEEP_ALIVE_S = 75
CLIENT_KEEP_ALIVE_S = 3.0  # shorter than the server's, so that an idle socket is never closed under a request
MAX_TIMEOUT_S = 600.0
WIRE_HEADER = "x-sandbox-wire"  # a server that sends it answers a repeated key or seq from memory
WIRE_TELLS = 2  # from this value of it on, the server also tells what became of a call, and takes one back
WIRE_VERSION = WIRE_TELLS
CALL_ID = "X-Call-Id"  # sent with every attempt; a server that repeats it proves that its reply is to this one
WRECKED = (500, 502, 504, 524)  # statuses that say nothing about whether the request was carried out
LEVELS = ("L0", "L1", "L2", "L3")


class Outcome(enum.StrEnum):
    """What became of the program. All of these are the program's doing and may be shown to the model."""

    OK = "ok"
    PROGRAM_ERROR = "program_error"
    PROGRAM_TIMEOUT = "program_timeout"
    PROGRAM_OOM = "program_oom"
    OUTPUT_TRUNCATED = "output_truncated"  # it was ended for printing too much; a result that was merely cut says dropped_bytes
    DENIED = "denied"  # it asked for a function or a language that the session does not have


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a fixed function returned, or why it did not."""

    outcome: Outcome
    value: Any
    error: str | None
    elapsed_s: float
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a program printed and how it ended. `value` is the repr of Python's last expression."""

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None
    dropped_bytes: int
    elapsed_s: float
    value: str | None = None
    error: str | None = None
    session_lost: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    attempts: int = 1

    @property
    def output_truncated(self) -> bool:
        return self.dropped_bytes > 0


@dataclass(frozen=True, slots=True)
class GradeResult:
    """What a grader found. `reward` is finite, and None where the grader gave none: `outcome` and `error` say why."""

    reward: float | None
    outcome: Outcome
    stdout: str
    stderr: str
    error: str | None
    missing: tuple[str, ...]  # of the files that were to be graded
    elapsed_s: float
    dropped_bytes: int = 0
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Readiness:
    """The level a server reached, the guarantees it lacks there, and whether it runs code."""

    level: str
    missing: tuple[str, ...]
    code: bool
    reason: str | None
    remedy: str | None
    functions: tuple[str, ...]
    sessions: int
    graders: bool = False
    imports: tuple[str, ...] = ()  # the sets of modules that a session may ask for


class InfrastructureError(Exception):
    """The program may be innocent: mask the sample, do not score it."""

    def __init__(self, message: str, attempts: int = 0, may_have_executed: bool = False) -> None:
        executed = "may have executed" if may_have_executed else "was not executed"
        super().__init__(f"{message} (attempts: {attempts}; the call {executed})")
        self.attempts = attempts
        self.may_have_executed = may_have_executed


class Unreachable(InfrastructureError):
    """No connection could be made."""


class Overloaded(InfrastructureError):
    """The server kept refusing for load."""


class SessionLost(InfrastructureError):
    """The session is gone. `caused_by_program`: its own code ended it."""

    def __init__(
        self, message: str, attempts: int = 0, may_have_executed: bool = False, caused_by_program: bool = False
    ) -> None:
        super().__init__(message, attempts, may_have_executed)
        self.caused_by_program = caused_by_program


class ProtocolError(InfrastructureError):
    """The reply cannot be trusted."""


class Unknown(InfrastructureError):
    """It was sent and no reply came: it may have run."""


class Cancelled(InfrastructureError):
    """The client was closed under the call."""


_OF_WHAT_WAS_ASKED = frozenset({"too_large", "no_such_file", "bad_request", "language_unknown", "unreadable"})


class RequestRefused(Exception):
    """A request that will never succeed as it stands."""

    @property
    def caused_by_policy(self) -> bool:
        """Whether it may be told to the policy: the program or the path that it gave is at fault, and not the set-up."""
        return self.code in _OF_WHAT_WAS_ASKED

    def __init__(self, code: str, message: str, remedy: str | None = None) -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.code = code
        self.message = message
        self.remedy = remedy


class CodeRefused(RequestRefused):
    """This server runs fixed functions only."""


class SandboxStartError(Exception):
    """The embedded server did not start; the text is what it said."""


def _reject(text: str) -> NoReturn:
    raise ValueError(f"wanted a finite number, got {text}")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _reject(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("wanted each key once, got a repeated key")
    return result


_decoder = json.JSONDecoder(parse_constant=_reject, parse_float=_finite)
_unique_decoder = json.JSONDecoder(parse_constant=_reject, parse_float=_finite, object_pairs_hook=_unique)
_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def decode(data: bytes, unique: bool = False) -> dict[str, Any]:
    """Returns the JSON object in `data`. Raises ValueError for all else: nan, infinity, deep nesting, bad UTF-8.

    `unique` refuses repeated keys too; it costs as much again, so only replies, which two programs may read, are asked.
    """
    try:
        result = (_unique_decoder if unique else _decoder).decode(data.decode())
    except RecursionError:
        raise ValueError("wanted JSON of moderate depth, got a deeper one") from None
    if type(result) is not dict:
        raise ValueError(f"wanted a JSON object, got {type(result).__name__}")
    return result


def encode(value: Any) -> bytes:
    """Returns `value` as JSON. Raises ValueError for nan and infinity, TypeError for what JSON cannot hold."""
    return _encoder.encode(value).encode()


def take(reply: dict[str, Any], key: str, *types: type) -> Any:
    """Returns `reply[key]`, of one of `types` exactly. Raises ValueError naming the key otherwise."""
    value = reply.get(key)
    if type(value) not in types:
        raise ValueError(f"wanted {key!r} as {'/'.join(t.__name__ for t in types)}, got {type(value).__name__}")
    return value


def shorten(text: str, max_bytes: int) -> tuple[str, int]:
    """Returns `text` with its middle left out, at most `max_bytes` in UTF-8, and how many bytes were dropped."""
    if 4 * len(text) <= max_bytes:
        return text, 0
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text, 0
    head = max_bytes // 2
    kept = data[:head].decode(errors="ignore") + data[len(data) - (max_bytes - head) :].decode(errors="ignore")
    return kept, len(data) - len(kept.encode())


_NONE = type(None)


def parse_call(reply: dict[str, Any], attempts: int) -> CallResult:
    """Returns the reply of /call as a result. Raises ValueError when it is against the schema."""
    error, elapsed_s = take(reply, "error", str, _NONE), take(reply, "elapsed_s", float, int)
    return CallResult(Outcome(reply.get("outcome", "")), reply.get("value"), error, elapsed_s, attempts)


def parse_exec(reply: dict[str, Any], attempts: int) -> ExecResult:
    """Returns the reply of /exec as a result. Raises ValueError when it is against the schema."""
    return ExecResult(
        outcome=Outcome(reply.get("outcome", "")),
        stdout=take(reply, "stdout", str),
        stderr=take(reply, "stderr", str),
        exit_code=take(reply, "exit_code", int, _NONE),
        dropped_bytes=take(reply, "dropped_bytes", int),
        elapsed_s=take(reply, "elapsed_s", float, int),
        value=take(reply, "value", str, _NONE),
        error=take(reply, "error", str, _NONE),
        session_lost=take(reply, "session_lost", bool),
        attempts=attempts,
    )


def parse_grade(reply: dict[str, Any], attempts: int) -> GradeResult:
    """Returns the reply of /grade as a result. Raises ValueError when it is against the schema."""
    outcome, reward = Outcome(reply.get("outcome", "")), take(reply, "reward", float, int, _NONE)
    if (reward is None) == (outcome is Outcome.OK):
        raise ValueError(f"wanted a reward exactly where the grader ended well, got {reward} and {outcome}")
    return GradeResult(
        reward=None if reward is None else float(reward),
        outcome=outcome,
        stdout=take(reply, "stdout", str),
        stderr=take(reply, "stderr", str),
        error=take(reply, "error", str, _NONE),
        missing=tuple(map(str, take(reply, "missing", list))),
        elapsed_s=take(reply, "elapsed_s", float, int),
        dropped_bytes=take(reply, "dropped_bytes", int),
        attempts=attempts,
    )


def parse_ready(reply: dict[str, Any]) -> Readiness:
    """Returns the reply of /readyz. Raises ValueError when it is against the schema."""
    return Readiness(
        level=take(reply, "level", str),
        missing=tuple(map(str, take(reply, "missing", list))),
        code=take(reply, "code", bool),
        reason=take(reply, "reason", str, _NONE),
        remedy=take(reply, "remedy", str, _NONE),
        functions=tuple(map(str, take(reply, "functions", list))),
        sessions=take(reply, "sessions", int),
        graders=take({"graders": False, **reply}, "graders", bool),
        imports=tuple(map(str, take({"imports": [], **reply}, "imports", list))),
    )
