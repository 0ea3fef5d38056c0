"""A fleet of sandbox servers as a file: which service, where, how many; and how many cores a run needs of it.

Scaling out is a matter of configuration here: the servers are started by others (Kubernetes, a vendor), the client spreads
trajectories over their addresses.
"""

import asyncio
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from .backends.agent_sandbox import AgentSandbox
from .backends.backend import Backend
from .backends.e2b import E2B
from .backends.mcp import Mcp
from .backends.openenv import OpenEnv
from .backends.prime import Prime
from .backends.sandbox_fusion import SandboxFusion
from .backends.swe_rex import SweRex
from .backends.v1 import V1
from .client import SandboxClient
from .tokens import Provider

BACKENDS: dict[str, Callable[..., Backend]] = {
    "v1": V1,
    "sandbox_fusion": SandboxFusion,
    "e2b": E2B,
    "openenv": OpenEnv,
    "agent_sandbox": AgentSandbox,
    "swe_rex": SweRex,
    "prime": Prime,
    "mcp": Mcp,
}
_KEYS = ("backend", "urls", "url", "replicas", "token", "max_in_flight", "timeout_s", "options")


@dataclass(frozen=True)
class Fleet:
    """Servers of one kind, and what a client of them is made of."""

    urls: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # what SandboxClient takes besides
    make_backend: Callable[[], Backend] = V1

    def client(self, **changes: Any) -> SandboxClient:
        """Returns a client of them all."""
        return SandboxClient(self.urls, **{"backend": self.make_backend(), **self.settings, **changes})

    def each(self, **changes: Any) -> list[SandboxClient]:
        """Returns a client of every one of them, in their order."""
        return [replace(self, urls=(url,)).client(**changes) for url in self.urls]


def connect(path: str | Path, **changes: Any) -> SandboxClient:
    """Returns a client of the fleet that a TOML file describes; see read.

    Args:
      changes: what SandboxClient takes, instead of what the file says.

    Raises ValueError for a file that does not say that.
    """
    return read(path).client(**changes)


def read(path: str | Path) -> Fleet:
    """Returns the fleet that a TOML file describes.

    Its keys: `backend`, a name of BACKENDS; `urls`, or `url` with `{n}` and `replicas`; `token`, a text, `{file = ...}` or
    `{env = ...}`; `max_in_flight` of all servers together; `timeout_s`; `[options]`, the adapter's own.

    Raises ValueError for a file that is not there or does not say that.
    """
    try:
        words = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: wanted a fleet file, TOML: {getattr(error, 'strerror', None) or error}") from None
    unknown = sorted(set(words) - set(_KEYS))
    if unknown:
        raise ValueError(f"{path}: wanted the keys {', '.join(_KEYS)}, got {unknown[0]!r}")
    if words.get("backend") not in BACKENDS:
        raise ValueError(f"{path}: wanted backend as one of {', '.join(BACKENDS)}, got {words.get('backend')!r}")
    options = {name: _secret(path, name, value) for name, value in words.get("options", {}).items()}
    try:
        make_backend = partial(BACKENDS[words["backend"]], **options)
        make_backend()
    except TypeError as error:
        raise ValueError(f"{path}: [options] of {words['backend']}: {error}") from None
    settings: dict[str, Any] = {"token": _token(path, words.get("token", ""))}
    settings |= {"max_connections": words["max_in_flight"]} if "max_in_flight" in words else {}
    settings |= {"timeout_s": float(words["timeout_s"])} if "timeout_s" in words else {}
    return Fleet(tuple(urls_of(path, words)), settings, make_backend)


def urls_of(path: str | Path, words: Mapping[str, Any]) -> list[str]:
    """Returns the addresses that a fleet's words name. Raises ValueError."""
    if "urls" in words:
        urls = [str(url) for url in words["urls"]]
    elif "{n}" in words.get("url", "") and int(words.get("replicas", 0)) > 0:
        urls = [words["url"].replace("{n}", str(n)) for n in range(words["replicas"])]
    else:
        urls = [words["url"]] if words.get("url") and "{n}" not in words["url"] else []
    wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
    if not urls or wrong:
        found = repr(wrong[0]) if wrong else "none"
        raise ValueError(f"{path}: wanted urls, or url with {{n}} and replicas, of http(s) servers; got {found}")
    return urls


def _secret(path: str | Path, name: str, value: Any) -> Any:
    """Returns an option's value; one that stands in a file is read each time it is needed, since such files change."""
    if isinstance(value, dict):
        read = _reader(path, name, value)
        return read if "file" in value else read()
    return value


def _token(path: str | Path, value: Any) -> str | Provider:
    if isinstance(value, str):
        return value
    read = _reader(path, "token", value)

    async def fetch() -> str:
        return await asyncio.to_thread(read)

    return fetch


def _reader(path: str | Path, name: str, value: Mapping[str, str]) -> Callable[[], str]:
    if set(value) == {"file"}:
        return lambda: Path(value["file"]).read_text().strip()
    if set(value) == {"env"}:
        variable = value["env"]
        if not os.environ.get(variable):
            raise ValueError(f"{path}: {name}: wanted the environment variable {variable}, which is not set")
        return lambda: os.environ[variable]
    raise ValueError(f"{path}: {name}: wanted a text, {{file = ...}} or {{env = ...}}, got {dict(value)}")


def cores_needed(
    calls: int, iteration_s: float, cpu_s_per_call: float, overlap: float = 1.0, starts_per_core_s: float = 100.0
) -> float:
    """Returns the cores that `calls` programs in one iteration need: `rate * (1 / starts_per_core_s + cpu_s_per_call)`.

    Args:
      iteration_s: how long an iteration takes
      cpu_s_per_call: what a program itself computes; measure it first, it is most of the answer
      overlap: the share of the iteration during which programs run
      starts_per_core_s: isolated programs that do nothing, per second and core; 98 to 128 on two virtual cores
    """
    rate = calls / (iteration_s * overlap)
    return rate * (1.0 / starts_per_core_s + cpu_s_per_call)
