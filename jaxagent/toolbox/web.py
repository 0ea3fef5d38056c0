"""Requests of tools to HTTP services: one host that is allowed, no redirects, a bounded reply, and whose fault a failure is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import aiohttp
from yarl import URL

from jaxagent.toolbox.kit import Workplace
from jaxagent.tools import ToolFailed
from sandbox_client import ProtocolError, Unknown, Unreachable

MAX_BYTES = 1 << 20
_THEIRS = (401, 403, 407, 408, 429)  # beside 500 and above: the policy could not have done better


class Service:
    """An HTTP service as one episode sees it. Its connections are closed with the workplace.

    Args: timeout_s: of a request; a tool's own deadline must be longer, as what it cuts off is told to the policy.
    """

    def __init__(self, place: Workplace, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 300.0):
        self._place, self.url, self._headers = place, url.rstrip("/"), dict(headers or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None) -> str:
        """The text of the reply.

        Raises ToolFailed for what the service says is wrong with the request, InfrastructureError for what is wrong with it.
        """
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
            self._place.at_the_end(self._http.close)
        what = f"{method.upper()} {self.url}{path}"
        data = None if body is None else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            url = URL(self.url + path + (f"?{urlencode(query)}" if query else ""), encoded=True)  # not to be quoted anew
            async with self._http.request(method, url, data=data, headers=kind, allow_redirects=False) as reply:
                content = await _bounded(reply)
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{what}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unknown(f"{what}: {error!r}", 1, may_have_executed=True) from None
        text = content.decode(errors="replace")
        if reply.status in _THEIRS or reply.status >= 500:
            raise Unknown(f"{what}: status {reply.status}: {text[:200]}", 1, may_have_executed=True)
        if len(content) > MAX_BYTES:
            raise ToolFailed(f"error: the reply is longer than {MAX_BYTES} bytes")
        if not 200 <= reply.status < 300:
            raise ToolFailed(f"error: status {reply.status}: {text[:1000]}")
        return text

    async def ask_json(self, method: str, path: str, body: Any = None) -> Any:
        """The reply as JSON, where it must be. Raises ProtocolError otherwise."""
        text = await self.ask(method, path, body=body)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ProtocolError(f"{self.url}{path}: JSON was wanted, got {text[:100]!r} ({error.msg})", 1) from None


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    content = b""
    while len(content) <= MAX_BYTES:
        chunk = await reply.content.read(MAX_BYTES + 1 - len(content))
        if not chunk:
            break
        content += chunk
    return content


def wanted_url(url: str, where: str) -> str:
    """The URL. Raises ValueError where it is none of http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{where} must be a URL of http or https, got {url!r}")
    return url.rstrip("/")
