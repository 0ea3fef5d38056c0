"""SandboxFusion's `POST /run_code`: stateless programs, the protocol that code rewards are trained with.

The outer status is `Failed` for a timeout and for a non-zero exit alike, so the inner object is read. A failure of the
sandbox itself comes as HTTP 200 with `SandboxError` and is no result.
"""

import base64
import binascii
import urllib.parse
from typing import Any

from .. import wire
from ..calls import Call
from ..transport import Request, Safety
from ..wire import ExecResult, Outcome
from .backend import Abilities, Backend, Program

_LANGUAGES = (
    "python cpp nodejs go go_test java php csharp bash typescript sql rust cuda lua R perl D_ut ruby scala julia "
    "pytest junit kotlin_script jest verilog lean swift racket"
)


class SandboxFusion(Backend):
    """Speaks to a SandboxFusion server."""

    name = "sandbox_fusion"
    can = Abilities(
        run_code=True,
        stdin=True,
        files=True,
        languages=tuple(_LANGUAGES.split()),
        output_bytes=128_000,  # some releases wait for the exit before they read: more fills the pipe until the time limit
    )

    def headers(self, token: str) -> dict[str, str]:
        return {**super().headers(token), "Content-Type": "application/json"}

    async def ready(self, call: Call) -> wire.Readiness:
        await call.ask(Request("GET", "/v1/ping"))
        return wire.Readiness("remote", (), True, None, None, (), 0)

    async def run_code(self, call: Call, program: Program) -> ExecResult:
        return await post_run(call, program, Safety.PURE if program.pure else Safety.KEYED)


async def post_run(call: Call, program: Program, safety: Safety) -> ExecResult:
    """Returns the result of a stateless program; `key` is for servers that remember it, others ignore it."""
    body = {
        "code": program.code,
        "language": program.language,
        "stdin": program.stdin,
        "compile_timeout": program.timeout_s,
        "run_timeout": program.timeout_s,
        "files": {path: base64.b64encode(content).decode() for path, content in program.files.items()},
        "fetch_files": program.fetch_files,
        "key": program.key,
    }
    answer_s = program.timeout_s + wire.ASK_AGAIN_S
    fate = f"/v1/exec/{urllib.parse.quote(program.key, safe='')}"
    request = Request("POST", "/run_code", wire.encode(body), safety=safety, answer_s=answer_s, fate=fate)
    return await call.json(request, lambda reply: parse_run(reply, call.attempts))


def parse_run(reply: dict[str, Any], attempts: int) -> ExecResult:
    """Reads SandboxFusion's reply, and our own server's words beside it where they are."""
    if reply.get("status") == "SandboxError":
        raise ValueError(f"the sandbox itself failed: {reply.get('message')}")
    compiled = wire.take(reply, "compile_result", dict, type(None)) if "compile_result" in reply else None
    ran = wire.take(reply, "run_result", dict, type(None)) if "run_result" in reply else None
    failed_to_compile = compiled is not None and (compiled.get("status") != "Finished" or compiled.get("return_code") != 0)
    result = compiled if ran is None and failed_to_compile else ran
    if result is None:
        raise ValueError("wanted 'run_result' as dict, got NoneType")
    status = wire.take(result, "status", str)
    if status not in ("Finished", "TimeLimitExceeded"):
        raise ValueError(f"the sandbox itself failed: run status {status!r}")
    code = wire.take(result, "return_code", int, type(None)) if "return_code" in result else None
    late = status == "TimeLimitExceeded"
    guess = Outcome.PROGRAM_TIMEOUT if late else Outcome.OK if code == 0 else Outcome.PROGRAM_ERROR
    try:
        files = {path: base64.b64decode(text, validate=True) for path, text in (reply.get("files") or {}).items()}
    except (binascii.Error, TypeError, AttributeError) as error:
        raise ValueError(f"wanted 'files' as path -> base64: {error}") from None
    dropped = wire.take(reply, "dropped_bytes", int) if "dropped_bytes" in reply else 0
    return ExecResult(
        outcome=Outcome(reply.get("outcome", guess)),
        stdout=wire.take(result, "stdout", str, type(None)) or "",
        stderr=wire.take(result, "stderr", str, type(None)) or "",
        exit_code=code,
        dropped_bytes=dropped,
        elapsed_s=wire.take(result, "execution_time", float, int, type(None)) or 0.0,
        error=wire.take(reply, "message", str, type(None)) or None,
        files=files,
        attempts=attempts,
    )
