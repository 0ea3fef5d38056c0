"""A client for code sandboxes over HTTP, and a sandbox server that a trainer can embed.

Imports nothing of jaxagent's and no JAX; it could be published alone.
"""

from .client import AiohttpTransport, Reply, SandboxClient, Session, Transport
from .embedded import EmbeddedServer
from .wire import (
    CallResult,
    Cancelled,
    CodeRefused,
    ExecResult,
    InfrastructureError,
    Outcome,
    Overloaded,
    ProtocolError,
    Readiness,
    RequestRefused,
    SandboxStartError,
    SessionLost,
    Unknown,
    Unreachable,
)

__all__ = [
    "AiohttpTransport",
    "CallResult",
    "Cancelled",
    "CodeRefused",
    "EmbeddedServer",
    "ExecResult",
    "InfrastructureError",
    "Outcome",
    "Overloaded",
    "ProtocolError",
    "Readiness",
    "Reply",
    "RequestRefused",
    "SandboxClient",
    "SandboxStartError",
    "Session",
    "SessionLost",
    "Transport",
    "Unknown",
    "Unreachable",
]
