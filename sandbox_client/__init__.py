"""A client for code sandboxes over HTTP, and a sandbox server that a trainer can embed.

Imports nothing of jaxagent's and no JAX; it could be published alone.
"""

from .backends.backend import Abilities, Backend, Program, Unsupported
from .blocking import BlockingClient, BlockingSession
from .cache import PureCache
from .client import SandboxClient, Session, Snapshot, Ticket
from .embedded import EmbeddedServer
from .transport import AiohttpTransport, Reply, Request, Safety, Transport
from .wire import (
    CallResult,
    Cancelled,
    CodeRefused,
    ExecResult,
    GradeResult,
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
    "Abilities",
    "AiohttpTransport",
    "Backend",
    "BlockingClient",
    "BlockingSession",
    "CallResult",
    "Cancelled",
    "CodeRefused",
    "EmbeddedServer",
    "ExecResult",
    "GradeResult",
    "InfrastructureError",
    "Outcome",
    "Overloaded",
    "Program",
    "ProtocolError",
    "PureCache",
    "Readiness",
    "Reply",
    "Request",
    "RequestRefused",
    "Safety",
    "SandboxClient",
    "SandboxStartError",
    "Session",
    "SessionLost",
    "Snapshot",
    "Ticket",
    "Transport",
    "Unknown",
    "Unreachable",
    "Unsupported",
]
