"""Processes over Connect RPC with JSON messages, as E2B's envd and Prime's gateway serve them.

A streamed reply is a row of envelopes: a flag byte, four bytes of length, a JSON message; flag 2 closes the stream and may
carry its error. A stream without that last envelope was cut.
"""

import base64
import binascii
import dataclasses
import json
import secrets
from typing import Any

from .. import wire
from ..calls import Call
from ..transport import Reply
from ..wire import ExecResult, Outcome, ProtocolError

CONTENT_TYPE = "application/connect+json"
STREAM_MAX_BYTES = 8 << 20  # two streams of 1 MiB in base64, in small pieces
_LAST, _COMPRESSED = 2, 1


def envelope(message: dict[str, Any]) -> bytes:
    """Returns the body of a streaming request with one message."""
    data = wire.encode(message)
    return b"\0" + len(data).to_bytes(4, "big") + data


def read_stream(body: bytes) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Returns the messages of a streamed reply and its end, None for a stream that was cut. Raises ValueError."""
    messages, place = list[dict[str, Any]](), 0
    while place + 5 <= len(body):
        flags, size = body[place], int.from_bytes(body[place + 1 : place + 5], "big")
        data = body[place + 5 : place + 5 + size]
        if len(data) < size:
            break
        place += 5 + size
        if flags & _COMPRESSED:
            raise ValueError("wanted envelopes that are not compressed")
        if flags & _LAST:
            if place != len(body):
                raise ValueError(f"wanted nothing after the end of the stream, got {len(body) - place} bytes")
            return messages, wire.decode(data or b"{}")
        messages.append(wire.decode(data))
    return messages, None


@dataclasses.dataclass
class Progress:
    """What a process has said and how it ended."""

    stdout: bytearray = dataclasses.field(default_factory=bytearray)
    stderr: bytearray = dataclasses.field(default_factory=bytearray)
    pid: int | None = None
    exit_code: int | None = None
    ended: bool = False
    code: str = ""  # of the stream's error
    text: str = ""


def read_process(reply: Reply) -> Progress:
    """Returns what the events of a process say. Raises ValueError."""
    messages, end = read_stream(reply.body)
    progress = Progress()
    for message in messages:
        event = wire.take(message, "event", dict)
        if "start" in event:
            progress.pid = wire.take(event["start"], "pid", int)
        elif "data" in event:
            for name in ("stdout", "stderr", "pty"):
                if name in event["data"]:
                    try:
                        data = base64.b64decode(wire.take(event["data"], name, str), validate=True)
                    except binascii.Error as error:
                        raise ValueError(f"wanted {name!r} as base64: {error}") from None
                    (progress.stderr if name == "stderr" else progress.stdout).extend(data)
        elif "end" in event:
            progress.ended = True
            progress.exit_code = wire.take({"exitCode": 0, **event["end"]}, "exitCode", int)
            progress.text = str(event["end"].get("error") or event["end"].get("status") or "")
    error = end.get("error") if end else None
    if isinstance(error, dict):
        progress.code, progress.text = str(error.get("code")), str(error.get("message"))
    elif end is None and not reply.cut and not progress.ended:
        progress.code, progress.text = "cut", "the stream broke off before the process ended"
    return progress


def result_of(call: Call, reply: Reply, elapsed_s: float) -> ExecResult:
    """Returns the result of a process, its time being over included. Raises InfrastructureError."""
    progress = call.parsed(lambda: read_process(reply))
    late = not progress.ended and (reply.cut or progress.code == "deadline_exceeded")
    if progress.code in ("not_found", "unavailable") and not progress.ended:
        call.sent = True
        raise call.lost(progress.text)
    if not progress.ended and not late:
        call.sent = True
        raise wire.Unknown(f"{call.what}: {progress.code}: {progress.text}", call.attempts, may_have_executed=True)
    killed = progress.exit_code is not None and progress.exit_code in (-9, 137) and "oom" in progress.text.lower()
    failed = Outcome.OK if progress.exit_code == 0 else Outcome.PROGRAM_OOM if killed else Outcome.PROGRAM_ERROR
    outcome = Outcome.PROGRAM_TIMEOUT if late else failed
    return ExecResult(
        outcome,
        progress.stdout.decode(errors="replace"),
        progress.stderr.decode(errors="replace"),
        None if late else progress.exit_code,
        0,
        elapsed_s,
        error="the time limit was reached" if late else None,
        attempts=call.attempts,
    )


def multipart(name: str, filename: str, content: bytes, fields: dict[str, str] | None = None) -> tuple[str, bytes]:
    """Returns content type and body of a form with one file."""
    boundary = secrets.token_hex(16)
    quoted = filename.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "%0D").replace("\n", "%0A")
    parts = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        for key, value in (fields or {}).items()
    )
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{quoted}"\r\n'
    body = (
        parts + head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + content + f"\r\n--{boundary}--\r\n".encode()
    )
    return f"multipart/form-data; boundary={boundary}", body


def json_lines(call: Call, reply: Reply) -> list[dict[str, Any]]:
    """Returns the objects of a reply that is one JSON object a line; of a reply that was cut, the whole lines."""
    lines = reply.body.split(b"\n")
    if reply.cut:
        lines = lines[:-1]
    try:
        return [wire.decode(line) for line in lines if line.strip()]
    except (ValueError, json.JSONDecodeError) as error:
        raise ProtocolError(f"{call.what}: {error}", call.attempts, may_have_executed=True) from None
