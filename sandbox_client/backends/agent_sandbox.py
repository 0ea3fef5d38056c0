"""agent-sandbox on Kubernetes: one SandboxClaim from a warm pool per session, reached through the router by its headers.

The runtime's `/execute` splits a command without a shell and knows neither directory nor environment, so both are given
with `env`. It answers its own failures with exit code 1; the words in which it does so are recognised.
"""

import asyncio
import hashlib
import posixpath
import shlex
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from .. import wire
from ..calls import Call
from ..endpoints import Endpoint
from ..transport import Request, Safety
from ..wire import ExecResult, Outcome, RequestRefused
from .backend import Abilities, Backend, Opening, Program, Seat, command, no_such_file
from .connect import multipart

_API = "/apis/extensions.agents.x-k8s.io/v1beta1"
_POLL_S, _POLL_MAX_S = 0.1, 1.0
_OWN_FAILURE = "Failed to execute command:"
_HOPELESS = frozenset(
    {
        "InvalidMetadata",
        "EnvVarsInjectionRejected",
        "VolumeClaimTemplatesError",
        "ClaimExpired",
        "SandboxExpired",
        "InvalidConfiguration",
        "PodFailed",
        "PodSucceeded",
    }
)


class AgentSandbox(Backend):
    """Speaks to the router of agent-sandbox, and to Kubernetes for claims."""

    name = "agent_sandbox"
    can = Abilities(sessions=True, exec=True, read_file=True, write_file=True, cwd=True, env=True, state="files")

    def __init__(
        self,
        warm_pool: str = "",
        namespace: str = "default",
        kubernetes_url: str = "",
        kubernetes_token: str | Callable[[], str] = "",
        port: int = 8888,
        home: str = "/app",
        life_s: int = 3600,
    ) -> None:
        """Args:
        warm_pool: that claims name; without one a session is opened with options={"sandbox": NAME}
        kubernetes_url: of the API server; its token, or what returns the present one, is sent there and nowhere else
        port: of the runtime inside a sandbox
        home: where the runtime keeps files and relative paths begin
        life_s: after which the cluster ends a claim that nobody closed
        """
        self._pool, self._namespace, self._port, self._home, self._life_s = warm_pool, namespace, port, home, life_s
        self._cluster = Endpoint(kubernetes_url, 16) if kubernetes_url else None
        self._cluster_token = kubernetes_token

    async def open(self, call: Call, opening: Opening) -> Seat:
        name, claim = str(opening.options.get("sandbox", "")), ""
        if not name:
            claim = "rollout-" + hashlib.blake2b(opening.key.encode(), digest_size=12).hexdigest()
            name = await self._claim(call, claim)
        call.endpoint = None
        seat = Seat(name, call.caller.endpoints[0], "L5", facts={"claim": claim})
        await call.ask(Request("GET", "/", headers=self._headers(seat, call.left_s)))
        assert call.answered_by is not None
        seat.endpoint = call.answered_by
        return seat

    async def _claim(self, call: Call, name: str) -> str:
        """Returns the name of the sandbox that a claim of ours is bound to, once it is ready."""
        if self._cluster is None or not self._pool:
            raise RequestRefused("no_claim", "wanted warm_pool and kubernetes_url, or options={'sandbox': NAME}")
        call.endpoint = self._cluster
        end = time.strftime(
            "%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self._life_s)
        )  # the cluster's clock is a wall clock
        claim = {
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxClaim",
            "metadata": {"name": name},
            "spec": {"warmPoolRef": {"name": self._pool}, "lifecycle": {"shutdownTime": end, "shutdownPolicy": "Delete"}},
        }
        place = f"{_API}/namespaces/{self._namespace}/sandboxclaims"
        make = Request("POST", place, wire.encode(claim), self._cluster_headers(), expect=(409,), own_credentials=True)
        await call.ask(make)  # 409: an earlier sending of this request has made it
        wait_s = _POLL_S
        while True:
            look = Request("GET", f"{place}/{name}", headers=self._cluster_headers(), own_credentials=True)
            bound, hopeless = await call.json(look, _read_claim)
            if bound:
                return bound
            if hopeless:
                raise RequestRefused("claim_failed", f"claim {name} of warm pool {self._pool}: {hopeless}", "see its status")
            if wait_s >= call.left_s:
                raise wire.Overloaded(f"{call.what}: no sandbox of warm pool {self._pool} became ready", call.attempts)
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _POLL_MAX_S)

    def _cluster_headers(self) -> dict[str, str]:
        token = self._cluster_token if isinstance(self._cluster_token, str) else self._cluster_token()
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def _headers(self, seat: Seat, timeout_s: float, kind: str = "application/json") -> dict[str, str]:
        return {
            "X-Sandbox-ID": seat.id,
            "X-Sandbox-Namespace": self._namespace,
            "X-Sandbox-Port": str(self._port),
            "X-Sandbox-Timeout": f"{max(1.0, timeout_s):.1f}",
            "Content-Type": kind,
        }

    async def exec(self, call: Call, seat: Seat, program: Program) -> ExecResult:
        start = time.monotonic()
        place = ["-C", posixpath.join(self._home, program.cwd)] if program.cwd else []
        variables = [f"{name}={value}" for name, value in program.env.items()]
        words = [*(["env", *place, *variables] if place or variables else []), *command(program)]
        body = wire.encode({"command": shlex.join(words), "timeout_seconds": program.timeout_s})
        head = self._headers(seat, program.timeout_s + wire.KILL_MARGIN_S)
        reply = await call.json(Request("POST", "/execute", body, head, Safety.ONCE), _read_execution)
        elapsed_s = time.monotonic() - start
        out, err, code = reply["stdout"], reply["stderr"], reply["exit_code"]
        if reply["timed_out"]:
            return ExecResult(Outcome.PROGRAM_TIMEOUT, out, err, None, 0, elapsed_s, error=err or None, attempts=call.attempts)
        if code == 1 and not out and err.startswith(_OWN_FAILURE):
            raise wire.Unknown(f"{call.what}: {err}", call.attempts, may_have_executed=True)
        outcome = Outcome.OK if code == 0 else Outcome.PROGRAM_ERROR
        return ExecResult(outcome, out, err, code, 0, elapsed_s, attempts=call.attempts)

    async def read_file(self, call: Call, seat: Seat, path: str) -> bytes:
        place = urllib.parse.quote(path, safe="")
        head, size = self._headers(seat, call.left_s), wire.FILE_MAX_BYTES
        reply = await call.ask(Request("GET", f"/download/{place}", headers=head, max_bytes=size, expect=(404,)))
        if reply.status == 404 and b"sandbox" not in reply.body.lower():
            raise no_such_file(path)
        if reply.status == 404:
            raise call.lost("the router knows no such sandbox")
        return reply.body

    async def write_file(self, call: Call, seat: Seat, path: str, content: bytes) -> None:
        kind, body = multipart("file", path, content)
        await call.ask(Request("POST", "/upload", body, self._headers(seat, call.left_s, kind)))

    async def close(self, call: Call, seat: Seat) -> None:
        if seat.facts["claim"] and self._cluster is not None:
            call.endpoint = self._cluster
            place = f"{_API}/namespaces/{self._namespace}/sandboxclaims/{seat.facts['claim']}"
            await call.ask(Request("DELETE", place, headers=self._cluster_headers(), expect=(404,), own_credentials=True))


def _read_claim(reply: dict[str, Any]) -> tuple[str, str]:
    """Returns the sandbox's name once it is ready, and the reason why it never will be."""
    status = reply.get("status") or {}
    ready: dict[str, Any] = next((one for one in status.get("conditions") or () if one.get("type") == "Ready"), {})
    name = str((status.get("sandbox") or {}).get("name") or "")
    if ready.get("status") == "True" and name:
        return name, ""
    reason = str(ready.get("reason", ""))
    return "", f"{reason}: {ready.get('message', '')}" if reason in _HOPELESS else ""


def _read_execution(reply: dict[str, Any]) -> dict[str, Any]:
    late = wire.take(reply, "timed_out", bool, type(None)) if "timed_out" in reply else False
    texts = {name: wire.take(reply, name, str) for name in ("stdout", "stderr")}
    return {**texts, "exit_code": wire.take(reply, "exit_code", int), "timed_out": bool(late)}
