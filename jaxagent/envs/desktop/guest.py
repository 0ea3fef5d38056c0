"""OSWorld's guest, spoken to: a computer with a desktop, whose server answers over HTTP.

GET  /platform                                      -> the name of its system
GET  /screenshot                                    -> PNG
GET  /accessibility                                 -> {"AT": the accessibility tree, as XML}
POST /execute {"command": [...], "shell": false}    -> {"output", "error", "returncode"}, or status 500 where it cannot be run
POST /file, a form with file_path                   -> the file, or status 404
POST /setup/upload, a form with file_path, file_data;   /setup/launch {"command", "shell"};   /setup/open_file {"path"};
POST /setup/activate_window, /setup/close_window {"window_name", "strict", "by_class"}

GuestFault        a guest did not answer, answered late, too much or nonsense: never the policy's fault
  Declined        it answered with another status than 200
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

MOST_BYTES = 256 << 20  # of a file
_MOST_ANSWER = 16 << 20  # of anything else
_AGAIN_S = 0.5
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"


class GuestFault(Exception):
    """A guest failed; the episode is to be played again."""


class Declined(GuestFault):
    """A guest answered that it cannot do what was asked."""


@dataclass(frozen=True)
class Ran:
    """What a command of a task said."""

    output: str
    error: str
    returncode: int


class Guest:
    """One guest, for one episode.

    Args:
        url: of its server, as in http://127.0.0.1:5000.
        timeout_s: of one request.
    """

    def __init__(self, url: str, timeout_s: float):
        self.url = url
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def close(self) -> None:
        await self.http.close()

    async def wait_until_there(self, start_s: float) -> None:
        """Waits for a guest that starts. Raises GuestFault where it has not answered after `start_s`."""
        until = time.monotonic() + start_s
        while True:
            try:
                await self._ask("GET", "platform")
                return
            except GuestFault as fault:
                if time.monotonic() > until:
                    raise GuestFault(f"{self.url}: no guest within {start_s:g} s: {fault}") from None
            await asyncio.sleep(_AGAIN_S)

    async def screenshot(self) -> bytes:
        picture = await self._ask("GET", "screenshot")
        if not picture.startswith((_PNG, _JPEG)):
            raise GuestFault(f"{self.url}/screenshot: a picture was wanted, got {picture[:40]!r}")
        return picture

    async def tree(self) -> str:
        told = await self._told("GET", "accessibility")
        if not isinstance(told.get("AT"), str):
            raise GuestFault(f'{self.url}/accessibility: {{"AT": a tree}} was wanted, got {str(told)[:200]}')
        return str(told["AT"])

    async def run(self, command: list[str] | str, shell: bool = False) -> Ran:
        """What a command says that has run, whatever its status."""
        told = await self._told("POST", "execute", json={"command": command, "shell": shell})
        try:
            return Ran(str(told["output"] or ""), str(told.get("error") or ""), int(told.get("returncode") or 0))
        except (KeyError, TypeError, ValueError):
            raise GuestFault(f"{self.url}/execute: output and returncode were wanted, got {str(told)[:200]}") from None

    async def file(self, path: str) -> bytes | None:
        """A file of the guest; None where there is none."""
        status, content = await self._exchange("POST", "file", most_bytes=MOST_BYTES, data={"file_path": path})
        if status == 404:
            return None
        return self._sound(status, "file", content)

    async def upload(self, path: str, content: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("file_path", path)
        form.add_field("file_data", content, filename=path.rpartition("/")[2] or "file")
        await self._ask("POST", "setup/upload", data=form)

    async def set_up(self, name: str, **words: Any) -> None:
        """One of launch, open_file, activate_window, close_window, with what it takes; `restore` of our own guests."""
        await self._ask("POST", name if name == "restore" else f"setup/{name}", json=words)

    async def _told(self, method: str, path: str, **what: Any) -> dict[str, Any]:
        content = await self._ask(method, path, **what)
        try:
            told = json.loads(content)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise GuestFault(f"{self.url}/{path}: a JSON object was wanted, got {content[:80]!r}")
        return told

    async def _ask(self, method: str, path: str, **what: Any) -> bytes:
        status, content = await self._exchange(method, path, most_bytes=_MOST_ANSWER, **what)
        return self._sound(status, path, content)

    def _sound(self, status: int, path: str, content: bytes) -> bytes:
        if status != 200:
            raise Declined(f"{self.url}/{path}: status {status}: {_message(content)}")
        return content

    async def _exchange(self, method: str, path: str, *, most_bytes: int, **what: Any) -> tuple[int, bytes]:
        """An answer's status and body."""
        content = bytearray()
        try:
            # A guest is the policy's to change: it must not send us elsewhere.
            async with self.http.request(method, f"{self.url}/{path}", allow_redirects=False, **what) as reply:
                async for chunk in reply.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > most_bytes:
                        raise GuestFault(f"{self.url}/{path}: more than {most_bytes >> 20} MiB")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GuestFault(f"{self.url}/{path}: {type(error).__name__}: {error}") from None
        return reply.status, bytes(content)


def _message(content: bytes) -> str:
    """What a guest says that is wrong."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(content)["message"])[:200]
    return content.decode(errors="replace")[:200]
