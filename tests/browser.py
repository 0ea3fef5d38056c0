"""Chromium as tests and benchmarks drive it: one page, over its DevTools protocol, without a window."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp

# What it would do besides showing a page; and a pointer that can hover, which without a window it has not.
_ALONE = (
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--no-first-run",
)
_MOUSE = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"

START_S = 120.0


class Unanswered(Exception):
    """The browser could not say what it was asked."""


class Browser:
    """One page of Chromium. `faults` are what its console said of errors, and exceptions that nobody caught."""

    def __init__(self, program: str):
        self.faults: list[str] = []
        self.http: aiohttp.ClientSession | None = None
        self._drain: threading.Thread | None = None
        self.folder = tempfile.mkdtemp()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={self.folder}"]
        command = [program, *flags, *_ALONE, _MOUSE, "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    async def __aenter__(self) -> "Browser":
        try:
            port = await asyncio.to_thread(self._port)
            self.http = aiohttp.ClientSession()
            async with self.http.get(f"http://127.0.0.1:{port}/json") as answer:
                (page,) = [one for one in await answer.json() if one["type"] == "page"]
            self.socket = await self.http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
            self.number = 0
            for domain in ("Page", "Runtime", "Log"):
                await self.do(f"{domain}.enable")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def _port(self) -> str:
        assert self.process.stderr
        impatient = threading.Timer(START_S, self.process.kill)
        impatient.start()
        try:
            for line in self.process.stderr:
                if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                    self._drain = threading.Thread(target=self.process.stderr.read, daemon=True)
                    self._drain.start()
                    return found[1]
        finally:
            impatient.cancel()
        raise RuntimeError(f"Chromium ended before it listened, or did not within {START_S:g} s")

    async def __aexit__(self, *_: object) -> None:
        if self.http:
            await self.http.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        assert self.process.stderr
        if self._drain:
            self._drain.join(30)
        self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            told = await self.socket.receive_json(timeout=120)
            self._hear(told)
            if told.get("id") == self.number:
                if "error" in told:
                    raise Unanswered(f"{method}: {told['error']}")
                return dict(told["result"])

    def _hear(self, told: dict[str, Any]) -> None:
        said = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(said["exceptionDetails"]))
        elif told.get("method") == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.faults.append(str(said["args"]))
        elif told.get("method") == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.faults.append(str(said["entry"]))

    async def open(self, url: str, until: str = "true") -> None:
        """Leaves for another page; returns when it is there, and `until` holds of it."""
        await self.do("Page.navigate", url="about:blank")
        await self.do("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete' && ({until})")

    async def value(self, script: str) -> Any:
        told = await self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str, limit_s: float = 240.0) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(Unanswered):  # the page was changing
                if await self.value(f"!!({script})"):
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {limit_s:g} s: {script}")
            await asyncio.sleep(0.1)

    async def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.do("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.do("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def size(self, width: int, height: int, scheme: str) -> None:
        await self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        await self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.frames()

    async def frames(self) -> None:
        """Waits until what was changed has been painted."""
        await self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    async def shot(self, path: Path) -> None:
        told = await self.do("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))
