"""A server on the loopback address that fails by script, and remembers everything that it has executed."""

import asyncio
import contextlib
import gzip
import json
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

OK = b'{"seq":%d,"outcome":"ok","value":%d,"error":null,"elapsed_s":0.0,"session_lost":false}'
# what a schedule may draw from; the first ones are kinder
WORDS = (
    *("honest", "honest", "honest", "honest", "slam", "reset", "lose", "half", "429:0.01", "503:0.01", "500", "502", "504"),
    *("524", "409", "stall", "stall_mid", "drip", "garbage", "deep", "twice", "nan", "crossed", "gzip", "huge", "bomb"),
    *("endless", "slow410", "410", "404"),
)


def http(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def body_of(word: str, honest: bytes) -> bytes:
    """The body that a word makes of an honest one."""
    match word:
        case "garbage":
            return b"<html>gateway</html>"
        case "deep":
            return b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        case "twice":
            return honest.replace(b'"elapsed_s":', b'"elapsed_s":1,"elapsed_s":').replace(b'"files":', b'"files":1,"files":')
        case "nan":
            return honest.replace(b'"value":', b'"value":NaN,"was":').replace(b"0.1", b"NaN")
        case "crossed":
            return honest.replace(b'"seq":', b'"seq":9').replace(b'"run_result"', b'"other_result"')
        case "gzip":
            return b"\x1f\x8b" + b"\0" * 100
        case "huge":
            return b'{"value":"' + b"x" * (8 << 20) + b'"}'
        case "bomb":
            return gzip.compress(honest + b" " * (3 << 20), 1)  # well-formed, and within the limit of a reply
        case "packed":
            return gzip.compress(honest)
        case "deflated":
            return zlib.compress(honest)
    return honest


class FaultServer:
    """Answers by script, one word per request, then honestly; remembers every seq and key that it has executed.

    Words: slam (closes before reading), reset (before executing), lose (executes, then resets), stall (executes, never
    answers), stall_mid (a part of the body, then nothing), drip (a byte a tenth of a second), garbage, deep, twice (a key
    twice), huge, endless, nan, crossed (the reply of another seq), swapped (the id of another call), gzip (announced),
    bomb (gzip that grows a thousandfold), packed (gzip as it should be), half (a body cut short), slow:S, or a status code
    with an optional Retry-After, as in 429:0.01. `scripts` gives single sessions and programs scripts of their own.
    """

    def __init__(
        self,
        script: Sequence[str] = (),
        announces_memory: bool = True,
        scripts: Mapping[str, Sequence[str]] | None = None,
        token: str = "",
        keep_alive_s: float = 0.0,
    ) -> None:
        self.script = list(script)
        self.scripts = {name: list(words) for name, words in (scripts or {}).items()}
        self.executions: Counter[str] = Counter()
        self.codes: dict[str, str] = {}  # by key, the program that was run under it
        self.requests = 0
        self.opened: list[str] = []
        self.accepted_at: list[float] = []
        self.token = token
        self.deadlines_ms: list[int] = []
        self.gone = asyncio.Event()  # a client has closed a connection
        self._memory: dict[str, int] = {}
        self._keep_alive_s = keep_alive_s
        self._wire = ["x-sandbox-wire: 1"] if announces_memory else []
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def accepted(self) -> int:
        return len(self.accepted_at)

    @property
    def live(self) -> int:
        return sum(not connection.is_closing() for connection in self._connections)

    def execute(self, key: str, remembered: bool = True) -> int:
        if key not in self._memory or not remembered:
            self.executions[key] += 1
            self._memory[key] = sum(self.executions.values())
        return self._memory[key]

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for connection in self._connections:
                connection.transport.abort()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        self.accepted_at.append(time.monotonic())
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # a task of a stream that is cancelled is reported as a failure: it ends like one whose client has gone
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            while True:
                if self._next() == "slam":
                    self.script.pop(0)
                    writer.transport.abort()
                    break
                async with asyncio.timeout(self._keep_alive_s or None):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                await self._answer(head, await reader.readexactly(length), writer)
        if reader.at_eof():
            self.gone.set()
        writer.close()
        self._tasks.discard(task)
        self._connections.discard(writer)

    def _next(self) -> str:
        return self.script[0] if self.script else "honest"

    def _word(self, name: str) -> str:
        script = self.scripts.get(name, self.script)
        return script.pop(0) if script else "honest"

    async def _answer(self, top: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.requests += 1
        path = top.split(" ")[1]
        head = json.loads(body or b"{}")
        call_id = top.partition("x-call-id: ")[2].partition("\r\n")[0]
        self.deadlines_ms.append(int(top.partition("x-deadline-ms: ")[2].partition("\r\n")[0] or 0))
        extra = [*self._wire, *([f"Keep-Alive: timeout={int(self._keep_alive_s + 0.5)}"] if self._keep_alive_s else [])]
        if self.token and f"authorization: bearer {self.token}\r\n".lower() not in top:
            writer.write(http(401, b'{"error":{"code":"unauthorized","message":"expired"}}'))
            return
        if path == "/v1/sessions":
            self.opened.append(head["key"])
            writer.write(http(200, json.dumps({"session": head["key"].replace("/", "-"), "level": "L2"}).encode(), *extra))
            return
        if top.startswith("delete"):
            writer.write(http(200, b"{}", *extra))
            return
        session = path.split("/")[3] if path.startswith("/v1/sessions/") else ""
        word = self._word(session or str(head.get("code")))
        if word == "reset" or word == "slam":
            writer.transport.abort()
        elif word[0].isdigit() or word == "slow410":
            if word == "slow410":
                await asyncio.sleep(0.05)
            status, _, after = word.removeprefix("slow").partition(":")
            text = b'{"error":{"code":"x","message":"y"}}' if status not in ("404", "409", "410") else b"{}"
            writer.write(http(int(status), text, *[f"Retry-After: {after}"] * bool(after), *extra))
        else:
            seq = head.get("seq", 0)
            key = str(head.get("key") or f"{session}/{seq}")
            self.codes[key] = str(head.get("code"))
            value = self.execute(key, remembered=bool(self._wire or seq))
            await self._reply(word, OK % (seq, value) if seq else self._run_reply(value), call_id, writer, extra)

    @staticmethod
    def _run_reply(value: int) -> bytes:
        result = {"status": "Finished", "return_code": 0, "stdout": str(value), "stderr": "", "execution_time": 0.1}
        return json.dumps({"status": "Success", "message": "", "run_result": result, "files": {}}).encode()

    async def _reply(self, word: str, honest: bytes, call_id: str, writer: asyncio.StreamWriter, extra: list[str]) -> None:
        if word == "lose":
            writer.transport.abort()
        elif word in ("stall", "stall_mid"):
            writer.write(http(200, honest)[: -len(honest) // 2] if word == "stall_mid" else b"")
            await asyncio.sleep(60)
        elif word == "drip":
            for byte in http(200, honest):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)
        elif word == "endless":
            writer.write(b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
        elif word == "half":
            writer.write(http(200, honest)[:-5])
            writer.transport.write_eof()
            await asyncio.sleep(0)
            writer.transport.abort()
        elif word == "swapped":
            writer.write(http(200, honest, "X-Call-Id: another"))
        else:
            if word.startswith("slow:"):
                await asyncio.sleep(float(word[5:]))
            coded = {"bomb": "gzip", "packed": "gzip", "deflated": "deflate", "brotli": "br"}
            told = [f"Content-Encoding: {coded[word]}"] if word in coded else []
            echo = [f"X-Call-Id: {call_id}"] if word == "echo" else []
            writer.write(http(200, body_of(word, honest), *extra, *told, *echo))
            await writer.drain()
