"""How fast the page of `jaxagent view --serve` answers: `python benchmarks/page.py` makes a run of 10,000 episodes and asks.

It needs Chromium (`chromium` on the path, or --browser), which it drives over its own protocol, headless. A keystroke is a real
key event of the browser; its time ends with the second animation frame after it, when what it changed has been painted. With
--shots=DIR it leaves pictures of the page, light and dark, wide and narrow.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import Store
from jaxagent.live import LiveServer
from jaxagent.types import Message, Sample, StopReason, ToolCall, ToolRecord, Trajectory

TEMPLATE = PlainTemplate()
TEXT = "the path of a lamp over rivers and stone by night under many old trees where paper birds count slow hours"
WORDS = TEXT.split()
# Marks the time of a key before the page hears of it, and that of the frame after the one in which it was painted.
WATCH = """
window.took = [];
addEventListener("keydown", () => {
  const begun = performance.now();
  requestAnimationFrame(() => requestAnimationFrame(() => took.push(performance.now() - begun)));
}, true);
"""


def episode(rng: random.Random, task: int, rollout: int, skill: float) -> Trajectory:
    """Some calls, one of which may fail, be repeated or be cut short; and an answer."""
    t = Trajectory(f"toy/{task}", task, f"train/{task}", rollout, difficulty=f"{1 + task % 3} hops", seconds=rng.random())
    t.feed(TEMPLATE.prompt([Message("user", " ".join(random.Random(task).choices(WORDS, k=12)))], ()))
    calls = rng.randint(0, 4)
    keys = [str(rng.randint(0, 9)) for _ in range(calls)]
    if calls > 1 and rng.random() < 0.1:
        keys = keys[:1] * calls
    messages = [Message("assistant", calls=(ToolCall("A", {"key": key}),)) for key in keys]
    messages.append(Message("assistant", " ".join(rng.choices(WORDS, k=10))))
    for message in messages:
        ids = TEMPLATE.turn(message)
        fed = t.tokens[t.turns[-1].end if t.turns else 0 :]
        turn = t.sampled(
            Sample(ids, [-rng.random()] * len(ids), [task] * len(ids), True, len(t.tokens) - len(fed), fed),
            "",
            TEMPLATE.text(ids),
        )
        turn.advantage = rng.gauss(0, 1)
        if message.calls:
            said = " ".join(rng.choices(WORDS, k=20))
            outcome = rng.choices(["ok", "error", "timeout"], [0.9, 0.07, 0.03])[0]
            turn.tools = [ToolRecord("A", message.calls[0].arguments, outcome, said, rng.random())]
            t.feed(TEMPLATE.extend([Message("tool", said)]))
    won = calls > 1 and rng.random() < skill
    t.turns[-1].reward, t.turns[-1].reason = float(won), "right answer" if won else "wrong"
    t.turns[0].error = "no call could be read" if rng.random() < 0.05 else ""
    t.stop = rng.choices([StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.INFRA_FAILURE], [0.9, 0.08, 0.02])[0]
    return t


def write_run(folder: Path, episodes: int, per_step: int = 500, seed: int = 0) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    config = {
        "env": {"name": "toy"},
        "init_from": "",
        "warmup": {"steps": 0},
        "train": {"steps": episodes // per_step},
        "seed": seed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    steps = range(1, episodes // per_step + 1)
    for step in steps:
        # every task is met again two steps later
        tasks = [(step % 2) * per_step + number for number in range(per_step // 8)]
        write_step(folder, step, [episode(rng, task, rollout, step / len(steps)) for task in tasks for rollout in range(8)])
    return folder


def write_step(folder: Path, step: int, rows: list[Trajectory]) -> None:
    Store(folder / "trajectories").write(f"train-{step:06d}", rows)
    with (folder / "metrics.jsonl").open("a") as file:
        success = statistics.fmean(row.solved for row in rows)
        file.write(json.dumps({"step": step, "reward/success": success, "reward/mean": success, "time/rollout_s": 1.0}) + "\n")


class Unanswered(Exception):
    """The browser could not say what it was asked."""


class Browser:
    """One page of Chromium, over its DevTools protocol."""

    def __init__(self, program: str):
        self.folder = tempfile.mkdtemp()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={self.folder}"]
        self.process = subprocess.Popen([program, *flags, "about:blank"], stderr=subprocess.PIPE, text=True)

    async def __aenter__(self) -> "Browser":
        port = await asyncio.to_thread(self._port)
        self.http = aiohttp.ClientSession()
        async with self.http.get(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [one for one in await answer.json() if one["type"] == "page"]
        self.socket = await self.http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self.number = 0
        return self

    def _port(self) -> str:
        assert self.process.stderr
        for line in self.process.stderr:
            if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return found[1]
        raise RuntimeError("Chromium ended before it listened")

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        self.process.terminate()
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            told = await self.socket.receive_json(timeout=120)
            if told.get("id") == self.number:
                if "error" in told:
                    raise Unanswered(f"{method}: {told['error']}")
                return dict(told["result"])

    async def value(self, script: str) -> Any:
        told = await self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str, limit_s: float = 240.0) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(Unanswered):  # the page was changing
                if await self.value(script):
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
        await asyncio.sleep(0.5)

    async def shot(self, path: Path) -> None:
        told = await self.do("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))


async def typed(browser: Browser, text: str) -> list[float]:
    """Milliseconds from each keystroke into the search to what it changed on the screen."""
    await browser.value("document.querySelector('input[type=search]').focus()")
    await browser.value("took.length = 0")
    for n, key in enumerate(text, 1):
        await browser.key(key)
        await browser.until(f"took.length >= {n}")
    return list(await browser.value("took"))


async def measure(server: LiveServer, folder: Path, episodes: int, program: str, shots: Path | None) -> dict[str, Any]:
    async with Browser(program) as browser:
        await browser.size(1400, 900, "light")
        await browser.do("Page.enable")
        await browser.do("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        begun = time.monotonic()
        await browser.do("Page.navigate", url=server.address)
        await browser.until(f"document.body && document.body.dataset.episodes >= {episodes}")
        opened_s = time.monotonic() - begun
        words = [await typed(browser, "lamp over")]
        words.append(await typed(browser, " rivers"))
        found = await browser.value("document.querySelector('.filters [role=status]').textContent")
        await browser.value("document.activeElement.value = ''; document.activeElement.dispatchEvent(new Event('input'))")
        await browser.value(
            "document.querySelector('#browse').scrollIntoView(); document.querySelector('#list').focus(); took.length = 0"
        )
        for n in range(1, 21):
            await browser.key("j")
            await browser.until(f"took.length >= {n}")
        moves = await browser.value("took")
        if shots:
            await pictures(browser, shots)
        rng = random.Random(1)
        step = episodes // 500 + 1
        await asyncio.to_thread(write_step, folder, step, [episode(rng, n // 8, n % 8, 1.0) for n in range(80)])
        begun = time.monotonic()
        await browser.until(f"document.body.dataset.episodes >= {episodes + 80}")
        return {
            "episodes": episodes,
            "opened_s": round(opened_s, 1),
            "search": found,
            "key_to_paint_ms": spread([one for times in words for one in times]),
            "next_episode_ms": spread(moves),
            "new_step_seen_after_s": round(time.monotonic() - begun, 1),
        }


def spread(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 1), "worst": round(max(times), 1)}


async def pictures(browser: Browser, folder: Path) -> None:
    places = {"top": "scrollTo(0, 0)", "cases": "document.querySelector('#cases').scrollIntoView()"}
    places["browse"] = "document.querySelector('#browse').scrollIntoView()"
    hold = "[...document.querySelectorAll('#detail button')].find((b) => b.textContent === 'hold beside').click()"
    for name, width, height, scheme in (
        ("light", 1400, 900, "light"),
        ("dark", 1400, 900, "dark"),
        ("narrow", 400, 800, "dark"),
    ):
        await browser.size(width, height, scheme)
        for place, script in places.items():
            await browser.value(script)
            await asyncio.sleep(0.3)
            await browser.shot(folder / f"{name}-{place}.png")
    await browser.size(1400, 900, "light")
    await browser.value(hold)
    await browser.value("document.querySelector('#list').focus()")
    await browser.key("j")
    await asyncio.sleep(1.5)
    await browser.value("document.querySelector('#browse').scrollIntoView()")
    await asyncio.sleep(0.5)
    await browser.shot(folder / "held.png")
    wide = await browser.value("document.documentElement.scrollWidth")
    print(f"page width at 1400: {wide}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--shots", type=Path)
    parser.add_argument("--beside", action="store_true", help="a second run of as many beside it")
    options = parser.parse_args()
    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(Path(folder, name), options.episodes, seed=n) for n, name in enumerate("ab"[: 1 + options.beside])]
        server = LiveServer(runs)
        begun = time.process_time()
        server.index.update()
        read_s = time.process_time() - begun
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=server.follow, daemon=True).start()
        made = asyncio.run(measure(server, runs[0], len(server.index.rows), options.browser, options.shots))
        server.shutdown()
        server.server_close()
        print(json.dumps({**made, "index_cpu_s": round(read_s, 1)}, indent=1))


if __name__ == "__main__":
    main()
