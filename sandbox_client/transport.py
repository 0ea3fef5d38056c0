"""The seam to the network: one HTTP exchange or one WebSocket, bounded in time and bytes before anything is parsed.

The default speaks HTTP/1.1 through aiohttp on asyncio's own loop: closing the connection is how a server learns that a
call was cancelled, which a stream cancelled inside a shared HTTP/2 connection does not tell it.
"""

import asyncio
import enum
import importlib
import io
import re
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from . import wire
from .limits import Pacer

_STREAMED_BYTES = 1 << 20  # above, aiohttp wants a file so as not to hold the loop
_CONNECT_S = 5.0
_EXPANSION = 20  # a compressed reply may grow by so much, as an archive may
_EXPANSION_FREE_BYTES = 64 << 10
_KEEP_ALIVE_TOLD = re.compile(r"timeout=(\d+)")


class Safety(enum.Enum):
    """What sending a request a second time would do."""

    SAME = "same"  # what it did once: reading, writing a whole file, deleting, or a number that the protocol dedupes
    KEYED = "keyed"  # nothing, at a server that announced that it remembers keys; elsewhere it would run twice
    PURE = "pure"  # run it twice, which nobody can tell: declared so by the caller
    ONCE = "once"  # run it twice


@dataclass(frozen=True, slots=True)
class Request:
    """One request of an adapter. `url` is absolute, or a path below the endpoint's URL.

    `answer_s`: after so long without a reply the server is asked again, where that is safe.
    `fate`: a path below the endpoint's URL where a server that tells says what became of this request: GET gives its reply,
    202 while it is carried out, 404 where it never came; DELETE takes it back.
    `life_s`: the reply is a stream that lives as long as the program: what has come by then is the reply, `cut`.
    """

    method: str
    url: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    safety: Safety = Safety.SAME
    max_bytes: int = wire.REPLY_MAX_BYTES
    answer_s: float | None = None
    fate: str = ""
    life_s: float | None = None
    expect: tuple[int, ...] = ()  # statuses that the adapter reads itself
    own_credentials: bool = False  # the adapter has put them into `headers`: the client's token stays at home

    def inquiry(self) -> "Request":
        """Returns the question what became of this request."""
        return Request("GET", self.fate, max_bytes=self.max_bytes, answer_s=wire.ASK_AGAIN_S, expect=(202, 404))


class Reply(NamedTuple):
    """An HTTP reply; `headers` is asked by lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool = False  # its time was over before its end


class NotSent(Exception):
    """No connection was made: the request has certainly not arrived."""


class ReplyLost(Exception):
    """The request may have arrived, its reply did not."""


class BadReply(Exception):
    """The reply is larger than it may be, or expands to more, or is no HTTP."""


class Socket(Protocol):
    """A WebSocket that carries text. Raises ReplyLost or BadReply."""

    async def send(self, text: str) -> None: ...

    async def receive(self, timeout_s: float) -> str: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Raises NotSent, ReplyLost or BadReply."""

    async def send(self, request: Request, url: str, headers: dict[str, str], timeout_s: float) -> Reply: ...

    async def connect(self, url: str, headers: dict[str, str], timeout_s: float, max_bytes: int) -> Socket: ...

    async def close(self) -> None: ...


class AiohttpTransport:
    """Pooled connections that are given up before the server closes them, made at a bounded rate."""

    def __init__(self, max_connections: int, connects_per_s: float = 1000.0) -> None:
        # an optional weight: the server imports this package too and never opens a transport
        self._aiohttp = importlib.import_module("aiohttp")
        self._max_connections = max_connections
        self._pacer = Pacer(connects_per_s)
        self._keep_s = wire.CLIENT_KEEP_ALIVE_S
        self._in_use: dict[Any, int] = {}  # sessions of earlier keep-alive times live until their last exchange ends
        self._sockets: set[Any] = set()
        self._sending = self._warm = 0  # exchanges under way, and as many as there are connections for
        self._peaked = 0.0
        self._session = self._open()

    def _open(self) -> Any:
        aiohttp = self._aiohttp
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=self._keep_s),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,  # what is compressed is expanded here, under a limit
        )
        self._in_use[session] = 0
        return session

    async def _pace(self) -> None:
        """Waits where one more exchange than lately must mean one more connection; aiohttp's own hook costs every call."""
        now = time.monotonic()
        if now - self._peaked > self._keep_s:
            self._warm = self._sending - 1  # those that were idle for so long are closed
        if self._sending > self._warm:
            self._warm, self._peaked = self._sending, now
            await self._pacer.wait()

    async def send(self, request: Request, url: str, headers: dict[str, str], timeout_s: float) -> Reply:
        aiohttp, session = self._aiohttp, self._session
        self._in_use[session] += 1
        self._sending += 1
        parts = _Bounded(request.max_bytes)
        life_s = request.life_s
        limit_s = timeout_s if life_s is None else min(life_s, timeout_s)
        reply: Any = None
        try:
            await self._pace()
            async with (
                asyncio.timeout(limit_s),
                session.request(
                    request.method,
                    url,
                    data=_payload(request.body),
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(_CONNECT_S, 0.9 * timeout_s)),
                ) as reply,
            ):
                if (told := reply.headers.get(wire.CALL_ID, headers.get(wire.CALL_ID))) != headers.get(wire.CALL_ID):
                    reply.close()  # and with it the connection, on which everything is one reply late
                    raise BadReply(f"the reply to another call: wanted {wire.CALL_ID} {headers.get(wire.CALL_ID)}, got {told}")
                parts.encoding = reply.headers.get("Content-Encoding", "identity").lower()
                await parts.read(reply.content)
                self._heed(reply.headers.get("Keep-Alive", ""))
                return Reply(reply.status, reply.headers, parts.whole())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._warm -= 1
            raise NotSent(str(error)) from None
        except TimeoutError:
            self._warm -= 1
            if reply is not None and life_s is not None and life_s <= timeout_s:
                return Reply(reply.status, reply.headers, bytes(parts.data), cut=True)
            raise ReplyLost(f"no reply within {limit_s:.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._warm -= 1
            raise ReplyLost(f"{type(error).__name__}: {error}") from None
        finally:
            self._sending -= 1
            await self._leave(session)

    async def _leave(self, session: Any) -> None:
        self._in_use[session] -= 1
        if session is not self._session and not self._in_use[session]:
            del self._in_use[session]
            await session.close()

    def _heed(self, told: str) -> None:
        """Keeps idle connections for less than the server says that it does."""
        found = _KEEP_ALIVE_TOLD.search(told)
        if found and (keep_s := max(0.1, 0.5 * int(found[1]))) < self._keep_s:
            self._keep_s = keep_s
            self._session = self._open()

    async def connect(self, url: str, headers: dict[str, str], timeout_s: float, max_bytes: int) -> Socket:
        aiohttp = self._aiohttp
        try:
            async with asyncio.timeout(timeout_s):
                socket = await self._session.ws_connect(url, headers=headers, max_msg_size=max_bytes, compress=0, autoping=True)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, TimeoutError) as error:
            raise NotSent(str(error) or f"no connection within {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotSent(f"no WebSocket there: {type(error).__name__}: {error}") from None
        self._sockets = {one for one in self._sockets if not one.closed} | {socket}
        return _AiohttpSocket(aiohttp, socket)

    async def close(self) -> None:
        for socket in self._sockets:
            await _AiohttpSocket(self._aiohttp, socket).close()
        for session in list(self._in_use):
            await session.close()
        self._in_use = {}


class _AiohttpSocket:
    def __init__(self, aiohttp: Any, socket: Any) -> None:
        self._aiohttp, self._socket = aiohttp, socket

    async def send(self, text: str) -> None:
        try:
            await self._socket.send_str(text)
        except (self._aiohttp.ClientError, OSError) as error:
            raise ReplyLost(f"{type(error).__name__}: {error}") from None

    async def receive(self, timeout_s: float) -> str:
        kinds = self._aiohttp.WSMsgType
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._socket.receive()
        except TimeoutError:
            raise ReplyLost(f"no message within {timeout_s:.3g} s") from None
        if message.type is kinds.TEXT:
            text: str = message.data
            return text
        if message.type is kinds.ERROR or self._socket.close_code in (1002, 1007, 1009):
            raise BadReply(f"the WebSocket was given up, code {self._socket.close_code}: {message.data}")
        raise ReplyLost(f"the server closed the WebSocket, code {self._socket.close_code}")

    async def close(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._socket.close()
        except TimeoutError:
            pass  # the transport's own end takes it


def _payload(body: bytes) -> Any:
    return None if not body else body if len(body) < _STREAMED_BYTES else io.BytesIO(body)


class _Bounded:
    """A body as it comes, never held beyond its limit, compressed or not."""

    def __init__(self, max_bytes: int) -> None:
        self.data = bytearray()
        self.encoding = "identity"
        self._max_bytes = max_bytes

    async def read(self, content: Any) -> None:
        expand = self._expander()
        came = 0
        while True:
            data: bytes = await content.readany()
            if not data and content.at_eof():
                break
            came += len(data)
            self.data += expand(data, came) if expand else data
            if len(self.data) > self._max_bytes:
                raise BadReply(f"wanted a reply of at most {self._max_bytes} bytes, got more")

    def whole(self) -> bytes:
        return bytes(self.data)

    def _expander(self) -> "Callable[[bytes, int], bytes] | None":
        if self.encoding in ("identity", ""):
            return None
        if self.encoding not in ("gzip", "deflate"):
            raise BadReply(f"wanted a reply that is not compressed, got {self.encoding!r}")
        stream = zlib.decompressobj(wbits=47 if self.encoding == "gzip" else 15)

        def expand(data: bytes, came: int) -> bytes:
            room = min(self._max_bytes, _EXPANSION * came + _EXPANSION_FREE_BYTES) - len(self.data) + 1
            try:
                grown = stream.decompress(data, max(1, room))
            except zlib.error as error:
                raise BadReply(f"wanted {self.encoding}, got {error}") from None
            if stream.unconsumed_tail or len(grown) >= room:
                raise BadReply(f"a compressed reply that grows more than {_EXPANSION} times")
            return grown

        return expand
